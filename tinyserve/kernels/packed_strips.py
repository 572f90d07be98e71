"""Codes of four bits times one to sixteen vectors on matrix units.

    y = x · Wᵀ + bias                  or, gated, act(first half) * (second half)

One row may also have a norm before and a residual after, as in `packed_gemv.py`.

Vector units need five instructions a code, and a GPU has time for three and a half while it reads one. A matrix
instruction takes 256 codes at once and leaves about two a code, most of them to make codes numbers.

What it costs otherwise is that its operands must lie in a certain order over the threads of a warp, and going there
through shared memory takes longer than the product. But the order of columns is free as long as x comes in the same
one, so columns are taken as they lie. Of a tile of 128 codes in a row, 64 bytes, each of four threads loads 16:

    thread q of a row          words 8 q .. 8 q + 7, columns 32 p + 8 q + j at place p
    as the instruction's       column 16 b + 8 h + 2 q + e of the place's 32, with j = 4 b + 2 h + e

Reshaping and permuting the tile as (q, b, h, e) -> (b, h, q, e) says so to the compiler, and moves nothing. x takes the
same way: eight tokens by the same four threads. One token is read by all eight, so all eight columns of the result are
the same.

Groups of 32 or 64 columns stand in tiles of as many: then a thread's 16 bytes lie in one group, which has a scale of
its own, and numbers are scaled, and rounded to x's type, before the product.

A program takes 16 rows of W (twice 16 if gated); its warps share K, each with several tiles a step, and words of the
next step are asked for before the arithmetic of this one. Sums are float32, scaled after each tile; a norm's weight
times x is rounded to x's type before the product, once, as a norm of its own would leave it.

Source: the layout of mma.m16n8k16 in NVIDIA's PTX ISA; Frantar et al., "MARLIN", arXiv:2408.11743, section 3.

Before: `packed.py`.  After: packed_gemv.py comes here with one row in groups of 128, packed_gemm.py with 2 to 16.
"""

import torch
import triton
import triton.language as tl

from .activation import activate, gated_activation_reference
from .launch import cdiv, choose, facts, overlap, speaks_ptx, start_next, use_kernel, wait_inputs
from .norm import rms_norm_reference
from .packed import Packed, four_nibbles, four_scaled_nibbles, packed_dense_reference, pair_product, two_halves

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
def _words(codes_ptr, row, tile, row_elements, tiles, more, EVEN: tl.constexpr):
    """Words [8, WARPS, TILES, 2, 32] of rows [8, 2] and tiles [WARPS, TILES]; nothing is read if there are no more."""
    inside = (tile >= 0) & more if EVEN else (tile < tiles) & more
    place = row.to(tl.int64)[:, None, None, :, None] * row_elements + (tile * 32)[None, :, :, None, None]
    place += tl.arange(0, 32)[None, None, None, None, :]
    if EVEN:
        return tl.load(codes_ptr + place, mask=inside[None, :, :, None, None])
    return tl.load(codes_ptr + place, mask=inside[None, :, :, None, None], other=0)


@triton.jit
def _of_tiles(ptr, row, tile, G, tiles, more, WIDTH: tl.constexpr):
    """Values [4, 8, WARPS, 2, TILES] of the groups in which tiles of these rows lie, the same four times."""
    # Neighbours are loaded together if the compiler sees that they are, and must not be if a warp has only one.
    beside: tl.constexpr = WIDTH == 128 and tile.shape[1] > 1
    group = tile if beside else tl.minimum(tile * 128 // max(WIDTH, 1), G - 1)
    place = (row.to(tl.int64) * G)[None, :, None, :, None] + group[None, None, :, None, :]
    inside = (tile < tiles) & more
    return tl.load(ptr + (place + tl.zeros([4, 1, 1, 1, 1], tl.int32)), mask=inside[None, None, :, None, :], other=0.0)


@triton.jit
def _of_words(ptr, row, tile, G, tiles, more, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Values [8, WARPS, TILES, 2, 4] of the group that each thread's eight words lie in, where that is not all 128."""
    part = tl.arange(0, 4) * 8 // (TILE // 4) * TILE
    column = tile[None, None, :, None, :] * 128 + part[:, None, None, None, None]
    group = tl.minimum(column // WIDTH, G - 1)
    place = (row.to(tl.int64) * G)[None, :, None, :, None] + group
    inside = (tile < tiles) & more
    values = tl.load(ptr + place, mask=inside[None, None, :, None, :], other=0.0)
    return tl.permute(values, (1, 2, 4, 3, 0))  # loaded so that threads hold what they need


@triton.jit
def _left(numbers, WARPS: tl.constexpr, TILES: tl.constexpr):
    """Numbers [8, WARPS, TILES, 2, 32] as the left side [TILES * WARPS, 16, 32]."""
    split = tl.reshape(numbers, [8, WARPS, TILES, 2, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, (2, 1, 3, 0, 5, 6, 4, 7)), [TILES * WARPS, 16, 32])


@triton.jit
def _right(x, WARPS: tl.constexpr, TILES: tl.constexpr):
    """x [8, WARPS, TILES, eights, 32] of tokens as the right side [TILES * WARPS, 32, tokens]."""
    EIGHTS: tl.constexpr = x.shape[3]
    split = tl.reshape(x, [8, WARPS, TILES, EIGHTS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, (2, 1, 5, 6, 4, 7, 3, 0)), [TILES * WARPS, 32, 8 * EIGHTS])


@triton.jit
def _scaled(part, values, WARPS: tl.constexpr, TILES: tl.constexpr):
    """Products [TILES * WARPS, 16, tokens] times values [4, 8, WARPS, 2, TILES] of their groups."""
    TOKENS: tl.constexpr = part.shape[2]
    own = tl.reshape(tl.permute(values, (4, 2, 3, 1, 0)), [TILES * WARPS, 16, 1, 4, 1]).to(tl.float32)
    wide = tl.reshape(part, [TILES * WARPS, 16, TOKENS // 8, 4, 2]) * own
    return tl.reshape(wide, [TILES * WARPS, 16, TOKENS])


@triton.jit
def _wide(values):
    """Values [8, WARPS, TILES, 2, 4] of threads for each of their eight words, [8, WARPS, TILES, 2, 32]."""
    shape: tl.constexpr = values.shape
    all_words = tl.broadcast_to(values[:, :, :, :, :, None], [shape[0], shape[1], shape[2], shape[3], 4, 8])
    return tl.reshape(all_words, [shape[0], shape[1], shape[2], shape[3], 32])


@triton.jit
def _minus(zero, base: tl.constexpr, kind: tl.constexpr):
    """-(base + zero point) of each word [8, WARPS, TILES, 2, 32], from zero points [4, 8, WARPS, 2, TILES]."""
    own = (-(zero.to(tl.float32) + base)).to(kind)
    return _wide(tl.permute(own, (1, 2, 4, 3, 0)))


@triton.jit
def _columns(x_row, norm_ptr, column, K, offset, NORM: tl.constexpr, SHIFT: tl.constexpr, NATIVE: tl.constexpr,
             EVEN: tl.constexpr):  # fmt: skip
    """x [8, WARPS, TILES, eights, 32] at these columns, times the norm's weight if there is one."""
    where = column[None, :, :, None, :]
    x = tl.load(x_row + where) if EVEN else tl.load(x_row + where, mask=where < K, other=0.0)
    if NORM:
        every = where + tl.zeros([8, 1, 1, 1, 1], tl.int32)  # each thread its own, in the order of x
        weight = tl.load(norm_ptr + every) if EVEN else tl.load(norm_ptr + every, mask=every < K, other=0.0)
        if NATIVE and not SHIFT:
            x = pair_product(x, weight)
        else:
            x = (x.to(tl.float32) * (weight.to(tl.float32) + offset)).to(x.dtype)
    return x


@triton.jit
def _four(words, scale, zero, kind: tl.constexpr, TILE: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
          ADDED: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """The four numbers of each word, in x's type; scaled if words of a thread share a group that not all 128 share."""
    half: tl.constexpr = kind == tl.float16
    base: tl.constexpr = (1024 if half else 128) if NATIVE else 0
    minus = tl.full(words.shape, -(base + (0 if ADDED else MIDDLE)), kind)
    if ZEROS and not ADDED:
        minus = _minus(zero, base, kind) if TILE == 128 else _wide((-(zero.to(tl.float32) + base)).to(kind))
    if not NATIVE:
        w0, w1 = (words & 15).to(kind) + minus, ((words >> 4) & 15).to(kind) + minus
        w2, w3 = ((words >> 8) & 15).to(kind) + minus, ((words >> 12) & 15).to(kind) + minus
        if TILE < 128:
            scales = _wide(scale.to(tl.float32))
            added = _wide(zero.to(tl.float32)) if ADDED else 0.0
            w0, w1 = (w0 * scales + added).to(kind), (w1 * scales + added).to(kind)
            w2, w3 = (w2 * scales + added).to(kind), (w3 * scales + added).to(kind)
    elif TILE < 128:
        added = _wide(zero.to(kind)) if ADDED else tl.zeros(words.shape, kind)
        w0, w1, w2, w3 = four_scaled_nibbles(
            words, minus, _wide(two_halves(scale.to(tl.float32), kind)), added, half
        )  # fmt: skip
    else:
        w0, w1, w2, w3 = four_nibbles(words, minus, half)
    return w0, w1, w2, w3


@triton.jit
def _products(
    words,  # [8, WARPS, TILES, 2, 32]
    x0,  # [TILES * WARPS, 32, TOKENS] of the first place, and so on
    x1,
    x2,
    x3,
    scale,  # [4, 8, WARPS, 2, TILES], or [8, WARPS, TILES, 2, 4] if groups are narrower than 128; read if WIDTH
    zero,  # the same; read if ZEROS
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Products [TILES * WARPS, 16, TOKENS] of the tiles, scaled."""
    w0, w1, w2, w3 = _four(words, scale, zero, x0.dtype, TILE, MIDDLE, ZEROS, ADDED, NATIVE)
    part = tl.dot(_left(w0, WARPS, TILES), x0, input_precision="ieee")
    part = tl.dot(_left(w1, WARPS, TILES), x1, part, input_precision="ieee")
    part = tl.dot(_left(w2, WARPS, TILES), x2, part, input_precision="ieee")
    part = tl.dot(_left(w3, WARPS, TILES), x3, part, input_precision="ieee")
    return _scaled(part, scale, WARPS, TILES) if WIDTH > 0 and TILE == 128 else part


@triton.jit
def _ahead(codes_ptr, scales_ptr, zeros_ptr, row, tile, row_elements, G, tiles, more, TILE: tl.constexpr,
           WIDTH: tl.constexpr, ZEROS: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Words, scales and zero points of a step; scales stand in for zero points where there are none."""
    words = _words(codes_ptr, row, tile, row_elements, tiles, more, EVEN)
    if TILE < 128:
        scale = _of_words(scales_ptr, row, tile, G, tiles, more, TILE, WIDTH)
    else:
        scale = _of_tiles(scales_ptr, row, tile, G, tiles, more, WIDTH)
    zero = scale
    if ZEROS and TILE < 128:
        zero = _of_words(zeros_ptr, row, tile, G, tiles, more, TILE, WIDTH)
    elif ZEROS:
        zero = _of_tiles(zeros_ptr, row, tile, G, tiles, more, WIDTH)
    return words, scale, zero


@triton.jit
def _finished(total, scales_ptr, bias_ptr, read, norm_scale, ONE: tl.constexpr, WIDTH: tl.constexpr,
              BIAS: tl.constexpr):  # fmt: skip
    """[16, TOKENS] from the sums of all tiles; [16, 1] of one token, which all columns hold."""
    if ONE:  # columns first: fewer numbers go through shared memory, where those of all warps stand in the same banks
        total = tl.sum(total, axis=2)[:, :, None]
    y = tl.sum(total, axis=0)
    if ONE:
        y *= norm_scale / 8
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
    out_ptr,  # [M, N]
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
    EVEN: tl.constexpr,  # K is a multiple of a step's columns
    TOKENS: tl.constexpr,  # 8 or 16
    TILES: tl.constexpr,  # of a warp and step
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,  # ask for a step's words before the arithmetic of the one in front
    STAGES: tl.constexpr,  # more than 1: x comes through shared memory, asked for a step ahead
    LATE: tl.constexpr,  # hold the next kernel back until the loop is through
    PDL: tl.constexpr,
):
    if not LATE:
        start_next(PDL)
    row = tl.program_id(0) * 16 + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 2)[None, :]
    rows = tl.minimum(row, N - 1)  # rows past the end read the last one again, and are not stored
    tile = TILES * tl.arange(0, WARPS)[:, None] + tl.arange(0, TILES)[None, :]
    tiles = tl.cdiv(K, 128)
    each: tl.constexpr = TILES * WARPS  # tiles of a step
    LANES: tl.constexpr = TILE // 4
    lane = tl.arange(0, 32) // LANES * TILE + tl.arange(0, 32) % LANES  # columns of words of 128 columns
    if AHEAD:
        words, scale, zero = _ahead(
            codes_ptr, scales_ptr, zeros_ptr, rows, tile, row_elements, G, tiles, True, TILE, WIDTH, ZEROS, EVEN
        )  # fmt: skip
        words_up, scale_up, zero_up = words, scale, zero
        if GATE != "":
            words_up, scale_up, zero_up = _ahead(
                codes_ptr, scales_ptr, zeros_ptr, rows + N, tile, row_elements, G, tiles, True, TILE, WIDTH, ZEROS, EVEN
            )  # fmt: skip
    token = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, TOKENS // 8)[None, :]
    x_row = x_ptr + (tl.minimum(token, M - 1).to(tl.int64) * x_stride)[:, None, None, :, None]
    total = tl.zeros([TILES * WARPS, 16, TOKENS], tl.float32)
    total_up = total
    squares = tl.zeros([TILES * WARPS * 128], tl.float32)
    wait_inputs(PDL)

    for start in tl.range(0, tiles, TILES * WARPS, num_stages=STAGES):
        later = tile + (start + each if AHEAD else start)
        more = start + each < tiles if AHEAD else True
        next_words, next_scale, next_zero = _ahead(
            codes_ptr, scales_ptr, zeros_ptr, rows, later, row_elements, G, tiles, more, TILE, WIDTH, ZEROS, EVEN
        )  # fmt: skip
        next_words_up, next_scale_up, next_zero_up = next_words, next_scale, next_zero
        if GATE != "":
            next_words_up, next_scale_up, next_zero_up = _ahead(
                codes_ptr, scales_ptr, zeros_ptr, rows + N, later, row_elements, G, tiles, more, TILE, WIDTH, ZEROS,
                EVEN,
            )  # fmt: skip
        column = ((tile + start) * 128)[:, :, None] + lane[None, None, :]
        x0 = _right(_columns(x_row, norm_ptr, column, K, offset, NORM, SHIFT, NATIVE, EVEN), WARPS, TILES)
        x1 = _right(_columns(x_row, norm_ptr, column + LANES, K, offset, NORM, SHIFT, NATIVE, EVEN), WARPS, TILES)
        x2 = _right(_columns(x_row, norm_ptr, column + 2 * LANES, K, offset, NORM, SHIFT, NATIVE, EVEN), WARPS, TILES)
        x3 = _right(_columns(x_row, norm_ptr, column + 3 * LANES, K, offset, NORM, SHIFT, NATIVE, EVEN), WARPS, TILES)
        if NORM:
            flat = start * 128 + tl.arange(0, TILES * WARPS * 128)
            x = (tl.load(x_ptr + flat) if EVEN else tl.load(x_ptr + flat, mask=flat < K, other=0.0)).to(tl.float32)
            squares += x * x
        if not AHEAD:
            words, scale, zero = next_words, next_scale, next_zero
            words_up, scale_up, zero_up = next_words_up, next_scale_up, next_zero_up
        total += _products(words, x0, x1, x2, x3, scale, zero, WARPS, TILES, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE)
        if GATE != "":
            total_up += _products(
                words_up, x0, x1, x2, x3, scale_up, zero_up, WARPS, TILES, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE
            )  # fmt: skip
        if AHEAD:
            words, scale, zero = next_words, next_scale, next_zero
            words_up, scale_up, zero_up = next_words_up, next_scale_up, next_zero_up
    if LATE:
        start_next(PDL)

    norm_scale = 1.0
    if NORM:
        norm_scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    strip = tl.program_id(0) * 16 + tl.arange(0, 16)
    read = tl.minimum(strip, N - 1)
    y = _finished(total, scales_ptr, bias_ptr, read, norm_scale, ONE, WIDTH, BIAS)
    if GATE != "":
        y = activate(y, GATE) * _finished(total_up, scales_ptr, bias_ptr, read + N, norm_scale, ONE, WIDTH, BIAS)
    column = tl.arange(0, 1 if ONE else TOKENS)[None, :]
    place = column.to(tl.int64) * N + strip[:, None]
    inside = (strip[:, None] < N) & (column < M)
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
        parts: return [1, M, N] in float32, for a norm that adds parts.

    Returns:
        [M, N] in x's type. Nothing is rounded in between but x times the norm's weight.
    """
    own = {"norm": norm, "eps": eps, "offset": offset, "gate": gate, "residual": residual}
    if not use_kernel(x):
        return packed_strips_reference(x, weight, bias, parts=parts, **own)
    tokens, rows = x.shape[0], weight.codes.shape[0] // (2 if gate else 1)
    shape = (1, tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    if out.numel():
        _launch(x, weight, bias, out, **own)
    return out


def _launch(x, weight, bias, out, *, norm, eps, offset, gate, residual) -> None:
    """One program for each 16 rows. Unused pointers point at x and are not read."""
    (tokens, columns), rows, gated = x.shape, out.shape[-1], gate is not None
    default = _formula(x, weight, rows, gated) | {"LATE": norm is not None and not gated}  # as in gemv.py
    shape = {"inputs": columns, "outputs": rows, "gated": int(gated), "tokens": tokens}
    options = choose("packed_strips", x, default, **shape)
    constants = weight.constants()
    _packed_strips_kernel[(cdiv(rows, 16),)](
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
        EVEN=columns % (128 * options["TILES"] * options["num_warps"]) == 0,
        NATIVE=speaks_ptx(x),
        TOKENS=8 if tokens <= 8 else 16,
        WARPS=options["num_warps"],
        **{name: constants[name] for name in ("TILE", "WIDTH", "MIDDLE", "ZEROS", "ADDED")},
        **options,
        **overlap(x),
    )


def _formula(x: torch.Tensor, weight: Packed, rows: int, gated: bool) -> dict[str, int]:
    """Two tiles a warp and step unless registers are taken otherwise, eight warps where four would not fill the device;
    words are carried one step ahead."""
    tokens, tiles = x.shape[0], cdiv(x.shape[1], 128)
    warps = 8 if cdiv(rows, 16) <= 2 * facts(x.device).processors and tiles >= 16 else 4
    crowded = gated and (tokens > 8 or weight.zeros is not None)
    each = 1 if crowded or tiles < 2 * warps or (tokens > 8 and warps > 4) else 2
    return {"TILES": each, "AHEAD": 1, "STAGES": 1, "num_warps": warps}
