"""A quantised matrix times one vector, with what stands around it: the products of a step of one token.

    z = W · x                          or, with a norm, W · (x / sqrt(mean(x²) + eps) * (norm + offset))
    y = z + bias                       or, gated, act(first half of z + bias) * (second half of z + bias)
    out = y + residual

As `gemv.py`, but W comes as codes (`packed.py`): a half or a quarter of the bytes, and so many more codes a second
that arithmetic takes longer than memory. Per code of four bits there is a mask, a subtraction and a product in float32,
no more: a word is masked where it lies, which leaves its codes 16, 256 and 4096 times too large, and x is that much
smaller instead. Scales come in once for the codes of a word (they share a group), and zero points once for the sum of
the x that meet it.

Nothing is rounded in between: x stays in its type, products and sums are float32.

Before: `packed.py`, `gemv.py`.  After: `packed_gemm.py` for more rows; quant/grouped.py chooses.
"""

import torch
import triton
import triton.language as tl

from .activation import KINDS, activate
from .gemv import check_row
from .launch import cdiv, choose, overlap, speaks_ptx, start_next, use_kernel, wait_inputs
from .packed import Packed, shrunk, single
from .packed_limbs import limbs_fit, packed_limbs
from .packed_strips import packed_strips, packed_strips_reference, strips_fit


def packed_gemv_reference(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `packed_gemv`, with its arguments."""
    own = {"norm": norm, "eps": eps, "offset": offset, "gate": gate, "residual": residual}
    return packed_strips_reference(x, weight, bias, **own)


@triton.jit
def _words(codes_ptr, read, element, row_elements, more, TILES: tl.constexpr, EVEN: tl.constexpr):
    """Elements [rows, tiles, lanes] of the codes; nothing is read if there are no more.

    Loaded as rows, so that the threads of a warp stand along one, as they do when x is loaded: with one warp to a
    program nothing has to change hands.
    """
    place = codes_ptr + read[:, None].to(tl.int64) * row_elements + element[None, :]
    if EVEN:
        words = tl.load(place, mask=((element >= 0) & more)[None, :])
    else:
        words = tl.load(place, mask=((element < row_elements) & more)[None, :], other=0)
    return tl.reshape(words, [words.shape[0], TILES, words.shape[1] // TILES])


@triton.jit
def _vector(x_ptr, norm_ptr, column, K, offset, NORM: tl.constexpr, EVEN: tl.constexpr):
    """x at these columns, times the norm's weight; and its squares."""
    x = (tl.load(x_ptr + column) if EVEN else tl.load(x_ptr + column, mask=column < K, other=0.0)).to(tl.float32)
    square = x * x
    if NORM:
        weight = tl.load(norm_ptr + column) if EVEN else tl.load(norm_ptr + column, mask=column < K, other=0.0)
        x *= weight.to(tl.float32) + offset
    return x, square


@triton.jit
def _group_values(ptr, read, tile, G, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Values [rows, tiles, 1] of the group that each tile lies in."""
    group = tile * 0 if WIDTH == 0 else tl.minimum(tile * TILE // max(WIDTH, 1), G - 1)
    return tl.load(ptr + read[:, None].to(tl.int64) * G + group[None, :]).to(tl.float32)[:, :, None]


@triton.jit
def _step(
    total,  # [rows, tiles, lanes], added to
    total_up,
    words,  # [rows, tiles, lanes]
    words_up,  # the same of the second half; read if GATED
    start,  # first column of the tile
    column,  # [tiles, lanes] of each word's lowest bits, in the tile
    tile,  # [tiles]
    read,  # [rows]
    N,
    x_ptr,
    norm_ptr,
    scales_ptr,
    zeros_ptr,
    K,
    G,
    offset,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One step along the rows: the totals of both halves, and what it adds to the sum of squares."""
    WHOLE: tl.constexpr = WIDTH == 0 and not ZEROS  # scales and zero points are left to the end
    part = total if WHOLE else tl.zeros(words.shape, tl.float32)
    part_up = total_up if WHOLE else part
    squares = tl.zeros(column.shape, tl.float32)
    sums = squares  # of the x that meet a word
    for place in tl.static_range(PER):
        x, square = _vector(x_ptr, norm_ptr, start + column + place * (TILE // PER), K, offset, NORM, EVEN)
        squares += square
        sums += x
        small = shrunk(x, place, PER)[None, :, :]
        part += single(words, place, KIND, PER, MIDDLE, NATIVE) * small
        if GATED:
            part_up += single(words_up, place, KIND, PER, MIDDLE, NATIVE) * small
    here = start // TILE + tile
    if ZEROS and not ADDED:
        part -= _group_values(zeros_ptr, read, here, G, TILE, WIDTH) * sums[None, :, :]
        if GATED:
            part_up -= _group_values(zeros_ptr, read + N, here, G, TILE, WIDTH) * sums[None, :, :]
    if WHOLE:
        return part, part_up, squares
    if WIDTH == 0:
        return total + part, total_up + part_up, squares
    total += part * _group_values(scales_ptr, read, here, G, TILE, WIDTH)
    if GATED:
        total_up += part_up * _group_values(scales_ptr, read + N, here, G, TILE, WIDTH)
    if ADDED:
        total += _group_values(zeros_ptr, read, here, G, TILE, WIDTH) * sums[None, :, :]
        if GATED:
            total_up += _group_values(zeros_ptr, read + N, here, G, TILE, WIDTH) * sums[None, :, :]
    return total, total_up, squares


@triton.jit
def _packed_gemv_kernel(
    x_ptr,  # [K]
    codes_ptr,  # [N, row_elements], or [2 N, ...] if GATE
    scales_ptr,  # [N, G] or [2 N, G]
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [N] or [2 N]; read if BIAS
    norm_ptr,  # [K]; read if NORM
    residual_ptr,  # [N]; read if RESIDUAL
    out_ptr,  # [N]
    N,
    K,
    row_elements,
    G,
    eps,
    offset,
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,  # rows a program
    BLOCK_K: tl.constexpr,  # columns a step; a multiple of TILE
    AHEAD: tl.constexpr,  # ask for a step's words before the arithmetic of the one in front, not after it
    LATE: tl.constexpr,  # hold the next kernel back until the loop is through
    PDL: tl.constexpr,
):
    if not LATE:
        start_next(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1)  # rows past the end read the last one again, and are not stored
    tile, lane = tl.arange(0, BLOCK_K // TILE), tl.arange(0, TILE // PER)
    element = tl.arange(0, BLOCK_K // PER)
    column = tile[:, None] * TILE + lane[None, :]
    words = _words(codes_ptr, read, element, row_elements, True, BLOCK_K // TILE, EVEN)
    words_up = words
    if GATE != "":
        words_up = _words(codes_ptr, read + N, element, row_elements, True, BLOCK_K // TILE, EVEN)
    wait_inputs(PDL)

    total = tl.zeros(words.shape, tl.float32)
    total_up = total
    squares = tl.zeros(column.shape, tl.float32)
    if (
        not AHEAD
    ):  # the first step by itself, so that codes of a byte need not be carried around, which takes them apart
        total, total_up, squares = _step(
            total, total_up, words, words_up, 0, column, tile, read, N, x_ptr, norm_ptr, scales_ptr, zeros_ptr, K, G,
            offset, GATE != "", NORM, KIND, PER, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE, EVEN,
        )  # fmt: skip
    for start in range(0 if AHEAD else BLOCK_K, K, BLOCK_K):
        next_step = start + BLOCK_K if AHEAD else start
        later, more = next_step // PER + element, next_step < K if AHEAD else True
        ahead = _words(codes_ptr, read, later, row_elements, more, BLOCK_K // TILE, EVEN)
        ahead_up = ahead
        if GATE != "":
            ahead_up = _words(codes_ptr, read + N, later, row_elements, more, BLOCK_K // TILE, EVEN)
        total, total_up, square = _step(
            total, total_up, words if AHEAD else ahead, words_up if AHEAD else ahead_up, start, column, tile, read, N,
            x_ptr, norm_ptr, scales_ptr, zeros_ptr, K, G, offset, GATE != "", NORM, KIND, PER, TILE, WIDTH, MIDDLE,
            ZEROS, ADDED, NATIVE, EVEN,
        )  # fmt: skip
        squares += square
        if AHEAD:
            words, words_up = ahead, ahead_up
    if LATE:
        start_next(PDL)

    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
    y = tl.sum(tl.sum(total, axis=2), axis=1) * scale
    if WIDTH == 0:
        y *= tl.load(scales_ptr + read).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + read).to(tl.float32)
    if GATE != "":
        up = tl.sum(tl.sum(total_up, axis=2), axis=1) * scale
        if WIDTH == 0:
            up *= tl.load(scales_ptr + read + N).to(tl.float32)
        if BIAS:
            up += tl.load(bias_ptr + N + read).to(tl.float32)
        y = activate(y, GATE) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + read).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < N)


def packed_gemv(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one row by a quantised matrix.

    Args:
        x: [1, K].
        weight: N rows; with `gate` 2 N, the gate's rows first.
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
    check_packed("packed_gemv", x, weight, bias, gate)
    if not use_kernel(x):
        return packed_gemv_reference(x, weight, bias, **options)
    rows = weight.codes.shape[0] // (2 if gate else 1)
    check_row("packed_gemv", x, rows, norm, residual)
    if limbs_fit(x, weight, gated=gate is not None):
        return packed_limbs(x, weight, bias, **options)
    if weight.tile == 128 and strips_fit(x, weight, norm):
        return packed_strips(x, weight, bias, **options)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    if rows and x.shape[1]:
        _launch(x, weight, bias, out, **options)
    return out


def _launch(x, weight, bias, out, *, norm, eps, offset, gate, residual) -> None:
    """One program for each few rows. Unused pointers point at x and are not read."""
    rows, width, gated = out.shape[1], x.shape[1], gate is not None
    default = _formula(weight, gated) | {"LATE": norm is not None and not gated}  # as in gemv.py
    shape = {"inputs": width, "outputs": rows, "gated": int(gated), "bits": weight.bits}
    options = choose("packed_gemv", x, default, **shape)
    _packed_gemv_kernel[(cdiv(rows, options["BLOCK_N"]),)](
        x,
        *weight.tensors(),
        x if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        rows,
        width,
        weight.codes.shape[1],
        weight.scales.shape[1],
        eps,
        offset,
        GATE=gate or "",
        BIAS=bias is not None,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        EVEN=width % options["BLOCK_K"] == 0,
        NATIVE=speaks_ptx(x),
        **weight.constants(),
        **options,
        **overlap(x),
    )


def _formula(weight: Packed, gated: bool) -> dict[str, int]:
    """2048 codes of a byte for two warps, 4096 smaller ones for one warp; half as many rows if there are two halves."""
    block = min((1024, 512, 256), key=lambda size: (cdiv(weight.columns, size) * size, -size))
    rows = max((2048 if weight.each == 1 else 4096) // block // (1 + gated), 1)
    return {"BLOCK_N": rows, "BLOCK_K": block, "AHEAD": 0, "num_warps": 2 if weight.each == 1 else 1}


def check_packed(name: str, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, gate: str | None) -> None:
    """Refuse what the kernels of packed products cannot read.

    Raises:
        ValueError: with the shapes.
    """
    rows, columns = weight.codes.shape[0], weight.columns
    tiles = cdiv(columns, weight.tile)
    wanted = columns if weight.bits == 8 else tiles * weight.tile // weight.each
    if x.dim() != 2 or x.shape[1] != columns or weight.codes.shape[1] != wanted:
        raise ValueError(f"{name}: x is {list(x.shape)}, codes {list(weight.codes.shape)} for {columns} columns")
    groups = cdiv(columns, weight.width) if weight.width else 1
    for values in (weight.scales, weight.zeros):
        if values is not None and values.shape != (rows, groups):
            raise ValueError(f"{name}: scales and zeros must be [{rows}, {groups}], are {list(values.shape)}")
    if groups % 2 and groups > 1 and weight.scales.element_size() < 4:
        raise ValueError(f"{name}: scales of an odd number of groups, {groups}, must be float32")
    if weight.added and (weight.zeros is None or weight.width % 128 == 0):
        raise ValueError(f"{name}: numbers to add need groups narrower than 128, not {weight.width}")
    if weight.zeros is not None and weight.zeros.dtype != weight.scales.dtype:
        raise ValueError(f"{name}: zeros must be {weight.scales.dtype} as scales are, not {weight.zeros.dtype}")
    if not all(one is None or one.is_contiguous() for one in (weight.codes, weight.scales, weight.zeros)):
        raise ValueError(f"{name}: codes, scales and zeros must be contiguous")
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        raise ValueError(f"{name}: bias must be [{rows}], contiguous, is {list(bias.shape)}")
    if gate is not None and (gate not in KINDS or rows % 2):
        raise ValueError(f"{name}: unknown kind {gate!r}, or an odd number of rows, {rows}")
