"""The k largest logits of each row, and the peaks by which a row's few largest are found without sorting it.

Stage 1, one program per (row, tile of 4096 ids), reads the logits once and leaves the peak of each 128 ids. k peaks are
k tokens, so the k-th largest peak is not above the k-th largest logit. Stage 2, one program per row, finds that bound,
copies out the candidates, which are the tokens at or above it and lie under few peaks, and takes the largest of them k
times. Equals go by id, so that a tie is reported the same way in any batch. Bytes: the logits once, and a 32nd of them
again. If there are more candidates than fit (a row of equals), stage 2 passes over the row k times instead.

Numbers are compared as `ordered_key`s, the integers that order as float32 does. The same peaks and candidates serve the
filters of sampling (`threshold.py`).

Source: Alabi et al., "Fast k-selection algorithms for graphics processing units", JEA 17, 2012, section 3 (a bound from
the extremes of buckets).

Before: `launch.py`.  After: `threshold.py`, `logprobs.py`.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen

from .launch import cdiv, check_rows, next_power_of_2, overlap, start_next, use_kernel, wait_inputs

MAX_K = 64  # more alternatives than this are sorted by torch; the kernel's time grows with k, a sort's does not
TILE = 4096  # ids of a program of stage 1
UNDER = 128  # ids under one peak
CANDIDATES = 2048  # tokens of a row that fit the registers of a program
GROUP = 32  # peaks whose ids are copied at a time
LEAST = tl.constexpr(-0x80000000)  # below every key
KEY_OF_NOTHING = tl.constexpr(-0x7F800001)  # the key of -inf


@frozen
class TopTokens:
    """The k largest logits of each row, best first: their logits [R, k] float32 and ids [R, k] int32."""

    logits: torch.Tensor
    ids: torch.Tensor


def top_tokens_reference(logits: torch.Tensor, k: int, rows: torch.Tensor | None = None) -> TopTokens:
    """The specification of `top_tokens`, with its arguments."""
    values = (logits if rows is None else logits[rows]).float()
    k = min(k, values.shape[1])
    if k > MAX_K:
        ranked, ids = values.sort(dim=-1, descending=True, stable=True)
        return TopTokens(ranked[:, :k].contiguous(), ids[:, :k].int())
    top = values.new_empty(len(values), k)
    best = torch.empty(len(values), k, dtype=torch.int32, device=logits.device)
    for i, row in enumerate(values if k else ()):
        ids = (row >= row.topk(k).values[-1]).nonzero()[:, 0]  # k of them, or more when the last has equals
        if len(ids) < k:  # NaN: nothing is larger
            ids = torch.arange(len(row), device=logits.device)
        ranked, order = row[ids].sort(descending=True, stable=True)
        top[i], best[i] = ranked[:k], ids[order[:k]].int()
    return TopTokens(top, best)


@triton.jit
def ordered_key(x):
    """An int32 that orders as the float32 `x` does (-0.0 equals 0.0): negative numbers have all other bits flipped."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of an ordered key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def peaks_of(logit, UNDER: tl.constexpr):
    """The largest of every UNDER neighbours of a tile: [TILE] -> [TILE / UNDER]."""
    return tl.max(tl.reshape(logit, [logit.shape[0] // UNDER, UNDER]), axis=1)


@triton.jit
def search_block(keys, amounts, low, high, target):
    """The largest key in [low, high) with `target` or more at or above it; `low` is known to have it, `high` not to.

    keys, amounts: what is held in registers; each key counts as its amount.
    """
    middle = (low & high) + ((low ^ high) >> 1)  # rounded down, and no overflow
    while middle > low:
        enough = tl.sum(tl.where(keys >= middle, amounts, 0.0), axis=0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = (low & high) + ((low ^ high) >> 1)
    return low


@triton.jit
def load_peaks(peaks_ptr, count, PEAKS: tl.constexpr):
    """Peaks [PEAKS] of a row and their keys; -inf and LEAST after the last."""
    lane = tl.arange(0, PEAKS)
    peak = tl.load(peaks_ptr + lane, mask=lane < count, other=float("-inf"))
    return peak, tl.where(lane < count, ordered_key(peak), LEAST)


@triton.jit
def copy_candidates(
    row_ptr, keys, under_ptr, key_ptr, id_ptr, V, low,
    PEAKS: tl.constexpr, UNDER: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Keys and ids of the tokens with key >= low, by id, to scratch; how many there are, of which CANDIDATES fit."""
    high_enough = (keys >= low).to(tl.int32)  # the keys of the peaks
    tl.store(under_ptr + tl.cumsum(high_enough, axis=0) - 1, tl.arange(0, PEAKS), mask=high_enough > 0)
    groups = tl.sum(high_enough, axis=0)
    tl.debug_barrier()
    found = 0
    start = 0
    while (start < groups) & (found <= CANDIDATES):
        place = start + tl.arange(0, GROUP)
        under = tl.load(under_ptr + place, mask=place < groups, other=0)
        ids = under[:, None] * UNDER + tl.arange(0, UNDER)[None, :]
        real = (place < groups)[:, None] & (ids < V)
        key = ordered_key(tl.load(row_ptr + ids, mask=real, other=float("-inf")).to(tl.float32))
        take = tl.reshape((real & (key >= low)).to(tl.int32), [GROUP * UNDER])
        to = found + tl.cumsum(take, axis=0) - 1
        fits = (take > 0) & (to < CANDIDATES)
        tl.store(key_ptr + to, tl.reshape(key, [GROUP * UNDER]), mask=fits)
        tl.store(id_ptr + to, tl.reshape(ids, [GROUP * UNDER]), mask=fits)
        found += tl.sum(take, axis=0)
        start += GROUP
    tl.debug_barrier()
    return found


@triton.jit
def _peaks_kernel(
    logits_ptr,  # [L, V]
    rows_ptr,  # [R]; read if ROWS
    temperature_ptr,  # [R]; read if MASS
    peaks_ptr,  # [R, tiles * TILE / UNDER] float32
    mass_ptr,  # [R, tiles] float32: sum of exp((logit - largest of the tile) / temperature); written if MASS
    V,
    logits_stride,  # elements between rows
    ROWS: tl.constexpr,
    MASS: tl.constexpr,
    TILE: tl.constexpr,
    UNDER: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64) if ROWS else index
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    at = index * tl.num_programs(1) + tile
    tl.store(peaks_ptr + at * (TILE // UNDER) + tl.arange(0, TILE // UNDER), peaks_of(logit, UNDER))
    if MASS:
        temperature = tl.load(temperature_ptr + index)
        top = tl.max(logit, axis=0)
        share = tl.exp((logit - top) / tl.where(temperature > 0, temperature, 1.0))
        tl.store(mass_ptr + at, tl.sum(tl.where(logit > float("-inf"), share, 0.0), axis=0))


@triton.jit(do_not_specialize=["K"])
def _top_kernel(
    logits_ptr,  # [L, V]
    rows_ptr,  # [R]; read if ROWS
    peaks_ptr,  # [R, count] float32
    scratch_ptr,  # [R, PEAKS + 2 CANDIDATES] int32
    top_ptr,  # [R, K] float32
    id_ptr,  # [R, K] int32
    V,
    K,  # not a constexpr: a request's number of alternatives must not compile a kernel
    logits_stride,  # elements between rows
    count,
    ROWS: tl.constexpr,
    PEAKS: tl.constexpr,  # a power of two, at least count
    UNDER: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64) if ROWS else index
    row_ptr = logits_ptr + row * logits_stride
    _, keys = load_peaks(peaks_ptr + index * count, count, PEAKS)
    there = (tl.arange(0, PEAKS) < count).to(tl.float32)
    best = tl.max(keys, axis=0)
    low = tl.zeros_like(best) + LEAST
    if count >= K:
        low = search_block(keys, there, low, tl.minimum(best, 0x7FFFFFFE) + 1, K.to(tl.float32))
    scratch_ptr += index * (PEAKS + 2 * CANDIDATES)
    key_ptr = scratch_ptr + PEAKS
    found = copy_candidates(
        row_ptr, keys, scratch_ptr, key_ptr, key_ptr + CANDIDATES, V, low, PEAKS, UNDER, GROUP, CANDIDATES
    )
    # A pair (logit, id) is one int64 that orders first by logit and then by falling id.
    lane = tl.arange(0, CANDIDATES)
    some = (lane < found) & (found <= CANDIDATES)
    key = tl.load(key_ptr + lane, mask=some, other=LEAST)
    ids = tl.load(key_ptr + CANDIDATES + lane, mask=some, other=0)
    pairs = tl.where(some, (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), -0x8000000000000000)
    last = tl.max(pairs, axis=0) * 0 + 0x7FFFFFFFFFFFFFFF
    for place in range(0, K):
        if found > CANDIDATES:
            largest = tl.full([CANDIDATES], -0x8000000000000000, tl.int64)
            for start in range(0, V, CANDIDATES):
                at = start + lane
                one = ordered_key(tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32))
                pair = (one.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
                largest = tl.maximum(largest, tl.where((at < V) & (pair < last), pair, largest))
            last = tl.max(largest, axis=0)
        else:
            last = tl.max(tl.where(pairs < last, pairs, -0x8000000000000000), axis=0)
        tl.store(top_ptr + index * K + place, value_of((last >> 32).to(tl.int32)))
        tl.store(id_ptr + index * K + place, 0x7FFFFFFF - (last & 0x7FFFFFFF).to(tl.int32))


def search_sizes(V: int) -> dict[str, int]:
    """The sizes that stage 2 is compiled for; scratch of a row is PEAKS + 2 CANDIDATES numbers."""
    peaks = max(next_power_of_2(cdiv(V, TILE) * (TILE // UNDER)), 128)  # threshold.py makes 128 groups of them
    return {"PEAKS": peaks, "UNDER": UNDER, "GROUP": GROUP, "CANDIDATES": CANDIDATES}


def find_peaks(
    logits: torch.Tensor, rows: torch.Tensor | None, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 1 for R rows (None: all): peaks [R, tiles * TILE / UNDER]; with temperature [R] also masses [R, tiles]."""
    R, V = (len(logits) if rows is None else len(rows)), logits.shape[1]
    tiles = cdiv(V, TILE)
    peaks = logits.new_empty(R, tiles * (TILE // UNDER), dtype=torch.float32)
    mass = peaks if temperature is None else logits.new_empty(R, tiles, dtype=torch.float32)
    _peaks_kernel[(R, tiles)](
        logits, logits if rows is None else rows, logits if temperature is None else temperature, peaks, mass,
        V, logits.stride(0), ROWS=rows is not None, MASS=temperature is not None, TILE=TILE, UNDER=UNDER,
        num_warps=4, **overlap(logits),
    )  # fmt: skip
    return peaks, mass


def scratch_for(logits: torch.Tensor, R: int) -> torch.Tensor:
    """[R, PEAKS + 2 CANDIDATES] int32 for stage 2."""
    return logits.new_empty(R, search_sizes(logits.shape[1])["PEAKS"] + 2 * CANDIDATES, dtype=torch.int32)


def top_tokens(logits: torch.Tensor, k: int, rows: torch.Tensor | None = None) -> TopTokens:
    """The k largest logits of each row.

    Args:
        logits: [L, V] fp32, fp16 or bf16; rows may lie apart.
        k: at least 0; above V it is V, so the result may be narrower.
        rows: [R] int, which rows; None for all.

    Returns:
        TopTokens, [R, min(k, V)]; among equal logits the lowest id comes first.
    """
    check_rows("top_tokens", logits)
    R, V = (len(logits) if rows is None else len(rows)), logits.shape[1]
    k = min(k, V)
    if not use_kernel(logits) or k > MAX_K:
        return top_tokens_reference(logits, k, rows)
    top = TopTokens(logits.new_empty(R, k, dtype=torch.float32), logits.new_empty(R, k, dtype=torch.int32))
    if R and k:
        peaks, _ = find_peaks(logits, rows, None)
        _top_kernel[(R,)](
            logits, logits if rows is None else rows, peaks, scratch_for(logits, R), top.logits, top.ids,
            V, k, logits.stride(0), peaks.shape[1], ROWS=rows is not None, num_warps=8, **search_sizes(V),
            **overlap(logits),
        )  # fmt: skip
    return top
