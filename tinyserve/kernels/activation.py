"""Activations: `act(x)`, and `act(gate) * up` for the gated MLP whose first product puts out both halves.

    silu       x · sigmoid(x)
    gelu       x · Φ(x), with the exact normal distribution function
    gelu_tanh  x · sigmoid(2u), u = sqrt(2/π) · (x + 0.044715 x³): the usual tanh form, as 1 + tanh(u) = 2 · sigmoid(2u)
    relu       max(x, 0)
    relu2      max(x, 0)²
    xielu      p·x² + β·x above zero, n·(e^min(x, ε) - 1 - x) + β·x below: a function of its own, as p and n are learned

One program takes one piece of one row; the gated form reads 2·T·I numbers and writes T·I, in one launch instead of two.
Numbers are float32 between load and store: act(gate) is not rounded before the product.

Source: Hendrycks and Gimpel, arXiv:1606.08415 (GELU and SiLU); Shazeer, arXiv:2002.05202 (gated); So et al.,
arXiv:2109.08668 (squared ReLU); Huang and Schlag, arXiv:2411.13010 (xIELU).

Before: the MLP's first product.  After: its second.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs, wide

KINDS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}


def gated_activation_reference(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The specification of `gated_activation`, with its arguments."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    result = _function(kind)(gate).mul_(up)
    return result if result.dtype == gate_up.dtype else result.to(gate_up.dtype)


def activation_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The specification of `activation`, with its arguments."""
    return _function(kind)(x.float()).to(x.dtype)


def xielu_reference(x: torch.Tensor, positive: float, negative: float, *, beta: float, eps: float) -> torch.Tensor:
    """The specification of `xielu`, with its arguments."""
    number = wide(x)
    below = (torch.expm1(number.clamp(max=eps)) - number) * negative
    return (torch.where(number > 0, positive * number * number, below) + beta * number).to(x.dtype)


def _function(kind: str):
    if kind not in KINDS:
        raise ValueError(f"activation: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    return KINDS[kind]


@triton.jit
def activate(x, KIND: tl.constexpr):
    """act(x) of a float32 tile."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        # A comparison instead of tl.maximum: NaN must stay NaN, so that it is found in the logits.
        y = tl.where(x < 0.0, 0.0, x)
        if KIND == "relu2":
            y = y * y
    return y


@triton.jit
def _activation_kernel(
    x_ptr,  # [T, I], or [T, 2 I] if GATED: gate, then up
    out_ptr,  # [T, I] contiguous
    x_stride,  # elements between rows
    width,  # I
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x_row = x_ptr + row * x_stride
    result = activate(tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32), KIND)
    if GATED:
        result *= tl.load(x_row + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _xielu_kernel(
    x_ptr,  # [T, I]
    out_ptr,  # [T, I] contiguous
    x_stride,  # elements between rows
    width,  # I
    positive,
    negative,
    beta,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    low = tl.where(x > eps, eps, x)
    # exp(x) - 1 loses all digits near zero; there its series is exact to 1e-8 of x.
    grown = tl.where(low > -0.01, low * (1.0 + low * (0.5 + low * 0.16666667)), tl.exp(low) - 1.0)
    curved = tl.where(x > 0.0, positive * x * x, (grown - x) * negative)
    tl.store(out_ptr + row * width + column, (curved + beta * x).to(out_ptr.dtype.element_ty), mask=inside)


def xielu(x: torch.Tensor, positive: float, negative: float, *, beta: float, eps: float) -> torch.Tensor:
    """The activation xIELU.

    Args:
        x: [T, I]; rows may lie apart.
        positive, negative: curvature above and below zero.
        beta: slope at zero.
        eps: a small negative number, where the exponential is cut off.

    Returns:
        [T, I] in x's type, contiguous.
    """
    if not use_kernel(x):
        return xielu_reference(x, positive, negative, beta=beta, eps=eps)
    check_rows("xielu", x)
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(next_power_of_2(width), 1024)
        grid = (tokens, cdiv(width, block))
        _xielu_kernel[grid](x, out, x.stride(0), width, positive, negative, beta, eps, BLOCK=block, num_warps=4)
    return out


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up.

    Args:
        gate_up: [T, 2 I], gate in the first half of each row, up in the second; rows may lie apart.
        kind: a key of KINDS.

    Returns:
        [T, I] in the same type, contiguous.

    Raises:
        ValueError: an unknown kind, an odd row length, or columns that lie apart.
    """
    if not use_kernel(gate_up):
        return gated_activation_reference(gate_up, kind)
    check_rows("gated_activation", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gated_activation: rows hold gate and up, so their length is even, not {gate_up.shape[1]}")
    return _launch(gate_up, kind, gate_up.shape[1] // 2, gated=True)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """act(x). Args: x: [T, I]; rows may lie apart.  kind: a key of KINDS.  Returns: [T, I] in x's type, contiguous."""
    if not use_kernel(x):
        return activation_reference(x, kind)
    check_rows("activation", x)
    return _launch(x, kind, x.shape[1], gated=False)


def _launch(x: torch.Tensor, kind: str, width: int, *, gated: bool) -> torch.Tensor:
    _function(kind)  # refuse an unknown kind
    tokens = x.shape[0]
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    default = {"BLOCK": min(next_power_of_2(width), 1024), "num_warps": 4}
    options = choose("activation", x, default, tokens=tokens, width=width)
    grid = (tokens, cdiv(width, options["BLOCK"]))
    _activation_kernel[grid](x, out, x.stride(0), width, KIND=kind, GATED=gated, **options, **overlap(x))
    return out
