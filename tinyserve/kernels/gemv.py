"""A matrix times one vector, together with what stands around it in a decoder: one kernel for a step of one token.

    z = W · x                          or, with a norm, W · (x / sqrt(mean(x²) + eps) * (norm + offset))
    y = z + bias                       or, gated, act(first half of z + bias) * (second half of z + bias)
    out = y + residual

The weights are read once and nothing else counts: 2·N·K bytes in bf16. One program takes a few whole rows of W and
walks along them; sums are float32, one running sum per lane, added up once at the end. There are no other programs to
wait for: splitting K never won at one row. Each program recomputes the sum of squares of the norm from the x that it
reads anyway, which costs 0.3 to 0.5 us a product where a norm kernel of its own costs 1.5.

The first tile of weights is loaded before the results of the kernel in front are waited for (`launch.py`, overlap).

Measured on an H200 beside cuBLAS: 4096 x 28672 54.7 us against 56.2, 4096 x 4096 10.3 against 13.2, 2048 x 1024 3.2
against 12.6.

Source: Gray et al., "GPU Kernels for Block-Sparse Weights", 2017, section 3 (products bound by reading weights).

Before: `norm.py`, `activation.py`, which it takes in.  After: `skinny_gemm.py` for more rows; quant/plain.py chooses.
"""

import torch
import triton
import triton.language as tl

from .activation import KINDS, activate, gated_activation_reference
from .launch import cdiv, choose, overlap, start_next, use_kernel, wait_inputs
from .norm import rms_norm_reference


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `gemv`, with its arguments."""
    wide = x.float()
    if norm is not None:
        wide = rms_norm_reference(wide, norm, eps, offset=offset)
    y = torch.nn.functional.linear(wide, weight.float(), None if bias is None else bias.float())
    if gate is not None:
        y = gated_activation_reference(y, gate)
    return (y if residual is None else y + residual.float()).to(x.dtype)


@triton.jit
def _tile(weight_ptr, row, column, K, EVEN: tl.constexpr):
    """Weights [rows, columns]; 0 beyond the last column."""
    place = weight_ptr + row[:, None].to(tl.int64) * K + column[None, :]
    return tl.load(place) if EVEN else tl.load(place, mask=(column < K)[None, :], other=0.0)


@triton.jit
def _vector(ptr, column, K, EVEN: tl.constexpr):
    """Numbers [columns] of a vector in float32; 0 beyond the last."""
    numbers = tl.load(ptr + column) if EVEN else tl.load(ptr + column, mask=column < K, other=0.0)
    return numbers.to(tl.float32)


@triton.jit
def _input(x_ptr, norm_ptr, column, K, offset, NORM: tl.constexpr, EVEN: tl.constexpr):
    """The piece of x that the weights are multiplied by, and its squares."""
    x = _vector(x_ptr, column, K, EVEN)
    square = x * x
    if NORM:
        x *= _vector(norm_ptr, column, K, EVEN) + offset
    return x, square


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N, K], or [2 N, K] if GATE
    bias_ptr,  # [N] or [2 N]; read if BIAS
    norm_ptr,  # [K]; read if NORM
    residual_ptr,  # [N]; read if RESIDUAL
    out_ptr,  # [N]
    N,
    K,
    eps,
    offset,
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,  # rows a program
    BLOCK_K: tl.constexpr,
    LATE: tl.constexpr,  # hold the next kernel back until the loop is through
    PDL: tl.constexpr,
):
    if not LATE:
        start_next(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    read = tl.minimum(row, N - 1)  # rows past the end read the last one again, and are not stored
    column = tl.arange(0, BLOCK_K)
    tile = _tile(weight_ptr, read, column, K, EVEN)
    if GATE != "":
        tile_up = _tile(weight_ptr, read + N, column, K, EVEN)
    wait_inputs(PDL)

    x, squares = _input(x_ptr, norm_ptr, column, K, offset, NORM, EVEN)
    total = tile.to(tl.float32) * x[None, :]
    if GATE != "":
        total_up = tile_up.to(tl.float32) * x[None, :]
    for start in range(BLOCK_K, K, BLOCK_K):
        here = start + column
        tile = _tile(weight_ptr, read, here, K, EVEN)
        if GATE != "":
            tile_up = _tile(weight_ptr, read + N, here, K, EVEN)
        x, square = _input(x_ptr, norm_ptr, here, K, offset, NORM, EVEN)
        squares += square
        total += tile.to(tl.float32) * x[None, :]
        if GATE != "":
            total_up += tile_up.to(tl.float32) * x[None, :]
    if LATE:
        start_next(PDL)

    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    y = tl.sum(total, axis=1) * scale
    if BIAS:
        y += tl.load(bias_ptr + read).to(tl.float32)
    if GATE != "":
        up = tl.sum(total_up, axis=1) * scale
        if BIAS:
            up += tl.load(bias_ptr + N + read).to(tl.float32)
        y = activate(y, GATE) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + read).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=inside)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one row by a matrix.

    Args:
        x: [1, K].
        weight: [N, K], contiguous; with `gate` [2 N, K], the gate's rows first.
        bias: one number per row of `weight`.
        norm: [K], the weight of an RMS norm of x that comes first; None for none.   eps, offset: of that norm.
        gate: a kind of activation.py: the product's first half goes through it and is multiplied by the second.
        residual: [1, N], added at the end.

    Returns:
        [1, N] in x's type. Nothing is rounded in between.

    Raises:
        ValueError: shapes that do not fit, or an unknown kind.
    """
    options = {"norm": norm, "eps": eps, "offset": offset, "gate": gate, "residual": residual}
    check_product("gemv", x, weight, bias, gate)
    if not use_kernel(x):
        return gemv_reference(x, weight, bias, **options)
    rows = weight.shape[0] // (2 if gate else 1)
    check_row("gemv", x, rows, norm, residual)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    if rows and x.shape[1]:
        _launch(x, weight, bias, out, **options)
    return out


def _launch(x, weight, bias, out, *, norm, eps, offset, gate, residual) -> None:
    """One program for each few rows. Unused pointers point at x and are not read."""
    rows, width = out.shape[1], x.shape[1]
    # The product before attention, the one with a norm and no gate, holds back the kernels after it: if no kernel of a
    # layer does, waiting programs crowd out running ones, and a step of an 8B model takes 8 % longer.
    late = norm is not None and gate is None
    default = _formula(width, gate is not None) | {"LATE": late}
    options = choose("gemv", x, default, inputs=width, outputs=rows, gated=int(gate is not None))
    _gemv_kernel[(cdiv(rows, options["BLOCK_N"]),)](
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        rows,
        width,
        eps,
        offset,
        GATE=gate or "",
        BIAS=bias is not None,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        EVEN=width % options["BLOCK_K"] == 0,
        **options,
        **overlap(x),
    )


def _formula(width: int, gated: bool) -> dict[str, int]:
    """4096 numbers a tile, as wide as wastes the least of the last one; two tiles if gated."""
    block = min((1024, 512, 256), key=lambda size: (cdiv(width, size) * size, -size))
    warps = 4 if block == 1024 and not gated else 2
    return {"BLOCK_N": (2048 if gated else 4096) // block, "BLOCK_K": block, "num_warps": warps}


def check_row(name: str, x: torch.Tensor, rows: int, norm: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    """Refuse what the kernels of one row cannot read. Args: rows: of the result.

    Raises:
        ValueError: with the shapes.
    """
    width = x.shape[1]
    if x.shape[0] != 1 or not x.is_contiguous():
        raise ValueError(f"{name}: x must be one row [1, {width}], is {list(x.shape)}")
    if norm is not None and (norm.shape != (width,) or not norm.is_contiguous()):
        raise ValueError(f"{name}: norm must be [{width}], contiguous, is {list(norm.shape)}")
    if residual is not None and (residual.shape != (1, rows) or not residual.is_contiguous()):
        raise ValueError(f"{name}: residual must be [1, {rows}], contiguous, is {list(residual.shape)}")


def check_product(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: str | None
) -> None:
    """Refuse what the kernels of dense products cannot read.

    Raises:
        ValueError: with the shapes.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise ValueError(f"{name}: x is {list(x.shape)}, weight {list(weight.shape)} (contiguous: rows, columns)")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"{name}: bias must be [{weight.shape[0]}], contiguous, is {list(bias.shape)}")
    if gate is not None and gate not in KINDS:
        raise ValueError(f"{name}: unknown kind {gate!r}; known: {', '.join(KINDS)}")
    if gate is not None and weight.shape[0] % 2:
        raise ValueError(f"{name}: a gated product has an even number of rows, not {weight.shape[0]}")
