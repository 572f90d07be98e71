"""The smallest logit that may be drawn, per row: min-p, then top-k, then top-p, found without sorting.

    min-p   keep logit >= max + temperature * ln(min_p)
    top-k   keep logit >= the k-th largest; all equals of the k-th are kept
    top-p   of what is left, keep the smallest set of most likely tokens whose mass reaches p times the mass of what is
            left; among equal logits the lower ids come first, and at least one token is kept

All three keep the upper part of a row, so one number says it all, and the sampler applies it while it reads the logits:
no second copy of [L, V]. Where top-p cuts through a group of equal logits, `last_tie` is the last id of the group kept.

Stage 1, one program per (row, tile), reads the logits once and leaves the peak of each 128 ids (`top_tokens.py`). k
peaks are k tokens, so the k-th largest peak is not above the k-th largest logit; in the same way peaks that hold p of
the mass bound the border of top-p, and min-p is a bound by itself. Stage 2, one program per row, finds that bound,
copies out the tokens at or above it, and finds the border among these: up to 128 are compared each with each, more are
bisected over the integers that order float32. So the logits are read once, by as many programs as there are tiles,
whatever is asked; a row that asks for nothing costs one program that ends at once.

Over a flat row the border of top-p lies below most tokens, and no bound helps. Stage 2 then passes over the whole row,
weighs what lies above each of eight pivots, and goes on between two of them, until the tokens there can be copied out.

Source: Park et al., "Qrita: High-performance Top-k and Top-p using Pivot-based Truncation", arXiv:2602.01518, for the
pivot search; Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv:1904.09751, for top-p.

Before: `penalties.py`, `token_mask.py` (edit the logits).  After: `sample.py` (applies the threshold).
"""

import torch
import triton
import triton.language as tl

from .launch import check_rows, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .top_tokens import (
    KEY_OF_NOTHING,
    LEAST,
    TILE,
    UNDER,
    copy_candidates,
    find_peaks,
    load_peaks,
    ordered_key,
    scratch_for,
    search_block,
    search_sizes,
    value_of,
)

# Of the reference, at V 49152 on one core: topk takes 0.1 ms up to here, kthvalue 0.1 to 0.5 ms for any k.
SMALL_K = 128
SORT_AT_MOST = 1024  # ten halvings cost 0.2 ms; sorting 20000 candidates costs 1.5 ms
INF = float("inf")

FEW = 128  # candidates that are compared each with each, without a search
PIVOTS = tl.constexpr(8)  # of a pass over the whole row
BY_VALUE = tl.constexpr(5)  # passes whose pivots lie evenly in value


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
def _pass(row_ptr, V, pivot, top, scale, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of the row, or their mass if WEIGH, with key >= pivot."""
    amount = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        weight = tl.exp((logit - top) * scale) if WEIGH else 1.0
        amount += tl.where((ids < V) & (ordered_key(logit) >= pivot), weight, 0.0)
    return tl.sum(amount, axis=0)


@triton.jit
def _kth_of_row(row_ptr, V, low, high, k, BLOCK: tl.constexpr):
    """The key of the k-th largest logit, by passes over the whole row: at most 32."""
    middle = (low & high) + ((low ^ high) >> 1)
    while middle > low:
        enough = _pass(row_ptr, V, middle, 0.0, 1.0, False, BLOCK) >= k
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
def _narrow(row_ptr, V, low, high, above, target, top, scale, by_value, BLOCK: tl.constexpr):
    """One pass: (low, high, mass at or above high) between two neighbours of PIVOTS pivots; the last is `low`.

    by_value: pivots lie evenly in value, which divides the tokens best; else evenly among keys, which always ends.
    """
    place = tl.arange(0, PIVOTS)
    step = (high.to(tl.int64) - low.to(tl.int64)) * (place + 1) // PIVOTS
    keys = (high.to(tl.int64) - step).to(tl.int32)
    if by_value:
        first = tl.where(above > 0, value_of(high), top)
        pivots = first - (first - value_of(low)) * (place + 1).to(tl.float32) / PIVOTS
        keys = tl.minimum(tl.maximum(ordered_key(pivots), low), high)
    mass = tl.zeros((PIVOTS, BLOCK), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        weight = tl.where(ids < V, tl.exp((logit - top) * scale), 0.0)
        mass += tl.where(ordered_key(logit)[None, :] >= keys[:, None], weight[None, :], 0.0)
    masses = tl.sum(mass, axis=1)
    # So many pivots lie above the border. The last pivot is `low`, which does not, but for rounding.
    short = tl.minimum(tl.sum((masses < target).to(tl.int32), axis=0), PIVOTS - 1)
    low = tl.sum(tl.where(place == short, keys, 0), axis=0)
    above = tl.where(short > 0, tl.sum(tl.where(place == short - 1, masses, 0.0), axis=0), above)
    high = tl.where(short > 0, tl.sum(tl.where(place == short - 1, keys, 0), axis=0), high)
    return low, high, above


@triton.jit
def _copy_between(row_ptr, key_ptr, id_ptr, V, low, high, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and ids of the tokens with low <= key < high, by id, to scratch; how many there are, of which some fit."""
    found = 0
    for start in tl.range(0, V, BLOCK, num_stages=4):
        ids = start + tl.arange(0, BLOCK)
        key = ordered_key(tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32))
        take = ((ids < V) & (key >= low) & (key < high)).to(tl.int32)
        to = found + tl.cumsum(take, axis=0) - 1
        tl.store(key_ptr + to, key, mask=(take > 0) & (to < CANDIDATES))
        tl.store(id_ptr + to, ids, mask=(take > 0) & (to < CANDIDATES))
        found += tl.sum(take, axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def _bound(keys, peak, count, low, high, top, top_k, top_p, total, scale, GROUPS: tl.constexpr):
    """A key that is at most the border, from the peaks of the row, and whether they hold one.

    With top-k or min-p, all that is kept is at or above the key; with top-p alone, p of the mass is. The peaks of
    groups of peaks are asked first: they are so few that each can be compared with each.
    """
    least = tl.zeros_like(low) + KEY_OF_NOTHING
    tops = tl.max(tl.reshape(peak, [GROUPS, peak.shape[0] // GROUPS]), axis=1)
    top_keys = ordered_key(tops)
    above = top_keys[None, :] >= top_keys[:, None]
    groups = count * GROUPS // peak.shape[0]
    if (top_k > 0) & (top_k <= count):
        kth = least
        if 3 * top_k <= 2 * groups:
            enough = tl.sum(above.to(tl.int32), axis=1) >= top_k
            kth = tl.max(tl.where(enough, top_keys, LEAST), axis=0)
        else:
            kth = search_block(keys, (keys > LEAST).to(tl.float32), least, high, top_k.to(tl.float32))
        low = tl.maximum(low, tl.maximum(kth, least + 1))  # fewer than k tokens that are possible: all of these
    elif (top_k <= 0) & (low <= least) & (top_p < 1):
        wanted = top_p * total * 1.00001  # sums in another order may differ by this much
        mass = tl.where(top_keys > least, tl.exp((tops - top) * scale), 0.0)
        enough = tl.sum(tl.where(above, mass[None, :], 0.0), axis=1) >= wanted
        low = tl.maximum(low, tl.max(tl.where(enough, top_keys, LEAST), axis=0))
        if low <= least:
            masses = tl.where(keys > least, tl.exp((peak - top) * scale), 0.0)
            if tl.sum(masses, axis=0) >= wanted:
                low = search_block(keys, masses, least, high, wanted)
    return low, low > least


@triton.jit
def _among_few(key_ptr, count, low, top, top_k, top_p, total, scale, limited, FEW: tl.constexpr):
    """The border (key, place of the last tie) among up to FEW candidates, by comparing each with each."""
    lane = tl.arange(0, FEW)
    there = lane < count
    keys = tl.load(key_ptr + lane, mask=there, other=LEAST)
    not_below = (keys[None, :] >= keys[:, None]) & there[None, :]
    if (top_k > 0) & (top_k < count):
        ranks = tl.sum(not_below.to(tl.int32), axis=1)
        low = tl.maximum(low, tl.max(tl.where(there & (ranks >= top_k), keys, LEAST), axis=0))
    mass = tl.where(there & (keys >= low), tl.exp((value_of(keys) - top) * scale), 0.0)
    if limited:
        total = tl.sum(mass, axis=0)
    first = not_below & ((keys[None, :] > keys[:, None]) | (lane[None, :] < lane[:, None]))
    before = tl.sum(tl.where(first, mass[None, :], 0.0), axis=1)
    keep = there & (keys >= low) & ((top_p >= 1) | (before < top_p * total))
    low = tl.min(tl.where(keep, keys, 0x7FFFFFFF), axis=0)
    return low, tl.max(tl.where(keep & (keys == low), lane, 0), axis=0)


@triton.jit
def _among_many(
    key_ptr, count, low, high, top, top_k, top_p, above, total, scale, limited, CANDIDATES: tl.constexpr
):  # fmt: skip
    """The border (key, place of the last tie) among up to CANDIDATES, by bisection. `above`: mass over all of them."""
    lane = tl.arange(0, CANDIDATES)
    there = lane < count
    keys = tl.load(key_ptr + lane, mask=there, other=LEAST)
    if (top_k > 0) & (top_k < count):
        low = search_block(keys, there.to(tl.float32), low, high, top_k.to(tl.float32))
    ties = count
    if top_p < 1:
        mass = tl.where(there & (keys >= low), tl.exp((value_of(keys) - top) * scale), 0.0)
        if limited:
            total = tl.sum(mass, axis=0)
        target = top_p * total - above
        low = search_block(keys, mass, low, high, target)
        missing = target - tl.sum(tl.where(keys > low, mass, 0.0), axis=0)
        share = tl.ceil(missing / tl.exp((value_of(low) - top) * scale))
        ties = tl.maximum(tl.minimum(share, count.to(tl.float32)), 1.0).to(tl.int32)
    equal = (keys == low) & there
    number = tl.cumsum(equal.to(tl.int32), axis=0)
    return low, tl.max(tl.where(equal & (number <= ties), lane, 0), axis=0)


@triton.jit
def _over_row(
    row_ptr, key_ptr, id_ptr, V, low, high, top, top_k, top_p, total, scale, limited,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass over the whole row: (low, high, mass at or above high, mass in all, held).

    Without top-p, low is the border. With it, the border lies in [low, high), whose tokens are in scratch if no more
    than CANDIDATES are held; else low is the border, and only some of its equals are kept.
    """
    above = 0.0
    held = CANDIDATES + 1
    if top_k > 0:
        least = tl.zeros_like(low) + KEY_OF_NOTHING
        low = tl.maximum(low, _kth_of_row(row_ptr, V, least, high, top_k.to(tl.float32), BLOCK))
    if top_p < 1:
        if limited:
            total = _pass(row_ptr, V, low, top, scale, True, BLOCK)
        target = top_p * total
        # Tokens that together weigh less than 1 - p are never needed; half, as a margin for rounding.
        low = tl.maximum(low, ordered_key(top + tl.log(total * (1 - top_p) / V * 0.5) / scale))
        passes = 0
        while (held > CANDIDATES) & ((low & high) + ((low ^ high) >> 1) > low):  # more than one key between them
            low, high, above = _narrow(row_ptr, V, low, high, above, target, top, scale, passes < BY_VALUE, BLOCK // 2)
            passes += 1
            if passes > 2:
                held = _copy_between(row_ptr, key_ptr, id_ptr, V, low, high, CANDIDATES, BLOCK)
    return low, high, above, total, held


@triton.jit
def border_of_row(
    row_ptr,  # [V] logits
    peaks_ptr,  # [count] float32
    scratch_ptr,  # [PEAKS + 2 CANDIDATES] int32: numbers of peaks, then the candidates' keys, then their ids, rising
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
    key_ptr = scratch_ptr + PEAKS
    id_ptr = key_ptr + CANDIDATES
    peak, keys = load_peaks(peaks_ptr, count, PEAKS)
    bound, certain = _bound(keys, peak, count, low, high, top, top_k, top_p, total, scale, FEW)
    found = CANDIDATES + 1
    if certain:
        found = copy_candidates(
            row_ptr, keys, scratch_ptr, key_ptr, id_ptr, V, bound, PEAKS, UNDER, GROUP, CANDIDATES
        )  # fmt: skip
    last_tie = V - 1
    if found <= FEW:
        low, place = _among_few(key_ptr, found, bound, top, top_k, top_p, total, scale, limited, FEW)
        last_tie = tl.load(id_ptr + place)
    else:
        low = tl.where(found <= CANDIDATES, bound, low)
        above, held, cut = 0.0, found, top_k  # cut: what is left to be cut by count
        if found > CANDIDATES:
            low, high, above, total, held = _over_row(
                row_ptr, key_ptr, id_ptr, V, low, high, top, top_k, top_p, total, scale, limited, CANDIDATES, BLOCK
            )  # fmt: skip
            cut, limited = top_k * 0, False
        if held <= CANDIDATES:
            low, place = _among_many(
                key_ptr, held, low, high, top, cut, top_p, above, total, scale, limited, CANDIDATES
            )  # fmt: skip
            last_tie = tl.load(id_ptr + place)
        elif top_p < 1:  # equals, and more of them than fit
            ties = tl.ceil((top_p * total - above) / tl.exp((value_of(low) - top) * scale))
            last_tie = _nth_equal(row_ptr, V, low, tl.maximum(tl.minimum(ties, V), 1).to(tl.int32), BLOCK)
    if (top_k > found) & (found <= CANDIDATES) & (top_p >= 1) & (drop == float("-inf")):
        low = tl.zeros_like(low) + KEY_OF_NOTHING  # every possible token was found, and all are kept
        last_tie = V - 1
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
        bound, last_tie, _ = border_of_row(
            logits_ptr + row * logits_stride, peaks_ptr, scratch_ptr + row * (PEAKS + 2 * CANDIDATES),
            V, count, top, total, scale, top_k, top_p, drop, PEAKS, UNDER, GROUP, CANDIDATES, FEW, BLOCK,
        )  # fmt: skip
    tl.store(threshold_ptr + row, bound)
    tl.store(last_tie_ptr + row, last_tie)


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
        peaks, mass = find_peaks(logits, None, temperature)
        tiles = mass.shape[1]
        _threshold_kernel[(L,)](
            logits, temperature, top_k, top_p, min_p, peaks, mass, scratch_for(logits, L), out, last_tie,
            V, logits.stride(0), tiles, TILES=next_power_of_2(tiles), PER_TILE=TILE // UNDER, FEW=FEW, BLOCK=2048,
            num_warps=8, **search_sizes(V), **overlap(logits),
        )  # fmt: skip
    return out, last_tie
