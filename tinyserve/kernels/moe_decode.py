"""A mixture of experts for a few tokens, without sorting: each (token, choice) slot reads its expert's rows itself.

    moe_decode_gate_up   h[slot]    = act(x[t] Wg[e]ᵀ) * (x[t] Wu[e]ᵀ)                     e = ids[slot], t = slot // K
    moe_decode_down      out[t]     = sum over the slots of t of weight * (h[slot] Wd[e]ᵀ)  + sigmoid(gate) * shared
                                      + residual

At one token there is nothing to group: 3·K·H·I weights are read once, and a product of one row is a sum along memory,
so the tiles are rows of weights times stretches of them, multiplied and added without a matrix unit. Up to a few tokens
slots that share an expert find its rows in L2. A program of the second kernel holds the same row of all experts of a
token at once: many loads are in flight, and routing weights, the sum over choices, the shared expert and the residual
stream cost no launch and no traffic.

Both take part in overlap (`launch.py`). The first lets the second start only after it has waited itself, so what the
router wrote is visible to the second before it waits: it loads its first tile of weights meanwhile.

Before: `moe_router.py`.  After: the next norm.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .moe_gemm import GATED, check_experts, gated, gated_reference
from .moe_reduce import add_shared, check_shared

MOST_SLOTS = 16  # beyond, sorting pays. H200, 128 experts, top 8: 4 tokens take 81 us here and 76 sorted, one 26 and 32


def moe_decode_gate_up_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    kind: str,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `moe_decode_gate_up`, with its arguments."""
    rows = x.repeat_interleave(ids.shape[1], 0).float()
    chosen = ids.flatten().long()
    both = torch.einsum("nh,nrh->nr", rows, weight[chosen].float())
    if scales is not None:
        both *= scales.view(-1, 1)
    if bias is not None:
        both += bias[chosen].float()
    return gated_reference(*both.chunk(2, dim=-1), kind).to(x.dtype)


def moe_decode_down_reference(
    h: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `moe_decode_down`, with its arguments."""
    chosen = ids.flatten().long()
    parts = torch.einsum("ni,nri->nr", h.float(), weight[chosen].float())
    if bias is not None:
        parts += bias[chosen].float()
    if scales is not None:
        parts *= scales.view(-1, 1)
    total = parts.unflatten(0, ids.shape).sum(dim=1)
    if shared is not None:
        total += shared.float() if gate is None else gate.float().sigmoid() * shared.float()
    return (total if residual is None else total + residual.float()).to(h.dtype)


@triton.jit
def _moe_decode_gate_up_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, 2 I, H] contiguous
    bias_ptr,  # [E, 2 I] contiguous; read if BIAS
    ids_ptr,  # [N] int32
    scales_ptr,  # [N] float32; read if SCALES
    h_ptr,  # [N, I] contiguous
    x_stride,  # elements between rows
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,  # rows of gate, and of up; a power of two
    BLOCK: tl.constexpr,  # numbers of a row at once; a power of two
    PDL: tl.constexpr,
):
    wait_inputs(PDL)
    start_next(PDL)
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    x_ptr += (slot // TOP_K).to(tl.int64) * x_stride
    weight_row = weight_ptr + (expert * 2 * INNER + row)[:, None] * H + k[None, :]
    gate = tl.zeros([ROWS, BLOCK], tl.float32)
    up = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, H, BLOCK):
        inside = (row < INNER)[:, None] & (at + k < H)[None, :]
        x = tl.load(x_ptr + at + k, mask=at + k < H, other=0.0).to(tl.float32)[None, :]
        gate += x * tl.load(weight_row + at, mask=inside, other=0.0).to(tl.float32)
        up += x * tl.load(weight_row + INNER * H + at, mask=inside, other=0.0).to(tl.float32)
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if SCALES:
        scale = tl.load(scales_ptr + slot)
        gate_sum *= scale
        up_sum *= scale
    if BIAS:
        bias = bias_ptr + expert * 2 * INNER + row
        gate_sum += tl.load(bias, mask=row < INNER, other=0.0).to(tl.float32)
        up_sum += tl.load(bias + INNER, mask=row < INNER, other=0.0).to(tl.float32)
    result = gated(gate_sum, up_sum, KIND).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + slot.to(tl.int64) * INNER + row, result, mask=row < INNER)


@triton.jit
def _moe_decode_down_kernel(
    h_ptr,  # [N, I] contiguous
    weight_ptr,  # [E, H, I] contiguous
    bias_ptr,  # [E, H] contiguous; read if BIAS
    ids_ptr,  # [N] int32; with scales, written before the kernel in front
    scales_ptr,  # [N] float32; read if SCALES
    shared_ptr,  # [T, H] contiguous; read if SHARED
    gate_ptr,  # [T]; read if GATE
    residual_ptr,  # [T, H] contiguous; read if RESIDUAL
    out_ptr,  # [T, H] contiguous
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least TOP_K
    ROWS: tl.constexpr,  # rows of the result; a power of two
    BLOCK: tl.constexpr,  # numbers of a row at once; a power of two
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, ROWS * SLOTS)  # row of the result, and choice
    choice = pair % SLOTS
    row = tl.program_id(0) * ROWS + pair // SLOTS
    real = (choice < TOP_K) & (row < H)
    slot = token * TOP_K + choice
    expert = tl.load(ids_ptr + slot, mask=choice < TOP_K, other=0).to(tl.int64)
    weight_row = weight_ptr + ((expert * H + row) * INNER)[:, None]
    h_row = h_ptr + (slot * INNER)[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_row + k, mask=real[:, None] & (k < INNER), other=0.0)
    wait_inputs(PDL)

    h = tl.load(h_row + k, mask=real[:, None] & (k < INNER), other=0.0)
    acc = weight.to(tl.float32) * h.to(tl.float32)
    for at in range(BLOCK, INNER, BLOCK):
        inside = real[:, None] & (at + k < INNER)
        weight = tl.load(weight_row + at + k, mask=inside, other=0.0)
        acc += weight.to(tl.float32) * tl.load(h_row + at + k, mask=inside, other=0.0).to(tl.float32)
    parts = tl.sum(acc, axis=1)
    if BIAS:
        parts += tl.load(bias_ptr + expert * H + row, mask=real, other=0.0).to(tl.float32)
    if SCALES:
        parts *= tl.load(scales_ptr + slot, mask=choice < TOP_K, other=0.0)
    total = tl.sum(tl.reshape(parts, [ROWS, SLOTS]), axis=1)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = token * H + column
    total = add_shared(total, shared_ptr, gate_ptr, token, place, column < H, SHARED, GATE)
    if RESIDUAL:
        total += tl.load(residual_ptr + place, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=column < H)


def moe_decode_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    kind: str,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate and up products of each slot, activated.

    Args:
        x: [T, H]; rows may lie apart.
        weight: [E, 2 I, H], contiguous, in x's type.   bias: [E, 2 I], contiguous, or None.
        ids: [T, K] int32, contiguous, each in 0 .. E-1.
        kind: one of moe_gemm.GATED.
        scales: [T, K] float32 factors on the products, before the bias, or None.

    Returns:
        [T·K, I] in x's type, by slot.

    Raises:
        ValueError: shapes, strides or a kind that do not fit.
    """
    if kind not in GATED:
        raise ValueError(f"moe_decode_gate_up: unknown kind {kind!r}; known: {', '.join(GATED)}")
    if not use_kernel(x):
        return moe_decode_gate_up_reference(x, weight, ids, kind=kind, bias=bias, scales=scales)
    check_experts("moe_decode_gate_up", x, weight, bias, scales, (ids.numel(), x.shape[0] * ids.shape[1]))
    slots, inner, width = ids.numel(), weight.shape[1] // 2, x.shape[1]
    h = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
    if not h.numel():
        return h
    rows = 1 if slots <= 8 else 2
    default = {"ROWS": rows, "BLOCK": min(max(next_power_of_2(width), 16), 1024), "num_warps": 2 * rows}
    options = _options("moe_decode_gate_up", x, inner, default)
    _moe_decode_gate_up_kernel[(cdiv(inner, options["ROWS"]), slots)](
        x,
        weight,
        weight if bias is None else bias,
        ids,
        weight if scales is None else scales,
        h,
        x.stride(0),
        H=width,
        INNER=inner,
        TOP_K=ids.shape[1],
        KIND=kind,
        BIAS=bias is not None,
        SCALES=scales is not None,
        **options,
        **overlap(x),
    )
    return h


def moe_decode_down(
    h: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Down products, weighted and added up for each token, with the shared expert.

    Args:
        h: [T·K, I], contiguous, from `moe_decode_gate_up`.
        weight: [E, H, I], contiguous.   bias: [E, H], contiguous, or None.
        ids: [T, K] int32, contiguous.   scales: [T, K] float32 factors on the results, or None. Both were written
            before the kernel that is launched last when this one is.
        shared, gate: as for `moe_reduce`.
        residual: [T, H], contiguous, added at the end, or None.

    Returns: [T, H] in h's type.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    if not use_kernel(h):
        options = {"bias": bias, "scales": scales, "shared": shared, "gate": gate, "residual": residual}
        return moe_decode_down_reference(h, weight, ids, **options)
    check_experts("moe_decode_down", h, weight, bias, scales, (ids.numel(), h.shape[0]))
    tokens, width = ids.shape[0], weight.shape[1]
    check_shared("moe_decode_down", (tokens, width), shared, gate)
    check_shared("moe_decode_down", (tokens, width), residual, None, what="residual")
    out = torch.empty((tokens, width), dtype=h.dtype, device=h.device)
    if not out.numel():
        return out
    options = _options("moe_decode_down", h, width, {"ROWS": 1, "BLOCK": _stretch(h.shape[1]), "num_warps": 4})
    _moe_decode_down_kernel[(cdiv(width, options["ROWS"]), tokens)](
        h,
        weight,
        weight if bias is None else bias,
        ids,
        weight if scales is None else scales,
        weight if shared is None else shared,
        weight if gate is None else gate,
        weight if residual is None else residual,
        out,
        H=width,
        INNER=h.shape[1],
        TOP_K=ids.shape[1],
        BIAS=bias is not None,
        SCALES=scales is not None,
        SHARED=shared is not None,
        GATE=gate is not None,
        RESIDUAL=residual is not None,
        SLOTS=next_power_of_2(ids.shape[1]),
        **options,
        **overlap(h),
    )
    return out


def _stretch(inner: int) -> int:
    """Numbers of a row at once: all if there are not too many, else what wastes little of the last stretch."""
    if inner <= 1024:
        return max(next_power_of_2(inner), 16)
    return min((512, 256), key=lambda size: cdiv(inner, size) * size)


def _options(kernel: str, x: torch.Tensor, width: int, default: dict[str, int]) -> dict[str, int]:
    """Rows and stretches: measured ones, or the formula's; many rows in the interpreter, which pays by the program."""
    if x.is_cpu:
        default = default | {"ROWS": 32}
    return choose(kernel, x, default, inputs=x.shape[1], width=width, bytes=x.element_size())
