"""Norms, gates and additions that are left to a neighbour's kernel give the numbers of a chain that leaves nothing."""

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.kernels.harness import interpreting, randn, replaced
from tinyserve.layers.fold import Normed, Product
from tinyserve.layers.linear import Linear
from tinyserve.layers.mlp import GatedMLP
from tinyserve.layers.norm import RMSNorm
from tinyserve.quant.plain import Plain

HIDDEN, INNER = 64, 96


class Unfolding(Plain):
    """A format like those of quantised weights: it multiplies, and takes nothing in."""

    folds = False


def parts(make_format):
    """Two norms, a block with biases between them, and a norm at the end; float16, so that both kernels serve."""
    norms = [RMSNorm(HIDDEN, 1e-5) for _ in range(3)]
    blocks = [GatedMLP(HIDDEN, INNER, "silu", bias=True) for _ in range(2)]
    for seed, module in enumerate([*norms, *(layer for b in blocks for layer in (b.gate_up, b.down))]):
        if isinstance(module, Linear):
            module.format = make_format()
        module.allocate(torch.float16, torch.device("cpu"))
        for parameter in module.parameters():
            spread = HIDDEN**-0.5 if parameter.dim() == 2 else 1.0
            parameter.copy_(randn(*parameter.shape, dtype=torch.float16, device="cpu", seed=seed, spread=spread))
    return norms, blocks


def run(norms, blocks, x):
    """The frame of models/decoder.py with layers that fold; also the types that went between."""
    delta, seen = None, []
    for norm, block in zip(norms, blocks, strict=False):
        x, h = norm.fold(x, delta)
        delta = block(h)
        seen += [type(h), type(delta)]
    return norms[-1].add(x, delta)[1], seen


@pytest.mark.parametrize("tokens, kernels", [(1, 5), (3, 7)])
def test_a_folded_chain_is_the_chain(tokens, kernels):
    """One token: two kernels a block and the last norm; more: also a norm a block. Numbers within float16 noise."""
    norms, blocks = parts(Plain)
    x = randn(tokens, HIDDEN, dtype=torch.float16, device="cpu", seed=9)
    expected, plain = run(norms, blocks, x)
    launched, run_kernel = [], JITFunction.run

    with interpreting():
        interpreted = JITFunction.run

        def count(self, *args, **kwargs):
            launched.append(self)
            return interpreted(self, *args, **kwargs)

        with replaced(JITFunction, run=count):
            actual, seen = run(norms, blocks, x)

    assert JITFunction.run is run_kernel
    assert set(plain) == {torch.Tensor} and seen == [Normed, Product] * 2
    assert len(launched) == kernels
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("make_format", [Unfolding, lambda: Plain(invariant=True)], ids=["unfolding", "invariant"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_format_that_does_not_fold_gets_tensors(make_format, tokens):
    norms, blocks = parts(make_format)
    x = randn(tokens, HIDDEN, dtype=torch.float16, device="cpu", seed=9)
    expected, _ = run(norms, blocks, x)

    with interpreting():
        actual, seen = run(norms, blocks, x)

    assert seen == [Normed, torch.Tensor] * 2
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_invariant_weights_make_a_row_independent_of_its_batch():
    """The bits of the last row alone and among 33 rows, through norms, gates and biases."""
    norms, blocks = parts(lambda: Plain(invariant=True))
    x = randn(33, HIDDEN, dtype=torch.float16, device="cpu", seed=9)

    with interpreting():
        together, _ = run(norms, blocks, x)
        for rows in (x[-1:], x[-2:], x[-8:]):
            assert torch.equal(run(norms, blocks, rows)[0], together[-len(rows) :])
