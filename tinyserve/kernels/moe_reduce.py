"""What the experts of a token said, added up: `out = sum over K of parts + sigmoid(gate) * shared`, in one launch.

The down products leave one row per (token, choice), already weighted. The shared expert, which every token visits, and
its gate join here, so that no sum of two tensors is a launch of its own. T·(K + 2)·H numbers move; sums are float32.

Before: `moe_gemm.py`, the shared expert.  After: the next norm, which adds the result to the stream.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs


def moe_reduce_reference(
    parts: torch.Tensor, shared: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification of `moe_reduce`, with its arguments."""
    total = parts.float().sum(dim=1)
    if shared is not None:
        total += shared.float() if gate is None else gate.float().sigmoid() * shared.float()
    return total.to(parts.dtype)


@triton.jit
def add_shared(total, shared_ptr, gate_ptr, row, place, inside, SHARED: tl.constexpr, GATE: tl.constexpr):
    """total + sigmoid(gate[row]) * shared[place], or what of it there is."""
    if SHARED:
        extra = tl.load(shared_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            extra *= tl.sigmoid(tl.load(gate_ptr + row).to(tl.float32))
        total += extra
    return total


@triton.jit
def _moe_reduce_kernel(
    parts_ptr,  # [T, K, H] contiguous
    shared_ptr,  # [T, H] contiguous; read if SHARED
    gate_ptr,  # [T]; read if GATE
    out_ptr,  # [T, H] contiguous
    width,  # H
    K: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):
        total += tl.load(parts_ptr + (row * K + choice) * width + column, mask=inside, other=0.0).to(tl.float32)
    place = row * width + column
    total = add_shared(total, shared_ptr, gate_ptr, row, place, inside, SHARED, GATE)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


def moe_reduce(
    parts: torch.Tensor, shared: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Add up the weighted outputs of each token's experts.

    Args:
        parts: [T, K, H], contiguous.
        shared: [T, H], contiguous, or None: the shared expert's output.
        gate: [T, 1] or None: `shared` is multiplied by its sigmoid.

    Returns:
        [T, H] in parts' type.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    if not use_kernel(parts):
        return moe_reduce_reference(parts, shared, gate)
    tokens, choices, width = parts.shape
    check_shared("moe_reduce", (tokens, width), shared, gate)
    if not parts.is_contiguous():
        raise ValueError(f"moe_reduce: parts must be contiguous, strides are {parts.stride()}")
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device)
    if out.numel() == 0:
        return out
    default = {"BLOCK": min(next_power_of_2(width), 1024), "num_warps": 4}
    options = choose("moe_reduce", parts, default, tokens=tokens, width=width)
    _moe_reduce_kernel[(tokens, cdiv(width, options["BLOCK"]))](
        parts,
        parts if shared is None else shared,
        parts if gate is None else gate,
        out,
        width,
        K=choices,
        SHARED=shared is not None,
        GATE=gate is not None,
        **options,
        **overlap(parts),
    )
    return out


def check_shared(
    name: str,
    shape: tuple[int, int],
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    *,
    what: str = "shared",
) -> None:
    """Refuse a shared expert's output (or `what` is added) or gate that does not fit [T, H]. Raises: ValueError."""
    if shared is not None and (shared.shape != shape or not shared.is_contiguous()):
        raise ValueError(f"{name}: {what} must be {list(shape)}, contiguous, is {list(shared.shape)}")
    if gate is not None and (shared is None or gate.shape != (shape[0], 1) or not gate.is_contiguous()):
        raise ValueError(f"{name}: a gate is [{shape[0]}, 1] and comes with shared")
