"""Grouped products of a mixture of experts whose weights are codes: fp8, integers of 2 to 8 bits, MXFP4.

    moe_packed_gate_up   h[i]      = act(x[token] Wg[e]ᵀ) * (x[token] Wu[e]ᵀ)       for i = 0 .. N-1, slot = order[i]
    moe_packed_down      out[slot] = weight[slot] * (h[i] Wd[e]ᵀ)                   token = slot // K, e: owner of i

The tiles of `moe_gemm.py` around the steps of `packed_gemm.py`: a program owns up to 128 slots of one expert and a
strip of its rows, whose codes become numbers in registers, where the matrix instruction takes its left side from. The
matrices of all experts are one `Packed` of E times as many rows. Activations stay as they are; also where a checkpoint
would have them rounded to fp8, which costs accuracy and gains nothing while weights are what is waited for.

With few tokens the time is that of reading the codes of the experts touched, a half or a quarter of what plain numbers
take; with many a code is decoded once for each 128 slots.

MXFP4: a code's exponent and mantissa become the low exponent bits of a float, which is then 2**126 (float16: 2**14)
times too small, also below the smallest normal number; the exponent of its group makes another factor. All of it is
exact in bfloat16.

Source: arXiv:2211.15841 (grouped products without padding); Frantar et al., "MARLIN", arXiv:2408.11743, section 3
(decoding in registers); OCP Microscaling Formats (MX) v1.0, section 5.3.3 (e2m1).

Before: `moe_align.py`, `packed.py`.  After: `moe_reduce.py`.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen

from . import launch
from .launch import cdiv, choose, next_power_of_2, overlap, speaks_ptx, start_next, use_kernel, wait_inputs
from .moe_gemm import GATED, _grid, _tile_of, gated, moe_down_reference, moe_gate_up_reference
from .packed import Packed, packed_dense_reference
from .packed_gemm import _columns_of_x, _one_step


@frozen(eq=False)
class Numbers:
    """The experts of a Packed as plain numbers, float32, made when they are asked for: [E, rows, columns].

    Args: weight: E · rows rows.   experts: E.
    """

    weight: Packed
    experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, rows of an expert, columns."""
        return self.experts, len(self.weight.codes) // self.experts, self.weight.columns

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        """Numbers of one expert, or of several, [n, rows, columns]."""
        rows = torch.arange(self.shape[1], device=self.weight.codes.device)
        if isinstance(expert, torch.Tensor):
            rows = (expert[:, None] * self.shape[1] + rows).flatten()
            return packed_dense_reference(self.weight.take(rows), torch.float32).unflatten(0, (-1, self.shape[1]))
        return packed_dense_reference(self.weight.take(rows + expert * self.shape[1]), torch.float32)


def moe_packed_gate_up_reference(
    x: torch.Tensor, weight: Packed, order: torch.Tensor, starts: torch.Tensor, **options
) -> torch.Tensor:
    """The specification of `moe_packed_gate_up`, with its arguments; also how the CPU serves."""
    return moe_gate_up_reference(x, Numbers(weight, len(starts) - 1), order, starts, **options)


def moe_packed_down_reference(
    h: torch.Tensor, weight: Packed, order: torch.Tensor, starts: torch.Tensor, **options
) -> torch.Tensor:
    """The specification of `moe_packed_down`, with its arguments."""
    return moe_down_reference(h, Numbers(weight, len(starts) - 1), order, starts, **options)


@triton.jit
def e2m1(word, place: tl.constexpr):
    """float32 of the codes at one place of their words, before the factor of their group; exact."""
    high = word.to(tl.int32) << (28 - 4 * place)
    bits = (high & -2147483648) | ((high >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def power_of(exponents, place: tl.constexpr):
    """float32 of the factors of one place's group, from the four exponents of a tile. (2**-127 becomes 0.)"""
    return (((exponents >> (8 * place)) & 255) << 23).to(tl.float32, bitcast=True)


def _e2m1(kind: str, shift: int, bits: str, up: str) -> tl.constexpr:
    """PTX that makes the places of the words $4 numbers of a type, times $5 .. $8: a code's sign, and its other bits
    where that type's exponent begins, times a power of two."""
    lines = [".reg .b32 w, e, up, none;", f"mov.b32 up, {up};", "mov.b32 none, 0x80008000;"]
    for place in range(4):
        word = "w" if place < 3 else "$4"
        lines += [f"shl.b32 w, $4, {12 - 4 * place};"] if place < 3 else []
        lines += [f"shr.u32 e, {word}, {shift};", f"and.b32 e, e, {bits};", f"lop3.b32 w, {word}, 0x80008000, e, 0xEA;"]
        lines += [f"fma.rn.{kind} w, w, up, none;", f"fma.rn.{kind} ${place}, w, ${5 + place}, none;"]
    return tl.constexpr("\n".join(["{", *lines, "}"]))


E2M1_OF_HALF = _e2m1("f16x2", 3, "0x0E000E00", "0x74007400")
E2M1_OF_BFLOAT = _e2m1("bf16x2", 6, "0x01C001C0", "0x7E807E80")


@triton.jit
def four_e2m1(code, s0, s1, s2, s3, HALF: tl.constexpr):
    """The four numbers of each word times s0 .. s3, as float16 if HALF, else bfloat16; two words at a time."""
    if HALF:
        return tl.inline_asm_elementwise(
            E2M1_OF_HALF, "=&r,=&r,=&r,=&r,r,r,r,r,r", [code, s0, s1, s2, s3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            E2M1_OF_BFLOAT, "=&r,=&r,=&r,=&r,r,r,r,r,r", [code, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _spread(exponents, place: tl.constexpr, like, KIND: tl.constexpr):
    """Factors [rows] of one place's group, for each word of `like` [rows, elements]."""
    return tl.broadcast_to(power_of(exponents, place).to(KIND)[:, None], like.shape)


@triton.jit
def _fp4_step(
    total,  # [rows, slots] float32, added to
    codes_row,  # [rows, 1] pointers
    element,  # [elements] of the step, which is one tile
    x_row,
    column,  # [elements] of each element's lowest bits
    token,
    exponents_ptr,  # [rows] pointers to the exponents of the tile
    M,
    K,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """total + the product of one tile of MXFP4. Rows of codes are whole tiles, so nothing is out of bounds."""
    kind: tl.constexpr = x_row.dtype.element_ty
    code = tl.load(codes_row + element[None, :])
    exponents = tl.load(exponents_ptr)
    if NATIVE and kind != tl.float32:
        half: tl.constexpr = kind == tl.float16
        s0, s1 = _spread(exponents, 0, code, kind), _spread(exponents, 1, code, kind)
        s2, s3 = _spread(exponents, 2, code, kind), _spread(exponents, 3, code, kind)
        w0, w1, w2, w3 = four_e2m1(code, s0, s1, s2, s3, half)
        total = tl.dot(w0, tl.trans(_columns_of_x(x_row, column, token, M, K, EVEN)), total)
        total = tl.dot(w1, tl.trans(_columns_of_x(x_row, column + 32, token, M, K, EVEN)), total)
        total = tl.dot(w2, tl.trans(_columns_of_x(x_row, column + 64, token, M, K, EVEN)), total)
        total = tl.dot(w3, tl.trans(_columns_of_x(x_row, column + 96, token, M, K, EVEN)), total)
    else:
        for place in tl.static_range(4):
            weight = (e2m1(code, place) * power_of(exponents, place)[:, None]).to(kind)
            x = _columns_of_x(x_row, column + 32 * place, token, M, K, EVEN)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _moe_packed_kernel(
    x_ptr,  # [T, K]; without GATE [N, K], sorted
    codes_ptr,  # [E * rows, row_elements]; rows is 2 WIDE with GATE, else WIDE
    scales_ptr,  # [E * rows, G]
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [E * rows]; read if BIAS
    order_ptr,  # [N] int32
    starts_ptr,  # [E + 1] int32
    factors_ptr,  # [N] float32, by slot; read if FACTORS
    out_ptr,  # [N, WIDE], sorted; without GATE [T, TOP_K, WIDE] or [TOP_K, T, WIDE]
    x_stride,  # elements between rows
    token_stride,  # elements between tokens of out, without GATE
    choice_stride,  # elements between choices of out, without GATE
    row_elements,
    G,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,  # a kind of moe_gemm.GATED, "" for none
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
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a multiple of TILE; of MXFP4 TILE
    BLOCK_E: tl.constexpr,  # a power of two, at least E
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    tiles_n: tl.constexpr = (WIDE + BLOCK_N - 1) // BLOCK_N
    expert, first, end = _tile_of(starts_ptr, tl.program_id(0) // tiles_n, E, BLOCK_M, BLOCK_E)
    if first >= end:
        return
    token = first + tl.arange(0, BLOCK_M)  # in the sorted order
    slot = tl.load(order_ptr + token, mask=token < end, other=0)
    source = token if GATE == "" else slot // TOP_K
    x_row = x_ptr + source[:, None].to(tl.int64) * x_stride
    row = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows: tl.constexpr = WIDE if GATE == "" else 2 * WIDE
    read = expert.to(tl.int64) * rows + tl.minimum(row, WIDE - 1)  # rows past the end read the last one again
    codes_row = codes_ptr + read[:, None] * row_elements
    up_row = codes_row + WIDE * row_elements
    LANES: tl.constexpr = TILE // PER
    lane = tl.arange(0, BLOCK_K // PER)
    tile = lane // LANES
    column = tile * TILE + lane % LANES
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    total_up = total
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        element = start // PER + lane
        if KIND == "e2m1":
            exponents = scales_ptr + read * G + start // TILE
            total = _fp4_step(
                total, codes_row, element, x_row, start + column, token, exponents, end, K, NATIVE, EVEN
            )  # fmt: skip
            if GATE != "":
                total_up = _fp4_step(
                    total_up, up_row, element, x_row, start + column, token, exponents + WIDE * G, end, K, NATIVE, EVEN
                )  # fmt: skip
        else:
            total = _one_step(
                total, codes_row, element, row_elements, x_row, start + column, token, scales_ptr, zeros_ptr, read,
                0, 0, start, tile, end, K, G, KIND, PER, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE, EVEN, False, 1,
                BLOCK_K,
            )  # fmt: skip
            if GATE != "":
                total_up = _one_step(
                    total_up, up_row, element, row_elements, x_row, start + column, token, scales_ptr, zeros_ptr,
                    read + WIDE, 0, 0, start, tile, end, K, G, KIND, PER, TILE, WIDTH, MIDDLE, ZEROS, ADDED, NATIVE,
                    EVEN, False, 1, BLOCK_K,
                )  # fmt: skip

    if WIDTH == 0:
        total *= tl.load(scales_ptr + read).to(tl.float32)[:, None]
    factor = tl.load(factors_ptr + slot, mask=token < end, other=0.0)[None, :] if FACTORS else 1.0
    inside = (token < end)[None, :] & (row < WIDE)[:, None]
    if GATE != "":
        if WIDTH == 0:
            total_up *= tl.load(scales_ptr + read + WIDE).to(tl.float32)[:, None]
        if FACTORS:
            total *= factor
            total_up *= factor
        if BIAS:
            total += tl.load(bias_ptr + read).to(tl.float32)[:, None]
            total_up += tl.load(bias_ptr + read + WIDE).to(tl.float32)[:, None]
        total = gated(total, total_up, GATE)
        begin = token.to(tl.int64) * WIDE
    else:
        if BIAS:
            total += tl.load(bias_ptr + read).to(tl.float32)[:, None]
        if FACTORS:
            total *= factor
        begin = (slot // TOP_K).to(tl.int64) * token_stride + (slot % TOP_K).to(tl.int64) * choice_stride
    tl.store(out_ptr + begin[None, :] + row[:, None], total.to(out_ptr.dtype.element_ty), mask=inside)


def moe_packed_gate_up(
    x: torch.Tensor,
    weight: Packed,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    top_k: int,
    kind: str,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Gate and up products of each slot, activated.

    Args:
        x: [T, H]; rows may lie apart.
        weight: E · 2 I rows of H columns: an expert's gate rows, then its up rows.
        bias: [E, 2 I], contiguous, or None.
        order, starts, top_k, kind, scales, invariant: as of `moe_gemm.moe_gate_up`.

    Returns:
        [N, I] in x's type, sorted as `order` is; rows of no expert hold anything.

    Raises:
        ValueError: shapes, strides or a kind that do not fit.
    """
    experts = len(starts) - 1
    if kind not in GATED:
        raise ValueError(f"moe_packed_gate_up: unknown kind {kind!r}; known: {', '.join(GATED)}")
    check_packed_experts("moe_packed_gate_up", x, weight, experts, bias, scales, (len(order), x.shape[0] * top_k))
    if not use_kernel(x):
        return moe_packed_gate_up_reference(x, weight, order, starts, top_k=top_k, kind=kind, bias=bias, scales=scales)
    inner = len(weight.codes) // experts // 2
    h = torch.empty((len(order), inner), dtype=x.dtype, device=x.device)
    if h.numel():
        options = _options("moe_packed_gate_up", x, weight, len(order), experts, invariant)
        _launch(x, weight, bias, (order, starts, scales), h, (0, 0), top_k, kind, options)
    return h


def moe_packed_down(
    h: torch.Tensor,
    weight: Packed,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    parts: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """Down products of each slot, weighted.

    Args:
        h: [N, I], contiguous, from `moe_packed_gate_up`.
        weight: E · H rows of I columns.   bias: [E, H], contiguous, or None.
        order, starts, top_k, scales, parts, invariant: as of `moe_gemm.moe_down`.

    Returns:
        [T, K, H] in h's type; as parts, [K, T, H] in float32.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    slots, experts = len(order), len(starts) - 1
    check_packed_experts("moe_packed_down", h, weight, experts, bias, scales, (slots, h.shape[0]))
    if not use_kernel(h):
        return moe_packed_down_reference(h, weight, order, starts, top_k=top_k, bias=bias, scales=scales, parts=parts)
    tokens, width = slots // top_k, len(weight.codes) // experts
    shape = (top_k, tokens, width) if parts else (tokens, top_k, width)
    out = torch.empty(shape, dtype=torch.float32 if parts else h.dtype, device=h.device)
    if out.numel():
        strides = out.stride(1 if parts else 0), out.stride(0 if parts else 1)
        options = _options("moe_packed_down", h, weight, slots, experts, invariant)
        _launch(h, weight, bias, (order, starts, scales), out, strides, top_k, "", options)
    return out


def _launch(x, weight, bias, routed, out, strides, top_k, gate, options) -> None:
    """One program for each tile of slots and strip of rows. Unused pointers point at x and are not read."""
    (order, starts, scales), wide = routed, out.shape[-1]
    _moe_packed_kernel[_grid(len(order), wide, len(starts) - 1, options)](
        x,
        *weight.tensors(),
        x if bias is None else bias,
        order,
        starts,
        x if scales is None else scales,
        out,
        x.stride(0),
        *strides,
        weight.codes.shape[1],
        weight.scales.shape[1],
        K=weight.columns,
        WIDE=wide,
        E=len(starts) - 1,
        TOP_K=top_k,
        GATE=gate,
        BIAS=bias is not None,
        FACTORS=scales is not None,
        EVEN=weight.columns % options["BLOCK_K"] == 0,
        NATIVE=speaks_ptx(x),
        **weight.constants(),
        **options,
        **overlap(x),
    )


def _options(kernel: str, x: torch.Tensor, weight: Packed, slots: int, experts: int, invariant: bool) -> dict[str, int]:
    """Tiles: measured ones, or by the rows of a mean expert, as `moe_gemm.py` has them."""
    shape = {"experts": experts, "width": len(weight.codes) // experts, "inputs": x.shape[1], "bits": weight.bits}
    if invariant:
        options = choose(f"{kernel}_invariant", x, _formula(x, weight, 64, 2 if "gate" in kernel else 1), **shape)
    else:
        mean, most = slots // experts, 64 if launch.facts(x.device).backend == "hip" else 128
        tokens = min(16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 64 else 128, most)
        formula = _formula(x, weight, tokens, 2 if "gate" in kernel else 1)
        options = choose(kernel, x, formula, slots=slots, **shape)
    return options | {"BLOCK_E": max(next_power_of_2(experts), 2)}


def _formula(x: torch.Tensor, weight: Packed, tokens: int, pair: int) -> dict[str, int]:
    """Strips of 64 rows, steps of 128 columns, and as many loads in flight as fit. pair: 2 for gate and up.

    Products of float32 are made of single instructions, which want all their numbers in registers: smaller steps.
    """
    device, block_n, block_k, warps = launch.facts(x.device), 64, 128, 4
    if x.element_size() == 4 and device.backend != "cpu":
        tokens, block_k, warps = 16, 32 if weight.bits == 8 else 128, 4 if weight.bits == 8 else 8
        block_n = 32 if weight.kind == "e2m1" and pair == 2 else 64  # 64 spill with triton 3.6
    elif tokens >= 128 and pair == 1:
        block_n, warps = 128, 8
    stage = tokens * block_k * x.element_size() + block_n * block_k * pair * weight.bits // 8
    if weight.kind != "e2m1" and weight.width % block_k:  # a scale and a zero point for each element
        stage += 8 * block_n * pair * block_k // weight.each
    stages = min(max(device.shared * 7 // 10 // stage, 1), 4)
    return {
        "BLOCK_M": tokens,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": 1 if device.backend == "cpu" else stages,
        "num_warps": warps,
    }


def check_packed_experts(name: str, x, weight: Packed, experts: int, bias, scales, slots: tuple[int, int]) -> None:
    """Refuse what the kernels of packed experts cannot read. Args: slots: (found, expected). Raises: ValueError."""
    rows, columns = len(weight.codes), weight.columns
    if x.dim() != 2 or x.shape[1] != columns or rows % max(experts, 1) or (x.stride(1) != 1 and columns > 1):
        raise ValueError(f"{name}: x {list(x.shape)} does not fit {experts} experts of {rows} rows, {columns} columns")
    tiles = cdiv(columns, weight.tile)
    wanted = (rows, columns if weight.bits == 8 else tiles * weight.tile // weight.each)
    groups = tiles if weight.kind == "e2m1" else cdiv(columns, weight.width) if weight.width else 1
    if weight.codes.shape != wanted or weight.scales.shape != (rows, groups):
        raise ValueError(f"{name}: codes {list(weight.codes.shape)} and scales {list(weight.scales.shape)}")
    if weight.kind != "e2m1" and groups > 1 and groups % 2 and weight.scales.element_size() < 4:
        raise ValueError(f"{name}: scales of an odd number of groups, {groups}, must be float32")
    if weight.kind == "e2m1" and weight.scales.dtype != torch.int32:
        raise ValueError(f"{name}: exponents must be int32, are {weight.scales.dtype}")
    if weight.zeros is not None and (weight.zeros.shape, weight.zeros.dtype) != (
        weight.scales.shape,
        weight.scales.dtype,
    ):
        raise ValueError(f"{name}: zeros must be as scales are")
    if not all(one is None or one.is_contiguous() for one in (weight.codes, weight.scales, weight.zeros)):
        raise ValueError(f"{name}: codes, scales and zeros must be contiguous")
    if bias is not None and (bias.shape != (experts, rows // experts) or not bias.is_contiguous()):
        raise ValueError(f"{name}: bias must be {[experts, rows // experts]}, contiguous, is {list(bias.shape)}")
    if slots[0] != slots[1] or (scales is not None and (scales.numel() != slots[0] or not scales.is_contiguous())):
        raise ValueError(f"{name}: {slots[0]} slots, expected {slots[1]}, each with a contiguous scale")
