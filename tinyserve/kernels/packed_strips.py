"""Codes of four bits times one to sixteen vectors on matrix units.

    y = x · Wᵀ + bias                  or, gated, act(first half) * (second half)

One row may also have a norm before and a residual after, as in `packed_gemv.py`.

Vector units need five instructions a code, and a GPU has time for three and a half while it reads one. A matrix
instruction takes 256 codes at once and leaves one and a half a code, most of them to make codes numbers.

A program takes a few strips of 16 rows of W, which share the x that they meet (gate and up are strips of one program);
its warps share K, a tile of each row a step. Tiles and x lie over their threads as packed_lanes.py says. Words of the
next step are on their way during the arithmetic of this one; the assembler has to be kept from asking for them later,
which it does to save registers. Sums are float32; a norm's weight times x is rounded to x's type before the product,
once, as a norm of its own would leave it.

Source: the layout of mma.m16n8k16 in NVIDIA's PTX ISA; Frantar et al., "MARLIN", arXiv:2408.11743, section 3.

Before: `packed_lanes.py`.  After: packed_gemv.py comes here with one row in groups of 128, packed_gemm.py with 2 to 16.
"""

import torch
import triton
import triton.language as tl

from .activation import activate, gated_activation_reference
from .launch import cdiv, choose, facts, overlap, speaks_ptx, start_next, use_kernel, wait_inputs
from .norm import rms_norm_reference
from .packed import LEAST_BFLOAT, LEAST_HALF, Packed, packed_dense_reference
from .packed_lanes import LIFT, normed_columns, of_tiles, of_words, pairs_of_words, products_of_tiles

MOST_TOKENS = 16


def packed_strips_reference(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """The specification of `packed_strips`, with its arguments, for all kinds of codes."""
    wide = x.float()
    if norm is not None:
        wide = rms_norm_reference(wide, norm, eps, offset=offset)
    dense = packed_dense_reference(weight, torch.float32)
    y = torch.nn.functional.linear(wide, dense, None if bias is None else bias.float())
    if gate is not None:
        y = gated_activation_reference(y, gate)
    y = y if residual is None else y + residual.float()
    return y[None] if parts else y.to(x.dtype)


@triton.jit
def _ahead(codes_ptr, scales_ptr, zeros_ptr, row, tile, row_elements, G, last, TILE: tl.constexpr,
           WIDTH: tl.constexpr, ZEROS: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """Words, scales and zero points of a step; scales stand in for zero points where there are none."""
    pairs = pairs_of_words(codes_ptr, row, tile, row_elements, last, ALL)
    if TILE < 128:
        scale = of_words(scales_ptr, row, tile, G, last, TILE, WIDTH)
    else:
        scale = of_tiles(scales_ptr, row, tile, G, last, WIDTH)
    zero = scale
    if ZEROS and TILE < 128:
        zero = of_words(zeros_ptr, row, tile, G, last, TILE, WIDTH)
    elif ZEROS:
        zero = of_tiles(zeros_ptr, row, tile, G, last, WIDTH)
    return pairs, scale, zero


@triton.jit
def _hold(NATIVE: tl.constexpr):
    """What was asked for before this is asked for before what comes after it. The assembler would move loads to where
    they need no registers of their own, which is behind the arithmetic that they should be on their way during."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _step(
    total,  # [WARPS, 8 * EIGHTS, TOKENS], added to
    squares,  # [WARPS * 128], added to if NORM
    loaded,  # words, scales and zero points
    start,  # the step's first tile
    tile,  # [WARPS]
    x_ptr,
    x_row,
    norm_ptr,
    K,
    offset,
    NORM: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The sums after a step."""
    LANES: tl.constexpr = TILE // 4
    lane = tl.arange(0, 32) // LANES * TILE + tl.arange(0, 32) % LANES  # columns of words of 128 columns
    column = ((tile + start) * 128)[:, None] + lane[None, :]
    x0 = normed_columns(x_row, norm_ptr, column, 0, K, offset, NORM, SHIFT, TILE, NATIVE, EVEN)
    x1 = normed_columns(x_row, norm_ptr, column, 1, K, offset, NORM, SHIFT, TILE, NATIVE, EVEN)
    x2 = normed_columns(x_row, norm_ptr, column, 2, K, offset, NORM, SHIFT, TILE, NATIVE, EVEN)
    x3 = normed_columns(x_row, norm_ptr, column, 3, K, offset, NORM, SHIFT, TILE, NATIVE, EVEN)
    if NORM:
        flat = start * 128 + tl.arange(0, squares.shape[0])
        x = (tl.load(x_ptr + flat) if EVEN else tl.load(x_ptr + flat, mask=flat < K, other=0.0)).to(tl.float32)
        squares += x * x
    pairs, scale, zero = loaded
    total += products_of_tiles(pairs, scale, zero, x0, x1, x2, x3, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE)
    return total, squares


@triton.jit
def _finished(total, scales_ptr, bias_ptr, read, factor, ONE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """[8 * EIGHTS, TOKENS] from the sums of all tiles; [.., 1] of one token, which all columns hold."""
    if ONE:  # columns first: fewer numbers go through shared memory, where those of all warps stand in the same banks
        total = tl.sum(total, axis=2)[:, :, None]
    y = tl.sum(total, axis=0) * (factor / 8 if ONE else factor)
    if WIDTH == 0:
        y *= tl.load(scales_ptr + read)[:, None].to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + read)[:, None].to(tl.float32)
    return y


@triton.jit(do_not_specialize=["M"])
def _packed_strips_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # [N, row_elements], or [2 N, ...] if GATE
    scales_ptr,  # [N, G] or [2 N, G]
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [N] or [2 N]; read if BIAS
    norm_ptr,  # [K]; read if NORM
    residual_ptr,  # [M, N]; read if RESIDUAL
    out_ptr,  # [M, N]; [SPLITS, M, N] float32 if there are parts
    M,
    N,
    K,
    row_elements,
    G,
    x_stride,  # elements between rows
    eps,
    offset,
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    NORM: tl.constexpr,  # with one token
    SHIFT: tl.constexpr,  # the norm's offset is not zero
    RESIDUAL: tl.constexpr,
    ONE: tl.constexpr,  # M is 1
    TILE: tl.constexpr,  # 32, 64 or 128
    WIDTH: tl.constexpr,  # a multiple of TILE, or 0
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of a round's columns, times SPLITS
    TOKENS: tl.constexpr,  # 8 or 16
    STRIPS: tl.constexpr,  # of 16 rows; half of the rows are of the second half if GATE
    RING: tl.constexpr,  # steps of a round: words of as many are on their way
    ROUNDS: tl.constexpr,  # 1, or 0 for more
    SPLITS: tl.constexpr,
    HOLD: tl.constexpr,  # words of a round are on their way during the arithmetic of the one in front
    WARPS: tl.constexpr,  # tiles of a step
    LATE: tl.constexpr,  # hold the next kernel back until the loop is through
    PDL: tl.constexpr,
):
    if not LATE:
        start_next(PDL)
    OWN: tl.constexpr = STRIPS * (8 if GATE != "" else 16)  # rows of the result
    eighth = tl.arange(0, 2 * STRIPS)[None, :]
    row = tl.program_id(0) * OWN + 8 * (eighth % (OWN // 8)) + tl.arange(0, 8)[:, None]
    rows = tl.minimum(row, N - 1) + eighth // (OWN // 8) * N  # those past the end read the last one, unstored
    tile = tl.arange(0, WARPS)
    tiles = tl.cdiv(K, 128)
    share = tl.cdiv(tiles, SPLITS * RING * WARPS) * (RING * WARPS)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, tiles)
    ring = ()
    for step in tl.static_range(RING):
        ring = ring + (  # noqa: RUF005 - Triton knows no unpacking with *
            _ahead(codes_ptr, scales_ptr, zeros_ptr, rows, first + step * WARPS + tile, row_elements, G, last, TILE,
                   WIDTH, ZEROS, EVEN),
        )  # fmt: skip
    token = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, TOKENS // 8)[None, :]
    x_row = x_ptr + (tl.minimum(token, M - 1).to(tl.int64) * x_stride)[:, None, :, None]
    total = tl.zeros([WARPS, 16 * STRIPS, TOKENS], tl.float32)
    squares = tl.zeros([WARPS * 128], tl.float32)
    wait_inputs(PDL)

    start = first
    if ROUNDS == 0:
        for round_at in tl.range(first, last - RING * WARPS, RING * WARPS, num_stages=1):
            later = ()
            for step in tl.static_range(RING):
                here = round_at + (RING + step) * WARPS + tile
                later = later + (  # noqa: RUF005 - as above
                    _ahead(codes_ptr, scales_ptr, zeros_ptr, rows, here, row_elements, G, last, TILE, WIDTH, ZEROS,
                           EVEN),
                )  # fmt: skip
            if HOLD:
                _hold(NATIVE)
            for step in tl.static_range(RING):
                total, squares = _step(
                    total, squares, ring[step], round_at + step * WARPS, tile, x_ptr, x_row, norm_ptr, K, offset, NORM,
                    SHIFT, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE, EVEN,
                )  # fmt: skip
            ring = later
        start = first + (tl.cdiv(last - first, RING * WARPS) - 1) * (RING * WARPS)
    for step in tl.static_range(RING):
        total, squares = _step(
            total, squares, ring[step], start + step * WARPS, tile, x_ptr, x_row, norm_ptr, K, offset, NORM, SHIFT,
            TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE, EVEN,
        )  # fmt: skip
    if LATE:
        start_next(PDL)

    factor = 1.0
    if NATIVE and TILE == 128:
        factor = 1 / LEAST_HALF if x_ptr.dtype.element_ty == tl.float16 else 1 / (LEAST_BFLOAT * LIFT)
    if NORM:
        factor *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    inner = tl.arange(0, 16 * STRIPS)
    read = tl.minimum(tl.program_id(0) * OWN + inner % OWN, N - 1) + inner // OWN * N
    y = _finished(total, scales_ptr, bias_ptr, read, factor, ONE, WIDTH, BIAS)
    if GATE != "":
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OWN, y.shape[1]]), (1, 2, 0)))
        y = activate(gate, GATE) * up
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    column = tl.arange(0, 1 if ONE else TOKENS)[None, :]
    place = (tl.program_id(1).to(tl.int64) * M + column) * N + own[:, None]
    inside = (own[:, None] < N) & (column < M)
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


def strips_fit(x: torch.Tensor, weight: Packed, norm: torch.Tensor | None = None) -> bool:
    """Whether `packed_strips` multiplies these. With a norm x must be bfloat16: x and the norm's weight are multiplied
    before the norm's scale is known, which float16 has no room for."""
    codes = weight.kind == "int" and weight.each == 4 and weight.tile >= 32
    lies = x.shape[0] <= MOST_TOKENS and x.stride(0) % 8 == 0 and weight.codes.shape[1] % 32 == 0
    kind = x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and norm is None)
    return codes and lies and kind and speaks_ptx(x)


def packed_strips(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """Multiply one to sixteen rows by a matrix of four bits.

    Args:
        x: [M, K]; rows may lie apart.   weight: N rows; with `gate` 2 N, the gate's rows first; see `strips_fit`.
        bias: one number per row of `weight`.
        norm: [K], the weight of an RMS norm of x that comes first; for one row only.   eps, offset: of that norm.
        gate: a kind of activation.py: the product's first half goes through it and is multiplied by the second.
        residual: [M, N], added at the end.
        parts: return the splits of K, [P, M, N] in float32, for a norm that adds parts.

    Returns:
        [M, N] in x's type. Nothing is rounded in between but x times the norm's weight.
    """
    own = {"norm": norm, "eps": eps, "offset": offset, "gate": gate, "residual": residual}
    if not use_kernel(x):
        return packed_strips_reference(x, weight, bias, parts=parts, **own)
    tokens, rows = x.shape[0], weight.codes.shape[0] // (2 if gate else 1)
    options = _options(x, weight, rows, gate is not None, parts) | {"LATE": norm is not None and gate is None}
    shape = (options["SPLITS"], tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, bias, out, options, **own)
    return out


def _launch(x, weight, bias, out, options, *, norm, eps, offset, gate, residual) -> None:
    """One program for each few rows and split. Unused pointers point at x and are not read."""
    (tokens, columns), rows, gated = x.shape, out.shape[-1], gate is not None
    constants, own = weight.constants(), options["STRIPS"] * (8 if gated else 16)
    each = 128 * options["RING"] * options["num_warps"] * options["SPLITS"]  # columns of a round of all splits
    _packed_strips_kernel[(cdiv(rows, own), options["SPLITS"])](
        x,
        *weight.tensors(),
        x if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        tokens,
        rows,
        columns,
        weight.codes.shape[1],
        weight.scales.shape[1],
        x.stride(0),
        eps,
        offset,
        GATE=gate or "",
        BIAS=bias is not None,
        NORM=norm is not None,
        SHIFT=offset != 0,
        RESIDUAL=residual is not None,
        ONE=tokens == 1,
        EVEN=columns % each == 0,
        NATIVE=speaks_ptx(x),
        TOKENS=8 if tokens <= 8 else 16,
        ROUNDS=int(columns <= each),
        WARPS=options["num_warps"],
        **{name: constants[name] for name in ("TILE", "WIDTH", "MIDDLE", "ZEROS", "ADDED")},
        **options,
        **overlap(x),
    )


def _options(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """What was measured for this shape, or the formula. Only where parts are asked for is there more than one."""
    shape = {"tokens": x.shape[0], "inputs": x.shape[1], "outputs": rows, "gated": int(gated), "parts": int(parts)}
    options = dict(choose("packed_strips", x, _formula(x, weight, rows, gated, parts), **shape))
    most = options.pop("REGISTERS")
    if most and speaks_ptx(x):
        options["maxnreg"] = most
    if not parts:
        return options | {"SPLITS": 1}
    each = 128 * options["RING"] * options["num_warps"]  # columns of a round
    rounds = cdiv(x.shape[1], each * options["SPLITS"])
    return options | {"SPLITS": cdiv(x.shape[1], each * rounds)}  # without those that would have no column


def _formula(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """Many warps count for more than what each of them has on its way: so registers are few, and words one step ahead,
    unless a row is so short that a program asks for most of it at once. Splits where strips are few."""
    tokens, tiles = x.shape[0], cdiv(x.shape[1], 128)
    short = tiles <= 32
    if tokens > 1:
        strips, registers, warps = 4 if gated and tokens > 8 else 2, 0, 4
        ring = 4 if short and not gated else 1
    elif cdiv(rows, 16) <= 2 * facts(x.device).processors and weight.zeros is None and not gated:
        strips, registers, warps = 1, 64, 16
        ring = 2 if short else 1
    else:
        strips, registers, warps, ring = 2, 128, 4 if gated else 8, 1
    while warps > 4 and warps > tiles:
        warps, registers = warps // 2, 0
    splits = 1 if not parts or tiles < 32 else 2 if short else 4
    hold = int(ring == 1 and warps < 16)
    options = {"STRIPS": strips, "RING": ring, "SPLITS": splits, "HOLD": hold, "REGISTERS": registers}
    return options | {"num_warps": warps}
