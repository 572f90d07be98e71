"""A few rows times a matrix, whole and in parts, against its reference; and the promise of `invariant`."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import launch
from tinyserve.kernels.skinny_gemm import skinny_gemm, skinny_gemm_reference


def arguments(tokens, rows, width, *, dtype, device, gate=None, bias=False):
    make = {"dtype": dtype, "device": device}
    weight = randn(rows * (2 if gate else 1), width, seed=1, spread=width**-0.5, **make)
    return (randn(tokens, width, **make), weight, randn(weight.shape[0], seed=2, **make) if bias else None)


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("tokens, rows, width", [(0, 5, 8), (1, 1, 1), (2, 37, 77), (17, 96, 576), (70, 130, 256)])
def test_skinny_gemm_is_its_reference(device, dtype, tokens, rows, width, gate):
    """Breaks at 37 x 77 if a row or a column past the end joins a sum, at 70 if the second tile of tokens is missed."""
    x, weight, bias = arguments(tokens, rows, width, dtype=dtype, device=device, gate=gate, bias=width != 576)

    actual = skinny_gemm(gapped(x), weight, bias, gate=gate)

    assert_close(actual, skinny_gemm_reference(x, weight, bias, gate=gate), scale=4)


@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("splits, width", [(2, 1024), (4, 1000)])
def test_parts_add_up_to_the_product(device, monkeypatch, splits, width, swap):
    """Breaks if the bias is added by every split, or at K 1000 if the last split reads on."""
    chosen = {"SPLITS": splits, "SWAP": swap, "BLOCK_N": 64, "BLOCK_M": 16, "BLOCK_K": 64}
    monkeypatch.setattr(launch, "tuned_rows", lambda name: {"skinny_gemm": [{"when": {}, "use": chosen}]})
    x, weight, bias = arguments(5, 72, width, dtype=torch.float16, device=device, bias=True)

    parts = skinny_gemm(x, weight, bias, parts=True)

    assert parts.shape == (splits, 5, 72) and parts.dtype == torch.float32
    assert_close(parts.sum(0), skinny_gemm_reference(x, weight, bias, parts=True)[0], scale=4)
    assert torch.equal(parts, skinny_gemm(x, weight, bias, parts=True))
    assert_close(skinny_gemm(x, weight, bias), skinny_gemm_reference(x, weight, bias), scale=2)


def test_invariant_rows_do_not_depend_on_their_batch(device, dtype):
    """The bits of a row are the same alone and among 2, 3, 8 and 33."""
    x, weight, bias = arguments(33, 100, 640, dtype=dtype, device=device, bias=True)
    whole = skinny_gemm(x, weight, bias, invariant=True)

    for tokens in (1, 2, 3, 8):
        assert torch.equal(skinny_gemm(x[:tokens], weight, bias, invariant=True), whole[:tokens])
    assert torch.equal(skinny_gemm(x[5:6], weight, bias, invariant=True), whole[5:6])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(2, 5)}, r"skinny_gemm: x is \[2, 5\], weight \[6, 4\]"),
        ({"x": torch.ones(4, 2).t()}, "the last dimension must be contiguous"),
        ({"gate": "silu", "parts": True}, "a gated product has no parts"),
    ],
)
def test_refusals(device, change, message):
    values = {"x": torch.ones(2, 4), "weight": torch.ones(6, 4)} | change
    values = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    with pytest.raises(ValueError, match=message):
        skinny_gemm(values.pop("x"), values.pop("weight"), **values)


@pytest.mark.gpu
def test_more_than_2_to_the_31_weights(device):
    """Breaks at row 524288 of 4096 columns: the offset 2**31 wraps in 32 bits."""
    weight = torch.zeros(524290, 4096, dtype=torch.float16, device=device)
    weight[-1] = 1

    y = skinny_gemm(torch.ones(3, 4096, dtype=torch.float16, device=device), weight)

    assert y[:, -1].tolist() == [4096.0] * 3 and float(y[:, :-1].abs().max()) == 0


def compile_cases():
    for tokens, rows, width, gate, parts in [
        (8, 6144, 4096, None, False),
        (40, 3072, 1024, "silu", False),
        (3, 576, 1536, None, True),
    ]:
        given = arguments(tokens, rows, width, dtype=torch.bfloat16, device="meta", gate=gate)
        yield lambda given=given, gate=gate, parts=parts: skinny_gemm(*given, gate=gate, parts=parts)
    given = arguments(33, 6144, 4096, dtype=torch.bfloat16, device="meta", bias=True)
    yield lambda: skinny_gemm(*given, invariant=True)
