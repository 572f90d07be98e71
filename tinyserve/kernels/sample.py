"""Choose one token per row: the largest logit at temperature 0, else a draw from softmax(logits / temperature).

The draw is by inverse CDF. With one uniform number u of the row, and the kept tokens in the order of their ids,

    token = first id with  w[0] + ... + w[id] > u * (w[0] + ... + w[V-1]),    w[i] = exp((logit[i] - max) / temperature)

Stage 1, one program per (row, tile of 4096 ids), reads the logits once and leaves the tile's largest logit and its sum
of w. Stage 2, one program per row, walks the sums to the tile in which the target falls, or to the tile of the largest
logit, and reads that tile alone again. Bytes: L·V logits once, and a tile a row. The sum of all w is there for nothing:
log_z. Tiles are no launch option: a tuned size would change the sums, and with them a token now and then.

With `filters` (top-k, top-p, min-p) the same two stages find each row's threshold on the way (`threshold.py`): stage 1
leaves the peaks too, and stage 2 draws from the few candidates that it has searched. Whether a row asks for a filter is
read on the device, so one captured graph serves every batch; a row that does not ask costs nothing more.

Tiles are the same whatever the batch, so a row's sums, and its token, do not depend on the rows beside it.

A row that holds NaN or +inf, or nothing above -inf, is flagged `bad`; its token is 0 and must not be used.

Source: Devroye, "Non-Uniform Random Variate Generation", 1986, section III.2 (inversion by sequential search). One
uniform number a row beat V Gumbel numbers a row by 2.5 to 4.4 times at 32 rows and more on an H200 (30 us against 122
us for 256 rows of 151936): Gumbel is bound by Philox and logarithms, not by bytes.

Before: `threshold.py` (top-k, top-p, min-p), `philox.py`.  After: `logprobs.py`; `sampling/sampler.py` calls it.
"""

from math import isfinite

import numpy as np
import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs, wide
from .philox import uniform_of, uniform_reference
from .threshold import FEW, asks_for_filter, border_of_row, drop_of, exp_, threshold_reference
from .top_tokens import LEAST, TILE, UNDER, peaks_of, scratch_for, search_sizes, value_of


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    threshold: torch.Tensor | None = None,
    last_tie: torch.Tensor | None = None,
    *,
    log_z: torch.Tensor | None = None,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `sample`, with its arguments."""
    if filters is not None:
        threshold, last_tie = threshold_reference(logits, temperature, *filters)
    if logits.shape[0] == 0:
        return temperature.new_empty(0, dtype=torch.int32), temperature.new_empty(0, dtype=torch.bool)
    logits = wide(logits)
    if logits.is_cpu and log_z is None and not temperature.numpy().any():
        return _greedy(logits.numpy())
    top, tokens = _largest(logits)
    bad = ~top.isfinite()
    some = temperature.nonzero()[:, 0]
    if len(some) or log_z is not None:
        rows = slice(None) if len(some) == len(tokens) or log_z is not None else some
        taken = [part if part is None else part[rows] for part in (logits, threshold, last_tie)]
        weights = _weights(*taken, top[rows], temperature[rows])
        drawn, total = _draw(weights, uniform_reference(seeds[rows], positions[rows]))
        tokens[rows] = torch.where(temperature[rows] > 0, drawn, tokens[rows])
        if log_z is not None:
            log_z.copy_(top * _inverse(temperature) + total.log())
    return tokens.masked_fill_(bad, 0).int(), bad


def _greedy(logits: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """All of it where no row draws, in few calls: between two steps of a CPU each comes out of main memory."""
    tokens = logits.argmax(-1).astype(np.int32)  # the first NaN, if there is one
    bad = [not isfinite(logits.item(row, token)) for row, token in enumerate(tokens.tolist())]
    wrong = np.array(bad)
    if any(bad):
        tokens[wrong] = 0
    return torch.from_numpy(tokens), torch.from_numpy(wrong)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, NaN if there is one, and its id, the lowest among equals."""
    if not logits.is_cpu:
        return logits.max(dim=-1)
    numbers = logits.numpy()
    ids = numbers.argmax(-1)  # twelve times as fast as torch's
    return torch.from_numpy(numbers[np.arange(len(ids)), ids]), torch.from_numpy(ids)


def _inverse(temperature: torch.Tensor) -> torch.Tensor:
    """1 / temperature, and 1 for greedy rows, whose log_z is that of the plain logits."""
    return 1 / torch.where(temperature > 0, temperature, 1.0)


def _weights(
    logits: torch.Tensor,
    threshold: torch.Tensor | None,
    last_tie: torch.Tensor | None,
    top: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """[R, tiles, ids of a tile] exp((logit - top) / temperature); 0 for dropped tokens and after the end."""
    rows, V = logits.shape
    width = min(V, TILE)
    out = logits.new_zeros(rows, cdiv(V, width) * width)
    weights = exp_(torch.sub(logits, top[:, None], out=out[:, :V]).mul_(_inverse(temperature)[:, None]))
    if threshold is not None:
        dropped = logits < threshold[:, None]
        if (last_tie < V - 1).any():
            ids = torch.arange(V, device=logits.device)
            dropped |= (logits == threshold[:, None]) & (ids > last_tie[:, None])
        weights.masked_fill_(dropped, 0)
    return out.view(rows, -1, width)


def _draw(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R] and total weights [R]: first the tile in which u * total falls, then the id inside it."""
    sums = weights.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    target = u * ends[:, -1]
    tile = _first(ends > target[:, None], sums > 0)
    each = torch.arange(len(u), device=u.device)
    before = ends[each, tile] - sums[each, tile]
    chosen = weights[each, tile]
    inside = _first(before[:, None] + chosen.cumsum(dim=-1) > target[:, None], chosen > 0)
    return tile * TILE + inside, ends[:, -1]


def _first(passed: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The first index that passed and is real; if rounding left none, the last real one."""
    index = torch.arange(real.shape[-1], device=real.device)
    last = torch.where(real, index, 0).amax(dim=-1)
    return torch.where(passed & real, index, last[:, None]).amin(dim=-1)


@triton.jit
def _kept(logit, ids, threshold, last_tie):
    """Whether a token survives the filters: above the threshold, or equal to it and not after the last tie kept."""
    return (logit > threshold) | ((logit == threshold) & (ids <= last_tie))


@triton.jit
def _tile_kernel(
    logits_ptr,  # [L, V]
    temperature_ptr,  # [L]
    threshold_ptr,  # [L]; read if FILTER; top_k [L] int32 if SEARCH
    last_tie_ptr,  # [L] int32; read if FILTER; top_p [L] if SEARCH
    min_p_ptr,  # [L]; read if SEARCH
    tile_top_ptr,  # [L, tiles] float32: largest logit
    tile_sum_ptr,  # [L, tiles] float32: sum of exp((logit - tile_top) / temperature) of kept tokens; NaN in a bad tile
    peaks_ptr,  # [L, tiles * TILE / UNDER] float32; written if SEARCH, for rows that ask
    V,
    logits_stride,  # elements between rows
    FILTER: tl.constexpr,
    SEARCH: tl.constexpr,
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
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    top = tl.max(logit, axis=0)
    # NaN and +inf make a NaN here, and so the sum; a tile of -inf makes zeros.
    weight = tl.exp((logit - tl.where(top == float("-inf"), 0.0, top)) * scale)
    bound = tl.load(threshold_ptr + row)
    last_tie = tl.load(last_tie_ptr + row)
    if FILTER:
        weight = tl.where((logit < bound) | ((logit == bound) & (ids > last_tie)), 0.0, weight)
    at = row * tl.num_programs(1) + tile
    tl.store(tile_top_ptr + at, top)
    tl.store(tile_sum_ptr + at, tl.sum(weight, axis=0))
    if SEARCH:
        drop = drop_of(temperature, tl.load(min_p_ptr + row))
        if asks_for_filter(temperature, bound, last_tie, drop, V):
            tl.store(peaks_ptr + at * (TILE // UNDER) + tl.arange(0, TILE // UNDER), peaks_of(logit, UNDER))


@triton.jit
def _first_of(passed, real, index):
    """The first index that passed and is real; if rounding left none, the last real one."""
    last = tl.max(tl.where(real, index, 0), axis=0)
    return tl.min(tl.where(passed & real, index, last), axis=0)


@triton.jit
def _draw_from_tiles(
    row_ptr, sums, tile, top, scale, bound, last_tie, u, V, FILTER: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The token at u of the mass, from the tiles' sums and the one tile in which it falls."""
    target = u * tl.sum(sums, axis=0)
    ends = tl.cumsum(sums, axis=0)
    found = _first_of(ends > target, sums > 0, tile)
    before = tl.sum(tl.where(tile < found, sums, 0.0), axis=0)
    lane = tl.arange(0, TILE)
    ids = found * TILE + lane
    logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    keep = logit > float("-inf")
    if FILTER:
        keep &= _kept(logit, ids, bound, last_tie)
    weight = tl.where(keep, tl.exp((logit - top) * scale), 0.0)
    return found * TILE + _first_of(before + tl.cumsum(weight, axis=0) > target, weight > 0, lane)


@triton.jit
def _draw_from_candidates(key_ptr, id_ptr, found, top, scale, bound, last_tie, u, BLOCK: tl.constexpr):
    """The token at u of the mass of the candidates kept, and that mass."""
    lane = tl.arange(0, BLOCK)
    ids = tl.load(id_ptr + lane, mask=lane < found, other=0)
    logit = value_of(tl.load(key_ptr + lane, mask=lane < found, other=LEAST))
    keep = (lane < found) & (logit > float("-inf")) & _kept(logit, ids, bound, last_tie)
    weight = tl.where(keep, tl.exp((logit - top) * scale), 0.0)
    total = tl.sum(weight, axis=0)
    at = _first_of(tl.cumsum(weight, axis=0) > u * total, weight > 0, lane)
    return tl.load(id_ptr + at), total


@triton.jit
def _sums_of_row(row_ptr, V, top, scale, bound, last_tie, TILES: tl.constexpr, TILE: tl.constexpr):
    """The mass kept of each tile, [TILES], by a pass over the whole row."""
    lane = tl.arange(0, TILE)
    tile = tl.arange(0, TILES)
    sums = tl.zeros((TILES,), tl.float32)
    for start in tl.range(0, V, TILE, num_stages=4):
        logit = tl.load(row_ptr + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
        keep = (logit > float("-inf")) & _kept(logit, start + lane, bound, last_tie)
        mass = tl.sum(tl.where(keep, tl.exp((logit - top) * scale), 0.0), axis=0)
        sums = tl.where(tile == start // TILE, mass, sums)
    return sums


@triton.jit
def _pick_kernel(
    logits_ptr,  # [L, V]
    temperature_ptr,  # [L]
    seeds_ptr,  # [L] int64
    positions_ptr,  # [L]
    threshold_ptr,  # [L]; read if FILTER; top_k [L] int32 if SEARCH
    last_tie_ptr,  # [L] int32; read if FILTER; top_p [L] if SEARCH
    min_p_ptr,  # [L]; read if SEARCH
    tile_top_ptr,  # [L, tiles] float32
    tile_sum_ptr,  # [L, tiles] float32
    peaks_ptr,  # [L, tiles * TILE / UNDER] float32; read if SEARCH
    scratch_ptr,  # [L, PEAKS + 2 CANDIDATES] int32; used if SEARCH
    token_ptr,  # [L] int32
    bad_ptr,  # [L] int8
    log_z_ptr,  # [L] float32; written if LOG_Z
    V,
    logits_stride,  # elements between rows
    tiles,
    FILTER: tl.constexpr,
    SEARCH: tl.constexpr,
    LOG_Z: tl.constexpr,
    TILES: tl.constexpr,  # a power of two, at least tiles
    TILE: tl.constexpr,
    PEAKS: tl.constexpr,
    UNDER: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    tile = tl.arange(0, TILES)
    there = tile < tiles
    at = row * tiles + tile
    tops = tl.load(tile_top_ptr + at, mask=there, other=float("-inf"))
    sums = tl.load(tile_sum_ptr + at, mask=there, other=0.0)
    top = tl.max(tops, axis=0)
    bad = (tl.max((sums != sums).to(tl.int32), axis=0) > 0) | (top == float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    sums = tl.where(sums > 0, sums * tl.exp((tops - top) * scale), 0.0)
    total = tl.sum(sums, axis=0)
    token = 0
    if (temperature > 0) & (bad == 0):
        u = uniform_of(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        bound = tl.load(threshold_ptr + row)
        last_tie = tl.load(last_tie_ptr + row)
        if SEARCH:
            drop = drop_of(temperature, tl.load(min_p_ptr + row))
            scratch_ptr += row * (PEAKS + 2 * CANDIDATES)
            key_ptr = scratch_ptr + PEAKS
            id_ptr = key_ptr + CANDIDATES
            border = float("-inf")
            tie = V
            found = CANDIDATES + 1
            if asks_for_filter(temperature, bound, last_tie, drop, V):
                count = tiles * (TILE // UNDER)
                border, tie, found = border_of_row(
                    row_ptr, peaks_ptr + row * count, scratch_ptr, V, count, top, total, scale,
                    bound, last_tie, drop, PEAKS, UNDER, GROUP, CANDIDATES, FEW, CANDIDATES,
                )  # fmt: skip
                if found > CANDIDATES:
                    sums = _sums_of_row(row_ptr, V, top, scale, border, tie, TILES, TILE)
                    total = tl.sum(sums, axis=0)
            if found <= FEW:
                token, total = _draw_from_candidates(key_ptr, id_ptr, found, top, scale, border, tie, u, FEW)
            elif found <= CANDIDATES:
                token, total = _draw_from_candidates(key_ptr, id_ptr, found, top, scale, border, tie, u, CANDIDATES)
            else:
                token = _draw_from_tiles(row_ptr, sums, tile, top, scale, border, tie, u, V, True, TILE)
        else:
            token = _draw_from_tiles(row_ptr, sums, tile, top, scale, bound, last_tie, u, V, FILTER, TILE)
    elif bad == 0:
        best = tl.min(tl.where(there & (tops == top), tile, tiles), axis=0)
        ids = best * TILE + tl.arange(0, TILE)
        logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        token = tl.min(tl.where(logit == top, ids, V), axis=0)
    tl.store(token_ptr + row, token)
    tl.store(bad_ptr + row, bad.to(tl.int8))
    if LOG_Z:
        tl.store(log_z_ptr + row, top * scale + tl.log(total))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    threshold: torch.Tensor | None = None,
    last_tie: torch.Tensor | None = None,
    *,
    log_z: torch.Tensor | None = None,
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row.

    Args:
        logits: [L, V] fp32, fp16 or bf16; rows may lie apart; masks, bias and penalties already applied.
        temperature: [L] float32; 0 takes the largest logit (the lowest id among equals), else at least 0.01.
        seeds: [L] int64.   positions: [L] int32 or int64, where the token will stand; with the seed its random number.
        threshold: [L] float32, smallest logit that may be drawn (see `threshold.py`); None: no row asks for a filter.
        last_tie: [L] int32, largest id that may be drawn among logits equal to the threshold.
        filters: (top_k [L] int32, top_p [L] float32, min_p [L] float32) as in `threshold.py`, instead of the two above:
            the threshold is found on the way, and rows that ask for none cost nothing.
        log_z: [L] float32, filled when given: log of the sum of exp(logit / temperature) over tokens that may be drawn.

    Returns:
        tokens [L] int32 and bad [L] bool; a bad row's token is 0 and its log_z is undefined.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_rows("sample", logits)
    L, V = logits.shape
    if any(len(part) != L for part in (temperature, seeds, positions)) or V == 0:
        raise ValueError(
            f"sample: logits are {[L, V]}, temperature {list(temperature.shape)}, seeds {list(seeds.shape)}"
        )
    if filters is not None and (threshold is not None or any(part.shape != (L,) for part in filters)):
        raise ValueError(f"sample: filters are {[list(part.shape) for part in filters]}, for {L} rows")
    if not use_kernel(logits):
        options = {"log_z": log_z, "filters": filters}
        return sample_reference(logits, temperature, seeds, positions, threshold, last_tie, **options)
    tokens = logits.new_empty(L, dtype=torch.int32)
    bad = logits.new_empty(L, dtype=torch.bool)
    if L:
        bounds = (temperature, positions, temperature) if threshold is None else (threshold, last_tie, temperature)
        outputs = (tokens, bad.view(torch.int8), log_z)
        rows = (logits, temperature, seeds, positions)
        _launch(rows, filters or bounds, outputs, given=threshold is not None, search=filters is not None)
    return tokens, bad


def _launch(rows, bounds, outputs, *, given: bool, search: bool) -> None:
    """Both stages. Unused pointers point at something that is there and are not used."""
    logits, temperature, seeds, positions = rows
    tokens, bad, log_z = outputs
    (L, V), tiles = logits.shape, cdiv(logits.shape[1], TILE)
    tops, sums = (logits.new_empty(L, tiles, dtype=torch.float32) for _ in range(2))
    peaks = logits.new_empty(L, tiles * (TILE // UNDER), dtype=torch.float32) if search else tops
    scratch = scratch_for(logits, L) if search else positions
    options = choose("sample", logits, {"num_warps": 4, "pick_warps": 8}, vocab=V)
    switch = {"FILTER": given, "SEARCH": search, "TILE": TILE} | overlap(logits)
    _tile_kernel[(L, tiles)](
        logits, temperature, *bounds, tops, sums, peaks, V, logits.stride(0), UNDER=UNDER,
        num_warps=options["num_warps"], **switch,
    )  # fmt: skip
    _pick_kernel[(L,)](
        logits, temperature, seeds, positions, *bounds, tops, sums, peaks, scratch,
        tokens, bad, tops if log_z is None else log_z, V, logits.stride(0), tiles,
        LOG_Z=log_z is not None, TILES=next_power_of_2(tiles), FEW=FEW, num_warps=options["pick_warps"],
        **search_sizes(V), **switch,
    )  # fmt: skip
