"""Activations, plain and gated, against torch's functions."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import activation

SHAPES = [(0, 64), (1, 1536), (3, 77), (5, 1), (1, 20000)]


@pytest.mark.parametrize("rows, width", SHAPES)
@pytest.mark.parametrize("kind", activation.KINDS)
def test_gated_activation_is_its_reference(device, dtype, rows, width, kind):
    gate_up = gapped(randn(rows, 2 * width, dtype=dtype, device=device, spread=3))

    actual = activation.gated_activation(gate_up, kind)

    assert_close(actual, activation.gated_activation_reference(gate_up, kind))
    assert torch.equal(actual, activation.gated_activation(gate_up, kind))


@pytest.mark.parametrize("rows, width", SHAPES[:3])
@pytest.mark.parametrize("kind", activation.KINDS)
def test_activation_is_its_reference(device, dtype, rows, width, kind):
    x = gapped(randn(rows, width, dtype=dtype, device=device, spread=3))

    assert_close(activation.activation(x, kind), activation.activation_reference(x, kind))


@pytest.mark.parametrize("kind", activation.KINDS)
def test_extremes_and_nan_survive(device, kind):
    """Breaks if exp overflows to NaN at -100, or if NaN becomes 0 in a comparison."""
    x = torch.tensor([[-100.0, -0.0, 0.0, 100.0, float("nan")]], device=device)

    assert_close(activation.activation(x, kind), activation.activation_reference(x, kind))


@pytest.mark.parametrize("rows, width", SHAPES)
def test_xielu_is_its_reference(device, dtype, rows, width):
    """Also around zero, where exp(x) - 1 loses its digits, and far below."""
    x = gapped(randn(rows, width, dtype=dtype, device=device, spread=3))
    x[:, ::3] *= 1e-3
    numbers = (0.7, 1.3)

    actual = activation.xielu(x, *numbers, beta=0.5, eps=-1e-6)

    assert_close(actual, activation.xielu_reference(x, *numbers, beta=0.5, eps=-1e-6))


def test_silu_by_hand():
    """silu(1) * 2 = 2 / (1 + 1/e) = 1.4621172."""
    assert_close(activation.gated_activation(torch.tensor([[1.0, 2.0]]), "silu"), torch.tensor([[1.4621172]]))


def test_refusals(device):
    with pytest.raises(ValueError, match="unknown kind 'swish'; known: silu, gelu"):
        activation.activation(torch.ones(1, 2, device=device), "swish")
    with pytest.raises(ValueError, match="their length is even, not 3"):
        activation.gated_activation(torch.ones(1, 3, device=device), "silu")
    with pytest.raises(ValueError, match=r"expected \[rows, columns\], got \[2\]"):
        activation.activation(torch.ones(2, device=device), "silu")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """Breaks in the last row: its offset passes 2**31."""
    gate_up = torch.zeros(131074, 16384, dtype=torch.float16, device=device)
    gate_up[-1] = 3

    out = activation.gated_activation(gate_up, "relu")

    assert (out[-1] == 9).all()
    assert out[-2].abs().max() == 0


def compile_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield lambda dtype=dtype: activation.gated_activation(torch.empty(4, 3072, dtype=dtype), "silu")
    for kind in activation.KINDS:
        yield lambda kind=kind: activation.activation(torch.empty(4, 1536, dtype=torch.bfloat16), kind)
    yield lambda: activation.xielu(torch.empty(4, 1536, dtype=torch.bfloat16), 0.7, 1.3, beta=0.5, eps=-1e-6)
