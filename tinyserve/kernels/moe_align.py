"""The tokens of each expert, side by side: a stable counting sort of (token, choice) pairs by expert, in one launch.

    ids     [T, K]      0 2 | 2 1 | 0 2            slot = token * K + choice, N = T·K of them
    order   [N]         0 4 | 3 | 1 2 5            slots, those of expert 0 first, each in rising order
    starts  [E + 1]     0 2 3 6                    expert e owns order[starts[e]] .. order[starts[e + 1] - 1]

Nothing is padded: a tile of a grouped product finds its expert from `starts` alone (`moe_gemm.py`). One program is one
expert: it counts the ids below its own, which is where its slots begin, then writes its slots behind each other. There
are no atomics, so the order is always the same; every program reads all ids, which the L2 cache serves.

Ids outside 0 .. E-1 belong to nobody here: they stand in no expert's range.

Before: `moe_router.py`.  After: `moe_gemm.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs


def moe_align_reference(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `moe_align`, with its arguments."""
    flat = ids.flatten().to(torch.int64)
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return flat.argsort(stable=True).to(torch.int32), starts.to(torch.int32)


@triton.jit(do_not_specialize=["num_slots"])
def _moe_align_kernel(
    ids_ptr,  # [N] int32
    order_ptr,  # [N] int32
    starts_ptr,  # [E + 1] int32
    num_slots,  # N
    experts,  # E
    BLOCK: tl.constexpr,  # ids at once; a power of two
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_slots, BLOCK):
        ids = tl.load(ids_ptr + first + place, mask=first + place < num_slots, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    start = tl.sum(before, axis=0)
    end = start
    for first in range(0, num_slots, BLOCK):
        ids = tl.load(ids_ptr + first + place, mask=first + place < num_slots, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + end + tl.cumsum(mine, axis=0) - 1, first + place, mask=mine > 0)
        end += tl.sum(mine, axis=0)
    tl.store(starts_ptr + expert, start)
    if expert == experts - 1:
        tl.store(starts_ptr + experts, end)


def moe_align(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort slots by expert.

    Args:
        ids: [T, K] int32, contiguous.
        experts: E.

    Returns:
        order [T·K] int32 and starts [E + 1] int32. Behind starts[E], `order` may hold anything.

    Raises:
        ValueError: ids that are not contiguous int32.
    """
    if not use_kernel(ids):
        return moe_align_reference(ids, experts)
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"moe_align: ids must be contiguous int32, are {ids.dtype} with strides {ids.stride()}")
    slots = ids.numel()
    order = torch.empty(slots, dtype=torch.int32, device=ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    block = min(max(next_power_of_2(slots), 32), 4096)
    options = choose("moe_align", ids, {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}, slots=slots)
    _moe_align_kernel[(experts,)](ids, order, starts, slots, experts, **options, **overlap(ids))
    return order, starts
