"""Norm, rotation and cache write of latent attention, kernel against reference, on a cache full of NaN."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import latent_write as module
from tinyserve.layers.rope import RopeSpec, table

CASES = [(5, 3, 8, 32, 8, True), (1, 17, 16, 24, 12, False), (0, 2, 8, 32, 8, True), (2, 4, 128, 512, 64, True)]


def inputs(dtype, device, tokens, heads, nope, width, rotary):
    q = gapped(randn(tokens, heads * (nope + rotary), dtype=dtype, device=device)).unflatten(1, (heads, -1))
    kv = gapped(randn(tokens, width + rotary, dtype=dtype, device=device, seed=1))
    positions = torch.arange(3, 3 + tokens, dtype=torch.int32, device=device)
    cos_sin = table(RopeSpec(dim=rotary), 40).to(device)
    weight = randn(width, dtype=dtype, device=device, seed=2)
    cache = torch.full((6, 1, 4, width + rotary), torch.nan, dtype=dtype, device=device)
    slots = torch.tensor([9, 4, -1, 22, 5], device=device)[:tokens]
    return q, kv, positions, cos_sin, weight, cache, slots


@pytest.mark.parametrize("tokens, heads, nope, width, rotary, interleaved", CASES)
def test_write_is_its_reference(device, dtype, tokens, heads, nope, width, rotary, interleaved):
    arguments = inputs(dtype, device, tokens, heads, nope, width, rotary)
    cache, slots = arguments[5], arguments[6]
    other = cache.clone()

    found = module.latent_write(*arguments, eps=1e-5, interleaved=interleaved)
    expected = module.latent_write_reference(*arguments[:5], other, slots, eps=1e-5, interleaved=interleaved)

    for actual, wanted in zip((*found, cache), (*expected, other), strict=True):
        assert_close(actual, wanted)
    assert int((~cache.isnan()).any(-1).sum()) == int((slots >= 0).sum())


def test_by_hand():
    """kv (3, 4 | 1, 0) at an angle of 90 degrees: norm 1/sqrt(12.5) of (3, 4), and (1, 0) becomes (0, 1)."""
    cache = torch.zeros(1, 1, 2, 4)
    q = torch.tensor([[[7.0, 0.0, 1.0]]])
    one = torch.tensor([0]), torch.tensor([[0.0, 1.0]]), torch.ones(2), cache, torch.tensor([1])

    q_pe, latent = module.latent_write(q, torch.tensor([[3.0, 4.0, 1.0, 0.0]]), *one, eps=0.0)

    assert_close(latent, torch.tensor([[3 / 12.5**0.5, 4 / 12.5**0.5, 0.0, 1.0]]))
    assert_close(q_pe, torch.tensor([[[-1.0, 0.0]]]))
    assert torch.equal(cache[0, 0, 1], latent[0]) and not cache[0, 0, 0].any()


def test_refusals(device):
    arguments = list(inputs(torch.float32, device, 2, 2, 8, 16, 8))
    arguments[1] = arguments[1][:, :20]
    with pytest.raises(ValueError, match="do not fit each other"):
        module.latent_write(*arguments)


def compile_cases():
    def case(dtype, heads):
        q, kv = torch.empty(4, heads, 192, dtype=dtype), torch.empty(4, 576, dtype=dtype)
        ints, cos_sin = torch.empty(4, dtype=torch.int32), torch.empty(100, 64)
        module.latent_write(q, kv, ints, cos_sin, kv[0, :512], torch.empty(8, 1, 64, 576, dtype=dtype), ints.long())

    yield lambda: case(torch.bfloat16, 128)
    yield lambda: case(torch.float32, 16)
