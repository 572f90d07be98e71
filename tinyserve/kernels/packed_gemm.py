"""A quantised matrix times a few vectors: the products of a decode step of 2 to about 64 tokens.

    y = x · Wᵀ + bias                  or, gated, act(first half) * (second half)

As `skinny_gemm.py`, but W comes as codes (`packed.py`). One program takes all rows of x (in tiles) and a strip of W,
and walks along K with several loads in flight. Codes become numbers of x's type in registers, where the matrix
instruction takes its left side from; x is the right side and may be as narrow as 16. The places of a word are
multiplied one after the other, each with its own columns of x.

Numbers of the type of x are exact as long as they are differences of codes and zero points; so scales are left to the
float32 sums: to the end if a row has one, and after each step where a step lies in one group. Only where a step has
several groups the numbers are scaled first, and rounded.

A short W (few rows) gives too few programs to fill the device, so K can be split. With `parts` the splits are returned,
[P, M, N] float32, and whoever reads the product next (`norm.py`) adds them in order.

Source: Frantar et al., "MARLIN", arXiv:2408.11743, section 3; Osama et al., "Stream-K", arXiv:2301.03598, section 3.

Before: `packed.py`; `packed_gemv.py`, for one row.  After: quant/grouped.py, which chooses.
"""

import torch
import triton
import triton.language as tl

from .activation import gated_activation, gated_activation_reference
from .launch import (
    cdiv,
    check_rows,
    choose,
    facts,
    next_power_of_2,
    overlap,
    speaks_ptx,
    start_next,
    use_kernel,
    wait_inputs,
)
from .packed import (
    Packed,
    biased_and_gated,
    four_nibbles,
    four_scaled_nibbles,
    packed_dense_reference,
    shrunk,
    single,
    two_halves,
)
from .packed_gemv import check_packed
from .packed_limbs import limbs_fit, packed_limbs
from .packed_strips import packed_strips, strips_fit


def packed_gemm_reference(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    gate: str | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """The specification of `packed_gemm`, with its arguments; it never splits."""
    dense = packed_dense_reference(weight, torch.float32)
    y = torch.nn.functional.linear(x.float(), dense, None if bias is None else bias.float())
    if gate is not None:
        y = gated_activation_reference(y, gate)
    return y[None] if parts else y.to(x.dtype)


@triton.jit
def _columns_of_x(x_row, column, token, M, K, EVEN: tl.constexpr):
    """x [tokens, columns]; zeros beyond the last token and the last column."""
    inside = (token[:, None] < M) if EVEN else (token[:, None] < M) & (column[None, :] < K)
    return tl.load(x_row + column[None, :], mask=inside, other=0.0)


@triton.jit
def _product(
    total,  # [rows, tokens] float32, added to
    code,  # [rows, elements]
    x_row,
    column,  # [elements] of each element's lowest bits
    token,
    scale,  # [rows, elements]; read if SCALED
    zero,  # [rows, elements] if SCALED, else [rows]; read if ZEROS
    M,
    K,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    FOLD: tl.constexpr,
):
    """total + the product of a tile of W with its columns of x; of the scaled tile if FOLD."""
    LANES: tl.constexpr = TILE // PER
    kind = x_row.dtype.element_ty
    if NATIVE and PER == 4 and not SCALED and kind != tl.float32:
        half: tl.constexpr = kind == tl.float16
        base: tl.constexpr = 1024.0 if half else 128.0
        minus = tl.full(code.shape, -(base + MIDDLE), kind)
        if FOLD:
            if ZEROS:
                minus = (-(zero + base)).to(kind)
            w0, w1, w2, w3 = four_scaled_nibbles(code, minus, two_halves(scale, kind), tl.zeros(code.shape, kind), half)
        else:
            w0, w1, w2, w3 = four_nibbles(code, minus, half)
            if ZEROS:
                shift = zero[:, None].to(kind)
                w0, w1, w2, w3 = w0 - shift, w1 - shift, w2 - shift, w3 - shift
        x0 = _columns_of_x(x_row, column, token, M, K, EVEN)
        total = tl.dot(w0, tl.trans(x0), total, input_precision="ieee")
        x1 = _columns_of_x(x_row, column + LANES, token, M, K, EVEN)
        total = tl.dot(w1, tl.trans(x1), total, input_precision="ieee")
        x2 = _columns_of_x(x_row, column + 2 * LANES, token, M, K, EVEN)
        total = tl.dot(w2, tl.trans(x2), total, input_precision="ieee")
        x3 = _columns_of_x(x_row, column + 3 * LANES, token, M, K, EVEN)
        total = tl.dot(w3, tl.trans(x3), total, input_precision="ieee")
    else:
        for place in tl.static_range(PER):
            if NATIVE and KIND == "e4m3" and not SCALED:
                weight = code.to(tl.float8e4nv, bitcast=True).to(kind)
            else:
                number = shrunk(single(code, place, KIND, PER, MIDDLE, NATIVE), place, PER)
                if ZEROS and not ADDED:
                    number -= zero if SCALED else zero[:, None]
                if SCALED:
                    number *= scale
                if ADDED:
                    number += zero
                weight = number.to(kind)
            x = _columns_of_x(x_row, column + place * LANES, token, M, K, EVEN)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _of_group(ptr, row, start, K, WIDTH: tl.constexpr):
    """float32 values of the group of column `start`; row: where the rows' values begin."""
    kind: tl.constexpr = ptr.dtype.element_ty
    if kind == tl.float32:
        values = tl.load(ptr + row + tl.minimum(start, K - 1) // WIDTH)
    else:  # no load of less than four bytes is kept in flight: two groups at a time, of an even number
        group = tl.minimum(start, K - 1) // WIDTH
        pair = tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row // 2 + group // 2)
        values = (pair >> (group % 2 * 16)).to(tl.int16).to(kind, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _of_groups(ptr, read, start, tile, G, K, TILE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """float32 values of the groups of a step: [rows] if it lies in one, else [rows, elements]."""
    row = read.to(tl.int64) * G
    if WIDTH == 0:
        values = tl.load(ptr + row)
    elif WIDTH % BLOCK_K > 0:
        values = tl.load(ptr + row[:, None] + tl.minimum((start + tile * TILE) // WIDTH, G - 1)[None, :])
    else:
        values = _of_group(ptr, row, start, K, WIDTH)
    return values.to(tl.float32)


@triton.jit
def _of_left(ptr, first, limit, start, G, K, WIDTH: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
             WARPS: tl.constexpr):  # fmt: skip
    """Values of a step's group for rows [ROWS, WORDS] from `first`, loaded by the threads that hold these rows as the
    left side of a product of whole warps: four for each row, eight rows beside each other, twice, for each warp."""
    each = tl.arange(0, ROWS // (8 * WARPS))[None, None, None, :, None]
    row = (each // 2) * (16 * WARPS) + tl.arange(0, WARPS)[None, None, :, None, None] * 16 + each % 2 * 8
    row += tl.arange(0, 8)[None, :, None, None, None] + tl.zeros([4, 1, 1, 1, 1], tl.int32)
    read = tl.minimum(first + row, limit - 1).to(tl.int64) * G
    own = _of_group(ptr, read, start, K, WIDTH)
    own = tl.permute(tl.reshape(own, [4, 8, WARPS, ROWS // (16 * WARPS), 2]), (3, 2, 4, 1, 0))
    wide = tl.broadcast_to(tl.reshape(own, [ROWS, 1, 4, 1]), [ROWS, WORDS // 8, 4, 2])
    return tl.reshape(wide, [ROWS, WORDS])


@triton.jit
def _one_step(
    total,  # [rows, tokens] float32, added to
    codes_row,  # [rows, 1] pointers
    element,  # [elements] of the step
    row_elements,
    x_row,
    column,
    token,
    scales_ptr,
    zeros_ptr,
    read,
    first,  # of the rows, and how many there are before the last one is read again; read if FOLD
    limit,
    start,
    tile,
    M,
    K,
    G,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
    FOLD: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + the product of one step, with its scales unless a row has only one."""
    SCALED: tl.constexpr = WIDTH % BLOCK_K > 0  # a step has several groups
    place = codes_row + element[None, :]
    code = tl.load(place) if EVEN else tl.load(place, mask=element[None, :] < row_elements, other=0)
    scale, zero = 0.0, 0.0
    quick: tl.constexpr = NATIVE and PER == 4 and x_row.dtype.element_ty != tl.float32
    fold: tl.constexpr = FOLD and WIDTH > 0 and not SCALED and quick and total.shape[0] >= 16 * WARPS
    WORDS: tl.constexpr = BLOCK_K // PER
    if fold:
        scale = _of_left(scales_ptr, first, limit, start, G, K, WIDTH, WORDS, total.shape[0], WARPS)
    elif WIDTH > 0:
        scale = _of_groups(scales_ptr, read, start, tile, G, K, TILE, WIDTH, BLOCK_K)
    if ZEROS and fold:
        zero = _of_left(zeros_ptr, first, limit, start, G, K, WIDTH, WORDS, total.shape[0], WARPS)
    elif ZEROS:
        zero = _of_groups(zeros_ptr, read, start, tile, G, K, TILE, WIDTH, BLOCK_K)
    apart: tl.constexpr = WIDTH > 0 and not SCALED and not fold
    part = tl.zeros(total.shape, tl.float32) if apart else total
    part = _product(
        part, code, x_row, column, token, scale, zero, M, K, KIND, PER, TILE, MIDDLE, ZEROS, ADDED, SCALED, NATIVE,
        EVEN, fold,
    )  # fmt: skip
    return total + part * scale[:, None] if apart else part


@triton.jit(do_not_specialize=["M"])
def _packed_gemm_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # [N, row_elements], or [2 N, ...] if GATE
    scales_ptr,  # [N, G] or [2 N, G]
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [N] or [2 N]; read if BIAS
    out_ptr,  # [M, N]; [SPLITS, M, N] float32 if there are parts
    M,
    N,
    K,
    row_elements,
    G,
    x_stride,  # elements between rows
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K * SPLITS
    FOLD: tl.constexpr,  # scale numbers, not sums, where both can be done
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a multiple of TILE
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    split = tl.program_id(2)
    strip = tl.program_id(1) * BLOCK_N
    row = strip + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1)  # rows past the end read the last one again, and are not stored
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # programs of the same rows run at the same time
    share = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    first = split * share
    LANES: tl.constexpr = TILE // PER
    lane = tl.arange(0, BLOCK_K // PER)
    tile = lane // LANES
    column = tile * TILE + lane % LANES
    x_row = x_ptr + token[:, None].to(tl.int64) * x_stride
    codes_row = codes_ptr + read[:, None].to(tl.int64) * row_elements
    up_row = codes_ptr + (read[:, None].to(tl.int64) + N) * row_elements
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    total_up = total
    wait_inputs(PDL)

    for start in tl.range(first, first + share, BLOCK_K, num_stages=STAGES):
        element = start // PER + lane
        total = _one_step(
            total, codes_row, element, row_elements, x_row, start + column, token, scales_ptr, zeros_ptr, read, strip,
            N, start, tile, M, K, G, KIND, PER, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE, EVEN, FOLD, WARPS, BLOCK_K,
        )  # fmt: skip
        if GATE != "":
            total_up = _one_step(
                total_up, up_row, element, row_elements, x_row, start + column, token, scales_ptr, zeros_ptr,
                read + N, strip + N, 2 * N, start, tile, M, K, G, KIND, PER, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE,
                EVEN, FOLD, WARPS, BLOCK_K,
            )  # fmt: skip

    if WIDTH == 0:
        total *= tl.load(scales_ptr + read).to(tl.float32)[:, None]
        if GATE != "":
            total_up *= tl.load(scales_ptr + read + N).to(tl.float32)[:, None]
    total = biased_and_gated(total, total_up, bias_ptr, read, split, N, GATE, BIAS)
    inside = (token[None, :] < M) & (row[:, None] < N)
    place = out_ptr + (split.to(tl.int64) * M + token[None, :]) * N + row[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)


def packed_gemm(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    gate: str | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """Multiply a few rows by a quantised matrix. Right for any number of rows, fast up to about 64.

    Args:
        x: [M, K]; rows may lie apart.
        weight: N rows; with `gate` 2 N, the gate's rows first.
        bias: one number per row of `weight`.
        gate: a kind of activation.py: the product's first half goes through it and is multiplied by the second.
        parts: return the splits instead of their sum; not with `gate`.

    Returns:
        [M, N] in x's type; with `parts` [P, M, N] float32 to be added up, P being what suits the device and the shape.

    Raises:
        ValueError: shapes that do not fit, or an unknown kind.
    """
    check_rows("packed_gemm", x)
    check_packed("packed_gemm", x, weight, bias, gate)
    if parts and gate is not None:
        raise ValueError("packed_gemm: a gated product has no parts")
    if not use_kernel(x):
        return packed_gemm_reference(x, weight, bias, gate=gate, parts=parts)
    if limbs_fit(x, weight, gated=gate is not None, parts=parts):
        return packed_limbs(x, weight, bias, gate=gate, parts=parts)
    if strips_fit(x, weight):
        return packed_strips(x, weight, bias, gate=gate, parts=parts)
    tokens, rows = x.shape[0], weight.codes.shape[0] // (2 if gate else 1)
    options = _options(x, weight, rows, gate is not None, parts)
    if gate is not None and options["APART"]:
        return gated_activation(packed_gemm(x, weight, bias), gate)
    del options["APART"]
    shape = (options["SPLITS"], tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    if tokens and rows:
        _launch(x, weight, bias, out, gate or "", options)
    return out


def _launch(x, weight, bias, out, gate, options) -> None:
    """One program for each strip of rows, split and tile of tokens. Unused pointers point at x and are not read."""
    (tokens, columns), rows = x.shape, out.shape[-1]
    _packed_gemm_kernel[(cdiv(tokens, options["BLOCK_M"]), cdiv(rows, options["BLOCK_N"]), options["SPLITS"])](
        x,
        *weight.tensors(),
        x if bias is None else bias,
        out,
        tokens,
        rows,
        columns,
        weight.codes.shape[1],
        weight.scales.shape[1],
        x.stride(0),
        GATE=gate,
        BIAS=bias is not None,
        EVEN=columns % (options["BLOCK_K"] * options["SPLITS"]) == 0,
        NATIVE=speaks_ptx(x),
        WARPS=options["num_warps"],
        **weight.constants(),
        **options,
        **overlap(x),
    )


def _options(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """What was measured for this shape, or the formula. Only where parts are asked for is there more than one."""
    tokens = x.shape[0]
    shape = {"tokens": tokens, "inputs": x.shape[1], "outputs": rows, "gated": int(gated), "bits": weight.bits}
    formula = _formula(x, weight, rows, gated, parts)
    options = choose("packed_gemm", x, formula, parts=int(parts), **shape)
    return options | {"SPLITS": options["SPLITS"] if parts else 1}


def _formula(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """Strips of 64 rows and several loads in flight; splits until they fill the device. Other tiles above 64 tokens."""
    device, (tokens, columns) = facts(x.device), x.shape
    quick = weight.each == 4 and weight.width % 128 == 0 and x.element_size() == 2 and speaks_ptx(x)
    enough = cdiv(rows, 128) * cdiv(tokens, 128) * (4 if parts else 1 + gated) >= device.processors // 2
    if tokens > 64 and quick and enough:
        return _formula_of_many(tokens, columns, rows, device.processors, gated)
    block_m, block_n, splits = min(max(next_power_of_2(tokens), 16), 64), 64, 1
    wide = weight.width == 0 and weight.bits == 8 and block_m < 64 and x.element_size() == 2
    block_k = 256 if wide else 128
    if weight.tile == 64 and weight.bits > 2 and not weight.added:
        block_k = 64  # so that a step lies in one group
    while splits < 4 and cdiv(rows, block_n) * splits < 2 * device.processors and columns >= 4 * splits * block_k:
        splits *= 2
    stage = block_m * block_k * x.element_size() + block_n * block_k * (1 + gated) * weight.bits // 8
    if weight.width % block_k:  # a scale and a zero point for each element, which may take their way through it too
        stage += 8 * block_n * (1 + gated) * block_k // weight.each
    stages = min(max(device.shared * 6 // 10 // stage, 1), 4)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "STAGES": stages,
        "FOLD": 0,
        "APART": int(gated and x.dtype == torch.float32),  # two sums of float32 have no room in registers
        "num_warps": 4,
    }


def _formula_of_many(tokens: int, columns: int, rows: int, processors: int, gated: bool) -> dict[str, int]:
    """Tiles of 128 tokens, so that codes are made numbers only half as often; a wide W has room for one sum only, which
    takes numbers that are scaled, and leaves the gate to a kernel of its own."""
    wide = rows >= 16384
    block_n, splits = 256 if wide else 128, 1
    while (
        splits < 4 and cdiv(rows, block_n) * cdiv(tokens, 128) * splits <= processors // 2 and columns >= 512 * splits
    ):
        splits *= 2
    return {
        "BLOCK_M": 128,
        "BLOCK_N": block_n,
        "BLOCK_K": 128,
        "SPLITS": splits,
        "STAGES": 3 if wide else 4,
        "FOLD": int(wide),
        "APART": int(gated),
        "num_warps": 8,
    }
