"""Rows rounded to whole numbers of two limbs, against the numbers that they were."""

import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels.round_limbs import column_of, round_limbs, round_limbs_reference


def test_limbs_are_their_reference(device, dtype):
    """What limbs and factors stand for is x to 2**-15 of a tile's largest; rows of zeros stay zeros, NaN stays NaN."""
    x = randn(5, 300, dtype=dtype, device=device, spread=3)
    x[1] *= 100
    x[2] = 0
    x[3, 150] = float("nan")
    for norm in (None, randn(300, dtype=dtype, device=device, seed=1)):
        limbs, wanted = round_limbs(gapped(x), norm, eps=1e-5), round_limbs_reference(x, norm, eps=1e-5)

        fine = torch.tensor([0, 1, 2, 4], device=device)
        assert limbs.codes.shape == (16, 384) and limbs.scales.shape == limbs.sums.shape == (3, 8)
        assert_close(limbs.scales[:, fine], wanted.scales[:, fine])
        numbers = limbs.codes.int().unflatten(1, (3, 128))
        numbers = 128 * numbers[:8] + numbers[8:]
        assert_close(limbs.sums[:, fine], (limbs.scales * numbers.sum(2).t())[:, fine])
        assert limbs.scales[1, 3].isnan() and limbs.scales[0, 3].isfinite() == (norm is None)
        numbers = (numbers * limbs.scales.t()[:, :, None])[fine]
        numbers = numbers[:, :, column_of(torch.arange(128)).argsort().to(device)].flatten(1)
        expected = x[fine].float()
        if norm is not None:
            expected = expected * (expected.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.float()
        near = wanted.scales[:, fine].t().repeat_interleave(128, dim=1)[:, :300]
        assert bool(((numbers[:, :300] - expected).abs() <= near * 0.51).all()) and not numbers[:, 300:].any()
