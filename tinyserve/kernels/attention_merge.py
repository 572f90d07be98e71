"""Joining what the parts of a sequence give.

A program of `attention_decode` attends to one part of a sequence's keys (`attention_cut.py`). What it leaves is the
part's own softmax average and the log of its denominator, which is all that is needed to weigh it against the others:

    out = Σ exp(lse_k) · partial_k / (Σ exp(lse_k) + exp(sink))

A part may be empty: then its lse is -inf and its average is not read. A row whose parts are all empty becomes zero. The
sink, a learned logit that takes probability and gives no value, joins the denominator here and only here.

One program = one sequence, ROWS of its (token, query head) pairs, a row after the other, and BLOCK_D numbers of each. A
row reads parts·(D + 1)·4 bytes. In a large batch hardly any sequence is cut, and what counts is that few programs start
to find that out.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023; sinks: gpt-oss's reference implementation.

Before: `attention_decode.py` and `attention_verify.py`, which leave the parts.  After: the output projection.
"""

import torch
import triton
import triton.language as tl

from .attention_cut import Cut, find_cut
from .launch import cdiv, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs

CHUNK = 1024  # floats of partial rows that a warp holds at a time
# Parts up to which a program is one warp. Measured: what four have to tell each other took half of a merge of 32 parts
# of 128; of 128 parts of 512, one warp has too short a piece of each row.
ONE_WARP = 64


def attention_merge_reference(
    partial: torch.Tensor, lse: torch.Tensor, *, sinks: torch.Tensor | None = None, out: torch.Tensor
) -> torch.Tensor:
    """The specification of `attention_merge`, with its arguments."""
    logits = lse if sinks is None else torch.cat([lse, sinks.float()[None, :, None].expand(len(lse), -1, 1)], dim=-1)
    weight = torch.softmax(logits, dim=-1)[..., : lse.shape[-1], None]
    weighed = torch.where(lse[..., None] == -torch.inf, 0.0, weight * partial)
    return out.copy_(weighed.sum(dim=2))


@triton.jit
def join(
    partial_ptr,  # the parts of one row: part k is at k * step * D
    lse_ptr,  # its lse at k * step
    step,
    count,  # parts
    peak,  # with a sink: (sink, 1), else (a finite floor, 0)
    total,
    column,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The weighed average [BLOCK_D] of one row's parts, BLOCK_K of them at a time."""
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, count, BLOCK_K):
        part = first + tl.arange(0, BLOCK_K)
        lse = tl.load(lse_ptr + part * step, mask=part < count, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(lse, axis=0))
        weight = tl.exp(lse - higher)
        # Loaded without waiting for lse, and dropped where a part is empty: there it may hold anything.
        place = partial_ptr + (part * step)[:, None] * D + column[None, :]
        partial = tl.load(place, mask=(part < count)[:, None] & (column < D)[None, :], other=0.0)
        partial = tl.where((lse > float("-inf"))[:, None], partial, 0.0)
        shrink = tl.exp(peak - higher)
        acc = acc * shrink + tl.sum(partial * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        peak = higher
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit(
    do_not_specialize=["num_seqs", "target", "most_parts"],
    do_not_specialize_on_alignment=["cut_ptr", "query_start_ptr", "lens_ptr"],
)
def _attention_merge_kernel(
    partial_ptr,  # RAGGED: [parts, QUERIES, Hq, D]; else [S, Hq, K, D]; contiguous, float32
    lse_ptr,  # the same without D; -inf: an empty part
    cut_ptr,  # records of attention_cut.py; read if LISTED
    query_start_ptr,  # [S + 1]; read if QUERIES > 1
    lens_ptr,  # [S]; read if RAGGED, unless LISTED
    sinks_ptr,  # [Hq]; read if SINKS
    out_ptr,  # [T, Hq, D]
    out_stride,  # elements between tokens
    out_head_stride,  # elements between heads
    heads,  # Hq
    num_seqs,  # S
    target,  # attention_cut.py::Cut
    most_parts,  # the parts of it
    D: tl.constexpr,
    K: tl.constexpr,  # parts of every sequence; 0 if RAGGED
    RAGGED: tl.constexpr,  # the parts are those of a cut
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    LEAST: tl.constexpr,
    FIXED: tl.constexpr,
    LISTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    rank = tl.program_id(1)
    sequence = rank
    first = rank
    count = rank * 0 + K
    if RAGGED:  # lengths were there before the kernel in front, and so was what follows from them
        sequence, first, count = find_cut(
            cut_ptr, lens_ptr, num_seqs, target, most_parts, rank, WINDOW, QUERIES, LEAST, FIXED, LISTED
        )
    wait_inputs(PDL)  # all programs do, also those without work: else this kernel could end before the one in front
    if RAGGED:
        if sequence >= num_seqs:
            return
        if count == 1:  # its program has written the output
            return
    token = sequence.to(tl.int64)
    tokens = 1
    if QUERIES > 1:
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        tokens = tl.load(query_start_ptr + sequence + 1) - token

    for row in range(tl.program_id(0) * ROWS, tl.minimum(tl.program_id(0) * ROWS + ROWS, tokens * heads)):
        head = row % heads
        peak = tl.full([], -1e30, tl.float32)  # finite: with every part empty, -inf minus -inf would be NaN
        total = tl.zeros([], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32)
            peak = tl.maximum(peak, sink)
            total = tl.exp(sink - peak)
        if RAGGED:
            step = heads * QUERIES
            base = first.to(tl.int64) * step + row
        else:
            step = 1
            base = (token * heads + row) * K
        merged = join(partial_ptr + base * D, lse_ptr + base, step, count, peak, total, column, D, BLOCK_K, BLOCK_D)
        place = out_ptr + (token + row // heads) * out_stride + head * out_head_stride + column
        tl.store(place, merged.to(out_ptr.dtype.element_ty), mask=column < D)


def attention_merge(
    partial: torch.Tensor, lse: torch.Tensor, *, sinks: torch.Tensor | None = None, out: torch.Tensor
) -> torch.Tensor:
    """Combine parts of which each sequence has equally many.

    Args:
        partial: [S, Hq, K, D] float32, contiguous: each part's own softmax average of the values.
        lse: [S, Hq, K] float32, contiguous: natural log of each part's denominator; -inf marks an empty part, whose
            partial row is not read.
        sinks: [Hq] logits that join the denominator once, or None.
        out: [S, Hq, D], written; its last dimension must be contiguous.

    Returns:
        out. Rows without any key are zero.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    if not use_kernel(partial):
        return attention_merge_reference(partial, lse, sinks=sinks, out=out)
    _check(partial, lse, sinks, out)
    sequences, heads, parts, _ = partial.shape
    if out.numel():
        constants = {"K": parts, "WINDOW": 0, "QUERIES": 1, "LEAST": 1, "FIXED": 0, "LISTED": False}
        _launch((partial, lse), (lse, lse, lse), sinks, out, (heads, sequences), (sequences, 1, 0), constants)
    return out


def merge_cut(parts, cut: Cut, where, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    """Combine the parts of a cut into `out` [T, Hq, D]; sequences in one part are left alone.

    Args:
        parts: (partial [cut.parts, cut.queries, Hq, D], lse [cut.parts, cut.queries, Hq]), float32, contiguous.
        cut: that the parts were made by.
        where: what `attention_cut` gave (anything if the cut is not listed), query_start [S + 1], and seq_lens [S].
        sinks: as for `attention_merge`.
    """
    if cut.merges:
        grid = out.shape[1] * cut.queries, cut.merges  # rows of a sequence, sequences
        numbers, constants = (len(where[2]), cut.target, cut.parts), {"K": 0, **cut.constants()}
        _launch(parts, where, sinks, out, grid, numbers, constants)


def _launch(parts, where, sinks, out, grid, numbers, constants) -> None:
    heads, head_dim = out.shape[1:]
    ragged = constants["K"] == 0
    count = next_power_of_2(constants["K"] or 32)
    warps = 1 if count <= ONE_WARP else 4
    block_k = min(count, 128)
    default = {
        "ROWS": 4 if ragged and grid[1] >= 8 else 1,  # of a cut, few programs have anything to do
        "BLOCK_K": block_k,
        "BLOCK_D": min(next_power_of_2(head_dim), warps * CHUNK // block_k),
        "num_warps": warps,
    }
    options = choose("attention_merge", out, default, parts=count, head_dim=head_dim)
    blocks = cdiv(grid[0], options["ROWS"]), grid[1], cdiv(head_dim, options["BLOCK_D"])
    _attention_merge_kernel[blocks](
        *parts,
        *where,
        parts[1] if sinks is None else sinks,
        out,
        *out.stride()[:2],
        heads,
        *numbers,
        D=head_dim,
        RAGGED=ragged,
        SINKS=sinks is not None,
        **constants,
        **options,
        **overlap(out),
    )


def _check(partial, lse, sinks, out) -> None:
    sequences, heads, parts, head_dim = partial.shape
    if lse.shape != partial.shape[:3] or out.shape != (sequences, heads, head_dim):
        raise ValueError(
            f"attention_merge: partial {list(partial.shape)} wants lse {[sequences, heads, parts]} and out "
            f"{[sequences, heads, head_dim]}, got {list(lse.shape)} and {list(out.shape)}"
        )
    if not (partial.is_contiguous() and lse.is_contiguous() and out.stride(2) == 1):
        raise ValueError("attention_merge: partial and lse must be contiguous, and out in its last dimension")
    if partial.dtype != torch.float32 or lse.dtype != torch.float32:
        raise ValueError(f"attention_merge: partial and lse must be float32, are {partial.dtype} and {lse.dtype}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"attention_merge: sinks must be [{heads}], is {list(sinks.shape)}")
    if not parts:
        raise ValueError("attention_merge: there are no parts")
