"""Tokens go to their rows where they are kept, and home all together, into the slot of the step."""

import pytest
import torch

from tinyserve.kernels.keep_tokens import keep_tokens, keep_tokens_reference


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def ring(device, width, slots=3):
    home = torch.full((slots, width), -1, dtype=torch.int32)
    return home if device.type == "cpu" else home.pin_memory()


def settled(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


@pytest.mark.parametrize("op", [keep_tokens, keep_tokens_reference])
@pytest.mark.parametrize("count", [0, 1, 5, 1030])
def test_kept_tokens_reach_their_rows(device, op, count):
    """Every third is not kept; 1030 sequences take two rounds. The turn goes from the last slot to the first."""
    device = torch.device("cpu") if op is keep_tokens_reference else device  # it is in numpy
    slots, places = torch.randperm(count, generator=torch.Generator().manual_seed(2)), torch.arange(count) % 11
    tokens, bad = torch.arange(count) + 100, torch.arange(count) % 4 == 0
    kept = torch.arange(count) % 3 != 2
    table = torch.full((max(count, 1), 12), -1, dtype=torch.int32, device=device)
    home, turn = ring(device, 2 * count + 3), ints([2], device)
    where = [part.int().to(device) for part in (slots, places, kept)]

    op(tokens.int().to(device), bad.to(device), *where, table, home, turn)

    settled(device)
    expected = torch.full((max(count, 1), 12), -1, dtype=torch.int32)
    for token, slot, place, keep in zip(tokens, slots, places, kept, strict=True):
        if keep:
            expected[slot, place] = token
    assert torch.equal(table.cpu(), expected)
    assert home[2].tolist() == [*tokens.tolist(), *bad.int().tolist(), -1, -1, -1]
    assert home[:2].tolist() == [[-1] * (2 * count + 3)] * 2
    assert turn.tolist() == [0]


@pytest.mark.parametrize("op", [keep_tokens, keep_tokens_reference])
def test_a_late_choice_replaces_the_first(device, op):
    """The step was ended with token 7; chosen again, token 9 stands in the same slot, and the turn stays."""
    device = torch.device("cpu") if op is keep_tokens_reference else device
    table, home, turn = ints([[0, 0]], device), ring(device, 2), ints([2], device)
    fine, zero, one = ints([0], device) > 0, ints([0], device), ints([1], device)

    op(ints([7], device), fine, zero, one, one, table, home, turn)
    op(ints([9], device), fine, zero, one, one, table, home, turn, late=True)

    settled(device)
    assert table.tolist() == [[0, 9]] and home.tolist() == [[-1, -1], [-1, -1], [9, 0]] and turn.tolist() == [0]


def test_shapes_are_checked(device):
    four = ints([0] * 4, device)

    with pytest.raises(ValueError, match=r"home \[3, 7\]"):
        keep_tokens(four, four > 0, four, four, four, ints([[0]], device), ring(device, 7), ints([0], device))


def compile_cases():
    four, table, home = (torch.empty(*shape, dtype=torch.int32) for shape in ((4,), (9, 4097), (3, 512)))
    bad, turn = torch.empty(4, dtype=torch.bool), torch.empty(1, dtype=torch.int32)
    yield lambda: keep_tokens(four, bad, four, four, four, table, home, turn)
    yield lambda: keep_tokens(four, bad, four, four, four, table, home, turn, late=True)
