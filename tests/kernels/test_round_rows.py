"""Rows rounded to fp8, against torch's own conversion."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels.round_rows import round_rows, round_rows_reference


@pytest.mark.parametrize("how", ["own", "limit", "static", "groups"])
def test_round_rows_is_its_reference(device, dtype, how):
    """Within one code of 16 in the mantissa; rows of zeros stay zeros; breaks if a row takes its neighbour's scale."""
    for shape in ((3, 77), (2, 4096), (0, 8)):
        x = randn(*shape, dtype=dtype, device=device, spread=3.0)
        x[1:2] *= 100
        x[2:] = 0
        static = torch.full((1,), 0.02, device=device) if how == "static" else None
        given = {"limit": 1.5 if how == "limit" else 0.0, "width": 128 if how == "groups" else 0}
        codes, scales = round_rows(gapped(x), static, **given)

        expected, wanted = round_rows_reference(x, static, **given)
        assert_close(scales, wanted)
        assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
        difference = (codes.float() - expected.float()).abs()
        assert float((difference > 0).float().mean() if x.numel() else 0) < 0.01
        assert bool((difference <= expected.float().abs() / 7 + 2**-9).all())


def compile_cases():
    x = torch.empty(300, 14336, dtype=torch.bfloat16)
    yield lambda: round_rows(x, width=128)
