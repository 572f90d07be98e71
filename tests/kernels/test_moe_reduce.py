"""The sum over a token's experts, with the shared one."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tinyserve.kernels import moe_reduce as module


@pytest.mark.parametrize("shared, gate", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("tokens, choices, width", [(0, 2, 8), (1, 8, 1500), (5, 3, 77)])
def test_reduce_is_its_reference(device, dtype, tokens, choices, width, shared, gate):
    parts = randn(tokens, choices, width, dtype=dtype, device=device)
    extra = randn(tokens, width, dtype=dtype, device=device, seed=1) if shared else None
    opening = randn(tokens, 1, dtype=dtype, device=device, seed=2) if gate else None

    assert_close(module.moe_reduce(parts, extra, opening), module.moe_reduce_reference(parts, extra, opening), scale=2)


def test_by_hand():
    """1 + 2 + sigmoid(0) * 4 = 5."""
    out = module.moe_reduce(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[4.0]]), torch.tensor([[0.0]]))

    assert out.item() == 5


def test_refusals(device):
    parts = torch.zeros(2, 2, 8, device=device)
    with pytest.raises(ValueError, match=r"shared must be \[2, 8\]"):
        module.moe_reduce(parts, torch.zeros(2, 4, device=device))
    with pytest.raises(ValueError, match="comes with shared"):
        module.moe_reduce(parts, None, torch.zeros(2, 1, device=device))


def compile_cases():
    for shared in (None, torch.bfloat16):
        yield lambda shared=shared: module.moe_reduce(
            torch.empty(4, 8, 2048, dtype=torch.bfloat16), shared and torch.empty(4, 2048, dtype=shared)
        )
