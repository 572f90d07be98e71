"""Grouped products of a mixture of experts: every token's rows against the weights of the experts that it chose.

    moe_gate_up   h[i]      = act(x[token] Wg[e]ᵀ) * (x[token] Wu[e]ᵀ)       for i = 0 .. N-1, slot = order[i]
    moe_down      out[slot] = weight[slot] * (h[i] Wd[e]ᵀ)                   token = slot // K, e: owner of i

Slots are sorted by expert (`moe_align.py`), so a tile of rows multiplies one expert's matrix. Tiles are numbered in one
row, starts[e] // BLOCK_M + e being the first of expert e: always enough, at most one too many, which returns at once.
So the grid depends on shapes only and a recorded graph serves every routing. Gate and up share the tile of x and meet
in registers: h is written once, activated. Weights are read once per tile of rows, from L2 after the first.

With few tokens the time is that of reading the weights of the experts touched; with many it is 6·N·H·I multiply-adds.
With SWAP the weights are the side of the matrix instruction that must be 64 wide, and the slots, of which an expert may
have as few as one, the other. `invariant` takes tiles that depend on the weights' shape alone: then a slot's numbers
are the same to the bit whatever shares its batch.

Source: arXiv:2211.15841 (grouped products without padding); for "clamped_swiglu" gpt-oss's reference implementation.

Before: `moe_align.py`.  After: `moe_reduce.py`.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl

from . import launch
from .activation import KINDS, activate
from .launch import cdiv, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .skinny_gemm import multiply

ALPHA, LIMIT = 1.702, 7.0  # of "clamped_swiglu"; the kernel names them again
GATED = (*KINDS, "clamped_swiglu")


def gated_reference(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up in float32, for the kinds of activation.py and "clamped_swiglu"."""
    if kind != "clamped_swiglu":
        return KINDS[kind](gate) * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """act(gate) * up of float32 tiles."""
    if KIND == "clamped_swiglu":
        # Comparisons instead of tl.minimum: NaN must stay NaN.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        result = activate(gate, KIND) * up
    return result


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ in float32. On the CPU, bfloat16 weights are multiplied as they are: making them wide takes longer."""
    if weight.is_cpu and weight.dtype == torch.bfloat16:
        return torch.nn.functional.linear(x.to(torch.bfloat16), weight).float()
    return x.float() @ weight.float().T


def moe_gate_up_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    top_k: int,
    kind: str,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `moe_gate_up`, with its arguments; also how the CPU serves."""
    h = torch.empty((len(order), weight.shape[1] // 2), dtype=x.dtype, device=x.device)
    order = order.long()
    for expert, begin, end in _ranges(starts):
        slots = order[begin:end]
        both = times(x[slots // top_k], weight[expert])
        if scales is not None:
            both *= scales.flatten()[slots, None]
        if bias is not None:
            both += bias[expert].float()
        h[begin:end] = gated_reference(*both.chunk(2, dim=-1), kind).to(x.dtype)
    return h


def moe_down_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """The specification of `moe_down`, with its arguments."""
    out = torch.zeros((len(order), weight.shape[1]), dtype=torch.float32 if parts else h.dtype, device=h.device)
    order = order.long()
    for expert, begin, end in _ranges(starts):
        slots = order[begin:end]
        result = times(h[begin:end], weight[expert])
        if bias is not None:
            result += bias[expert].float()
        if scales is not None:
            result *= scales.flatten()[slots, None]
        out[slots] = result.to(out.dtype)
    out = out.view(len(order) // top_k, top_k, weight.shape[1])
    return out.transpose(0, 1).contiguous() if parts else out


def _ranges(starts: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, first, end) of every expert that owns slots."""
    edges = starts.tolist()
    return [(expert, a, b) for expert, (a, b) in enumerate(pairwise(edges)) if a < b]


@triton.jit
def _tile_of(starts_ptr, tile, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Expert of row tile `tile`, its first row, and one past the expert's last row."""
    number = tl.arange(0, BLOCK_E)
    start = tl.load(starts_ptr + number, mask=number < E, other=0)
    expert = tl.sum(((start // BLOCK_M + number <= tile) & (number < E)).to(tl.int32), axis=0) - 1
    start = tl.load(starts_ptr + expert)
    return expert, start + (tile - start // BLOCK_M - expert) * BLOCK_M, tl.load(starts_ptr + expert + 1)


@triton.jit
def _moe_gate_up_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, 2 I, H] contiguous: gate rows, then up rows
    bias_ptr,  # [E, 2 I] contiguous; read if BIAS
    order_ptr,  # [N] int32
    starts_ptr,  # [E + 1] int32
    scales_ptr,  # [N] float32; read if SCALES
    h_ptr,  # [N, I] contiguous
    x_stride,  # elements between rows
    H: tl.constexpr,
    INNER: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # a power of two, at least E
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    tiles_n: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    expert, first, end = _tile_of(starts_ptr, tl.program_id(0) // tiles_n, E, BLOCK_M, BLOCK_E)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    slot = tl.load(order_ptr + row, mask=row < end, other=0)
    x_row = x_ptr + (slot // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_row = weight_ptr + expert.to(tl.int64) * (2 * INNER * H) + column[:, None] * H + k[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if SWAP else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = gate
    for at in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_row + at, mask=(row < end)[:, None] & (at + k < H)[None, :], other=0.0)
        inside = (column < INNER)[:, None] & (at + k < H)[None, :]
        gate = multiply(tl.load(weight_row + at, mask=inside, other=0.0), x, gate, SWAP)
        up = multiply(tl.load(weight_row + INNER * H + at, mask=inside, other=0.0), x, up, SWAP)
    if SWAP:
        gate, up = tl.trans(gate), tl.trans(up)
    if SCALES:
        scale = tl.load(scales_ptr + slot, mask=row < end, other=0.0)[:, None]
        gate *= scale
        up *= scale
    if BIAS:
        bias = bias_ptr + expert * 2 * INNER + column
        gate += tl.load(bias, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + INNER, mask=column < INNER, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, KIND).to(h_ptr.dtype.element_ty)
    place = h_ptr + row.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(place, result, mask=(row < end)[:, None] & (column < INNER)[None, :])


@triton.jit
def _moe_down_kernel(
    h_ptr,  # [N, I] contiguous
    weight_ptr,  # [E, H, I] contiguous
    bias_ptr,  # [E, H] contiguous; read if BIAS
    order_ptr,  # [N] int32
    starts_ptr,  # [E + 1] int32
    scales_ptr,  # [N] float32; read if SCALES
    out_ptr,  # [T, K, H], or [K, T, H]
    token_stride,  # elements between tokens of out
    choice_stride,  # elements between choices of out
    H: tl.constexpr,
    INNER: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # a power of two, at least E
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    tiles_n: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    expert, first, end = _tile_of(starts_ptr, tl.program_id(0) // tiles_n, E, BLOCK_M, BLOCK_E)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    h_row = h_ptr + row.to(tl.int64)[:, None] * INNER + k[None, :]
    weight_row = weight_ptr + expert.to(tl.int64) * (INNER * H) + column[:, None] * INNER + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if SWAP else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        h = tl.load(h_row + at, mask=(row < end)[:, None] & (at + k < INNER)[None, :], other=0.0)
        inside = (column < H)[:, None] & (at + k < INNER)[None, :]
        acc = multiply(tl.load(weight_row + at, mask=inside, other=0.0), h, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    slot = tl.load(order_ptr + row, mask=row < end, other=0)
    if BIAS:
        acc += tl.load(bias_ptr + expert * H + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    if SCALES:
        acc *= tl.load(scales_ptr + slot, mask=row < end, other=0.0)[:, None]
    begin = (slot // TOP_K).to(tl.int64) * token_stride + (slot % TOP_K).to(tl.int64) * choice_stride
    place = out_ptr + begin[:, None] + column[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < H)[None, :])


def moe_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
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
        weight: [E, 2 I, H], contiguous, in x's type: an expert's gate rows, then its up rows.
        order, starts: from `moe_align`.
        top_k: K = N / T, slots of a token.   kind: one of GATED.
        bias: [E, 2 I], contiguous, or None.
        scales: [T, K] float32 factors on the products, before the bias, or None (Llama-4 scales what enters an expert).
        invariant: tiles must not depend on T.

    Returns:
        [N, I] in x's type, sorted as `order` is; rows of no expert hold anything.

    Raises:
        ValueError: shapes, strides or a kind that do not fit.
    """
    if kind not in GATED:
        raise ValueError(f"moe_gate_up: unknown kind {kind!r}; known: {', '.join(GATED)}")
    if not use_kernel(x):
        return moe_gate_up_reference(x, weight, order, starts, top_k=top_k, kind=kind, bias=bias, scales=scales)
    check_experts("moe_gate_up", x, weight, bias, scales, (len(order), x.shape[0] * top_k))
    inner = weight.shape[1] // 2
    h = torch.empty((len(order), inner), dtype=x.dtype, device=x.device)
    if not h.numel():
        return h
    options = _options("moe_gate_up", x, weight, len(order), inner, invariant)
    grid = _grid(len(order), inner, weight.shape[0], options)
    _moe_gate_up_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        order,
        starts,
        weight if scales is None else scales,
        h,
        x.stride(0),
        H=x.shape[1],
        INNER=inner,
        E=weight.shape[0],
        TOP_K=top_k,
        KIND=kind,
        BIAS=bias is not None,
        SCALES=scales is not None,
        **options,
        **overlap(x),
    )
    return h


def moe_down(
    h: torch.Tensor,
    weight: torch.Tensor,
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
        h: [N, I], contiguous, from `moe_gate_up`.
        weight: [E, H, I], contiguous.   bias: [E, H], contiguous, or None.
        order, starts: from `moe_align`; every slot must belong to an expert.
        top_k: K.   scales: [T, K] float32 factors on the results, bias included, or None.
        parts: leave the sum over choices to the next norm (kernels/norm.py).   invariant: tiles must not depend on T.

    Returns:
        [T, K, H] in h's type; as parts, [K, T, H] in float32.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    if not use_kernel(h):
        return moe_down_reference(h, weight, order, starts, top_k=top_k, bias=bias, scales=scales, parts=parts)
    check_experts("moe_down", h, weight, bias, scales, (len(order), h.shape[0]))
    slots, width = len(order), weight.shape[1]
    tokens = slots // top_k
    shape = (top_k, tokens, width) if parts else (tokens, top_k, width)
    out = torch.empty(shape, dtype=torch.float32 if parts else h.dtype, device=h.device)
    if not out.numel():
        return out
    options = _options("moe_down", h, weight, slots, width, invariant)
    grid = _grid(slots, width, weight.shape[0], options)
    _moe_down_kernel[grid](
        h,
        weight,
        weight if bias is None else bias,
        order,
        starts,
        weight if scales is None else scales,
        out,
        out.stride(1 if parts else 0),
        out.stride(0 if parts else 1),
        H=width,
        INNER=h.shape[1],
        E=weight.shape[0],
        TOP_K=top_k,
        BIAS=bias is not None,
        SCALES=scales is not None,
        **options,
        **overlap(h),
    )
    return out


def _grid(slots: int, width: int, experts: int, options: dict[str, int]) -> tuple[int]:
    """Programs. By `_tile_of`'s numbering the last tile of rows begins at most at slots // rows + experts - 1."""
    return ((slots // options["BLOCK_M"] + experts) * cdiv(width, options["BLOCK_N"]),)


def _options(
    kernel: str, x: torch.Tensor, weight: torch.Tensor, slots: int, width: int, invariant: bool
) -> dict[str, int]:
    """Tiles: measured ones, or by the rows of a mean expert, within the device's shared memory.

    Measured with 128 experts of 768, top 8, on an H200: 16 rows up to 128 tokens, 32 at 256, 128 at 8,192.
    """
    experts = weight.shape[0]
    shape = {"experts": experts, "width": width, "inputs": x.shape[1], "bytes": x.element_size()}
    if invariant:
        options = choose(f"{kernel}_invariant", x, _formula(kernel, x, 64, width), **shape)
    else:
        mean, most = slots // experts, 64 if launch.facts(x.device).backend == "hip" else 128
        rows = min(16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 64 else 128, most)
        options = choose(kernel, x, _formula(kernel, x, rows, width), slots=slots, **shape)
    return options | {"BLOCK_E": max(next_power_of_2(experts), 2)}


def _formula(kernel: str, x: torch.Tensor, rows: int, width: int) -> dict[str, int]:
    """The largest tiles of weights and the most stages that fit beside so many slots."""
    device, pair = launch.facts(x.device), 2 if kernel == "moe_gate_up" else 1
    if x.element_size() == 4:
        rows = min(rows, 32)
    sizes = ((64, 128, 3), (64, 64, 3), (64, 64, 2), (32, 64, 2), (32, 32, 2))
    if rows >= 128:
        sizes = ((256 // pair, 64, 3), *sizes)
    room = (device.shared - 4096) // x.element_size()
    columns, k, stages = next(
        size for size in sizes if (rows + pair * size[0]) * size[1] * size[2] <= room or size == sizes[-1]
    )
    if device.backend == "cpu":
        columns, k, stages = 64, 64, 1  # the interpreter pays by the program
    return {
        "BLOCK_M": rows,
        "BLOCK_N": min(columns, max(next_power_of_2(width), 16)),
        "BLOCK_K": min(k, max(next_power_of_2(x.shape[1]), 16)),
        "SWAP": int(rows <= 32 and columns == 64 and width >= 64),
        "STAGES": stages,
        "num_warps": 8 if rows >= 128 else 4,
    }


def check_experts(name: str, x, weight, bias, scales, slots: tuple[int, int]) -> None:
    """Refuse what grouped and decode kernels cannot read. Args: slots: (found, expected). Raises: ValueError."""
    if weight.dim() != 3 or x.dim() != 2 or weight.shape[2] != x.shape[1] or not weight.is_contiguous():
        raise ValueError(f"{name}: x {list(x.shape)} does not fit contiguous experts, which are {list(weight.shape)}")
    if weight.dtype != x.dtype or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"{name}: x ({x.dtype}, rows contiguous) and weight ({weight.dtype}) must be of one type")
    if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"{name}: bias must be {list(weight.shape[:2])}, contiguous, is {list(bias.shape)}")
    if slots[0] != slots[1] or (scales is not None and (scales.numel() != slots[0] or not scales.is_contiguous())):
        raise ValueError(f"{name}: {slots[0]} slots, expected {slots[1]}, each with a contiguous scale")
