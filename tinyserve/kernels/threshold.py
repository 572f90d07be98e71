"""The smallest logit that may be drawn, per row: min-p, then top-k, then top-p, found without sorting.

    min-p   keep logit >= max + temperature * ln(min_p)
    top-k   keep logit >= the k-th largest; all equals of the k-th are kept
    top-p   of what is left, keep the smallest set of most likely tokens whose mass reaches p times the mass of what is
            left; among equal logits the lower ids come first, and at least one token is kept

All three keep the upper part of a row, so one number says it all, and the sampler applies it while it reads the logits:
no second copy of [L, V]. Where top-p cuts through a group of equal logits, `last_tie` is the last id of the group kept.

Stage 1, one program per (row, tile of 2048 ids), reads the logits once and leaves the peak of each 128 ids. k peaks are
k tokens, so the k-th largest peak is not above the k-th largest logit; in the same way peaks that hold p of the mass
bound the border of top-p, and min-p is a bound by itself. Stage 2, one program per row, finds that bound among the
peaks, copies out the candidates, which are the tokens at or above it and lie under few peaks, and searches among them
by bisection over the integers that order float32 (`ordered_key`), in registers. So the logits are read once, by as many
programs as there are tiles, whatever is asked; a row that asks for nothing costs one program that ends at once.

Where the bound fails (top-p over a flat row, whose border lies below most tokens, or k above the number of peaks) there
are too many candidates, and stage 2 bisects over the whole row: at most 32 passes, in practice about 20, from cache.

Source: Park et al., "Qrita: High-performance Top-k and Top-p using Pivot-based Truncation", arXiv:2602.01518, for the
pivot search; Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv:1904.09751, for top-p.

Before: `penalties.py`, `token_mask.py` (edit the logits).  After: `sample.py` (applies the threshold).
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs

# Of the reference, at V 49152 on one core: topk takes 0.1 ms up to here, kthvalue 0.1 to 0.5 ms for any k.
SMALL_K = 128
SORT_AT_MOST = 1024  # ten halvings cost 0.2 ms; sorting 20000 candidates costs 1.5 ms
INF = float("inf")

TILE = 2048  # ids of a program of stage 1
UNDER = 128  # ids under one peak
CANDIDATES = 4096  # most of a row that are searched in registers; of these usually fewer than
FEW = 512
GROUP = 32  # peaks whose ids are copied at a time
LEAST = tl.constexpr(-0x80000000)


def threshold_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `threshold`, with its arguments."""
    L, V = logits.shape
    out = torch.full((L,), -INF, device=logits.device)
    last_tie = torch.full((L,), V - 1, dtype=torch.int32, device=logits.device)
    asks = (temperature > 0) & ((top_p < 1) | (min_p > 0) | ((top_k > 0) & (top_k < V)))
    drops = _drop(temperature, min_p)
    for row in asks.nonzero()[:, 0].tolist():
        values = logits[row].float()
        top = values.max()
        k, p, t = int(top_k[row]), float(top_p[row]), float(temperature[row])
        bound = top + drops[row]
        if 0 < k < V:
            bound = torch.maximum(bound, _kth_largest(values, k))
        out[row] = bound
        if p < 1 and top.isfinite():
            out[row], last_tie[row] = _nucleus(values, bound, top, p, 1 / t)
    return out, last_tie


def exp_(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in place for x <= 0, and 0 below -80: what a CPU's exp does with such numbers takes four times as long.

    At V 49152 on one core: 44 us for ordinary logits, 189 us when most results underflow, 55 us this way. A token that
    is e**-80 times as likely as the best one is beyond the 24 bits of a uniform number anyhow.
    """
    return torch.nn.functional.threshold_(x.clamp_min_(-80).exp_(), 2e-35, 0.0)


def _drop(temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """How far below the largest logit min-p reaches: [L], -inf where it is off."""
    return torch.where(min_p > 0, temperature * min_p.log(), -INF)


def _kth_largest(values: torch.Tensor, k: int) -> torch.Tensor:
    if k <= SMALL_K:
        return values.topk(k).values[-1]
    return values.kthvalue(len(values) - k + 1).values


def _nucleus(
    values: torch.Tensor, bound: torch.Tensor, top: torch.Tensor, p: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """The smallest logit of the nucleus, and the last id among its equals. Sorts a few candidates only."""
    V = len(values)
    ids = (values >= bound).nonzero()[:, 0] if bound > -INF else torch.arange(V, device=values.device)
    values = values[ids] if len(ids) < V else values
    weights = exp_((values - top).mul_(scale))
    low, high, missing = _bracket(values, weights, torch.maximum(bound, values.min()), p, top, scale)
    inside = ((values >= low) & (values < high)).nonzero()[:, 0]
    if len(inside) == 0:  # p is 1 but for rounding: nothing more to drop
        return low, V - 1
    ranked, order = values[inside].sort(descending=True, stable=True)
    count = int((weights[inside[order]].cumsum(0) < missing).sum())
    count = min(count, len(ranked) - 1)
    cuts_a_tie = count + 1 < len(ranked) and bool(ranked[count + 1] == ranked[count])
    return ranked[count], ids[inside[order[count]]] if cuts_a_tie else V - 1


def _bracket(
    values: torch.Tensor, weights: torch.Tensor, low: torch.Tensor, p: float, top: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """low <= the border of the nucleus < high, and the mass still missing below high. Ten cheap halvings, if many.

    Tokens that together weigh less than 1 - p are never needed, so the border is not below (1 - p) / V of the mass.
    """
    total = weights.sum()
    high, missing = torch.full_like(top, INF), p * total
    if len(values) <= SORT_AT_MOST:
        return low, high, missing
    least = top + (total * ((1 - p) / len(values) * 0.5)).log() / scale  # half: a margin for rounding
    low, end = torch.maximum(low, least), top
    passed = torch.empty_like(values)  # 0.0 or 1.0
    for _ in range(10):
        middle = low + (end - low) / 2
        mass = torch.dot(weights, torch.ge(values, middle, out=passed))
        if mass >= p * total:
            low = middle
        else:
            high, end, missing = middle, middle, p * total - mass
    return low, high, missing


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
def _at_or_above(row_ptr, V, pivot, top, scale, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """One pass: tokens (or mass, if WEIGH) with key >= pivot; the smallest key >= pivot; the largest key < pivot."""
    amount = tl.zeros((BLOCK,), tl.float32)
    above = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    below = tl.full((BLOCK,), -0x80000000, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < V
        logit = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
        key = ordered_key(logit)
        passed = inside & (key >= pivot)
        if WEIGH:
            amount += tl.where(passed, tl.exp((logit - top) * scale), 0.0)
        else:
            amount += tl.where(passed, 1.0, 0.0)
        above = tl.minimum(above, tl.where(passed, key, 0x7FFFFFFF))
        below = tl.maximum(below, tl.where(inside & (key < pivot), key, -0x80000000))
    return tl.sum(amount, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _search(row_ptr, V, low, high, target, top, scale, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in [low, high) with `target` or more at or above it; `low` is known to have it, `high` not to."""
    middle = (low & high) + ((low ^ high) >> 1)  # rounded down, and no overflow
    while middle > low:
        amount, above, below = _at_or_above(row_ptr, V, middle, top, scale, WEIGH, BLOCK)
        if amount >= target:
            low = tl.minimum(above, high - 1)
        else:
            high = tl.maximum(below, low) + 1
        middle = (low & high) + ((low ^ high) >> 1)
    return low


@triton.jit
def _search_block(keys, amounts, low, high, target):
    """As `_search`, among keys that are held in registers; each counts as its amount."""
    middle = (low & high) + ((low ^ high) >> 1)
    while middle > low:
        enough = tl.sum(tl.where(keys >= middle, amounts, 0.0), axis=0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = (low & high) + ((low ^ high) >> 1)
    return low


@triton.jit
def _nth_equal(row_ptr, V, key, count, BLOCK: tl.constexpr):
    """The id of the `count`-th token (from 1) whose key is `key`; V - 1 if there are fewer."""
    found = V - 1
    seen = 0
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        equal = ((ordered_key(logit) == key) & (ids < V)).to(tl.int32)
        hit = (equal > 0) & (seen + tl.cumsum(equal, axis=0) == count)
        found = tl.minimum(found, tl.min(tl.where(hit, ids, V - 1), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit
def peaks_of(logit, UNDER: tl.constexpr):
    """The largest of every UNDER neighbours of a tile: [TILE] -> [TILE / UNDER]."""
    return tl.max(tl.reshape(logit, [logit.shape[0] // UNDER, UNDER]), axis=1)


@triton.jit
def _bound(peaks_ptr, count, low, high, top, top_k, top_p, total, scale, PEAKS: tl.constexpr):
    """A key that is at most the border, from the peaks of the row, and whether they hold one.

    With top-k or min-p, all that is kept is at or above the key; with top-p alone, p of the mass is.
    """
    lane = tl.arange(0, PEAKS)
    peak = tl.load(peaks_ptr + lane, mask=lane < count, other=float("-inf"))
    keys = tl.where(lane < count, ordered_key(peak), LEAST)
    least = tl.zeros_like(low) - 0x7F800001  # the key of -inf
    found = low > least
    if (top_k > 0) & (top_k <= count):
        kth = _search_block(keys, (lane < count).to(tl.float32), least, high, top_k.to(tl.float32))
        low = tl.maximum(low, kth)
        found = low > least
    if (found == 0) & (top_k <= 0) & (top_p < 1):
        mass = tl.where(keys > least, tl.exp((peak - top) * scale), 0.0)
        wanted = top_p * total * 1.00001  # sums in another order may differ by this much
        if tl.sum(mass, axis=0) >= wanted:
            low = _search_block(keys, mass, least + 1, high, wanted)
            found = low > least
    return low, found


@triton.jit
def _copy_candidates(
    row_ptr, peaks_ptr, under_ptr, key_ptr, id_ptr, V, count, low,
    PEAKS: tl.constexpr, UNDER: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Keys and ids of the tokens with key >= low, by id, to scratch; how many there are, of which CANDIDATES fit."""
    lane = tl.arange(0, PEAKS)
    peak = tl.load(peaks_ptr + lane, mask=lane < count, other=float("-inf"))
    high_enough = ((lane < count) & (ordered_key(peak) >= low)).to(tl.int32)
    tl.store(under_ptr + tl.cumsum(high_enough, axis=0) - 1, lane, mask=high_enough > 0)
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
def _among(key_ptr, id_ptr, count, V, low, high, top, top_k, top_p, total, scale, limited, BLOCK: tl.constexpr):
    """The border (key, last tie) among `count` candidates, which fit a block. `limited`: nothing else was left."""
    lane = tl.arange(0, BLOCK)
    there = lane < count
    keys = tl.load(key_ptr + lane, mask=there, other=-0x80000000)
    last_tie = V - 1
    if (top_k > 0) & (top_k < count):
        low = _search_block(keys, there.to(tl.float32), low, high, top_k.to(tl.float32))
    if top_p < 1:
        mass = tl.where(keys >= low, tl.exp((value_of(keys) - top) * scale), 0.0)
        if limited:
            total = tl.sum(mass, axis=0)
        low = _search_block(keys, mass, low, high, top_p * total)
        above = tl.sum(tl.where(keys > low, mass, 0.0), axis=0)
        ties = tl.ceil((top_p * total - above) / tl.exp((value_of(low) - top) * scale))
        ties = tl.maximum(tl.minimum(ties, V), 1).to(tl.int32)
        equal = (keys == low).to(tl.int32)
        hit = (equal > 0) & (tl.cumsum(equal, axis=0) == ties)
        ids = tl.load(id_ptr + lane, mask=hit, other=0x7FFFFFFF)
        last_tie = tl.minimum(tl.min(ids, axis=0), V - 1)
    return low, last_tie


@triton.jit
def _over_row(row_ptr, V, low, high, top, top_k, top_p, scale, BLOCK: tl.constexpr):
    """The border (key, last tie) by passes over the whole row."""
    last_tie = V - 1
    if (top_k > 0) & (top_k < V):
        least = tl.zeros_like(low) - 0x7F800001  # the key of -inf
        low = tl.maximum(low, _search(row_ptr, V, least, high, top_k.to(tl.float32), top, scale, False, BLOCK))
    if top_p < 1:
        total, _, _ = _at_or_above(row_ptr, V, low, top, scale, True, BLOCK)
        low = _search(row_ptr, V, low, high, top_p * total, top, scale, True, BLOCK)
        mass, _, _ = _at_or_above(row_ptr, V, low + 1, top, scale, True, BLOCK)
        ties = tl.ceil((top_p * total - mass) / tl.exp((value_of(low) - top) * scale))
        ties = tl.maximum(tl.minimum(ties, V), 1).to(tl.int32)
        last_tie = _nth_equal(row_ptr, V, low, ties, BLOCK)
    return low, last_tie


@triton.jit
def border_of_row(
    row_ptr,  # [V] logits
    peaks_ptr,  # [count] float32
    under_ptr,  # [count] int32, scratch
    key_ptr,  # [CANDIDATES] int32, scratch: the candidates' keys
    id_ptr,  # [CANDIDATES] int32, scratch: and ids, rising
    V,
    count,
    top,  # the largest logit
    total,  # sum of exp((logit - top) * scale)
    scale,  # 1 / temperature
    top_k,  # 0: off
    top_p,
    drop,  # temperature * ln(min_p), -inf for off
    PEAKS: tl.constexpr,
    UNDER: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(bound, last tie, found): the smallest logit kept. Up to CANDIDATES found: all kept are in scratch; else not."""
    high = ordered_key(top) + 1
    low = ordered_key(top + drop)
    top_k = tl.where(top_k < V, top_k, 0)
    limited = (top_k > 0) | (drop > float("-inf"))
    bound, certain = _bound(peaks_ptr, count, low, high, top, top_k, top_p, total, scale, PEAKS)
    found = CANDIDATES + 1
    if certain:
        found = _copy_candidates(
            row_ptr, peaks_ptr, under_ptr, key_ptr, id_ptr, V, count, bound, PEAKS, UNDER, GROUP, CANDIDATES
        )
    if found <= FEW:
        low, last_tie = _among(key_ptr, id_ptr, found, V, bound, high, top, top_k, top_p, total, scale, limited, FEW)
    elif found <= CANDIDATES:
        low, last_tie = _among(
            key_ptr, id_ptr, found, V, bound, high, top, top_k, top_p, total, scale, limited, CANDIDATES
        )
    else:
        low, last_tie = _over_row(row_ptr, V, low, high, top, top_k, top_p, scale, BLOCK)
    return value_of(low), last_tie, found


@triton.jit
def asks_for_filter(temperature, top_k, top_p, drop, V):
    """Whether a row is drawn from less than all tokens."""
    return (temperature > 0) & (((top_k > 0) & (top_k < V)) | (top_p < 1) | (drop > float("-inf")))


@triton.jit
def drop_of(temperature, min_p):
    """How far below the largest logit min-p reaches; -inf if it is off."""
    return tl.where(min_p > 0, temperature * tl.log(min_p), float("-inf"))


@triton.jit
def _peaks_kernel(
    logits_ptr,  # [L, V]
    temperature_ptr,  # [L]
    peaks_ptr,  # [L, tiles * TILE / UNDER] float32
    mass_ptr,  # [L, tiles] float32: sum of exp((logit - largest of the tile) / temperature)
    V,
    logits_stride,  # elements between rows
    TILE: tl.constexpr,
    UNDER: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    top = tl.max(logit, axis=0)
    weight = tl.where(logit > float("-inf"), tl.exp((logit - top) / tl.where(temperature > 0, temperature, 1.0)), 0.0)
    at = row * tl.num_programs(1) + tile
    tl.store(peaks_ptr + at * (TILE // UNDER) + tl.arange(0, TILE // UNDER), peaks_of(logit, UNDER))
    tl.store(mass_ptr + at, tl.sum(weight, axis=0))


@triton.jit
def _threshold_kernel(
    logits_ptr,  # [L, V]
    temperature_ptr,  # [L]
    top_k_ptr,  # [L] int32
    top_p_ptr,  # [L]
    min_p_ptr,  # [L]
    peaks_ptr,  # [L, count] float32
    mass_ptr,  # [L, tiles] float32
    scratch_ptr,  # [L, PEAKS + 2 CANDIDATES] int32
    threshold_ptr,  # [L] float32
    last_tie_ptr,  # [L] int32
    V,
    logits_stride,  # elements between rows
    tiles,
    TILES: tl.constexpr,  # a power of two, at least tiles
    PER_TILE: tl.constexpr,  # peaks of a tile
    PEAKS: tl.constexpr,  # a power of two, at least count
    UNDER: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,  # of a pass over the whole row
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    drop = drop_of(temperature, tl.load(min_p_ptr + row))
    bound = float("-inf")
    last_tie = V - 1
    if asks_for_filter(temperature, top_k, top_p, drop, V):
        count = tiles * PER_TILE
        peaks_ptr += row * count
        scale = 1.0 / temperature
        tile = tl.arange(0, TILES)
        each = tile[:, None] * PER_TILE + tl.arange(0, PER_TILE)[None, :]
        peaks = tl.load(peaks_ptr + each, mask=each < count, other=float("-inf"))
        tops = tl.max(peaks, axis=1)
        mass = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        top = tl.max(tops, axis=0)
        total = tl.sum(tl.where(mass > 0, mass * tl.exp((tops - top) * scale), 0.0), axis=0)
        scratch_ptr += row * (PEAKS + 2 * CANDIDATES)
        key_ptr = scratch_ptr + PEAKS
        bound, last_tie, _ = border_of_row(
            logits_ptr + row * logits_stride, peaks_ptr, scratch_ptr, key_ptr, key_ptr + CANDIDATES,
            V, count, top, total, scale, top_k, top_p, drop, PEAKS, UNDER, GROUP, CANDIDATES, FEW, BLOCK,
        )  # fmt: skip
    tl.store(threshold_ptr + row, bound)
    tl.store(last_tie_ptr + row, last_tie)


def search_sizes(V: int) -> dict[str, int]:
    """The sizes that `border_of_row` is compiled for; scratch of a row is PEAKS + 2 CANDIDATES numbers."""
    peaks = next_power_of_2(cdiv(V, TILE) * (TILE // UNDER))
    return {"PEAKS": peaks, "UNDER": UNDER, "GROUP": GROUP, "CANDIDATES": CANDIDATES, "FEW": FEW}


def threshold(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the smallest logit that each row may draw.

    Args:
        logits: [L, V] fp32, fp16 or bf16; rows may lie apart.
        temperature: [L] float32; rows with 0 are greedy and get no threshold.
        top_k: [L] int32; 0 and values >= V are off.   top_p: [L] float32 in (0, 1], 1 is off.
        min_p: [L] float32 in [0, 1], 0 is off.

    Returns:
        threshold [L] float32, -inf for no filter; a token is kept when its logit is larger, or equal with an id up to
        last_tie [L] int32. For a row with NaN or +inf both are undefined (and `sample` flags it).

    Raises:
        ValueError: shapes that do not fit.
    """
    check_rows("threshold", logits)
    L, V = logits.shape
    if any(part.shape != (L,) for part in (temperature, top_k, top_p, min_p)):
        raise ValueError(f"threshold: logits are {[L, V]}, temperature {list(temperature.shape)}")
    if not use_kernel(logits):
        return threshold_reference(logits, temperature, top_k, top_p, min_p)
    out = logits.new_empty(L, dtype=torch.float32)
    last_tie = logits.new_empty(L, dtype=torch.int32)
    if L:
        tiles, sizes = cdiv(V, TILE), search_sizes(V)
        peaks = logits.new_empty(L, tiles * (TILE // UNDER), dtype=torch.float32)
        mass = logits.new_empty(L, tiles, dtype=torch.float32)
        scratch = logits.new_empty(L, sizes["PEAKS"] + 2 * CANDIDATES, dtype=torch.int32)
        _peaks_kernel[(L, tiles)](
            logits, temperature, peaks, mass, V, logits.stride(0), TILE=TILE, UNDER=UNDER, num_warps=4,
            **overlap(logits),
        )  # fmt: skip
        options = choose("threshold", logits, {"BLOCK": 4096, "num_warps": 8}, vocab=V)
        _threshold_kernel[(L,)](
            logits, temperature, top_k, top_p, min_p, peaks, mass, scratch, out, last_tie, V, logits.stride(0), tiles,
            TILES=next_power_of_2(tiles), PER_TILE=TILE // UNDER, **sizes, **options, **overlap(logits),
        )  # fmt: skip
    return out, last_tie
