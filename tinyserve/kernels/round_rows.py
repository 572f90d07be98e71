"""Rows of activations rounded to fp8 (e4m3), each by a scale of its own, for products of fp8 with fp8.

    scale = max(|x|) / 448            code = fp8(x / scale)

One program reads a row, finds its largest magnitude, and writes codes and scale: 2·K bytes in, K out. Each `width`
columns may have a scale of their own; then a program takes only a few of a row's groups. A static scale, which some
checkpoints bring for all tokens, takes the place of the maximum.

Source: "FP8 Formats for Deep Learning", arXiv:2209.05433, section 3.

Before: a norm, an activation, or attention.  After: torch's scaled product (quant/grouped.py).
"""

import torch
import triton
import triton.language as tl

from .launch import (
    cdiv,
    check_rows,
    next_power_of_2,
    overlap,
    row_warps,
    speaks_ptx,
    start_next,
    use_kernel,
    wait_inputs,
)

LARGEST = 448.0  # of e4m3
SMALLEST = torch.finfo(torch.float32).tiny  # a scale that is not 0, for rows of zeros
MAX_COLUMNS = 65536  # one program holds a row in registers
GROUPS_AT_ONCE = 16  # of a row with several


def round_rows_reference(
    x: torch.Tensor, static: torch.Tensor | None = None, *, limit: float = 0.0, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `round_rows`, with its arguments."""
    width = width or max(x.shape[1], 1)
    tiles = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % width)).unflatten(1, (-1, width))
    if static is not None:
        scale = static.float().reshape(1, 1).expand(tiles.shape[:2])
    else:
        reach = tiles.abs().amax(dim=2)
        scale = ((reach.clamp(max=limit) if limit else reach) / LARGEST).clamp(min=SMALLEST)
    codes = (tiles / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scale.t().contiguous().t()


@triton.jit
def _e4m3(value, NATIVE: tl.constexpr):
    """The bytes of float32 numbers within +-448, rounded to the nearest; ties to even."""
    if NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        half = (value * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)  # e4m3's exponents are 8 lower
        size = half & 0x7FFF
        size = (size + 63 + ((size >> 7) & 1)) >> 7
        return (((half >> 8) & 128) | size).to(tl.uint8)


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [M, K]
    static_ptr,  # [1]; read if STATIC
    codes_ptr,  # [M, K] bytes
    scale_ptr,  # [GROUPS, M] float32
    x_stride,  # elements between rows
    scale_stride,  # elements between groups
    K,
    limit,
    STATIC: tl.constexpr,
    LIMITED: tl.constexpr,
    NATIVE: tl.constexpr,
    GROUPS: tl.constexpr,  # scales of a row
    BLOCK_G: tl.constexpr,  # groups of a program, a power of two
    WIDTH: tl.constexpr,  # columns that share a scale
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, lane = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK)
    if GROUPS > BLOCK_G:
        group += tl.program_id(1) * BLOCK_G
    column = group[:, None] * WIDTH + lane[None, :]
    inside = (column < K) & (lane[None, :] < WIDTH)
    wait_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.zeros([BLOCK_G], tl.float32) + tl.load(static_ptr).to(tl.float32)
    else:
        reach = tl.max(tl.abs(x), axis=1)
        if LIMITED:
            reach = tl.minimum(reach, limit)
        scale = tl.maximum(reach / 448.0, 1.1754943508222875e-38)
    value = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    tl.store(codes_ptr + row * K + column, _e4m3(value, NATIVE), mask=inside)
    tl.store(scale_ptr + row + group * scale_stride, scale, mask=group < GROUPS)


def round_rows(
    x: torch.Tensor, static: torch.Tensor | None = None, *, limit: float = 0.0, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to fp8.

    Args:
        x: [M, K]; rows may lie apart.
        static: [1] or a number, the scale of all rows; None: each row's own.
        limit: bound of the magnitude that a row's own scale must reach; 0: none.

        width: columns that share a scale; 0: all.

    Returns:
        codes [M, K] float8_e4m3fn, scales [M, ceil(K / width)] float32, with rows beside each other in
        memory: x is about codes * scales.

    Raises:
        ValueError: rows that are not contiguous, or longer than MAX_COLUMNS.
    """
    check_rows("round_rows", x)
    tokens, columns = x.shape
    if not use_kernel(x):
        return round_rows_reference(x, static, limit=limit, width=width)
    if columns > MAX_COLUMNS:
        raise ValueError(f"round_rows: rows of {columns} are too long for one program, at most {MAX_COLUMNS}")
    width = width or max(columns, 1)
    groups = cdiv(columns, width)
    codes = torch.empty(tokens, columns, dtype=torch.uint8, device=x.device)
    scales = torch.empty(groups, cdiv(tokens, 16) * 16 if groups > 1 else tokens, dtype=torch.float32, device=x.device)
    blocks = {"BLOCK_G": min(next_power_of_2(groups), GROUPS_AT_ONCE), "BLOCK": next_power_of_2(width)}
    if codes.numel():
        _round_rows_kernel[(tokens, cdiv(groups, blocks["BLOCK_G"]))](
            x,
            x if static is None else static,
            codes,
            scales,
            x.stride(0),
            scales.stride(0),
            columns,
            limit,
            STATIC=static is not None,
            LIMITED=limit > 0,
            NATIVE=speaks_ptx(x),
            GROUPS=groups,
            WIDTH=width,
            **blocks,
            num_warps=row_warps(blocks["BLOCK_G"] * blocks["BLOCK"]),
            **overlap(x),
        )
    return codes.view(torch.float8_e4m3fn), scales.t() if groups == 1 else scales[:, :tokens].t()
