"""Layer norm: `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, the norm of GPT-2, Falcon, Phi and ViT.

One program holds one whole row in registers: the row is read once, its mean and then the variance of the centred row
are taken there (two sums, no cancellation as with mean(x²) - mean(x)²), 2·T·H numbers move. Numbers are float32 between
load and store.

Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, section 3.

Before: `launch.py`, whether a kernel runs here.  After: the layers of models that centre.
"""

import torch
import triton
import triton.language as tl

from .launch import check_rows, choose, next_power_of_2, row_warps, use_kernel

MAX_COLUMNS = 65536  # one program holds a row in registers: 128 numbers a thread at 16 warps


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The specification of `layer_norm`, with its arguments."""
    shift = None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)


@triton.jit
def _layer_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H]
    bias_ptr,  # [H]; read if BIAS
    out_ptr,  # [T, H] contiguous
    x_stride,  # elements between rows
    eps,
    H: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least H
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / H, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / H + eps)
    result = centred * scale * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
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
    check_rows("layer_norm", x)
    tokens, width = x.shape
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[1:] or not vector.is_contiguous()):
            raise ValueError(f"layer_norm: {name} must be [{width}], contiguous, is {list(vector.shape)}")
    if width > MAX_COLUMNS:
        raise ValueError(f"layer_norm: rows of {width} are too long for one program, at most {MAX_COLUMNS}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = next_power_of_2(width)
    options = choose("layer_norm", x, {"num_warps": row_warps(block)}, width=width)
    _layer_norm_kernel[(tokens,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        eps,
        H=width,
        BIAS=bias is not None,
        BLOCK=block,
        **options,
    )
    return out
