"""Layer norm against its reference."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import layer_norm


@pytest.mark.parametrize("rows, width", [(0, 64), (1, 768), (3, 77), (4, 1), (1, 20000)])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_is_its_reference(device, dtype, rows, width, biased):
    x = gapped(randn(rows, width, dtype=dtype, device=device, spread=3) + 2)
    weight = randn(width, dtype=dtype, device=device, seed=1)
    bias = randn(width, dtype=torch.float32, device=device, seed=2) if biased else None

    actual = layer_norm.layer_norm(x, weight, bias, 1e-5)

    assert_close(actual, layer_norm.layer_norm_reference(x, weight, bias, 1e-5))
    assert torch.equal(actual, layer_norm.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("rows, width", [(0, 64), (1, 768), (3, 77), (4, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_add_layer_norm_is_its_reference(device, dtype, rows, width, biased):
    """The sum is rounded to its type before it is normalised, and the inputs stay as they are."""
    x, delta = (gapped(randn(rows, width, dtype=dtype, device=device, spread=3, seed=seed)) for seed in (3, 4))
    weight = randn(width, dtype=dtype, device=device, seed=1)
    bias = randn(width, dtype=torch.float32, device=device, seed=2) if biased else None
    before = x.clone()

    total, normed = layer_norm.add_layer_norm(x, delta, weight, bias, 1e-5)

    expected = layer_norm.add_layer_norm_reference(x, delta, weight, bias, 1e-5)
    assert torch.equal(total, expected[0])
    assert_close(normed, expected[1])
    assert torch.equal(x, before)


def test_a_large_mean_does_not_swallow_the_variance(device):
    """Breaks if the variance is mean(x²) - mean(x)²: with mean 4096 float32 has no digits left."""
    x = torch.tensor([[4095.0, 4097.0]], device=device)

    out = layer_norm.layer_norm(x, torch.ones(2, device=device), None, 0.0)

    assert out.tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(5)}, r"layer_norm: weight must be \[4\], contiguous, is \[5\]"),
        ({"bias": torch.ones(3)}, r"layer_norm: bias must be \[4\], contiguous, is \[3\]"),
        ({"x": torch.ones(4)}, r"layer_norm: expected \[rows, columns\], got \[4\]"),
        ({"x": torch.ones(1, 70000), "weight": torch.ones(70000), "bias": torch.ones(70000)}, "rows of 70000"),
    ],
)
def test_refusals(device, change, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(4), "bias": torch.ones(4)} | change

    with pytest.raises(ValueError, match=message):
        layer_norm.layer_norm(*(value.to(device) for value in arguments.values()), 1e-6)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """Breaks at row 524288: the offset 2**31 wraps in 32 bits."""
    x = torch.zeros(524290, 4096, dtype=torch.float16, device=device)
    x[-1, ::2], x[-1, 1::2] = 1, -1

    out = layer_norm.layer_norm(x, torch.ones(4096, dtype=torch.float16, device=device), None, 0.0)

    assert torch.equal(out[-1], x[-1])


def compile_cases():
    def case(dtype, biased=True):
        weight = torch.empty(768, dtype=dtype)
        layer_norm.layer_norm(torch.empty(4, 768, dtype=dtype), weight, weight if biased else None, 1e-5)

    yield lambda: case(torch.float32)
    yield lambda: case(torch.float16)
    yield lambda: case(torch.bfloat16)
    yield lambda: case(torch.bfloat16, biased=False)
    rows, weight = torch.empty(4, 768, dtype=torch.bfloat16), torch.empty(768, dtype=torch.bfloat16)
    yield lambda: layer_norm.add_layer_norm(rows, rows, weight, weight, 1e-5)
