"""A mixture of packed experts for a few tokens, without sorting: each (token, choice) slot reads its expert's codes.

    moe_packed_decode_gate_up   h[slot] = act(x[t] Wg[e]ᵀ) * (x[t] Wu[e]ᵀ)                e = ids[slot], t = slot // K
    moe_packed_decode_down      out[t]  = sum over the slots of t of weight * (h[slot] Wd[e]ᵀ)
                                          + sigmoid(gate) * shared + residual

The programs of `moe_decode.py` with the arithmetic of `packed_gemv.py`: a word is masked where it lies, x is as much
smaller as the masked codes are too large, products and sums are float32. Scales come in once for the codes of a word.

Before: `moe_router.py`, `packed.py`.  After: the next norm.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, choose, next_power_of_2, overlap, speaks_ptx, start_next, use_kernel, wait_inputs
from .moe_decode import moe_decode_down_reference, moe_decode_gate_up_reference
from .moe_gemm import GATED, gated
from .moe_packed_gemm import Numbers, check_packed_experts, e2m1, power_of
from .moe_reduce import add_shared, check_shared
from .packed import Packed, shrunk, single
from .packed_gemv import _group_values


def moe_packed_decode_gate_up_reference(
    x: torch.Tensor, weight: Packed, ids: torch.Tensor, experts: int, **options
) -> torch.Tensor:
    """The specification of `moe_packed_decode_gate_up`, with its arguments."""
    return moe_decode_gate_up_reference(x, Numbers(weight, experts), ids, **options)


def moe_packed_decode_down_reference(
    h: torch.Tensor, weight: Packed, ids: torch.Tensor, experts: int, **options
) -> torch.Tensor:
    """The specification of `moe_packed_decode_down`, with its arguments."""
    return moe_decode_down_reference(h, Numbers(weight, experts), ids, **options)


@triton.jit
def _words(codes_row, element, row_elements, TILES: tl.constexpr):
    """Elements [rows, tiles, lanes] of the codes; loaded as rows, so that the threads of a warp stand along one."""
    words = tl.load(codes_row + element[None, :], mask=(element < row_elements)[None, :], other=0)
    return tl.reshape(words, [words.shape[0], TILES, words.shape[1] // TILES])


@triton.jit
def _step(
    total,  # [rows, tiles, lanes] float32, added to
    words,  # [rows, tiles, lanes]
    x_ptr,  # pointers [rows, 1, 1], or one of all rows
    column,  # [1, tiles, lanes] of each word's lowest bits
    here,  # [tiles] which tiles they are
    read,  # [rows] int64
    scales_ptr,
    zeros_ptr,
    K: tl.constexpr,
    G,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """total + the products of words with the x that meet them. Scales of whole rows are left to the end."""
    LANES: tl.constexpr = TILE // PER
    if KIND == "e2m1":
        exponents = tl.load(scales_ptr + read[:, None] * G + here[None, :], mask=(here < G)[None, :], other=0)
        for place in tl.static_range(PER):
            at = column + place * LANES
            x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            total += e2m1(words, place) * x * power_of(exponents, place)[:, :, None]
        return total
    part = tl.zeros(words.shape, tl.float32)
    sums = tl.zeros([1, 1, 1], tl.float32)  # of the x that meet a word
    for place in tl.static_range(PER):
        at = column + place * LANES
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        part += single(words, place, KIND, PER, MIDDLE, NATIVE) * shrunk(x, place, PER)
        if ZEROS:
            sums = sums + x
    if ZEROS and not ADDED:
        part -= _group_values(zeros_ptr, read, here, G, TILE, WIDTH) * sums
    if WIDTH == 0:
        return total + part
    part *= _group_values(scales_ptr, read, here, G, TILE, WIDTH)
    if ADDED:
        part += _group_values(zeros_ptr, read, here, G, TILE, WIDTH) * sums
    return total + part


@triton.jit
def _moe_packed_decode_gate_up_kernel(
    x_ptr,  # [T, H]
    codes_ptr,  # [E * 2 I, row_elements]
    scales_ptr,  # [E * 2 I, G]
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [E, 2 I] contiguous; read if BIAS
    ids_ptr,  # [N] int32
    factors_ptr,  # [N] float32; read if FACTORS
    h_ptr,  # [N, I] contiguous
    x_stride,  # elements between rows
    row_elements,
    G,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of gate, and of up; a power of two
    BLOCK: tl.constexpr,  # columns at once; a power of two, at least TILE
    PDL: tl.constexpr,
):
    wait_inputs(PDL)
    start_next(PDL)
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = expert * 2 * INNER + tl.minimum(row, INNER - 1)  # rows past the end read the last one again
    tile, lane, element = tl.arange(0, BLOCK // TILE), tl.arange(0, TILE // PER), tl.arange(0, BLOCK // PER)
    column = (tile[:, None] * TILE + lane[None, :])[None, :, :]
    x_ptr += (slot // TOP_K).to(tl.int64) * x_stride
    gate_row = codes_ptr + read[:, None] * row_elements
    up_row = gate_row + INNER * row_elements
    gate = tl.zeros([ROWS, BLOCK // TILE, TILE // PER], tl.float32)
    up = gate
    for at in range(0, H, BLOCK):
        words = _words(gate_row, at // PER + element, row_elements, BLOCK // TILE)
        words_up = _words(up_row, at // PER + element, row_elements, BLOCK // TILE)
        gate = _step(
            gate, words, x_ptr, at + column, at // TILE + tile, read, scales_ptr, zeros_ptr, H, G, KIND, PER, TILE,
            WIDTH, MIDDLE, ZEROS, ADDED, NATIVE,
        )  # fmt: skip
        up = _step(
            up, words_up, x_ptr, at + column, at // TILE + tile, read + INNER, scales_ptr, zeros_ptr, H, G, KIND, PER,
            TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE,
        )  # fmt: skip
    gate_sum, up_sum = tl.sum(tl.sum(gate, axis=2), axis=1), tl.sum(tl.sum(up, axis=2), axis=1)
    if WIDTH == 0:
        gate_sum *= tl.load(scales_ptr + read).to(tl.float32)
        up_sum *= tl.load(scales_ptr + read + INNER).to(tl.float32)
    if FACTORS:
        factor = tl.load(factors_ptr + slot)
        gate_sum *= factor
        up_sum *= factor
    if BIAS:
        gate_sum += tl.load(bias_ptr + read).to(tl.float32)
        up_sum += tl.load(bias_ptr + read + INNER).to(tl.float32)
    result = gated(gate_sum, up_sum, GATE).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + slot.to(tl.int64) * INNER + row, result, mask=row < INNER)


@triton.jit
def _moe_packed_decode_down_kernel(
    h_ptr,  # [N, I] contiguous
    codes_ptr,  # [E * H, row_elements]
    scales_ptr,  # [E * H, G]
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [E, H] contiguous; read if BIAS
    ids_ptr,  # [N] int32; with factors, written before the kernel in front
    factors_ptr,  # [N] float32; read if FACTORS
    shared_ptr,  # [T, H] contiguous; read if SHARED
    gate_ptr,  # [T]; read if GATE
    residual_ptr,  # [T, H] contiguous; read if RESIDUAL
    out_ptr,  # [T, H] contiguous
    row_elements,
    G,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least TOP_K
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the result; a power of two
    BLOCK: tl.constexpr,  # columns at once; a power of two, at least TILE
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, ROWS * SLOTS)  # row of the result, and choice
    choice = tl.minimum(pair % SLOTS, TOP_K - 1)  # choices and rows past the end read the last one again
    real = pair % SLOTS < TOP_K
    slot = token * TOP_K + choice
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    read = expert * H + tl.minimum(tl.program_id(0) * ROWS + pair // SLOTS, H - 1)
    tile, lane, element = tl.arange(0, BLOCK // TILE), tl.arange(0, TILE // PER), tl.arange(0, BLOCK // PER)
    column = (tile[:, None] * TILE + lane[None, :])[None, :, :]
    codes_row = codes_ptr + read[:, None] * row_elements
    words = _words(codes_row, element, row_elements, BLOCK // TILE)
    wait_inputs(PDL)

    x_ptr = h_ptr + (slot * INNER)[:, None, None]
    total = tl.zeros([ROWS * SLOTS, BLOCK // TILE, TILE // PER], tl.float32)
    total = _step(
        total, words, x_ptr, column, tile, read, scales_ptr, zeros_ptr, INNER, G, KIND, PER, TILE, WIDTH, MIDDLE,
        ZEROS, ADDED, NATIVE,
    )  # fmt: skip
    for at in range(BLOCK, INNER, BLOCK):
        words = _words(codes_row, at // PER + element, row_elements, BLOCK // TILE)
        total = _step(
            total, words, x_ptr, at + column, at // TILE + tile, read, scales_ptr, zeros_ptr, INNER, G, KIND, PER,
            TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE,
        )  # fmt: skip
    parts = tl.sum(tl.sum(total, axis=2), axis=1)
    if WIDTH == 0:
        parts *= tl.load(scales_ptr + read).to(tl.float32)
    if BIAS:
        parts += tl.load(bias_ptr + read).to(tl.float32)
    if FACTORS:
        parts *= tl.load(factors_ptr + slot)
    result = tl.sum(tl.reshape(tl.where(real, parts, 0.0), [ROWS, SLOTS]), axis=1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = token * H + row
    result = add_shared(result, shared_ptr, gate_ptr, token, place, row < H, SHARED, GATE)
    if RESIDUAL:
        result += tl.load(residual_ptr + place, mask=row < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=row < H)


def moe_packed_decode_gate_up(
    x: torch.Tensor,
    weight: Packed,
    ids: torch.Tensor,
    experts: int,
    *,
    kind: str,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate and up products of each slot, activated.

    Args:
        x: [T, H]; rows may lie apart.
        weight: E · 2 I rows of H columns: an expert's gate rows, then its up rows.
        ids: [T, K] int32, contiguous, each in 0 .. E-1.   experts: E.
        bias, kind, scales: as of `moe_decode.moe_decode_gate_up`.

    Returns:
        [T·K, I] in x's type, by slot.

    Raises:
        ValueError: shapes, strides or a kind that do not fit.
    """
    name, slots = "moe_packed_decode_gate_up", ids.numel()
    if kind not in GATED:
        raise ValueError(f"{name}: unknown kind {kind!r}; known: {', '.join(GATED)}")
    check_packed_experts(name, x, weight, experts, bias, scales, (slots, x.shape[0] * ids.shape[1]))
    if not use_kernel(x):
        return moe_packed_decode_gate_up_reference(x, weight, ids, experts, kind=kind, bias=bias, scales=scales)
    inner = len(weight.codes) // experts // 2
    h = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
    if not h.numel():
        return h
    options = _options(name, x, weight, inner, 2)
    _moe_packed_decode_gate_up_kernel[(cdiv(inner, options["ROWS"]), slots)](
        x,
        *weight.tensors(),
        x if bias is None else bias,
        ids,
        x if scales is None else scales,
        h,
        x.stride(0),
        weight.codes.shape[1],
        weight.scales.shape[1],
        H=x.shape[1],
        INNER=inner,
        TOP_K=ids.shape[1],
        GATE=kind,
        BIAS=bias is not None,
        FACTORS=scales is not None,
        NATIVE=speaks_ptx(x),
        **weight.constants(),
        **options,
        **overlap(x),
    )
    return h


def moe_packed_decode_down(
    h: torch.Tensor,
    weight: Packed,
    ids: torch.Tensor,
    experts: int,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Down products, weighted and added up for each token, with the shared expert.

    Args:
        h: [T·K, I], contiguous, from `moe_packed_decode_gate_up`.
        weight: E · H rows of I columns.   experts: E.
        ids, bias, scales, shared, gate, residual: as of `moe_decode.moe_decode_down`.

    Returns: [T, H] in h's type.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    options = {"bias": bias, "scales": scales, "shared": shared, "gate": gate, "residual": residual}
    tokens, width = ids.shape[0], len(weight.codes) // experts
    check_packed_experts("moe_packed_decode_down", h, weight, experts, bias, scales, (ids.numel(), h.shape[0]))
    check_shared("moe_packed_decode_down", (tokens, width), shared, gate)
    check_shared("moe_packed_decode_down", (tokens, width), residual, None, what="residual")
    if not use_kernel(h):
        return moe_packed_decode_down_reference(h, weight, ids, experts, **options)
    out = torch.empty((tokens, width), dtype=h.dtype, device=h.device)
    if out.numel():
        _launch_down(h, weight, ids, out, **options)
    return out


def _launch_down(h, weight, ids, out, *, bias, scales, shared, gate, residual) -> None:
    """One program for each few rows of a token's result. Unused pointers point at h and are not read."""
    width, slots = out.shape[1], next_power_of_2(ids.shape[1])
    options = _options("moe_packed_decode_down", h, weight, width, slots)
    _moe_packed_decode_down_kernel[(cdiv(width, options["ROWS"]), len(out))](
        h,
        *weight.tensors(),
        h if bias is None else bias,
        ids,
        h if scales is None else scales,
        h if shared is None else shared,
        h if gate is None else gate,
        h if residual is None else residual,
        out,
        weight.codes.shape[1],
        weight.scales.shape[1],
        H=width,
        INNER=h.shape[1],
        TOP_K=ids.shape[1],
        BIAS=bias is not None,
        FACTORS=scales is not None,
        SHARED=shared is not None,
        GATE=gate is not None,
        RESIDUAL=residual is not None,
        SLOTS=slots,
        NATIVE=speaks_ptx(h),
        **weight.constants(),
        **options,
        **overlap(h),
    )


def _options(kernel: str, x: torch.Tensor, weight: Packed, width: int, beside: int) -> dict[str, int]:
    """Rows and columns: measured ones, or the formula's; many rows in the interpreter, which pays by the program.

    A program of one warp has 2048 codes of a byte, or 4096 smaller ones, in flight, if a row is so long.

    Args: beside: rows that a program reads for each of its own: gate and up, or those of all choices.
    """
    columns, codes = weight.columns, 2048 if weight.each == 1 else 4096
    sizes = [size for size in (1024, 512, 256) if size * beside <= codes] or [256]
    block = min(sizes, key=lambda size: (cdiv(columns, size) * size, -size))
    block = max(min(block, next_power_of_2(columns)), weight.tile)
    rows = 32 if x.is_cpu else max(codes // (block * beside), 1)
    default = {"ROWS": rows, "BLOCK": block, "num_warps": 1}
    return choose(kernel, x, default, inputs=x.shape[1], width=width, bits=weight.bits)
