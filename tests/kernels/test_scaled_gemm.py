"""A few rows of fp8 times fp8, whole and in parts, against numbers in full."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tests.kernels.test_packed import meta_weight, weight_of
from tinyserve.kernels import launch
from tinyserve.kernels.round_rows import round_rows_reference
from tinyserve.kernels.scaled_gemm import scaled_gemm, scaled_gemm_reference


def arguments(name, tokens, rows, width, *, device, gate=None):
    """Rounded activations, a weight, and the product's keywords."""
    weight, _ = weight_of(name, rows * (2 if gate else 1), width, device=device)
    x = randn(tokens, width, dtype=torch.float32, device=device)
    return round_rows_reference(x, width=weight.width), weight, {"dtype": torch.float16, "gate": gate}


@pytest.mark.parametrize("name", ["fp8-row", "fp8-128"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_scaled_gemm_is_its_reference(device, name, gate):
    """Breaks at 37 x 77 if a column past the end joins a sum, at 70 tokens if a token takes another's scale."""
    for tokens, rows, width in ((3, 37, 77), (70, 65, 384), (0, 5, 8)) if gate is None else ((17, 33, 300),):
        (codes, scales), weight, keywords = arguments(name, tokens, rows, width, device=device, gate=gate)
        bias = randn(len(weight.codes), dtype=torch.float16, device=device, seed=3) if rows != 65 else None

        actual = scaled_gemm(codes, scales, weight, bias, **keywords)

        assert_close(actual, scaled_gemm_reference(codes, scales, weight, bias, **keywords), scale=4)


def test_parts_add_up_to_the_product(device, monkeypatch):
    """Four splits of 1000 columns, the last one short; the bias joins once."""
    chosen = {"SPLITS": 4, "BLOCK_K": 128}
    monkeypatch.setattr(launch, "tuned_rows", lambda name: {"scaled_gemm": [{"when": {}, "use": chosen}]})
    (codes, scales), weight, keywords = arguments("fp8-row", 5, 40, 1000, device=device)
    bias = randn(40, dtype=torch.float16, device=device)

    parts = scaled_gemm(codes, scales, weight, bias, parts=True, **keywords)

    assert parts.shape == (4, 5, 40) and parts.dtype == torch.float32
    expected = scaled_gemm_reference(codes, scales, weight, bias, parts=True, **keywords)[0]
    assert float((parts.sum(0) - expected).norm() / expected.norm()) < 1e-3


def test_refusals(device):
    (codes, scales), weight, keywords = arguments("fp8-row", 2, 8, 64, device=device)
    with pytest.raises(ValueError, match="x_scales"):
        scaled_gemm(codes, scales[:1], weight, **keywords)
    with pytest.raises(ValueError, match="weights int"):
        scaled_gemm(codes, scales, weight_of("int8-row", 8, 64, device=device)[0], **keywords)


def compile_cases():
    for name, tokens, rows, width, gate, parts in [
        ("fp8-row", 64, 14336, 4096, "silu", False),
        ("fp8-128", 16, 6144, 4096, None, False),
    ]:
        weight = meta_weight(name, rows * (2 if gate else 1), width)
        x = torch.empty(tokens, width, dtype=torch.float8_e4m3fn)
        scales = torch.empty(weight.scales.shape[1], tokens).t()
        given = {"dtype": torch.bfloat16, "gate": gate, "parts": parts}
        yield lambda x=x, s=scales, w=weight, given=given: scaled_gemm(x, s, w, **given)
