"""One to sixteen rows times codes of four bits on matrix units, against plain numbers."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tests.kernels.test_packed import LAYOUTS, meta_weight, weight_of
from tests.kernels.test_packed_gemv import check_one_row
from tinyserve.kernels import launch
from tinyserve.kernels.packed import tile_of
from tinyserve.kernels.packed_gemm import packed_gemm
from tinyserve.kernels.packed_strips import packed_strips, packed_strips_reference, strips_fit
from tinyserve.kernels.skinny_gemm import skinny_gemm_reference

FOUR_BITS = ["int4-128", "int4-128-zeros", "int4-row", "int4-64", "int4-32", "int4-32-added"]
ONLY_DTYPES = (torch.float16, torch.bfloat16)


def weight_tile(name):
    return tile_of(LAYOUTS[name][2])


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("parts", [{"norm", "offset", "residual"}, {"norm", "gate", "bias"}], ids=["norm", "gate"])
def test_one_row_is_the_product_of_its_numbers(device, dtype, name, parts):
    """Breaks at 37 x 300 if a tile past the end joins a sum, at 19 x 3072 if a column meets another's number."""
    for rows, width in ((37, 300 if weight_tile(name) == 128 else 384), (19, 3072)):
        check_one_row(packed_strips, packed_strips_reference, name, parts, rows, width, dtype=dtype, device=device)


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("tokens", [3, 13])
def test_a_few_rows_are_the_product_of_its_numbers(device, dtype, name, tokens):
    """Breaks if the ninth token meets the first one's columns, or a row past the end is stored; parts are float32."""
    for gate, rows, width in ((None, 37, 1100 if weight_tile(name) == 128 else 1152), ("silu", 16, 512)):
        weight, dense = weight_of(name, rows * (2 if gate else 1), width, device=device)
        bias = randn(len(dense), dtype=dtype, device=device, seed=3)
        x = gapped(randn(tokens, width, dtype=dtype, device=device))

        actual = packed_strips(x, weight, bias, gate=gate)

        expected = skinny_gemm_reference(x, dense.to(device), bias, gate=gate)
        assert_close(actual, expected, scale=4)
        if gate is None:
            whole = packed_strips(x, weight, bias, parts=True)
            assert whole.shape == (1, tokens, rows) and whole.dtype == torch.float32
            assert torch.equal(whole[0].to(dtype), actual)


@pytest.mark.parametrize("name", ["int4-128", "int4-128-zeros", "int4-row", "int4-32"])
@pytest.mark.parametrize("tiles, splits", [(23, 3), (13, 2)])
def test_splits_and_rounds_add_up_to_the_product(device, name, tiles, splits, monkeypatch):
    """Splits of 23 tiles in steps of four, in rounds of one and of two, the last split short: a tile that is left
    out or taken twice is a 23rd of all. Of 13 tiles the third split would have none, and took the middle of the codes
    from x of others (20 % of all). 200 is more than 2**7: codes are small numbers that x has to make large."""
    weight, dense = weight_of(name, 37, tiles * 128, device=device)
    x = randn(5, tiles * 128, dtype=torch.float16, device=device, spread=200)
    expected = skinny_gemm_reference(x, dense.to(device), None, parts=True)[0]
    for ring, hold in ((1, 1), (2, 0)):
        chosen = {"STRIPS": 1, "RING": ring, "SPLITS": 3, "HOLD": hold, "num_warps": 4}
        monkeypatch.setattr(
            launch, "tuned_rows", lambda name, use=chosen: {"packed_strips": [{"when": {}, "use": use}]}
        )

        parts = packed_strips(x, weight, parts=True)

        assert parts.shape == (splits, 5, 37) and parts.dtype == torch.float32
        assert float((parts.sum(0) - expected).norm() / expected.norm()) < 1e-3


def test_what_fits(device):
    """float16 times a norm's weight may overflow before it is scaled; blocks of 32 are another kernel's."""
    weight, _ = weight_of("int4-128", 16, 256, device=device)
    fits = device.type == "cuda"
    x = torch.ones(1, 256, dtype=torch.float16, device=device)
    assert strips_fit(x, weight) == strips_fit(x.bfloat16(), weight, x[0]) == fits
    assert not strips_fit(x, weight, x[0]) and not strips_fit(x.float(), weight)
    assert not strips_fit(x.expand(17, 256), weight)
    for name in ("int4-48", "int2-16", "int8-row"):
        assert not strips_fit(x, weight_of(name, 16, 256, device=device)[0])


def compile_cases():
    """Through packed_gemm, which comes here where a kernel may hold PTX."""
    weight = meta_weight("int4-128-zeros", 2 * 14336, 4096)
    yield lambda: packed_gemm(torch.empty(8, 4096, dtype=torch.bfloat16), weight, gate="silu")
