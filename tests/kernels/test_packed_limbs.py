"""One to sixteen rows as whole numbers times codes of four bits, against plain numbers."""

import pytest
import torch

from tests.kernels.harness import assert_close, compile_only, gapped, randn
from tests.kernels.test_packed import meta_weight, weight_of
from tests.kernels.test_packed_gemv import check_one_row
from tinyserve.kernels import launch
from tinyserve.kernels.packed_gemm import packed_gemm
from tinyserve.kernels.packed_gemv import packed_gemv
from tinyserve.kernels.packed_limbs import limbs_fit, packed_limbs, packed_limbs_reference, with_limbs
from tinyserve.kernels.skinny_gemm import skinny_gemm_reference

LAYOUTS = ["int4-128", "int4-128-zeros", "int4-row"]
ONLY_DTYPES = (torch.float16, torch.bfloat16)


def product(x, weight, *given, **keywords):
    """With scales turned, as it wants them."""
    return packed_limbs(x, weight.with_beside(), *given, **keywords)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("parts", [{"norm", "offset", "residual"}, {"norm", "gate", "bias"}], ids=["norm", "gate"])
def test_one_row_is_the_product_of_its_numbers(device, dtype, name, parts):
    """Breaks at 37 x 300 if a tile past the end joins a sum, at 19 x 3072 if a column meets another's number."""
    for rows, width in ((37, 300), (19, 3072)):
        check_one_row(product, packed_limbs_reference, name, parts, rows, width, dtype=dtype, device=device)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [3, 13])
def test_a_few_rows_are_the_product_of_its_numbers(device, dtype, name, tokens):
    """Breaks if the ninth token meets the first one's columns, or a row past the end is stored; parts are float32."""
    for gate, rows, width in ((None, 137, 1100), ("silu", 100, 512)):
        weight, dense = weight_of(name, rows * (2 if gate else 1), width, device=device)
        bias = randn(len(dense), dtype=dtype, device=device, seed=3)
        x = gapped(randn(tokens, width, dtype=dtype, device=device))

        actual = product(x, weight, bias, gate=gate)

        expected = skinny_gemm_reference(x, dense.to(device), bias, gate=gate)
        assert_close(actual, expected, scale=4)
        if gate is None:
            whole = product(x, weight, bias, parts=True)
            assert whole.dtype == torch.float32 and whole.shape[1:] == actual.shape
            assert_close(whole.sum(0).to(dtype), actual)


@pytest.mark.parametrize("name", LAYOUTS)
def test_splits_add_up_to_the_product(device, name, monkeypatch):
    """23 tiles in steps of two and of four, the last split short: a tile that is left out or taken twice is a 23rd."""
    weight, dense = weight_of(name, 70, 23 * 128, device=device)
    x = randn(5, 23 * 128, dtype=torch.float16, device=device, spread=200)
    expected = skinny_gemm_reference(x, dense.to(device), None, parts=True)[0]
    for pieces, blocks, splits in ((2, 1, 3), (2, 2, 7), (4, 1, 2)):
        chosen = {"PIECES": pieces, "BLOCKS": blocks, "SPLITS": splits, "STAGES": 2}
        monkeypatch.setattr(launch, "tuned_rows", lambda name, use=chosen: {"packed_limbs": [{"when": {}, "use": use}]})

        parts = product(x, weight, parts=True)

        assert parts.shape == ({3: 3, 7: 6, 2: 2}[splits], 5, 70) and parts.dtype == torch.float32
        assert float((parts.sum(0) - expected).norm() / expected.norm()) < 1e-3


def test_where_it_comes():
    """On Hopper with large matrices: where it was measured to be slower, or there was no room, other kernels come."""
    gate_up, down = (meta_weight("int4-128", *shape) for shape in ((28672, 4096), (4096, 14336)))

    def fits(weight, tokens, dtype=torch.bfloat16, **how):
        return limbs_fit(torch.empty(tokens, weight.columns, dtype=dtype, device="meta"), with_limbs(weight), **how)

    with compile_only("sm_90") as built:
        assert all(fits(gate_up, tokens, dtype, gated=True) for tokens in (1, 8, 16) for dtype in ONLY_DTYPES)
        assert [fits(down, tokens, gated=False, parts=True) for tokens in (1, 8, 9, 16, 17)] == [0, 0, 1, 1, 0]
        assert not fits(down, 16, gated=False) and not fits(gate_up, 17, gated=True)
        assert not fits(gate_up, 1, torch.float32, gated=True)
        for name, shape in (("int4-128", (6144, 4096)), ("int4-64", (28672, 4096)), ("int8-row", (28672, 4096))):
            assert with_limbs(meta_weight(name, *shape)).beside is None
        packed_gemm(torch.empty(9, 14336, dtype=torch.bfloat16), with_limbs(down), parts=True)
        packed_gemv(torch.empty(1, 4096, dtype=torch.bfloat16), with_limbs(gate_up), gate="silu")
    assert [one.name for one in built] == ["_round_limbs_kernel", "_packed_limbs_kernel"] * 2
    for target in ("sm_80", "sm_100", "gfx942"):
        with compile_only(target):
            assert with_limbs(gate_up).beside is None


def compile_cases():
    weight = meta_weight("int4-128-zeros", 2 * 14336, 4096).with_beside()
    yield lambda: packed_limbs(torch.empty(8, 4096, dtype=torch.bfloat16), weight, gate="silu")
