"""Rows of activations as whole numbers of two bytes, for products of integers with codes of four bits.

    scale = max(|x| of 128 columns) / 16256        number = round(x / scale) = 128 * high + low

A matrix unit multiplies bytes, and twice as many of them as numbers of 16 bits. Both limbs of a number are signed
bytes; together they have 15 bits for the largest x of a tile, where bfloat16 has eight for each. Numbers much smaller
than the largest of their tile have fewer, but what is lost of them is less than 2**-15 of the largest.

Limbs come in the order in which packed_limbs.py meets columns, and zeros fill the last tile. Each tile of a row has a
scale, and the sum of its numbers, scaled, for the zero points of codes. A norm is taken in. A warp rounds a tile.

Before: a norm, an activation, or attention.  After: packed_limbs.py.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen

from .launch import cdiv, check_rows, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .norm import rms_norm_reference

TILE = 128
LARGEST = 128 * 127  # the largest number: its upper limb is a signed byte
SMALLEST = torch.finfo(torch.float32).tiny
TILES_AT_ONCE = 8  # of a program
LEAST_ROWS = 8  # as packed_limbs.py wants them


@frozen(eq=False)
class Limbs:
    """M rows of K columns.

    Attributes:
        codes: [2 R, tiles * 128] int8: R rows of upper limbs, then those of lower ones; R is a power of two, at least
            8 and at least M. Rows from M on are not written, here and below.
        scales: [tiles, R] float32.   sums: [tiles, R] float32 of a tile's numbers, scaled.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


def column_of(place):
    """The column of a tile that stands at one of its 128 places; an integer, a tensor or a kernel's."""
    step, upper, thread, byte = place // 32, place // 16 % 2, place // 4 % 4, place % 4
    return 8 * thread + 2 * step + byte // 2 + 64 * (byte % 2) + 32 * upper


def round_limbs_reference(
    x: torch.Tensor, norm: torch.Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0
) -> Limbs:
    """The specification of `round_limbs`, with its arguments."""
    tokens, rows = x.shape[0], max(next_power_of_2(x.shape[0]), LEAST_ROWS)
    wide = x.float() if norm is None else rms_norm_reference(x.float(), norm, eps, offset=offset)
    tiles = torch.nn.functional.pad(wide, (0, -x.shape[1] % TILE, 0, rows - tokens)).unflatten(1, (-1, TILE))
    scale = (tiles.abs().amax(dim=2) / LARGEST).clamp(min=SMALLEST) + (tiles * 0).sum(dim=2)  # NaN stays NaN
    numbers = (tiles / scale[..., None]).nan_to_num(0).round().int()
    numbers = numbers[:, :, column_of(torch.arange(TILE, device=x.device))]
    upper = (numbers + 64) >> 7
    codes = torch.cat([upper, numbers - 128 * upper]).to(torch.int8).flatten(1)
    return Limbs(codes, scale.t().contiguous(), (scale * numbers.sum(dim=2)).t().contiguous())


@triton.jit
def _round_limbs_kernel(
    x_ptr,  # [M, K]
    norm_ptr,  # [K]; read if NORM
    codes_ptr,  # [2 ROWS, tiles * 128] int8
    scales_ptr,  # [tiles, ROWS] float32
    sums_ptr,  # [tiles, ROWS] float32
    x_stride,  # elements between rows
    K,
    tiles,
    eps,
    offset,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,  # that there is room for
    TILES: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # at least K, a power of two
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, 128)[None, :]
    column = tile[:, None] * 128 + lane
    row = x_ptr + token.to(tl.int64) * x_stride
    inside = column < K
    weight = tl.full([TILES, 128], 1.0, tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + column, mask=column < K, other=0.0).to(tl.float32) + offset
    wait_inputs(PDL)
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        every = tl.arange(0, BLOCK)
        whole = tl.load(row + every, mask=every < K, other=0.0).to(tl.float32)
        x *= weight * tl.rsqrt(tl.sum(whole * whole, axis=0) / K + eps)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) * (1 / 16256.0), 1.1754943508222875e-38)
    scale += tl.sum(x * 0.0, axis=1)  # NaN stays NaN
    number = (x * (1.0 / scale)[:, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # to the nearest
    places = tl.permute(tl.reshape(number, [TILES, 2, 2, 4, 4, 2]), (0, 4, 2, 3, 5, 1))  # as column_of
    placed = tl.reshape(places, [TILES, 128])
    high = (placed + 64) >> 7
    here = codes_ptr + (token * tiles + tile[:, None]) * 128 + lane
    stored = (tile < tiles)[:, None] & (lane >= 0)
    tl.store(here, high.to(tl.int8), mask=stored)
    tl.store(here + ROWS * tiles * 128, (placed - 128 * high).to(tl.int8), mask=stored)
    own = tile * ROWS + token
    tl.store(scales_ptr + own, scale, mask=tile < tiles)
    tl.store(sums_ptr + own, scale * tl.sum(number, axis=1).to(tl.float32), mask=tile < tiles)


def round_limbs(x: torch.Tensor, norm: torch.Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0) -> Limbs:
    """Round a few rows to whole numbers of two limbs.

    Args:
        x: [M, K]; rows may lie apart.
        norm: [K], the weight of an RMS norm of x that comes first.   eps, offset: of that norm.

    Raises:
        ValueError: rows that are not contiguous.
    """
    check_rows("round_limbs", x)
    if not use_kernel(x):
        return round_limbs_reference(x, norm, eps=eps, offset=offset)
    (tokens, columns), rows = x.shape, max(next_power_of_2(x.shape[0]), LEAST_ROWS)
    tiles = cdiv(columns, TILE)
    codes = torch.empty(2 * rows, tiles * TILE, dtype=torch.int8, device=x.device)
    scales = torch.empty(tiles, rows, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales)
    if codes.numel():
        _round_limbs_kernel[(tokens, cdiv(tiles, TILES_AT_ONCE))](
            x,
            x if norm is None else norm,
            codes,
            scales,
            sums,
            x.stride(0),
            columns,
            tiles,
            eps,
            offset,
            NORM=norm is not None,
            ROWS=rows,
            TILES=TILES_AT_ONCE,
            BLOCK=next_power_of_2(columns),
            num_warps=TILES_AT_ONCE,
            **overlap(x),
        )
    return Limbs(codes, scales, sums)
