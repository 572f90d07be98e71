"""Layer norm: `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, the norm of GPT-2, Falcon, Phi and ViT,
alone or together with the addition to the residual stream before it.

One program holds one whole row in registers: the row is read once, its mean and then the variance of the centred row
are taken there (two sums, no cancellation as with mean(x²) - mean(x)²), 2·T·H numbers move, 4·T·H with the addition.
Numbers are float32 between load and store; the sum is rounded as it is stored, and then normalised.

Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, section 3.

Before: `launch.py`, whether a kernel runs here.  After: the layers of models that centre.
"""

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
)

MAX_COLUMNS = 65536  # one program holds a row in registers: 128 numbers a thread at 16 warps


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The specification of `layer_norm`, with its arguments."""
    shift = None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)


def add_layer_norm_reference(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `add_layer_norm`, with its arguments."""
    total = x + delta
    return total, layer_norm_reference(total, weight, bias, eps)


@triton.jit
def _layer_norm_kernel(
    x_ptr,  # [T, H]
    delta_ptr,  # [T, H]; read if ADD
    weight_ptr,  # [H]
    bias_ptr,  # [H]; read if BIAS
    total_ptr,  # [T, H] contiguous; written if ADD
    out_ptr,  # [T, H] contiguous
    x_stride,  # elements between rows
    delta_stride,  # elements between rows
    eps,
    H: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least H
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_inputs(PDL)
    value = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta_ptr + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * H + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / H, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / H + eps)
    result = centred * scale * weight
    if BIAS:
        result += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + column, result.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Centre each row, bring it to unit variance, scale and shift it.

    Args:
        x: [T, H]; rows may lie apart.
        weight: [H], any floating type.
        bias: [H] or None.
        eps: added to the variance.

    Returns:
        [T, H] in x's type, contiguous.

    Raises:
        ValueError: shapes that do not fit, or H above MAX_COLUMNS.
    """
    if not use_kernel(x):
        return layer_norm_reference(x, weight, bias, eps)
    _check("layer_norm", x, weight, bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, bias, None, out, eps)
    return out


def add_layer_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a block's output to the stream, and normalise the sum.

    Args:
        x: [T, H], the residual stream; rows may lie apart; not changed.
        delta: [T, H], what the last block put out, in x's type.
        weight, bias, eps: as for `layer_norm`.

    Returns:
        (x + delta, its norm), both [T, H] in x's type, contiguous.

    Raises:
        ValueError: shapes or types that do not fit, or H above MAX_COLUMNS.
    """
    if not use_kernel(x):
        return add_layer_norm_reference(x, delta, weight, bias, eps)
    _check("add_layer_norm", x, weight, bias)
    check_rows("add_layer_norm: delta", delta, x.shape[1])
    if delta.shape != x.shape or delta.dtype != x.dtype:
        raise ValueError(
            f"add_layer_norm: x is {list(x.shape)} {x.dtype}, delta {list(delta.shape)} {delta.dtype}; they must agree"
        )
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, delta, weight, bias, total, out, eps)
    return total, out


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_rows(name, x)
    width = x.shape[1]
    for what, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[1:] or not vector.is_contiguous()):
            raise ValueError(f"{name}: {what} must be [{width}], contiguous, is {list(vector.shape)}")
    if width > MAX_COLUMNS:
        raise ValueError(f"{name}: rows of {width} are too long for one program, at most {MAX_COLUMNS}")


def _launch(x, delta, weight, bias, total, out, eps) -> None:
    """One program a row. Unused pointers point at tensors that are there, and are not read."""
    tokens, width = x.shape
    if out.numel() == 0:
        return
    block = next_power_of_2(width)
    options = choose("layer_norm", x, {"num_warps": row_warps(block)}, width=width)
    add = delta is not None
    _layer_norm_kernel[(tokens,)](
        x,
        delta if add else x,
        weight,
        weight if bias is None else bias,
        total if add else out,
        out,
        x.stride(0),
        delta.stride(0) if add else 0,
        eps,
        H=width,
        ADD=add,
        BIAS=bias is not None,
        BLOCK=block,
        **options,
        **overlap(x),
    )
