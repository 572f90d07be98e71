"""Causal attention of many new tokens over cached keys, ragged and in pages: `out = softmax(scale · Q Kᵀ + mask) V`.

The tokens of all sequences of a step lie one after another; `query_start` says where each sequence begins. Query i of a
sequence stands at position seq_len - query_len + i, so a cached prefix, a chunk of a long prompt, a draft to verify and
a single new token are one case. Keys were written to their pages before, the new ones too.

One program = (query tile, kv head): BLOCK_M rows, which are BLOCK_M / G neighbouring queries times the G query heads of
the kv head, so that every key tile serves G heads. Tiles of all sequences are numbered in one row; a program finds its
sequence by counting those that begin at or before it. The tiles with the most keys start first. Keys are visited in
three stretches: the left edge of a window and the diagonal need masks; all between, nearly everything in a long prompt,
does without. A page comes through a TMA descriptor where the device has the unit (+15 to 20 % on an H200). To start a
tile's product with its values only beside the softmax of the next tile was tried there: it takes the shared memory of a
second program on the processor, and lost 12 %.
2·Σ query_len·seq_len·Hq·D multiply-adds less the causal half; see `attention_decode.py` for softmax and features.

Sources: Dao, arXiv:2307.08691 (FlashAttention-2); Kwon et al., arXiv:2309.06180 (pages).

Before: `rope.py` has written the new keys and values.  After: the output projection.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launch
from .attention_decode import (
    LOWEST,
    accumulate,
    base_2,
    head_number,
    load_keys,
    pages_of,
    score,
)
from .coded import CodedCache, averages, constants, load_queries, load_scales, raw, store_columns, words
from .launch import cdiv, check_attention, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .pages import attend, tokens_of

# Queries that the reference handles at once when it has to write scores down (window, soft-cap or sinks).
CHUNK = 512
MANY = 1 << 20  # queries of a long prompt
FEW = 17  # a tile is made for at least so many: fewer are `attention_verify`'s, and one variant less to compile
# Devices whose programs may take this much shared memory (sm_90, sm_100) have a TMA unit that wins.
TMA_SHARED = 200 * 1024


def attention_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `attention_prefill`, with its arguments; also how the CPU serves."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    page, heads = k_cache.shape[2], k_cache.shape[1]
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    plain = not window and not softcap and sinks is None and alibi_slopes is None
    tables = block_tables.unbind()
    sinks, slopes = (None if one is None else one.view(heads, -1, 1, 1) for one in (sinks, alibi_slopes))
    out[starts[-1] :] = 0
    for number, length in enumerate(lengths):
        begin, end = starts[number], starts[number + 1]
        hidden = max(0, end - begin - length)  # queries of a padding row, before position 0
        out[begin : begin + hidden] = 0
        begin += hidden
        step = max(end - begin, 1) if plain else CHUNK
        for first in range(begin, end, step):
            last = min(first + step, end)
            stop = length - (end - last)  # keys after the last query of the chunk are not seen
            low = max(0, stop - (last - first) - window + 1) if window else 0
            inside = slice(low % page, stop - low // page * page)
            blocks = tables[number][low // page : cdiv(stop, page)]
            k, v = (one.transpose(0, 1).to(q.dtype) for one in tokens_of(k_cache, v_cache, blocks, inside))
            grouped = q[first:last].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
            options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes}
            result = _attend_causally(grouped, k, v, **options)
            out[first:last] = result.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attend_causally(q, k, v, *, scale, window, softcap, sinks, slopes):
    """q [Hkv, G, M, D] are the last M tokens of k, v [Hkv, 1, N, D]."""
    queries, keys = q.shape[2], k.shape[2]
    k, v = (one.expand(-1, q.shape[1], -1, -1) for one in (k, v))
    visible = bias = None
    if slopes is not None:
        at = torch.arange(keys, device=q.device)
        bias = slopes.float() * (at - at[keys - queries :, None])
    if q.is_cpu and queries == keys and not (window or softcap or sinks is not None or slopes is not None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if queries > 1:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if window:
            visible = visible.triu(keys - queries - window + 1)
    return attend(q, k, v, visible=visible, scale=scale, softcap=softcap, sinks=sinks, bias=bias)


@triton.jit
def sequence_of(query_start_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that owns query tile `tile`; num_seqs for tiles of the padding behind the last, -1 before the first.

    Sequence s gets the tiles from query_start[s] // BLOCK_Q + s on: always enough, at most one too many.
    """
    count = tile * 0
    for first in range(0, num_seqs + 1, 128):
        number = first + tl.arange(0, 128)
        start = tl.load(query_start_ptr + number, mask=number <= num_seqs, other=0)
        begun = (start // BLOCK_Q + number <= tile) & (number <= num_seqs)
        count += tl.sum(begun.to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _load_tile(
    cache_ptr, boxes, pages, kv_head, kv_heads, key, end, block_stride,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Keys or values [TILE, BLOCK_D]; with MASKED those from `end` on are zero, whatever the cache holds there."""
    if TMA:
        tile = boxes.load([(pages * kv_heads + kv_head) * PAGE + key % PAGE, 0])
        if MASKED:
            tile = tl.where((key + tl.arange(0, TILE) < end)[:, None], tile, tl.zeros_like(tile))
    else:
        tile = load_keys(cache_ptr, pages, key, end, block_stride, D, BLOCK_D, PAGE, TILE, MASKED)
    return tile


@triton.jit
def _attend(
    q, q_high, acc, acc_high, peak, total, position, slope, begin, stop, end, table_ptr, k_ptr, v_ptr, k_tiles, v_tiles,
    kv_head, kv_heads, block_stride, scale, cap, k_scales_ptr, v_scales_ptr, scales_stride,
    MASKED: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr, CODE: tl.constexpr,
    EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Key tiles [begin, stop). MASKED: scores are masked by position, and values from `end` on are zero."""
    pages = pages_of(table_ptr, begin, end, PAGE, TILE)
    for key in tl.range(begin, stop, TILE, num_stages=STAGES):
        pages_ahead = pages_of(table_ptr, key + TILE, end, PAGE, TILE)
        # Keys from `end` on may come from TMA as they are, also if they are no numbers: their scores are replaced.
        k = _load_tile(
            k_ptr, k_tiles, pages, kv_head, kv_heads, key, end, block_stride, D, PAGE, BLOCK_D, TILE,
            MASKED and not TMA, TMA,
        )  # fmt: skip
        v = _load_tile(
            v_ptr, v_tiles, pages, kv_head, kv_heads, key, end, block_stride, D, PAGE, BLOCK_D, TILE, MASKED, TMA
        )
        k_scale = load_scales(k_scales_ptr, pages, key, end, scales_stride, PAGE, TILE, MASKED, EACH)
        v_scale = load_scales(v_scales_ptr, pages, key, end, scales_stride, PAGE, TILE, MASKED, EACH)
        place = key + tl.arange(0, TILE)
        scores = score(q, q_high, k, place, position, slope, scale, cap, k_scale, SOFTCAP, ALIBI, CODE, EACH)
        if MASKED:
            visible = place[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (place[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        acc, acc_high, peak, total = accumulate(
            scores, v, acc, acc_high, peak, total, scale, v_scale, not (SOFTCAP or ALIBI), CODE, EACH, q.dtype
        )
        pages = pages_ahead
    return acc, acc_high, peak, total


# What changes from step to step must not make a new variant: counts, and slices that begin anywhere in a buffer.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_tiles", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "query_start_ptr", "lens_ptr"],
)
def _attention_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [B, Hkv, P, D] contiguous, or words [B, Hkv, P, D / 2] of a coded cache
    v_ptr,  # the same
    k_tiles,  # with TMA: descriptor of k as [B * Hkv * P, D or D / 2], boxes of one tile
    v_tiles,  # with TMA: the same for v
    tables_ptr,  # [S, ...] block ids, int32
    query_start_ptr,  # [S + 1] int32
    lens_ptr,  # [S] int32
    sinks_ptr,  # [Hq]; read if SINKS
    slopes_ptr,  # [Hq]; read if ALIBI
    out_ptr,  # [T, Hq, D]
    q_stride,  # elements between tokens
    q_head_stride,  # elements between heads
    block_stride,  # elements between blocks of k and v
    page_stride,  # elements between the kv heads of a block
    table_stride,  # elements between sequences
    out_stride,  # elements between tokens
    out_head_stride,  # elements between heads
    num_tokens,  # T
    num_seqs,  # S
    num_tiles,
    kv_heads,
    scale,
    cap,
    k_scales_ptr,  # of coded caches, if EACH: [B, Hkv, P]
    v_scales_ptr,  # the same, else the number for all
    scales_stride,  # if EACH: elements between blocks
    G: tl.constexpr,  # query heads of a kv head
    D: tl.constexpr,
    PAGE: tl.constexpr,  # a power of two
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    CODE: tl.constexpr,  # of coded.py
    EACH: tl.constexpr,
    TMA: tl.constexpr,  # only if WIDTH == BLOCK_D and TILE <= PAGE
    BLOCK_M: tl.constexpr,  # rows: a power of two, at least G and 16
    BLOCK_D: tl.constexpr,  # a power of two, at least 16 and D, or D / 2 of coded caches
    TILE: tl.constexpr,  # keys of one step; a power of two
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,  # of the masked tiles
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    WIDTH: tl.constexpr = D if CODE == "" else D // 2  # of a key in the cache
    kv_head = tl.program_id(0) % kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // kv_heads
    sequence = sequence_of(query_start_ptr, tile, num_seqs, BLOCK_Q)
    if sequence < 0:  # query_start[0] may be anything: other tokens of the step may stand in front
        return
    start = tl.load(query_start_ptr + sequence)
    is_padding = sequence == num_seqs
    stop = tl.load(query_start_ptr + sequence + 1, mask=sequence < num_seqs, other=0)
    stop = tl.where(is_padding, num_tokens, stop)
    length = tl.load(lens_ptr + sequence, mask=sequence < num_seqs, other=0)
    first_query = (tile - start // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= stop - start:
        return

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    query = first_query + row // G
    head = kv_head * G + row % G
    real = ((row < BLOCK_Q * G) & (query < stop - start))[:, None] & (column < WIDTH)[None, :]
    token = (start + query).to(tl.int64)
    q_place = q_ptr + (token * q_stride + head * q_head_stride)[:, None] + column[None, :]
    q, q_high = load_queries(q_place, real, D, CODE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_high = acc
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slope = head_number(slopes_ptr, head, row < BLOCK_M, ALIBI)
    if SINKS:
        sink = head_number(sinks_ptr, head, row < BLOCK_M, SINKS)
        peak = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - peak)

    # Positions of the queries of this tile; in a padding row they lie before 0, where there are no keys.
    offset = length - (stop - start)
    position = offset + query
    lowest = offset + first_query
    highest = tl.minimum(lowest + BLOCK_Q, length) - 1
    end = highest + 1
    clear = tl.maximum(lowest + 1, 0) // TILE * TILE  # before it, every query sees every key (but for a window)
    begin = end * 0
    tables_ptr += sequence.to(tl.int64) * table_stride
    k_ptr += kv_head.to(tl.int64) * page_stride
    v_ptr += kv_head.to(tl.int64) * page_stride
    if EACH:
        k_scales_ptr += kv_head * PAGE
        v_scales_ptr += kv_head * PAGE
    if WINDOW:
        left = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        begin = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), TILE) * TILE
        begin = tl.minimum(begin, tl.cdiv(tl.maximum(end, 0), TILE) * TILE)
        acc, acc_high, peak, total = _attend(
            q, q_high, acc, acc_high, peak, total, position, slope, left, begin, end, tables_ptr, k_ptr, v_ptr,
            k_tiles, v_tiles, kv_head, kv_heads, block_stride, scale, cap, k_scales_ptr, v_scales_ptr, scales_stride,
            True, WIDTH, PAGE, WINDOW, SOFTCAP, ALIBI, BLOCK_D, TILE, TMA, CODE, EACH,
            EDGE_STAGES,
        )  # fmt: skip
    clear = tl.maximum(clear, begin)
    acc, acc_high, peak, total = _attend(
        q, q_high, acc, acc_high, peak, total, position, slope, begin, clear, end, tables_ptr, k_ptr, v_ptr,
        k_tiles, v_tiles, kv_head, kv_heads, block_stride, scale, cap, k_scales_ptr, v_scales_ptr, scales_stride,
        False, WIDTH, PAGE, WINDOW, SOFTCAP, ALIBI, BLOCK_D, TILE, TMA, CODE, EACH,
        STAGES,
    )  # fmt: skip
    acc, acc_high, peak, total = _attend(
        q, q_high, acc, acc_high, peak, total, position, slope, clear, end, end, tables_ptr, k_ptr, v_ptr,
        k_tiles, v_tiles, kv_head, kv_heads, block_stride, scale, cap, k_scales_ptr, v_scales_ptr, scales_stride,
        True, WIDTH, PAGE, WINDOW, SOFTCAP, ALIBI, BLOCK_D, TILE, TMA, CODE, EACH,
        EDGE_STAGES,
    )  # fmt: skip
    averaged, averaged_high = averages(acc, acc_high, total, v_scales_ptr, CODE, EACH)
    out_place = out_ptr + (token * out_stride + head * out_head_stride)[:, None] + column[None, :]
    store_columns(out_place, averaged, averaged_high, real, D, CODE)


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the new tokens of each sequence, whose keys and values are in the cache already.

    Args:
        q: [T, Hq, D]; tokens and heads may lie apart.
        k_cache, v_cache: [B, Hkv, P, D], contiguous or coded; P a power of two. Head h reads head h // (Hq / Hkv).
        block_tables: [S, at least ceil(length / P)] int32; what stands behind a sequence's last block is not read.
        query_start: [S + 1] int32, rising; sequence s owns tokens query_start[s] to query_start[s + 1]. Tokens before
            query_start[0] are left alone. Those from query_start[S] on are padding and give zeros, as do queries beyond
            their sequence's length.
        seq_lens: [S] int32: cached and new tokens together.
        scale: of q · k, usually D ** -0.5; positive.
        max_query_len: at least every query length; chooses the tile.
        window: a query at i sees keys i - window + 1 to i; 0: all up to i.
        softcap: c > 0 makes a logit c · tanh(logit / c); 0: off.
        sinks: [Hq] logits that join the denominator without a value, or None.
        alibi_slopes: [Hq] slopes m: a logit gets + m · (its key's position - its query's position), or None.
        batch_invariant: a query's result has the same bits whatever else the step holds, and however its prompt is cut.
        out: [T, Hq, D], written if given; contiguous in its last dimension.

    Returns:
        [T, Hq, D] in q's type: `out`, or new.

    Raises:
        ValueError: shapes, strides or options that do not fit.
    """
    if not use_kernel(q):
        return attention_prefill_reference(
            q, k_cache, v_cache, block_tables, query_start, seq_lens, scale=scale, max_query_len=max_query_len,
            window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out,
        )  # fmt: skip
    tensors = q, raw(k_cache), raw(v_cache), sinks, alibi_slopes, out
    check_ragged("attention_prefill", tensors, scale, block_tables, query_start, seq_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.numel():
        options = _options(q, words(k_cache), MANY if batch_invariant else max(max_query_len, FEW))
        caches = words(k_cache), words(v_cache)
        caches += _boxes(*caches, options)
        where = (block_tables, query_start, seq_lens)
        options |= {"WINDOW": window, "SOFTCAP": softcap > 0, **constants(k_cache, v_cache)}
        _launch(q, caches, where, (sinks, alibi_slopes), out, base_2(scale, softcap, k_cache), **options)
    return out


def check_ragged(name: str, tensors, scale, block_tables, query_start, seq_lens) -> None:
    """Refuse what the kernels for several queries a sequence cannot read.

    Args:
        tensors: q, k_cache, v_cache, sinks, alibi_slopes, out.

    Raises:
        ValueError: with shapes and strides.
    """
    q, k_cache, v_cache, *extras, out = tensors
    check_attention(name, q, k_cache, v_cache, scale, extras, out)
    sequences = len(seq_lens)
    if len(block_tables) != sequences or len(query_start) != sequences + 1 or block_tables.stride(1) != 1:
        raise ValueError(
            f"{name}: seq_lens has {sequences} sequences, block_tables {len(block_tables)} rows (each must be "
            f"contiguous) and query_start {len(query_start)} numbers"
        )


def _boxes(k_cache, v_cache, options):
    """TMA descriptors of both caches as rows of a key each, in boxes of one tile, or Nones."""
    if not options["TMA"]:
        return None, None
    width = k_cache.shape[3]
    flat = (cache.view(-1, width) for cache in (k_cache, v_cache))
    return tuple(TensorDescriptor.from_tensor(one, [options["TILE"], width]) for one in flat)


def _launch(q, caches, where, extras, out, factors, **options) -> None:
    block_tables, _, seq_lens = where
    tokens, heads, head_dim = q.shape
    k_cache, sequences = caches[0], len(seq_lens)
    kv_heads, page = k_cache.shape[1:3]
    group = heads // kv_heads
    tiles = tokens // (options["BLOCK_M"] // group) + sequences + 1
    _attention_prefill_kernel[(tiles * kv_heads,)](
        q,
        *caches,
        *where,
        *(q if extra is None else extra for extra in extras),
        out,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        tokens,
        sequences,
        tiles,
        kv_heads,
        *factors,
        G=group,
        D=head_dim,
        PAGE=page,
        SINKS=extras[0] is not None,
        ALIBI=extras[1] is not None,
        **options,
        **overlap(q),
    )


def _options(q: torch.Tensor, k_cache: torch.Tensor, max_query_len: int) -> dict[str, int]:
    """Block sizes: measured ones, or the first of `_sizes` whose pipeline fits into the device's shared memory.

    Args: k_cache: what `words` gave.
    """
    heads, head_dim = q.shape[1:]
    page, group, width = k_cache.shape[2], heads // k_cache.shape[1], k_cache.shape[3]
    block_d = max(16, next_power_of_2(head_dim))  # numbers that are made of codes take as much room
    device = launch.facts(q.device)
    hopper = device.backend == "cuda" and device.shared >= TMA_SHARED
    fits = q.element_size() == 2 and (q.dtype == k_cache.dtype or width < head_dim)
    tma = hopper and head_dim == block_d <= 256 and page >= 64 and fits and k_cache.numel() < width << 31
    # Rows of D numbers that fit; 4 KiB stay for reductions. Without wgmma, n stages keep n - 1 tiles in flight.
    room = (device.shared - 4096) // (block_d * q.element_size())
    most = max(16, next_power_of_2(group), next_power_of_2(max_query_len * group))
    rows, tile, stages = next(
        (max(min(rows, most), next_power_of_2(group)), tile, stages)
        for rows, tile, stages in _sizes(device, q.element_size(), block_d, tma)
        if min(rows, most) + 2 * tile * (stages if hopper else max(stages - 1, 1)) <= room or tile == 16
    )
    crowded = rows * (block_d + tile) * q.element_size() > 24576 or device.backend == "hip"
    default = {
        "BLOCK_M": rows,
        "BLOCK_D": max(16, next_power_of_2(width)),
        "TILE": tile,
        "TMA": tma and tile <= page,
        "STAGES": stages,
        "EDGE_STAGES": min(stages, 2) if hopper else stages,
        "num_warps": 8 if crowded else 4,
    }
    shape = {"head_dim": head_dim, "group": group, "max_query_len": max_query_len, "page": page}
    return choose("attention_prefill", q, default, **shape, coded=int(width < head_dim))


def _sizes(device: launch.DeviceFacts, item_size: int, block_d: int, tma: bool) -> tuple[tuple[int, int, int], ...]:
    """(rows, keys, stages) in the order to try them."""
    if device.backend == "cpu":
        return ((128, 64, 1), (16, 16, 1))  # the interpreter pays by the program
    if item_size == 4:
        first = ()  # no tensor cores: large tiles only spill
    elif device.backend == "hip" and device.lanes == 32:  # more spills: 256 registers, and tiles on their way hold some
        first = ((64, 32, 2),) if block_d <= 64 else ((64, 32, 1),) if block_d <= 128 else ((32, 16, 1),)
    elif device.backend == "hip":
        first = ((64, 32, 2),) if block_d <= 128 else ()
    elif tma:
        first = ((64, 64, 3), (64, 64, 2), (64, 32, 2))  # measured: two programs a processor beat larger tiles
    else:
        first = ((128, 64, 3), (128, 64, 2)) if block_d <= 128 else ()
        first += ((64, 64, 3), (64, 64, 2), (64, 32, 2))
    return (*first, (32, 32, 2), (32, 16, 2), (16, 16, 1))
