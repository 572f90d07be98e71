"""Log-probabilities that are reported: of one given token per row, and its rank.

    logprob = logit[target] - log(sum of exp(logit)),      rank = number of tokens with logit >= logit[target]

The row is read once: one program per (row, tile) leaves the tile's maximum, its sum of exponentials and how many of
its tokens stand above the target, and one program per row joins them. It serves the sampled token and the tokens of a
prompt alike. All sums are float32, whatever the type of the logits. The alternatives beside it come from
`top_tokens.py`: from a logit, subtract log_z to get a logprob; the row is never normalised as a whole.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

Before: `top_tokens.py`, `sample.py`.  After: `sampling/logprobs.py`.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen

from .launch import cdiv, check_rows, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .threshold import exp_

TILE = 4096


@frozen
class TokenScores:
    """What `logprobs` says of each row's target: its log-probability [R], rank [R] int32 from 1, and log_z [R]."""

    logprob: torch.Tensor
    rank: torch.Tensor
    log_z: torch.Tensor


def logprobs_reference(logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor | None = None) -> TokenScores:
    """The specification of `logprobs`, with its arguments."""
    values = (logits if rows is None else logits[rows]).float()
    target = values.gather(1, targets.long()[:, None])
    top = values.amax(dim=-1, keepdim=True)
    log_z = top[:, 0] + exp_(values - top).sum(dim=-1).log()
    rank = (values >= target).sum(dim=-1, dtype=torch.int32)
    return TokenScores(target[:, 0] - log_z, rank, log_z)


@triton.jit
def _score_tile_kernel(
    logits_ptr,  # [L, V]
    targets_ptr,  # [R]
    rows_ptr,  # [R]; read if ROWS
    top_ptr,  # [R, tiles] float32: largest logit
    sum_ptr,  # [R, tiles] float32: sum of exp(logit - top)
    rank_ptr,  # [R, tiles] int32: tokens with a logit not below the target's
    V,
    logits_stride,  # elements between rows
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    index = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64) if ROWS else index
    row_ptr = logits_ptr + row * logits_stride
    target = tl.load(row_ptr + tl.load(targets_ptr + index).to(tl.int64)).to(tl.float32)
    ids = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    top = tl.max(logit, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    at = index * tl.num_programs(1) + tile
    tl.store(top_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(tl.exp(logit - shift), axis=0))
    tl.store(rank_ptr + at, tl.sum(((logit >= target) & (ids < V)).to(tl.int32), axis=0))


@triton.jit
def _logprobs_kernel(
    logits_ptr,  # [L, V]
    targets_ptr,  # [R]
    rows_ptr,  # [R]; read if ROWS
    tile_top_ptr,  # [R, tiles] float32
    tile_sum_ptr,  # [R, tiles] float32
    tile_rank_ptr,  # [R, tiles] int32
    logprob_ptr,  # [R] float32
    rank_ptr,  # [R] int32
    log_z_ptr,  # [R] float32
    logits_stride,  # elements between rows
    tiles,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,  # a power of two, at least tiles
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64) if ROWS else index
    target_ptr = logits_ptr + row * logits_stride + tl.load(targets_ptr + index).to(tl.int64)
    tile = tl.arange(0, TILES)
    at, there = index * tiles + tile, tile < tiles
    tops = tl.load(tile_top_ptr + at, mask=there, other=float("-inf"))
    sums = tl.load(tile_sum_ptr + at, mask=there, other=0.0)
    top = tl.max(tops, axis=0)
    log_z = top + tl.log(tl.sum(sums * tl.exp(tops - top), axis=0))
    tl.store(logprob_ptr + index, tl.load(target_ptr).to(tl.float32) - log_z)
    tl.store(rank_ptr + index, tl.sum(tl.load(tile_rank_ptr + at, mask=there, other=0), axis=0))
    tl.store(log_z_ptr + index, log_z)


def logprobs(logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor | None = None) -> TokenScores:
    """Log-probability and rank of one token per row.

    Args:
        logits: [L, V] fp32, fp16 or bf16; rows may lie apart.
        targets: [R] int, ids in [0, V).
        rows: [R] int, the logit row of each target; None when R = L.

    Returns:
        TokenScores; a row with NaN, +inf or nothing above -inf holds undefined numbers.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_rows("logprobs", logits)
    R, V = (len(logits) if rows is None else len(rows)), logits.shape[1]
    if targets.shape != (R,):
        raise ValueError(f"logprobs: {R} rows of logits, targets are {list(targets.shape)}")
    if not use_kernel(logits):
        return logprobs_reference(logits, targets, rows)
    logprob, log_z = (logits.new_empty(R, dtype=torch.float32) for _ in range(2))
    rank = logits.new_empty(R, dtype=torch.int32)
    if R:
        options = {"ROWS": rows is not None} | overlap(logits)
        given = (logits, targets, targets if rows is None else rows)
        tile = min(next_power_of_2(V), TILE)
        tiles = cdiv(V, tile)
        tops, sums = (logits.new_empty(R, tiles, dtype=torch.float32) for _ in range(2))
        ranks = logits.new_empty(R, tiles, dtype=torch.int32)
        _score_tile_kernel[(R, tiles)](
            *given, tops, sums, ranks, V, logits.stride(0), TILE=tile, num_warps=4, **options
        )
        _logprobs_kernel[(R,)](
            *given, tops, sums, ranks, logprob, rank, log_z, logits.stride(0), tiles,
            TILES=next_power_of_2(tiles), num_warps=1, **options,
        )  # fmt: skip
    return TokenScores(logprob, rank, log_z)
