"""RMS norm against its reference: alone, fused with the addition, with rows that lie apart."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import norm

SHAPES = [(0, 576), (1, 576), (3, 77), (5, 1), (2, 8192), (1, 20000)]


@pytest.mark.parametrize("rows, width", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_its_reference(device, dtype, rows, width, offset):
    x = gapped(randn(rows, width, dtype=dtype, device=device, spread=3))
    weight = randn(width, dtype=dtype, device=device, seed=1)

    actual = norm.rms_norm(x, weight, 1e-5, offset=offset)

    assert_close(actual, norm.rms_norm_reference(x, weight, 1e-5, offset=offset))
    assert torch.equal(actual, norm.rms_norm(x, weight, 1e-5, offset=offset))


@pytest.mark.parametrize("rows, width", SHAPES)
def test_add_rms_norm_is_its_reference(device, dtype, rows, width):
    x = gapped(randn(rows, width, dtype=dtype, device=device, spread=3))
    delta = gapped(randn(rows, width, dtype=dtype, device=device, seed=2), gap=8)
    weight = randn(width, dtype=torch.float32, device=device, seed=1)
    before = x.clone()

    total, out = norm.add_rms_norm(x, delta, weight, 1e-6)
    expected_total, expected = norm.add_rms_norm_reference(x, delta, weight, 1e-6)

    assert torch.equal(total, expected_total)
    assert_close(out, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("parts", [1, 3])
def test_add_rms_norm_adds_up_parts(device, dtype, parts):
    """Breaks if only the first part of a split product joins the stream."""
    x = randn(3, 576, dtype=dtype, device=device)
    delta = randn(parts, 3, 576, dtype=torch.float32, device=device, seed=2)
    weight = randn(576, dtype=dtype, device=device, seed=1)

    total, out = norm.add_rms_norm(x, delta, weight, 1e-6)
    expected_total, expected = norm.add_rms_norm_reference(x, delta, weight, 1e-6)

    assert_close(total, expected_total)
    assert_close(out, expected)


def test_the_reference_is_the_formula():
    """Breaks if the mean is replaced by a sum, or eps is added outside the root: 1/sqrt(12.5 + 0.5) by hand."""
    x = torch.tensor([[3.0, 4.0]])

    out = norm.rms_norm(x, torch.tensor([1.0, 0.0]), 0.5, offset=1.0)

    assert_close(out, torch.tensor([[6.0, 4.0]]) / 13**0.5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(5)}, r"rms_norm: weight must be \[4\], contiguous, is \[5\]"),
        ({"x": torch.ones(4)}, r"rms_norm: expected \[rows, columns\], got \[4\]"),
        ({"x": torch.ones(4, 2).t()}, r"rms_norm: the last dimension must be contiguous, strides are \(1, 2\)"),
        ({"x": torch.ones(1, 70000), "weight": torch.ones(70000)}, "rows of 70000 are too long"),
    ],
)
def test_refusals(device, change, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(4)} | change

    with pytest.raises(ValueError, match=message):
        norm.rms_norm(*(value.to(device) for value in arguments.values()), 1e-6)


def test_add_refuses_another_shape(device):
    x, weight = torch.ones(2, 4, device=device), torch.ones(4, device=device)

    with pytest.raises(ValueError, match="delta"):
        norm.add_rms_norm(x, x[:1], weight, 1e-6)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """Breaks at row 524288: the offset 2**31 wraps in 32 bits."""
    x = torch.zeros(524290, 4096, dtype=torch.float16, device=device)
    x[-1] = 2

    out = norm.rms_norm(x, torch.ones(4096, dtype=torch.float16, device=device), 1e-6)

    assert torch.equal(out[-1], torch.ones(4096, dtype=torch.float16, device=device))
    assert out[-2].abs().max() == 0


def compile_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield lambda dtype=dtype: norm.rms_norm(torch.empty(4, 576, dtype=dtype), torch.empty(576, dtype=dtype), 1e-6)
        yield lambda dtype=dtype: norm.add_rms_norm(
            torch.empty(4, 4096, dtype=dtype), torch.empty(4, 4096, dtype=dtype), torch.empty(4096, dtype=dtype), 1e-6
        )
