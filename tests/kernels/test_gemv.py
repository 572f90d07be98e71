"""One row times a matrix, with the norm, the gate and the residual taken in, against its reference."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tinyserve.kernels.gemv import gemv, gemv_reference

FOLDED = {
    "plain": {},
    "norm": {"norm", "bias"},
    "offset": {"norm", "offset"},
    "residual": {"residual"},
    "gate": {"gate", "norm"},
    "gate-bias": {"gate", "bias", "residual"},
}


def keywords_of(parts, rows, width, *, dtype, device):
    """Bias, and keyword arguments of a product with these parts."""
    make, gate = {"dtype": dtype, "device": device}, "gate" in parts
    keywords = {
        "norm": randn(width, seed=3, **make) if "norm" in parts else None,
        "eps": 1e-5,
        "offset": 1.0 if "offset" in parts else 0.0,
        "gate": "silu" if gate else None,
        "residual": randn(1, rows, seed=4, **make) if "residual" in parts else None,
    }
    return randn(rows * (1 + gate), seed=2, **make) if "bias" in parts else None, keywords


def arguments(rows, width, parts, *, dtype, device):
    """Positional and keyword arguments of a product with these parts."""
    make = {"dtype": dtype, "device": device}
    bias, keywords = keywords_of(parts, rows, width, **make)
    weight = randn(rows * (2 if "gate" in parts else 1), width, seed=1, spread=width**-0.5, **make)
    return (randn(1, width, spread=2, **make), weight, bias), keywords


@pytest.mark.parametrize("parts", FOLDED.values(), ids=FOLDED)
@pytest.mark.parametrize("rows, width", [(1, 1), (5, 77), (48, 576), (33, 1024), (16, 4096)])
def test_gemv_is_its_reference(device, dtype, rows, width, parts):
    """Breaks at 5 x 77 if a row or a column past the end joins a sum."""
    positional, keywords = arguments(rows, width, parts, dtype=dtype, device=device)

    actual = gemv(*positional, **keywords)

    assert_close(actual, gemv_reference(*positional, **keywords), scale=4)
    assert torch.equal(actual, gemv(*positional, **keywords))


@pytest.mark.parametrize("gate", ["gelu", "gelu_tanh", "relu", "relu2"])
def test_every_kind_of_gate(device, gate):
    (x, weight, _), _ = arguments(9, 64, {"gate"}, dtype=torch.float32, device=device)

    assert_close(gemv(x, weight, gate=gate), gemv_reference(x, weight, gate=gate), scale=4)


def test_the_reference_is_the_formula():
    """norm((3, 4)) with eps 0.5 is (3, 4) / sqrt(13); silu(3/sqrt 13) * 4/sqrt 13, and 10 on top."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.eye(2)
    norm = torch.zeros(2)

    y = gemv(x, weight, norm=norm, eps=0.5, offset=1.0, gate="silu", residual=torch.tensor([[10.0]]))

    gate, up = 3 / 13**0.5, 4 / 13**0.5
    assert float(y) == pytest.approx(10 + gate / (1 + 2.718281828459045**-gate) * up, rel=1e-6)


def test_no_rows(device):
    assert gemv(torch.ones(1, 4, device=device), torch.ones(0, 4, device=device)).shape == (1, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(2, 4)}, r"gemv: x must be one row \[1, 4\], is \[2, 4\]"),
        ({"x": torch.ones(1, 5)}, r"gemv: x is \[1, 5\], weight \[6, 4\]"),
        ({"norm": torch.ones(5)}, r"gemv: norm must be \[4\]"),
        ({"residual": torch.ones(1, 3)}, r"gemv: residual must be \[1, 6\]"),
        ({"bias": torch.ones(3)}, r"gemv: bias must be \[6\]"),
        ({"gate": "swish"}, "gemv: unknown kind 'swish'"),
        ({"gate": "silu", "weight": torch.ones(5, 4)}, "an even number of rows, not 5"),
    ],
)
def test_refusals(device, change, message):
    values = {"x": torch.ones(1, 4), "weight": torch.ones(6, 4)} | change
    values = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    with pytest.raises(ValueError, match=message):
        gemv(values.pop("x"), values.pop("weight"), values.pop("bias", None), **values)


@pytest.mark.gpu
def test_more_than_2_to_the_31_weights(device):
    """Breaks at row 524288 of 4096 columns: the offset 2**31 wraps in 32 bits."""
    weight = torch.zeros(524290, 4096, dtype=torch.float16, device=device)
    weight[-1] = 1

    y = gemv(torch.ones(1, 4096, dtype=torch.float16, device=device), weight)

    assert float(y[0, -1]) == 4096 and float(y[0, :-1].abs().max()) == 0


def compile_cases():
    shapes = [
        (6144, 4096, {"norm"}),
        (4096, 14336, {"residual"}),
        (14336, 4096, {"norm", "gate"}),
        (960, 576, {"bias"}),
    ]
    for rows, width, parts in shapes:
        positional, keywords = arguments(rows, width, parts, dtype=torch.bfloat16, device="meta")
        yield lambda p=positional, k=keywords: gemv(*p, **k)
    positional, keywords = arguments(3072, 1024, {"norm", "gate"}, dtype=torch.float32, device="meta")
    yield lambda p=positional, k=keywords: gemv(*p, **k)
