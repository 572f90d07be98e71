"""Slots sorted by expert: kernel against reference and against Python's sort."""

import pytest
import torch

from tinyserve.kernels import moe_align as module


def random_ids(tokens, top_k, experts, low=0):
    return torch.randint(low, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).to(torch.int32)


@pytest.mark.parametrize("tokens, top_k, experts", [(0, 2, 4), (1, 8, 16), (5, 3, 7), (700, 4, 5)])
def test_slots_of_each_expert_are_side_by_side_and_rising(device, tokens, top_k, experts):
    ids = random_ids(tokens, top_k, experts).to(device)

    order, starts = module.moe_align(ids, experts)
    flat = ids.flatten().tolist()

    assert order.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])
    assert starts.tolist() == [sum(one < expert for one in flat) for expert in range(experts + 1)]
    for one, other in zip((order, starts), module.moe_align_reference(ids, experts), strict=True):
        assert torch.equal(one, other)


def test_ids_of_nobody_stand_in_no_range(device):
    """5 of 10 slots belong to experts 0..3: starts ends at 5, and the first 5 of the order are theirs."""
    ids = torch.tensor([[0, -1, 3, 9, 1], [4, 2, -1, 0, 7]], dtype=torch.int32, device=device)

    for call in (module.moe_align, module.moe_align_reference):
        order, starts = call(ids, 4)

        assert starts.tolist() == [0, 2, 3, 4, 5]
        assert order[:5].tolist() == [0, 8, 4, 6, 2]


def test_refusals(device):
    with pytest.raises(ValueError, match="contiguous int32"):
        module.moe_align(torch.zeros(2, 2, dtype=torch.int64, device=device), 4)


def compile_cases():
    for tokens in (4, 4096):
        yield lambda tokens=tokens: module.moe_align(torch.empty(tokens, 8, dtype=torch.int32), 128)
