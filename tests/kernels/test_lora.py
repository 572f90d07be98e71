"""Low-rank additions: the kernels against their references, and rows of different adapters side by side."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import lora

CASES = [  # tokens, K, parts, R
    (0, 32, (16,), 8),
    (1, 1100, (40, 24, 24), 8),  # K is split
    (5, 33, (70,), 3),
    (70, 48, (65, 65), 17),  # more than a tile of everything
]


def given(tokens, width, parts, rank, dtype, device, slots=3):
    """x, a, b, places and the base product. Both buffers have room between places, as on a device."""
    x = gapped(randn(tokens, width, dtype=dtype, device=device))
    rows, columns = len(parts) * rank, sum(parts)
    flat = randn(slots, rows * width + columns * rank + 5, dtype=dtype, device=device, seed=1, spread=0.2)
    a = flat[:, : rows * width].view(slots, rows, width)
    b = flat[:, rows * width : rows * width + columns * rank].view(slots, columns, rank)
    places = torch.tensor([(7 * index) % (slots + 1) - 1 for index in range(tokens)], dtype=torch.int32, device=device)
    out = gapped(randn(tokens, columns, dtype=dtype, device=device, seed=2))
    return x, a, b, places, out


@pytest.mark.parametrize("tokens, width, parts, rank", CASES)
def test_both_halves_are_their_references(device, dtype, tokens, width, parts, rank):
    """Breaks if a part reads another part's numbers, a split is lost, or places mix."""
    x, a, b, places, out = given(tokens, width, parts, rank, dtype, device)
    before = out.clone()

    y = lora.lora_shrink(x, a, places)
    expected = lora.lora_shrink_reference(x, a, places)
    assert_close(y.sum(0), expected[0], scale=10)
    changed = lora.lora_expand(y, b, places, parts, out)

    assert changed is out
    assert_close(out, lora.lora_expand_reference(expected, b, places, parts, before.clone()), scale=10)
    assert torch.equal(out[places < 0], before[places < 0])


def test_a_row_is_what_it_is_alone(device):
    """The bits of a row do not depend on what its neighbours wear, nor on NaN in their adapters."""
    x, a, b, places, out = given(9, 64, (32, 16), 4, torch.float32, device)
    a[2], b[2] = float("nan"), float("nan")
    together = lora.lora_expand(lora.lora_shrink(x, a, places), b, places, (32, 16), out.clone())

    for row in range(9):
        if places[row] == 2:
            continue
        one = slice(row, row + 1)
        alone = lora.lora_expand(lora.lora_shrink(x[one], a, places[one]), b, places[one], (32, 16), out[one].clone())
        assert torch.equal(together[one], alone)


def test_the_reference_is_the_formula():
    """out + B A x with numbers by hand: 10 + 3 * (1 * 2 + 2 * 1) = 22."""
    places = torch.tensor([0, -1], dtype=torch.int32)
    y = lora.lora_shrink(torch.tensor([[2.0, 1.0]] * 2), torch.tensor([[[1.0, 2.0]]]), places)
    out = lora.lora_expand(y, torch.tensor([[[3.0]]]), places, (1,), torch.tensor([[10.0], [10.0]]))

    assert out.tolist() == [[22.0], [10.0]]


def test_refusals(device):
    x, a, b, places, out = given(2, 32, (16,), 8, torch.float32, device)
    y = lora.lora_shrink(x, a, places)
    with pytest.raises(ValueError, match="places must be"):
        lora.lora_shrink(x, a, places[:1])
    with pytest.raises(ValueError, match="do not fit"):
        lora.lora_expand(y, b, places, (8, 8), out)
    with pytest.raises(ValueError, match="float16"):
        lora.lora_expand(y, b, places, (16,), out.half())


def compile_cases():
    def both(tokens, parts, rank, dtype):
        a = torch.empty(4, len(parts) * rank * 4096 + sum(parts) * rank, dtype=dtype)
        low = a[:, : len(parts) * rank * 4096].view(4, -1, 4096)
        high = a[:, len(parts) * rank * 4096 :].view(4, sum(parts), rank)
        places = torch.empty(tokens, dtype=torch.int32)
        y = lora.lora_shrink(torch.empty(tokens, 4096, dtype=dtype), low, places)
        lora.lora_expand(y, high, places, parts, torch.empty(tokens, sum(parts), dtype=dtype))

    yield lambda: both(4, (4096, 1024, 1024), 16, torch.bfloat16)
    yield lambda: both(300, (14336, 14336), 64, torch.bfloat16)
    yield lambda: both(4, (4096,), 8, torch.float32)
