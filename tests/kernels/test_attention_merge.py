"""Merging splits: against its reference, and against one softmax over all keys."""

import pytest
import torch

from tests.kernels.harness import assert_close, nan_like, randn
from tinyserve.kernels import attention_merge as module

SHAPES = [(0, 4, 2, 64), (1, 1, 1, 80), (3, 3, 5, 64), (2, 4, 64, 256), (1, 2, 300, 96)]


def parts(shape, device, seed=0):
    sequences, heads, splits, _ = shape
    partial = randn(*shape, dtype=torch.float32, device=device, seed=seed)
    lse = randn(sequences, heads, splits, dtype=torch.float32, device=device, seed=seed + 1, spread=5)
    return partial, lse


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merge_is_its_reference(device, dtype, shape, with_sinks):
    partial, lse = parts(shape, device)
    empty = lse > 4
    lse[empty] = -torch.inf
    partial[empty] = torch.nan
    sinks = randn(shape[1], dtype=dtype, device=device, seed=2, spread=3) if with_sinks else None
    wide = torch.full((shape[0], shape[1] + 1, shape[3] + 8), torch.nan, dtype=dtype, device=device)
    out = wide[:, : shape[1], : shape[3]]

    module.attention_merge(partial, lse, sinks=sinks, out=out)
    again = module.attention_merge(partial, lse, sinks=sinks, out=nan_like(out))

    assert_close(out, module.attention_merge_reference(partial, lse, sinks=sinks, out=torch.empty_like(out)))
    assert torch.equal(out, again)
    assert wide[:, shape[1] :].isnan().all() and wide[..., shape[3] :].isnan().all()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_splits_together_are_one_softmax(device, with_sinks):
    """Breaks if a split's weight is not its share of the denominator, or a sink counts once per split."""
    scores, values = (
        randn(2, 3, 40, dtype=torch.float32, device=device),
        randn(40, 16, dtype=torch.float32, device=device),
    )
    sinks = torch.tensor([0.5, -2.0, 3.0], device=device) if with_sinks else None
    pieces = scores.view(2, 3, 4, 10)
    partial = (pieces.softmax(-1)[..., None] * values.view(4, 10, 16)).sum(-2)

    out = module.attention_merge(partial, pieces.logsumexp(-1), sinks=sinks, out=torch.empty(2, 3, 16, device=device))

    weight = scores.exp() / (scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None]))
    assert_close(out, weight @ values)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("merge", [module.attention_merge, module.attention_merge_reference])
def test_a_row_of_empty_splits_is_zero(device, merge, with_sinks):
    partial, lse = parts((2, 2, 3, 64), device)
    lse[1], partial[1] = -torch.inf, torch.nan
    sinks = torch.zeros(2, device=device) if with_sinks else None

    out = merge(partial, lse, sinks=sinks, out=torch.empty(2, 2, 64, device=device))

    assert (out[1] == 0).all() and out[0].isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lse": torch.zeros(2, 3, 5)}, r"wants lse \[2, 3, 4\] and out \[2, 3, 8\], got \[2, 3, 5\]"),
        ({"sinks": torch.zeros(4)}, r"sinks must be \[3\], is \[4\]"),
        ({"partial": torch.zeros(2, 3, 4, 8, dtype=torch.float16)}, "must be float32"),
        ({"out": torch.zeros(2, 8, 3).mT}, "contiguous"),
        ({"partial": torch.zeros(2, 3, 0, 8), "lse": torch.zeros(2, 3, 0)}, "there are no parts"),
    ],
)
def test_refusals(device, change, message):
    arguments = {
        "partial": torch.zeros(2, 3, 4, 8),
        "lse": torch.zeros(2, 3, 4),
        "sinks": None,
        "out": torch.zeros(2, 3, 8),
    } | change
    arguments = {name: value if value is None else value.to(device) for name, value in arguments.items()}

    with pytest.raises(ValueError, match=message):
        module.attention_merge(arguments.pop("partial"), arguments.pop("lse"), **arguments)


def compile_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for splits, head_dim in ((4, 64), (32, 80), (64, 256)):
            yield lambda dtype=dtype, splits=splits, head_dim=head_dim: module.attention_merge(
                torch.empty(2, 8, splits, head_dim),
                torch.empty(2, 8, splits),
                sinks=torch.empty(8, dtype=dtype) if splits == 4 else None,
                out=torch.empty(2, 8, head_dim, dtype=dtype),
            )
