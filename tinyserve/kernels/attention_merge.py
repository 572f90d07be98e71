"""Putting the splits of one attention together: `out = Σ exp(lse_k) · partial_k / (Σ exp(lse_k) + exp(sink))`.

Split-KV decode lets K programs attend to K ranges of one sequence's keys. Each leaves its own softmax average and the
log of its denominator, which is all that is needed to weigh it against the others. A range may be empty: then its lse
is -inf and its partial row is never read, so it may hold anything. A row whose ranges are all empty becomes zero. The
attention sink, a learned logit that takes probability and gives no value, joins the denominator here and only here.

One program = one (sequence, query head) and a stripe of the head: it reads K·BLOCK_D floats at once, no loop.
S·Hq·K·(D + 1)·4 bytes are read.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023; sinks: gpt-oss's reference implementation.

Before: `attention_decode.py`, which leaves the parts.  After: the output projection.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, choose, next_power_of_2, use_kernel

MAX_SPLITS = 1024
STRIPE = 8192  # floats of partial rows that one program holds in registers


def attention_merge_reference(
    partial: torch.Tensor, lse: torch.Tensor, *, sinks: torch.Tensor | None = None, out: torch.Tensor
) -> torch.Tensor:
    """The specification of `attention_merge`, with its arguments."""
    logits = lse if sinks is None else torch.cat([lse, sinks.float()[None, :, None].expand(len(lse), -1, 1)], dim=-1)
    weight = torch.softmax(logits, dim=-1)[..., : lse.shape[-1], None]
    weighed = torch.where(lse[..., None] == -torch.inf, 0.0, weight * partial)
    return out.copy_(weighed.sum(dim=2))


@triton.jit
def _attention_merge_kernel(
    partial_ptr,  # [S, Hq, K, D] contiguous, float32
    lse_ptr,  # [S, Hq, K] contiguous, float32; -inf: an empty split
    sinks_ptr,  # [Hq]; read if SINKS
    out_ptr,  # [S, Hq, D]
    out_stride,  # elements between sequences
    out_head_stride,  # elements between heads
    heads,  # Hq
    D: tl.constexpr,
    K: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a power of two, at least K
    BLOCK_D: tl.constexpr,  # a power of two
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_K)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)

    lse = tl.load(lse_ptr + row * K + split, mask=split < K, other=float("-inf"))
    # A finite floor: with every split empty, -inf minus -inf would be NaN.
    peak = tl.maximum(tl.max(lse, axis=0), -1e30)
    if SINKS:
        sink = tl.load(sinks_ptr + row % heads).to(tl.float32)
        peak = tl.maximum(peak, sink)
    weight = tl.exp(lse - peak)
    total = tl.sum(weight, axis=0)
    if SINKS:
        total += tl.exp(sink - peak)

    filled = lse > float("-inf")
    partial = tl.load(
        partial_ptr + (row * K + split)[:, None] * D + column[None, :],
        mask=filled[:, None] & (column < D)[None, :],
        other=0.0,
    )
    merged = tl.sum(partial * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    place = out_ptr + (row // heads) * out_stride + (row % heads) * out_head_stride + column
    tl.store(place, merged.to(out_ptr.dtype.element_ty), mask=column < D)


def attention_merge(
    partial: torch.Tensor, lse: torch.Tensor, *, sinks: torch.Tensor | None = None, out: torch.Tensor
) -> torch.Tensor:
    """Combine the parts that the splits of a decode left.

    Args:
        partial: [S, Hq, K, D] float32, contiguous: each split's own softmax average of the values.
        lse: [S, Hq, K] float32, contiguous: natural log of each split's denominator; -inf marks an empty split,
            whose partial row is not read.
        sinks: [Hq] logits that join the denominator once, or None.
        out: [S, Hq, D], written; its last dimension must be contiguous.

    Returns:
        out. Rows without any key are zero.

    Raises:
        ValueError: shapes or strides that do not fit, or more than MAX_SPLITS splits.
    """
    if not use_kernel(partial):
        return attention_merge_reference(partial, lse, sinks=sinks, out=out)
    sequences, heads, splits, head_dim = partial.shape
    _check(partial, lse, sinks, out)
    if out.numel() == 0:
        return out
    block_k = next_power_of_2(splits)
    default = {
        "BLOCK_D": min(next_power_of_2(head_dim), max(STRIPE // block_k, 1)),
        "num_warps": 1 if splits <= 8 else 4,
    }
    options = choose("attention_merge", partial, default, splits=splits, head_dim=head_dim)
    _attention_merge_kernel[(sequences * heads, cdiv(head_dim, options["BLOCK_D"]))](
        partial,
        lse,
        sinks if sinks is not None else lse,
        out,
        out.stride(0),
        out.stride(1),
        heads,
        D=head_dim,
        K=splits,
        SINKS=sinks is not None,
        BLOCK_K=block_k,
        **options,
    )
    return out


def _check(partial, lse, sinks, out) -> None:
    sequences, heads, splits, head_dim = partial.shape
    if lse.shape != partial.shape[:3] or out.shape != (sequences, heads, head_dim):
        raise ValueError(
            f"attention_merge: partial {list(partial.shape)} wants lse {[sequences, heads, splits]} and out "
            f"{[sequences, heads, head_dim]}, got {list(lse.shape)} and {list(out.shape)}"
        )
    if not (partial.is_contiguous() and lse.is_contiguous() and out.stride(2) == 1):
        raise ValueError("attention_merge: partial and lse must be contiguous, and out in its last dimension")
    if partial.dtype != torch.float32 or lse.dtype != torch.float32:
        raise ValueError(f"attention_merge: partial and lse must be float32, are {partial.dtype} and {lse.dtype}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"attention_merge: sinks must be [{heads}], is {list(sinks.shape)}")
    if not 0 < splits <= MAX_SPLITS:
        raise ValueError(f"attention_merge: {splits} splits; 1 to {MAX_SPLITS} are possible")
