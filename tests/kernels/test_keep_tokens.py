"""Tokens go to their rows where they are kept, and home all together."""

import pytest
import torch

from tinyserve.kernels.keep_tokens import keep_tokens, keep_tokens_reference


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("op", [keep_tokens, keep_tokens_reference])
@pytest.mark.parametrize("count", [1, 5, 1030])
def test_kept_tokens_reach_their_rows(device, op, count):
    """Every third is not kept; 1030 sequences are more than one program's."""
    slots, places = torch.randperm(count, generator=torch.Generator().manual_seed(2)), torch.arange(count) % 11
    tokens, bad = torch.arange(count) + 100, torch.arange(count) % 4 == 0
    kept = torch.arange(count) % 3 != 2
    table = torch.full((count, 12), -1, dtype=torch.int32, device=device)
    result = torch.full((2 * count,), -1, dtype=torch.int32, device=device)

    op(*(ints(x.tolist(), device) for x in (tokens,)), bad.to(device), ints(slots.tolist(), device),
       ints(places.tolist(), device), ints(kept.tolist(), device), table, result)  # fmt: skip

    expected = torch.full((count, 12), -1, dtype=torch.int32)
    for token, slot, place, keep in zip(tokens, slots, places, kept, strict=True):
        if keep:
            expected[slot, place] = token
    assert torch.equal(table.cpu(), expected)
    assert result.tolist() == [*tokens.tolist(), *bad.int().tolist()]


def test_shapes_are_checked(device):
    four = ints([0] * 4, device)

    with pytest.raises(ValueError, match=r"result \[7\]"):
        keep_tokens(four, four > 0, four, four, four, ints([[0]], device), ints([0] * 7, device))


def compile_cases():
    four, table = torch.empty(4, dtype=torch.int32), torch.empty(9, 4097, dtype=torch.int32)
    bad = torch.empty(4, dtype=torch.bool)
    yield lambda: keep_tokens(four, bad, four, four, four, table, torch.empty(8, dtype=torch.int32))
