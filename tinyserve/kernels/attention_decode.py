"""Attention of one new token per sequence over its cached keys: `out = softmax(scale · q Kᵀ) V`, K and V in pages.

A decode step reads every key and value once and computes little, so what counts is that the whole device reads. One
program = (kv head, part of a sequence): the G query heads of a kv head are the rows of one tile, so that a key is read
once for all of them, and the keys of a long sequence are cut into parts. Into how many is computed from `seq_lens` on
the device, once a step (`attention_cut.py`), so that one recorded graph serves every length. The program of a sequence
in one part writes the output, else `attention_merge` joins the parts. `attention_verify` shares the kernel.

Softmax is online and in float32 with base 2: a running peak, a running denominator, an accumulator. The page number of
a tile is read one tile ahead, because a load that waits for another load breaks the software pipeline. What a model
does not use (window, soft-cap, sinks, ALiBi) is not in its compiled kernel. 2·Σ seq_lens·Hkv·D numbers are read.

Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et al., arXiv:2309.06180 (pages); soft-cap:
Gemma 2, arXiv:2408.00118; sinks: gpt-oss's reference implementation; ALiBi: Press et al., arXiv:2108.12409.

Before: `rope.py` has written the new key and value.  After: `attention_merge.py`, then the output projection.
"""

import torch
import triton
import triton.language as tl

from . import launch
from .attention_cut import PROGRAMS, Cut, attention_cut, find_part, first_block, make_cut, queries_of
from .attention_merge import merge_cut
from .coded import (
    CodedCache,
    averages,
    constants,
    high,
    load_queries,
    load_scales,
    low,
    raw,
    store_columns,
    words,
)
from .launch import (
    check_attention,
    choose,
    next_power_of_2,
    once,
    overlap,
    start_next,
    use_kernel,
    wait_inputs,
    warm_rows,
)
from .pages import attend, layout

LOG2E = tl.constexpr(1.4426950408889634)
# The peak's first value. Finite, so that a row without any visible key gives exp2(-inf) = 0 and not NaN.
LOWEST = tl.constexpr(-1e30)
FEW = 32  # sequences up to which the first keys are asked for early: with more, programs wait for room, not for keys


def attention_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    memo: dict | None = None,
) -> torch.Tensor:
    """The specification of `attention_decode`, with its arguments; also how the CPU serves.

    Each sequence attends to its own keys, in place or copied (`pages.layout`, the same in all layers of a step).
    Nothing is padded or masked: its result depends neither on its neighbours nor on what else lies in its last block.
    """
    heads, _, head_dim = k_cache.shape[1:]
    count = q.shape[0]
    grouped = q.view(count, heads, q.shape[1] // heads, head_dim)
    sinks, slopes = (None if one is None else one.view(heads, -1, 1) for one in (sinks, alibi_slopes))
    kept = raw(k_cache)
    key = ("layout", block_tables.data_ptr(), count, kept.shape, kept.stride(), kept.dtype, window)
    each = grouped.split_with_sizes([1] * count) if count > 1 else (grouped,)
    results = []
    for some in once(memo, key, lambda: layout(block_tables, seq_lens.tolist(), k_cache, v_cache, window)):
        for k, v in some.read(k_cache, v_cache, memo):
            one = each[len(results)]
            if not k.shape[2]:
                results.append(torch.zeros_like(one))
                continue
            if k.dtype != q.dtype:
                k, v = k.to(q.dtype), v.to(q.dtype)
            bias = None if slopes is None else slopes.float() * torch.arange(1 - k.shape[2], 1, device=q.device)
            results.append(attend(one, k, v, visible=None, scale=scale, softcap=softcap, sinks=sinks, bias=bias))
    if out is None and count == 1:
        return results[0].view(q.shape)
    result = torch.cat(results).view(q.shape) if results else torch.empty_like(q)
    return result if out is None else out.copy_(result)


@triton.jit
def pages_of(table_ptr, key, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Block ids of keys [key, key + TILE): one number if a tile lies in a page, else [TILE]. Past `end`: block 0.

    A loop that carries them must carry what was loaded: were it converted to int64 here, Triton would put this load
    into the software pipeline, and then no other load would run ahead (a third of the bandwidth).
    """
    if PAGE >= TILE:
        number = tl.load(table_ptr + key // PAGE, mask=key < end, other=0)
    else:
        keys = key + tl.arange(0, TILE)
        number = tl.load(table_ptr + keys // PAGE, mask=keys < end, other=0)
    return number


@triton.jit
def load_keys(
    cache_ptr,  # [B, P, D] of one kv head
    pages,  # what pages_of(key) gave; int64 before any multiplication
    key,  # first key, a multiple of TILE
    end,  # keys from here on read as zero
    block_stride,  # elements between blocks
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # False: all keys lie before `end`
):
    """Keys or values [TILE, BLOCK_D] of one kv head."""
    row = tl.arange(0, TILE)
    column = tl.arange(0, BLOCK_D)
    if PAGE >= TILE:
        place = cache_ptr + pages.to(tl.int64) * block_stride + (key % PAGE + row)[:, None] * D + column[None, :]
    else:
        place = (cache_ptr + pages.to(tl.int64) * block_stride + (row % PAGE) * D)[:, None] + column[None, :]
    if MASKED:
        tile = tl.load(place, mask=(key + row < end)[:, None] & (column < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(column < D)[None, :], other=0.0)
    return tile


@triton.jit
def score(
    q, q_high, k, place, position, slope, scale, cap, key_scale,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, CODE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Scores [M, TILE] of the keys at `place`. Plain ones are q·k and get their factor in `accumulate`; with SOFTCAP or
    ALIBI they are logits in base 2: scale holds log2(e), or with SOFTCAP 1/cap, and then cap holds the log2(e).

    With a CODE, k are words, q the columns of their low bytes; EACH: key_scale are the scales of the keys.
    """
    if CODE == "":
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(low(k, CODE, q.dtype)), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(high(k, CODE, q.dtype)), scores, input_precision="ieee")
    if EACH:
        scores *= key_scale[None, :]
    if SOFTCAP:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)  # cap * tanh(scale * scores)
    elif ALIBI:
        scores *= scale
    if ALIBI:
        scores += slope[:, None] * (place[None, :] - position[:, None]).to(tl.float32)
    return scores


@triton.jit
def accumulate(
    scores, v, acc, acc_high, peak, total, scale, value_scale,
    PLAIN: tl.constexpr, CODE: tl.constexpr, EACH: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: scores [M, TILE] and values [TILE, D] join (acc [M, D], peak [M], total [M]).

    PLAIN scores have still to be multiplied by `scale`, which then costs nothing: it joins the subtraction. With a
    CODE, v are words, acc and acc_high of the columns of their low and their high bytes. dtype: of the product.
    """
    if PLAIN:
        higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)
        weight = tl.exp2(scores * scale - higher[:, None])
    else:
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weight = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    taken = (weight * value_scale[None, :] if EACH else weight).to(dtype)
    if CODE == "":
        acc = tl.dot(taken, v.to(dtype), acc * shrink[:, None], input_precision="ieee")
    else:
        acc = tl.dot(taken, low(v, CODE, dtype), acc * shrink[:, None], input_precision="ieee")
        acc_high = tl.dot(taken, high(v, CODE, dtype), acc_high * shrink[:, None], input_precision="ieee")
    return acc, acc_high, higher, total * shrink + tl.sum(weight, axis=1)


@triton.jit
def head_number(ptr, head, mask, GIVEN: tl.constexpr):
    """A number of each head (a sink, a slope) in base 2; zeros if there is none."""
    if GIVEN:
        number = tl.load(ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
    else:
        number = tl.zeros_like(head).to(tl.float32)
    return number


# Lengths and counts change from step to step, and slices begin anywhere in a buffer: that must not make new variants.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "target", "table_stride"],
    do_not_specialize_on_alignment=["cut_ptr", "tables_ptr", "query_start_ptr", "lens_ptr"],
)
def _attention_parts_kernel(
    cut_ptr,  # records of attention_cut.py; read if LISTED
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [B, Hkv, P, D], or words [B, Hkv, P, D / 2] of a coded cache
    v_ptr,  # the same
    tables_ptr,  # [S, ...] block ids, int32
    query_start_ptr,  # [S + 1] int32; read if QUERIES > 1
    lens_ptr,  # [S] int32
    sinks_ptr,  # [Hq]; read if SINKS
    slopes_ptr,  # [Hq]; read if ALIBI
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [parts, QUERIES, Hq, D] float32
    lse_ptr,  # [parts, QUERIES, Hq] float32
    q_stride,  # elements between tokens
    q_head_stride,  # elements between heads
    block_stride,  # elements between blocks of k and v
    page_stride,  # elements between the kv heads of a block
    table_stride,  # elements between sequences
    out_stride,  # elements between tokens
    out_head_stride,  # elements between heads
    num_tokens,  # T
    num_seqs,  # S
    target,  # attention_cut.py::Cut
    scale,
    cap,
    k_scales_ptr,  # of coded caches, if EACH: [B, Hkv, P]
    v_scales_ptr,  # the same, else the number for all
    scales_stride,  # if EACH: elements between blocks
    G: tl.constexpr,  # query heads of a kv head
    D: tl.constexpr,
    PAGE: tl.constexpr,  # a power of two
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    QUERIES: tl.constexpr,  # most query tokens of a sequence; 1: sequence s has the one token s
    LEAST: tl.constexpr,
    FIXED: tl.constexpr,
    LISTED: tl.constexpr,
    CODE: tl.constexpr,  # of coded.py
    EACH: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least QUERIES * G and 16
    BLOCK_D: tl.constexpr,  # a power of two, at least 16 and D, or D / 2 of coded caches
    TILE: tl.constexpr,  # keys of one step; a power of two
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # cache lines of each of the first keys and values that are brought near while it waits
    PDL: tl.constexpr,
):
    start_next(PDL)
    WIDTH: tl.constexpr = D if CODE == "" else D // 2  # of a key in the cache
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    head = kv_head * G + row % G
    heads = tl.num_programs(0) * G

    # Lengths, tables and the list are older than the kernel in front, so is all of the cache but this step's tokens.
    sequence, length, begin, end, parts = find_part(
        cut_ptr, query_start_ptr, lens_ptr, num_seqs, target, item, WINDOW, QUERIES, LEAST, FIXED, LISTED, TILE
    )
    works = sequence < num_seqs
    start, queries = queries_of(query_start_ptr, sequence, works, QUERIES)
    tables_ptr += sequence.to(tl.int64) * table_stride
    k_ptr += kv_head.to(tl.int64) * page_stride
    v_ptr += kv_head.to(tl.int64) * page_stride
    if EACH:
        k_scales_ptr += kv_head * PAGE
        v_scales_ptr += kv_head * PAGE
    listed: tl.constexpr = LISTED and PAGE >= TILE
    pages = first_block(cut_ptr, item) if listed else pages_of(tables_ptr, begin, end, PAGE, TILE)
    if LINES > 0 and works:
        place = pages.to(tl.int64) * block_stride + begin % PAGE * WIDTH
        warm_rows(k_ptr + place, tl.arange(0, TILE), WIDTH, LINES, PDL)
        warm_rows(v_ptr + place, tl.arange(0, TILE), WIDTH, LINES, PDL)
    wait_inputs(PDL)

    if QUERIES > 1:  # padding behind the last sequence becomes zero
        for padding in range(tl.load(query_start_ptr + num_seqs) + item, num_tokens, tl.num_programs(1)):
            free = tl.zeros([ROWS], tl.int64) + padding
            place = out_ptr + (free * out_stride + head * out_head_stride)[:, None] + column[None, :]
            nothing = tl.zeros([ROWS, BLOCK_D], out_ptr.dtype.element_ty)
            store_columns(place, nothing, nothing, (row < G)[:, None] & (column < WIDTH)[None, :], D, CODE)
    if not works:
        return

    token = start.to(tl.int64) + row // G
    mine = row < tl.minimum(queries, QUERIES) * G
    real = mine[:, None] & (column < WIDTH)[None, :]
    q_place = q_ptr + token[:, None] * q_stride + head[:, None] * q_head_stride + column[None, :]
    q, q_high = load_queries(q_place, real, D, CODE)
    position = length - queries + row // G
    slope = head_number(slopes_ptr, head, mine, ALIBI)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    acc_high = acc
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = head_number(sinks_ptr, head, mine, SINKS)
        alone = parts == 1  # else the merge adds it
        peak = tl.where(alone, tl.maximum(sink, LOWEST), LOWEST)
        total = tl.where(alone, tl.exp2(sink - peak), 0.0)

    for key in tl.range(begin, end, TILE, num_stages=STAGES):
        pages_ahead = pages_of(tables_ptr, key + TILE, end, PAGE, TILE)
        k = load_keys(k_ptr, pages, key, end, block_stride, WIDTH, BLOCK_D, PAGE, TILE, True)
        v = load_keys(v_ptr, pages, key, end, block_stride, WIDTH, BLOCK_D, PAGE, TILE, True)
        k_scale = load_scales(k_scales_ptr, pages, key, end, scales_stride, PAGE, TILE, True, EACH)
        v_scale = load_scales(v_scales_ptr, pages, key, end, scales_stride, PAGE, TILE, True, EACH)
        place = key + tl.arange(0, TILE)
        visible = (place < end)[None, :]
        if QUERIES > 1:
            visible = visible & (place[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (place[None, :] > position[:, None] - WINDOW)
        scores = score(q, q_high, k, place, position, slope, scale, cap, k_scale, SOFTCAP, ALIBI, CODE, EACH)
        scores = tl.where(visible, scores, float("-inf"))
        acc, acc_high, peak, total = accumulate(
            scores, v, acc, acc_high, peak, total, scale, v_scale, not (SOFTCAP or ALIBI), CODE, EACH, q.dtype
        )
        pages = pages_ahead

    averaged, averaged_high = averages(acc, acc_high, total, v_scales_ptr, CODE, EACH)
    if parts == 1:
        place = out_ptr + token[:, None] * out_stride + head[:, None] * out_head_stride + column[None, :]
        store_columns(place, averaged, averaged_high, real, D, CODE)
    else:
        part = (item.to(tl.int64) * QUERIES + row // G) * heads + head
        tl.store(lse_ptr + part, (peak + tl.log2(total)) / LOG2E, mask=mine)
        partial_place = partial_ptr + part[:, None] * D + column[None, :]
        store_columns(partial_place, averaged, averaged_high, real, D, CODE)


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    memo: dict | None = None,
) -> torch.Tensor:
    """Attend with the newest token of each sequence, whose key and value are in the cache already.

    Nothing on the host depends on a length: one recorded graph serves all lengths up to the width of block_tables.

    Args:
        q: [S, Hq, D]; sequences and heads may lie apart.
        k_cache, v_cache: [B, Hkv, P, D], contiguous or coded; P a power of two. Head h reads head h // (Hq / Hkv).
        block_tables: [S, at least ceil(length / P)] int32; what stands behind a sequence's last block is not read.
        seq_lens: [S] int32, with the new token; 0 for padding, which gives zeros.
        scale: of q · k, usually D ** -0.5; positive.
        max_seq_len: at least every length; the kernel does not use it.   window: keys that are visible; 0: all.
        softcap: c > 0 makes a logit c · tanh(logit / c); 0: off.
        sinks: [Hq] logits that join the denominator without a value, or None.
        alibi_slopes: [Hq] slopes m: a logit gets + m · (its key's position - its query's position), or None.
        batch_invariant: a sequence's result has the same bits whatever its neighbours; slower for one long sequence.
        out: [S, Hq, D], written if given; contiguous in its last dimension.
        memo: of this step: what its layers share (launch.py::once).

    Returns:
        [S, Hq, D] in q's type: `out`, or new.

    Raises:
        ValueError: shapes, strides or options that do not fit.
    """
    if not use_kernel(q):
        return attention_decode_reference(
            q, k_cache, v_cache, block_tables, seq_lens, scale=scale, max_seq_len=max_seq_len, window=window,
            softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out, memo=memo,
        )  # fmt: skip
    check_attention("attention_decode", q, raw(k_cache), raw(v_cache), scale, (sinks, alibi_slopes), out)
    if block_tables.shape[0] != q.shape[0] or seq_lens.shape != q.shape[:1] or block_tables.stride(1) != 1:
        raise ValueError(
            f"attention_decode: {q.shape[0]} sequences, but block_tables (rows must be contiguous) is "
            f"{list(block_tables.shape)} and seq_lens {list(seq_lens.shape)}"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.numel():
        options = part_options("attention_decode", q, words(k_cache), len(seq_lens))
        sizes = len(seq_lens), k_cache.shape[1], options.pop("PROGRAMS")
        cut = make_cut(*sizes, invariant=batch_invariant, window=window)
        where = (block_tables, seq_lens, seq_lens)
        attend_parts(q, (k_cache, v_cache), where, (sinks, alibi_slopes), out, (scale, softcap), cut, options, memo)
    return out


def attend_parts(q, caches, where, extras, out, factors, cut: Cut, options, memo: dict | None) -> None:
    """Attend with up to `cut.queries` tokens of each sequence into `out`, through parts where a sequence is cut.

    Args:
        where: block_tables, query_start (anything if a sequence has one query), seq_lens.
        extras: sinks and slopes, or Nones.    factors: scale and soft-cap.    options: what `part_options` gave.
        memo: where layers keep the list of parts.
    """
    heads, head_dim = q.shape[1:]
    kept, factors = [words(cache) for cache in caches], base_2(*factors, caches[0])
    kv_heads, page = kept[0].shape[1:3]
    partial, lse = out, out
    listed = list_parts(where, cut, options["TILE"], page, memo) if cut.listed else where[2]
    if cut.merges:
        rows = (cut.parts, cut.queries, heads)
        partial = torch.empty((*rows, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    _attention_parts_kernel[(kv_heads, cut.parts)](
        listed,
        q,
        *kept,
        *where,
        *(q if extra is None else extra for extra in extras),
        out,
        partial,
        lse,
        *q.stride()[:2],
        *kept[0].stride()[:2],
        where[0].stride(0),
        *out.stride()[:2],
        q.shape[0],
        len(where[2]),
        cut.target,
        *factors,
        G=heads // kv_heads,
        D=head_dim,
        PAGE=page,
        SOFTCAP=factors[1] > 0,
        SINKS=extras[0] is not None,
        ALIBI=extras[1] is not None,
        **cut.constants(),
        **constants(*caches),
        **options,
        **overlap(q),
    )
    merge_cut((partial, lse), cut, (listed, *where[1:]), extras[0], out)


def list_parts(where, cut: Cut, tile: int, page: int, memo: dict | None) -> torch.Tensor:
    """What `attention_cut` gives, once for all layers that cut alike. where: as for `attend_parts`."""
    tables, query_start, seq_lens = where
    key = ("parts", cut, tile, page, len(seq_lens), *(one.data_ptr() for one in where))
    return once(memo, key, lambda: attention_cut(seq_lens, query_start, tables, cut, tile=tile, page=page))


def base_2(scale: float, softcap: float, k_cache: torch.Tensor | CodedCache) -> tuple[float, float]:
    """(scale, cap) as the kernels' `score` wants them, with the scale of coded keys in it where all have one."""
    log2e = LOG2E.value
    if isinstance(k_cache, CodedCache) and not k_cache.each:
        scale *= k_cache.scales
    return (scale / softcap, softcap * log2e) if softcap else (scale * log2e, 0.0)


def part_options(name: str, q: torch.Tensor, k_cache: torch.Tensor, sequences: int, queries: int = 1) -> dict[str, int]:
    """Block sizes: measured ones, or the largest tile whose pipeline fits into the device's shared memory.

    Args: k_cache: what `words` gave.
    """
    heads, head_dim = q.shape[1:]
    group, width = heads // k_cache.shape[1], k_cache.shape[3]
    rows, block_d = max(16, next_power_of_2(queries * group)), max(16, next_power_of_2(width))
    device = launch.facts(q.device)
    # In rows of D numbers; 4 KiB stay for reductions. A pipeline of n stages keeps n - 1 tiles of K and of V in flight.
    room = (device.shared - 4096) // (block_d * q.element_size())
    tile, stages = next(
        (tile, stages)
        for tile, stages in ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1))
        if rows + 2 * max(stages - 1, 1) * tile <= room or stages == 1
    )
    warms = sequences <= FEW and width in (64, 128, 256) and k_cache.element_size() == 2 and k_cache.shape[2] >= tile
    default = {
        "ROWS": rows,
        "BLOCK_D": block_d,
        "TILE": tile,
        "STAGES": stages,
        "PROGRAMS": PROGRAMS * device.processors,
        "LINES": width // 64 if warms else 0,
        "num_warps": 4 if rows * block_d <= 8192 else 8,
    }
    shape = {"head_dim": head_dim, "group": group, "sequences": sequences, "page": k_cache.shape[2]}
    shape["coded"] = int(width < head_dim)
    return choose(name, q, default, **shape, **({"queries": queries} if queries > 1 else {}))
