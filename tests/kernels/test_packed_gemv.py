"""One row times packed codes, with the norm, the gate and the residual taken in, against plain numbers."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tests.kernels.test_gemv import FOLDED, keywords_of
from tests.kernels.test_packed import LAYOUTS, meta_weight, weight_of
from tinyserve.kernels.gemv import gemv_reference
from tinyserve.kernels.packed_gemv import packed_gemv, packed_gemv_reference


def check_one_row(product, reference, name, parts, rows, width, *, dtype, device):
    """A product of one row is that of the codes' numbers, as its reference is, and the same each time."""
    weight, dense = weight_of(name, rows * (2 if "gate" in parts else 1), width, device=device)
    bias, keywords = keywords_of(parts, rows, width, dtype=dtype, device=device)
    x = randn(1, width, dtype=dtype, device=device, spread=2)

    actual = product(x, weight, bias, **keywords)

    expected = gemv_reference(x, dense.to(device), bias, **keywords)
    assert_close(actual, expected, scale=4)
    assert_close(reference(x, weight, bias, **keywords), expected, scale=4)
    assert torch.equal(actual, product(x, weight, bias, **keywords))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("parts", [FOLDED["offset"], FOLDED["gate-bias"]], ids=["offset", "gate-bias"])
def test_packed_gemv_is_the_product_of_its_numbers(device, dtype, name, parts):
    """Breaks at 5 x 77 if a column past the end joins a sum, at 9 x 1152 if a place meets another's columns."""
    for rows, width in ((5, 77), (9, 1152)):
        check_one_row(packed_gemv, packed_gemv_reference, name, parts, rows, width, dtype=dtype, device=device)


def test_refusals(device):
    weight, _ = weight_of("int4-32", 6, 64, device=device)
    with pytest.raises(ValueError, match=r"x is \[1, 65\]"):
        packed_gemv(torch.ones(1, 65, device=device), weight)
    with pytest.raises(ValueError, match=r"one row \[1, 64\], is \[2, 64\]"):
        packed_gemv(torch.ones(2, 64, device=device), weight)
    with pytest.raises(ValueError, match="unknown kind 'swish'"):
        packed_gemv(torch.ones(1, 64, device=device), weight, gate="swish")


def compile_cases():
    for name, rows, width, parts in [
        ("int4-128", 6144, 4096, {"norm"}),
        ("fp8-row", 14336, 4096, {"norm", "gate"}),
        ("int4-32-added", 4096, 4096, {"norm", "gate"}),
    ]:
        weight = meta_weight(name, rows * (2 if "gate" in parts else 1), width)
        bias, keywords = keywords_of(parts, rows, width, dtype=torch.bfloat16, device="meta")
        x = torch.empty(1, width, dtype=torch.bfloat16)
        yield lambda x=x, w=weight, b=bias, k=keywords: packed_gemv(x, w, b, **k)
