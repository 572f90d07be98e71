"""RMS norm, alone and fused with the residual addition before it: `y = x / sqrt(mean(x²) + eps) * (weight + offset)`.

A decoder adds each block's output to the residual stream and normalises the sum for the next block. Both are limited by
memory, so `add_rms_norm` does them in one pass: it reads x and delta and writes the sum and the normed sum, 4·T·H
numbers instead of the 5·T·H of two kernels, and one launch instead of two. One program holds one whole row in
registers, so the row is read once. Numbers are float32 between load and store.

The sum is rounded to the stream's type first and the norm is taken of the rounded sum, so that what the next addition
reads is exactly what was normalised. delta may come in parts, [P, T, H] float32, as a product that was split along K
leaves it (`skinny_gemm.py`): they are added up here. `offset` is 1.0 in the models (Gemma) whose checkpoints store
weight - 1.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4.

Before: `launch.py`, whether a kernel runs here.  After: `layers/`, which hold the weights.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from .launch import (
    check_rows,
    choose,
    next_power_of_2,
    overlap,
    row_warps,
    start_next,
    use_kernel,
    wait_inputs,
    wide,
)

MAX_COLUMNS = 65536  # one program holds a row in registers: 128 numbers a thread at 16 warps


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, scaled: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification of `rms_norm`, with its arguments: x * sqrt(H) (weight + offset) / sqrt(sum(x²) + H eps)."""
    scaled = scaled_weight(weight, offset) if scaled is None else scaled
    number = wide(x)
    # Fewer and cheaper operations than torch's own rms_norm makes of it, which counts when T is small.
    normed = (number * scaled).div_(length_of(number, eps))
    return normed if normed.dtype == x.dtype else normed.to(x.dtype)


def length_of(x: torch.Tensor, eps: float) -> torch.Tensor:
    """sqrt(sum(x²) + H eps) of each row of x [T, H] float32: [T, 1]."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.hypot_(_scalar((eps * x.shape[-1]) ** 0.5, x.device))


def scaled_weight(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """sqrt(H) (weight + offset), [H] float32: what the reference multiplies by."""
    return (weight.float() + offset) * weight.shape[-1] ** 0.5


@cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    """A number as a tensor, made once."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def add_rms_norm_reference(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    scaled: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `add_rms_norm`, with its arguments."""
    total = x + delta if delta.dim() == 2 else (x.float() + delta.sum(0)).to(x.dtype)
    return total, rms_norm_reference(total, weight, eps, offset=offset, scaled=scaled)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    delta_ptr,  # [T, H], or [PARTS, T, H] float32; read if PARTS > 0
    weight_ptr,  # [H]
    total_ptr,  # [T, H] contiguous; written if PARTS > 0
    out_ptr,  # [T, H] contiguous
    x_stride,  # elements between rows
    delta_stride,  # elements between rows
    part_stride,  # elements between parts
    eps,
    offset,
    H: tl.constexpr,
    PARTS: tl.constexpr,  # 0: nothing is added
    BLOCK: tl.constexpr,  # a power of two, at least H
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    wait_inputs(PDL)
    value = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        place = delta_ptr + row * delta_stride + column
        delta = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(place + part * part_stride, mask=inside, other=0.0).to(tl.float32)
        value += delta
        rounded = value.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * H + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    tl.store(out_ptr + row * H + column, (value * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, scaled: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise each row by its root mean square and scale it.

    Args:
        x: [T, H]; rows may lie apart.
        weight: [H], any floating type.
        eps: added to the mean square.
        offset: added to each weight, in float32.
        scaled: `scaled_weight(weight, offset)`, if it has been made already; for the reference.

    Returns:
        [T, H] in x's type, contiguous.

    Raises:
        ValueError: shapes that do not fit, or H above MAX_COLUMNS.
    """
    if not use_kernel(x):
        return rms_norm_reference(x, weight, eps, offset=offset, scaled=scaled)
    _check("rms_norm", x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, out, eps, offset)
    return out


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    scaled: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a block's output to the stream, and normalise the sum.

    Args:
        x: [T, H], the residual stream; rows may lie apart; not changed.
        delta: [T, H], what the last block put out, in x's type; or [P, T, H] float32, parts that add up to it.
        weight, eps, offset, scaled: as for `rms_norm`.

    Returns:
        (x + delta, its norm), both [T, H] in x's type, contiguous.

    Raises:
        ValueError: shapes or types that do not fit, or H above MAX_COLUMNS.
    """
    if not use_kernel(x):
        return add_rms_norm_reference(x, delta, weight, eps, offset=offset, scaled=scaled)
    _check("add_rms_norm", x, weight)
    check_rows("add_rms_norm: delta", delta if delta.dim() == 2 else delta.flatten(0, 1), x.shape[1])
    if delta.shape[-2:] != x.shape or delta.dtype != (x.dtype if delta.dim() == 2 else torch.float32):
        raise ValueError(
            f"add_rms_norm: x is {list(x.shape)} {x.dtype}, delta is {list(delta.shape)} {delta.dtype}; they must agree"
        )
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, delta, weight, total, out, eps, offset)
    return total, out


def _check(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    check_rows(name, x)
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"{name}: weight must be [{x.shape[1]}], contiguous, is {list(weight.shape)}")
    if x.shape[1] > MAX_COLUMNS:
        raise ValueError(f"{name}: rows of {x.shape[1]} are too long for one program, at most {MAX_COLUMNS}")


def _launch(x, delta, weight, total, out, eps, offset) -> None:
    tokens, width = x.shape
    if out.numel() == 0:
        return
    block = next_power_of_2(width)
    # The number of rows is no part of the choice: another number of warps adds in another order.
    options = choose("rms_norm", x, {"num_warps": row_warps(block)}, width=width)
    add = delta is not None
    parts = (delta.shape[0] if delta.dim() == 3 else 1) if add else 0
    _rms_norm_kernel[(tokens,)](
        x,
        delta if add else x,
        weight,
        total if add else out,
        out,
        x.stride(0),
        delta.stride(-2) if add else 0,
        delta.stride(0) if parts > 1 else 0,
        eps,
        offset,
        H=width,
        PARTS=parts,
        BLOCK=block,
        **options,
        **overlap(x),
    )
