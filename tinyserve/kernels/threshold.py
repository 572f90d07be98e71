"""The smallest logit that may be drawn, per row: min-p, then top-k, then top-p, found without sorting.

    min-p   keep logit >= max + temperature * ln(min_p)
    top-k   keep logit >= the k-th largest; all equals of the k-th are kept
    top-p   of what is left, keep the smallest set of most likely tokens whose mass reaches p times the mass of what is
            left; among equal logits the lower ids come first, and at least one token is kept

All three keep the upper part of a row, so one number says it all, and the sampler applies it while it reads the logits:
no second copy of [L, V]. Where top-p cuts through a group of equal logits, `last_tie` is the last id of the group kept.

The search is a bisection over the integers that order float32 (`ordered_key`): each pass over the row measures how many
tokens, or how much mass, stand at or above a pivot, and also finds the nearest keys on either side, so that the bracket
always ends on keys that exist. It takes at most 32 passes, in practice about 20, and exactly finds the k-th largest.
One program does one row and reads it once a pass (from cache: a row of 151936 in bf16 is 300 KB); a row that asks for
nothing costs one program that ends at once.

Source: Park et al., "Qrita: High-performance Top-k and Top-p using Pivot-based Truncation", arXiv:2602.01518, for the
pivot search; Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv:1904.09751, for top-p.

Before: `penalties.py`, `token_mask.py` (edit the logits).  After: `sample.py` (applies the threshold).
"""

import torch
import triton
import triton.language as tl

from .launch import check_rows, choose, next_power_of_2, use_kernel

# Of the reference, at V 49152 on one core: topk takes 0.1 ms up to here, kthvalue 0.1 to 0.5 ms for any k.
SMALL_K = 128
SORT_AT_MOST = 1024  # ten halvings cost 0.2 ms; sorting 20000 candidates costs 1.5 ms
INF = float("inf")


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
def _value_of(key):
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
def _threshold_kernel(
    logits_ptr,  # [L, V]
    temperature_ptr,  # [L]
    top_k_ptr,  # [L] int32
    top_p_ptr,  # [L]
    drop_ptr,  # [L] float32: temperature * ln(min_p), -inf for off
    threshold_ptr,  # [L] float32
    last_tie_ptr,  # [L] int32
    V,
    logits_stride,  # elements between rows
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    drop = tl.load(drop_ptr + row)
    limits = (top_k > 0) & (top_k < V)
    bound = float("-inf")
    last_tie = V - 1
    if (temperature > 0) & (limits | (top_p < 1) | (drop > float("-inf"))):
        scale = 1.0 / temperature
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, logit)
        top = tl.max(best, axis=0)
        high = ordered_key(top) + 1
        low = ordered_key(top + drop)
        if limits:
            least = tl.zeros_like(low) - 0x7F800001  # the key of -inf
            low = tl.maximum(low, _search(row_ptr, V, least, high, top_k.to(tl.float32), top, scale, False, BLOCK))
        if top_p < 1:
            total, _, _ = _at_or_above(row_ptr, V, low, top, scale, True, BLOCK)
            low = _search(row_ptr, V, low, high, top_p * total, top, scale, True, BLOCK)
            mass, _, _ = _at_or_above(row_ptr, V, low + 1, top, scale, True, BLOCK)
            ties = tl.ceil((top_p * total - mass) / tl.exp((_value_of(low) - top) * scale))
            ties = tl.maximum(tl.minimum(ties, V), 1).to(tl.int32)
            last_tie = _nth_equal(row_ptr, V, low, ties, BLOCK)
        bound = _value_of(low)
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
        block = min(next_power_of_2(V), 4096)
        options = choose("threshold", logits, {"BLOCK": block, "num_warps": 8}, rows=L, vocab=V)
        _threshold_kernel[(L,)](
            logits, temperature, top_k, top_p, _drop(temperature, min_p), out, last_tie, V, logits.stride(0), **options
        )  # fmt: skip
    return out, last_tie
