"""Latent attention (MLA) straight on the cached latents: `out = softmax(scale · (q_c Cᵀ + q_pe K_peᵀ)) C`.

A key is W_k c and a value W_v c of one latent c that all heads share, so W_k moves to the query and W_v behind the sum
("absorbed"): q · (W_k c) = (W_kᵀ q) · c. Then all Hq heads read the same C + P numbers of a position, as if there were
one kv head, and the tile of latents that was the key is the value, too: it is loaded once. 2·Hq·(2 C + P) operations a
position on (C + P)·2 bytes: with 128 heads, tensor cores and memory are busy alike.

As the products are written, heads are the rows: heads by keys, then heads by latent numbers. From 64 heads on they fill
Hopper's matrix instruction. With fewer, both products are taken the other way round there, keys by heads and latent
numbers by heads, so that the tile of latents is the wide side, which the instruction reads from shared memory: no
register ever holds it, nor the queries. The denominators stay apart by key until the end, one reduction across warps a
tile less. Three tiles must lie in shared memory then, because with two Triton asks for the next one only behind the
last product of a tile, and loads and products take turns. Three fit without the rotated parts, which are therefore
carried in registers, one tile ahead, and multiplied first: as pairs, since Triton carries single 16-bit numbers in a
register each and takes them apart as soon as they come, which waits for them. They also reach the matrix unit from
registers. Stored to shared memory first, Triton 3.6 puts the fence that the unit's reads need behind the barrier and
not before it, and the numbers were wrong on the device; the unpacking in between prevents that.

Each query token is one row of work with its own table and length, so a decode, a chunk of a prompt and a mixed batch
are one case: the token at position p sees p + 1 keys. One program = (tile of heads, split of the keys, token). Splits,
pages and the online softmax in base 2 are those of `attention_decode.py`.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.

Before: `latent_write.py` has stored the new latents.  After: the product with W_v, then the output projection.
"""

import torch
import triton
import triton.language as tl

from . import launch
from .attention_decode import pages_of
from .attention_merge import attention_merge
from .launch import cdiv, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .pages import attend

PROGRAMS = 132  # as many as run at once: one takes most of the shared memory of one of Hopper's processors
MOST_SPLITS = 128

LOG2E = tl.constexpr(1.4426950408889634)
# The peak's first value. Finite, so that a row without any visible key gives exp2(-inf) = 0 and not NaN.
LOWEST = tl.constexpr(-1e30)


def attention_latent_reference(
    q_c: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `attention_latent`, with its arguments; also how the CPU serves."""
    out = torch.empty_like(q_c) if out is None else out
    width, page = q_c.shape[2], cache.shape[2]
    q = torch.cat((q_c, q_pe), dim=-1)
    lengths, owners = lens.tolist(), rows.tolist()
    first = 0
    while first < len(owners):  # neighbours of one sequence together
        last = first + 1
        while last < len(owners) and owners[last] == owners[first]:
            last += 1
        longest = max(lengths[first:last])
        blocks = block_tables[owners[first], : cdiv(longest, page)].long()
        keys = cache[blocks, 0].flatten(0, 1)[:longest].to(q.dtype)  # [N, C + P]
        visible = torch.arange(longest, device=q.device) < lens[first:last, None]  # [M, N]
        if lse is not None:
            scores = torch.einsum("mhd,nd->mhn", q[first:last].float(), keys.float()) * scale
            lse[first:last] = scores.masked_fill(~visible[:, None], -torch.inf).logsumexp(-1)
        mixed = attend(q[first:last], keys, keys[:, :width], visible=visible[:, None], scale=scale) if longest else 0.0
        out[first:last] = torch.where(lens[first:last, None, None] > 0, mixed, 0.0)
        first = last
    return out


@triton.jit
def load_latents(
    cache_ptr,  # [B, PAGE, STRIDE], at the first of the columns wanted
    pages,  # what pages_of(key) gave; int64 before any multiplication
    key,  # first key, a multiple of TILE
    end,  # keys from here on read as zero
    block_stride,  # elements between blocks
    STRIDE: tl.constexpr,  # numbers of a position
    WIDTH: tl.constexpr,  # columns wanted
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr = True,  # False: what lies at and behind `end` may be anything
):
    """[TILE, BLOCK] numbers of TILE positions."""
    row = tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    if PAGE >= TILE:
        place = cache_ptr + pages.to(tl.int64) * block_stride + (key % PAGE + row)[:, None] * STRIDE + column[None, :]
    else:
        place = (cache_ptr + pages.to(tl.int64) * block_stride + (row % PAGE) * STRIDE)[:, None] + column[None, :]
    if MASKED:
        tile = tl.load(place, mask=(key + row < end)[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _load_queries(
    q_c_ptr, q_pe_ptr, token, head, q_c_stride, q_c_head_stride, q_pe_stride, q_pe_head_stride, HQ: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The queries of a token's heads, [ROWS, BLOCK_C] and [ROWS, BLOCK_P]."""
    column = tl.arange(0, BLOCK_C)
    turning = tl.arange(0, BLOCK_P)
    q_c_place = q_c_ptr + token * q_c_stride + head[:, None] * q_c_head_stride + column[None, :]
    q_c = tl.load(q_c_place, mask=(head < HQ)[:, None] & (column < C)[None, :], other=0.0)
    q_pe_place = q_pe_ptr + token * q_pe_stride + head[:, None] * q_pe_head_stride + turning[None, :]
    q_pe = tl.load(q_pe_place, mask=(head < HQ)[:, None] & (turning < P)[None, :], other=0.0)
    return q_c, q_pe


@triton.jit
def _heads_by_keys(
    q_c, q_pe, cache_ptr, tables_ptr, begin, end, block_stride, scale, C: tl.constexpr, P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end): the weighed sum of latents [ROWS, BLOCK_C], and peak and denominator of each head."""
    acc = tl.zeros([q_c.shape[0], BLOCK_C], tl.float32)
    peak = tl.full([q_c.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([q_c.shape[0]], tl.float32)
    pages = pages_of(tables_ptr, begin, end, PAGE, TILE)
    for key in tl.range(begin, end, TILE, num_stages=STAGES):
        pages_ahead = pages_of(tables_ptr, key + TILE, end, PAGE, TILE)
        c = load_latents(cache_ptr, pages, key, end, block_stride, C + P, C, BLOCK_C, PAGE, TILE).to(q_c.dtype)
        pe = load_latents(cache_ptr + C, pages, key, end, block_stride, C + P, P, BLOCK_P, PAGE, TILE).to(q_c.dtype)
        logits = tl.dot(q_c, tl.trans(c), input_precision="ieee")
        logits = tl.dot(q_pe, tl.trans(pe), logits, input_precision="ieee") * scale
        logits = tl.where((key + tl.arange(0, TILE) < end)[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        weight = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(peak - higher)
        acc = tl.dot(weight.to(c.dtype), c, acc * shrink[:, None], input_precision="ieee")
        peak, total = higher, total * shrink + tl.sum(weight, axis=1)
        pages = pages_ahead
    return acc, peak, total


@triton.jit
def _keys_by_heads(
    q_c, q_pe, cache_ptr, tables_ptr, begin, end, block_stride, scale, C: tl.constexpr, P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_heads_by_keys`, by products with the tile of latents on the wide side; of 16-bit numbers, C and P even."""
    acc = tl.zeros([BLOCK_C, q_c.shape[0]], tl.float32)
    peak = tl.full([q_c.shape[0]], LOWEST, tl.float32)
    totals = tl.zeros([TILE, q_c.shape[0]], tl.float32)
    pairs_ptr = (cache_ptr + C).to(tl.pointer_type(tl.int32), bitcast=True)
    HALF: tl.constexpr = (C + P) // 2
    pages = pages_of(tables_ptr, begin, end, PAGE, TILE)
    pairs = load_latents(pairs_ptr, pages, begin, end, block_stride // 2, HALF, P // 2, BLOCK_P // 2, PAGE, TILE, False)
    for key in tl.range(begin, end, TILE, num_stages=STAGES):
        ahead = key + TILE
        pages_ahead = pages_of(tables_ptr, ahead, end, PAGE, TILE)
        low = (pairs & 0xFFFF).to(tl.int16).to(q_c.dtype, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(q_c.dtype, bitcast=True)
        pe = tl.reshape(tl.join(low, high), [TILE, BLOCK_P])
        pairs = load_latents(
            pairs_ptr, pages_ahead, ahead, end, block_stride // 2, HALF, P // 2, BLOCK_P // 2, PAGE, TILE, False
        )
        logits = tl.dot(pe, tl.trans(q_pe), input_precision="ieee")
        c = load_latents(cache_ptr, pages, key, end, block_stride, C + P, C, BLOCK_C, PAGE, TILE)
        logits = tl.dot(c, tl.trans(q_c), logits, input_precision="ieee") * scale
        logits = tl.where((key + tl.arange(0, TILE) < end)[:, None], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=0))
        weight = tl.exp2(logits - higher[None, :])
        shrink = tl.exp2(peak - higher)
        acc = tl.dot(tl.trans(c), weight.to(c.dtype), acc * shrink[None, :], input_precision="ieee")
        totals = totals * shrink[None, :] + weight
        peak = higher
        pages = pages_ahead
    return tl.trans(acc), peak, tl.sum(totals, axis=0)


# A slice that begins anywhere in a buffer must not make a new variant.
@triton.jit(do_not_specialize_on_alignment=["tables_ptr", "rows_ptr", "lens_ptr"])
def _attention_latent_kernel(
    q_c_ptr,  # [T, HQ, C]
    q_pe_ptr,  # [T, HQ, P]
    cache_ptr,  # [B, 1, PAGE, C + P] contiguous
    tables_ptr,  # [S, ...] block ids, int32
    rows_ptr,  # [T] int32: which table
    lens_ptr,  # [T] int32
    out_ptr,  # one split: [T, HQ, C]; more: partial [T, HQ, K, C] float32
    lse_ptr,  # [T, HQ, K] float32; written if LSE
    q_c_stride,  # elements between tokens
    q_c_head_stride,  # elements between heads
    q_pe_stride,
    q_pe_head_stride,
    block_stride,  # elements between blocks
    table_stride,  # elements between tables
    out_stride,  # elements between tokens
    out_head_stride,  # elements between heads
    scale,  # with log2(e) in it
    HQ: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,  # a power of two
    SPLIT: tl.constexpr,  # more than one split
    LSE: tl.constexpr,  # always with SPLIT
    ROWS: tl.constexpr,  # heads a program; a power of two, at least 16
    BLOCK_C: tl.constexpr,  # a power of two, at least C
    BLOCK_P: tl.constexpr,  # a power of two, at least P and 16
    TILE: tl.constexpr,  # keys of one step; a power of two
    STAGES: tl.constexpr,
    LATENTS_WIDE: tl.constexpr,  # keys by heads, else heads by keys
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_C)
    real = (head < HQ)[:, None] & (column < C)[None, :]

    if LATENTS_WIDE:  # together with the length, which the first page waits for; more heads fill the registers
        q_c, q_pe = _load_queries(
            q_c_ptr, q_pe_ptr, token, head, q_c_stride, q_c_head_stride, q_pe_stride, q_pe_head_stride, HQ, C, P,
            BLOCK_C, BLOCK_P,
        )  # fmt: skip
    length = tl.load(lens_ptr + token)
    row = tl.load(rows_ptr + token).to(tl.int64)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)
    part = (token * HQ + head) * splits + split
    if SPLIT:
        nothing = tl.full([ROWS], float("-inf"), tl.float32)
        if begin >= end:
            tl.store(lse_ptr + part, nothing, mask=head < HQ)
            return

    if not LATENTS_WIDE:
        q_c, q_pe = _load_queries(
            q_c_ptr, q_pe_ptr, token, head, q_c_stride, q_c_head_stride, q_pe_stride, q_pe_head_stride, HQ, C, P,
            BLOCK_C, BLOCK_P,
        )  # fmt: skip
    tables_ptr += row * table_stride
    attend: tl.constexpr = _keys_by_heads if LATENTS_WIDE else _heads_by_keys
    acc, peak, total = attend(
        q_c, q_pe, cache_ptr, tables_ptr, begin, end, block_stride, scale, C, P, PAGE, BLOCK_C, BLOCK_P, TILE, STAGES
    )
    total_or_1 = tl.where(total == 0.0, 1.0, total)
    averaged = acc * (1.0 / total_or_1)[:, None] if LATENTS_WIDE else acc / total_or_1[:, None]
    if LSE:
        tl.store(lse_ptr + part, (peak + tl.log2(total)) / LOG2E, mask=head < HQ)
    if SPLIT:
        tl.store(out_ptr + part[:, None] * C + column[None, :], averaged, mask=real)
    else:
        place = out_ptr + token * out_stride + head[:, None] * out_head_stride + column[None, :]
        tl.store(place, averaged.to(out_ptr.dtype.element_ty), mask=real)


def attention_latent(
    q_c: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each token over the first latents of its sequence.

    Args:
        q_c: [T, Hq, C], queries times W_k; tokens and heads may lie apart.
        q_pe: [T, Hq, P], their rotated parts; likewise.
        cache: [B, 1, page, C + P], contiguous; page a power of two.
        block_tables: [S, at least ceil(length / page)] int32; what stands behind a sequence's last block is not read.
        rows: [T] int32: the row of block_tables that is the token's.
        lens: [T] int32: how many positions it sees; 0 gives zeros.
        scale: of the scores.   max_seq_len: at least every length; fixes the number of splits.
        out: [T, Hq, C], written if given; contiguous in its last dimension.
        lse: [T, Hq] float32, contiguous, or None: gets the natural log of each softmax's denominator, -inf for none.

    Returns:
        [T, Hq, C]: the weighted mean of latents, to be multiplied by W_v. `out`, or new.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    if not use_kernel(q_c):
        return attention_latent_reference(
            q_c, q_pe, cache, block_tables, rows, lens, scale=scale, max_seq_len=max_seq_len, out=out, lse=lse
        )
    _check(q_c, q_pe, cache, block_tables, rows, lens, out)
    out = torch.empty(q_c.shape, dtype=q_c.dtype, device=q_c.device) if out is None else out
    if out.numel():
        _launch((q_c, q_pe), (cache, block_tables, rows, lens), (out, lse), scale, max_seq_len)
    return out


def _launch(queries, where, results, scale: float, max_seq_len: int) -> None:
    """Attend into `results` (out, lse or None) with one split; with more into parts, and merge them."""
    out, total = results
    q_c, q_pe = queries
    cache, block_tables = where[:2]
    tokens, heads, width = q_c.shape
    options = _options(q_c, cache, max_seq_len)
    tiles = cdiv(heads, options["ROWS"])
    splits = count_splits(tokens * tiles, max_seq_len, options["TILE"])
    target, lse = out, out if total is None else total
    if splits > 1:
        target = torch.empty((tokens, heads, splits, width), dtype=torch.float32, device=out.device)
        lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=out.device)
    _attention_latent_kernel[(tiles, splits, tokens)](
        *queries,
        *where,
        target,
        lse,
        *q_c.stride()[:2],
        *q_pe.stride()[:2],
        cache.stride(0),
        block_tables.stride(0),
        *out.stride()[:2],
        scale * LOG2E.value,
        HQ=heads,
        C=width,
        P=q_pe.shape[2],
        PAGE=cache.shape[2],
        SPLIT=splits > 1,
        LSE=splits > 1 or total is not None,
        **options,
        **overlap(q_c),
    )
    if splits > 1:
        attention_merge(target, lse, out=out)
        if total is not None:
            torch.logsumexp(lse, dim=-1, out=total)


def count_splits(pairs: int, keys: int, tile: int) -> int:
    """Splits for `pairs` of (token, tile of heads) with up to `keys` keys: a power of two that fills the device."""
    most = min(PROGRAMS // pairs, cdiv(keys, tile), MOST_SPLITS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def _check(q_c, q_pe, cache, block_tables, rows, lens, out) -> None:
    tokens, heads, width = q_c.shape
    page, size = cache.shape[2:]
    if q_pe.shape[:2] != (tokens, heads) or size != width + q_pe.shape[2] or cache.shape[1] != 1:
        raise ValueError(
            f"attention_latent: q_c {list(q_c.shape)} and q_pe {list(q_pe.shape)} do not fit a cache of "
            f"{list(cache.shape)}"
        )
    if page & (page - 1) or not cache.is_contiguous():
        raise ValueError(f"attention_latent: a contiguous cache in blocks of a power of two, not {list(cache.shape)}")
    if q_c.stride(2) != 1 or q_pe.stride(2) != 1 or (out is not None and out.stride(2) != 1):
        raise ValueError("attention_latent: queries and out must be contiguous in the last dimension")
    if rows.shape != (tokens,) or lens.shape != (tokens,) or block_tables.stride(1) != 1:
        raise ValueError(f"attention_latent: {tokens} tokens need a row and a length each, and tables with dense rows")


def _options(q_c: torch.Tensor, cache: torch.Tensor, max_seq_len: int) -> dict[str, int]:
    """Block sizes: measured ones, or the largest tile whose pipeline fits into the device's shared memory."""
    tokens, heads, width = q_c.shape
    rotary = cache.shape[3] - width
    device, size = launch.facts(q_c.device), q_c.element_size()
    half = size == 2 and device.backend == "cuda"
    hopper = half and device.arch == 90
    wide = hopper and heads < 64 and cache.dtype == q_c.dtype and width % 2 == rotary % 2 == 0
    rows = 16 if heads < 64 or not half else 64 if hopper else 32
    block_c, block_p = max(16, next_power_of_2(width)), max(16, next_power_of_2(rotary))
    sizes = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1))

    def taken(tile: int, stages: int) -> int:
        """Bytes: Hopper's matrix unit reads a tile while the next ones arrive, which takes one more."""
        tiles = tile * (stages if wide or (hopper and rows == 64) else max(stages - 1, 1))
        return (tiles * block_c + (tile if wide else tiles) * block_p + rows * (block_c + block_p)) * size

    tile, stages = next(one for one in sizes if taken(*one) <= device.shared - 4096 or one == sizes[-1])
    default = {
        "ROWS": rows,
        "BLOCK_C": block_c,
        "BLOCK_P": block_p,
        "TILE": tile,
        "STAGES": stages,
        "LATENTS_WIDE": wide,
        "num_warps": 4 if rows == 16 else 8,
    }
    return choose("attention_latent", q_c, default, heads=heads, width=width, tokens=tokens, max_seq_len=max_seq_len)
