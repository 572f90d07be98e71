"""The k largest logits against a stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.harness import gapped, interpreting, randn
from tinyserve.kernels.top_tokens import MAX_K, top_tokens, top_tokens_reference

INF = float("inf")
SHAPES = [(0, 320), (1, 320), (3, 1001), (5, 1), (2, 9000), (1, 49152)]


@pytest.mark.parametrize("rows, vocab", SHAPES)
@pytest.mark.parametrize("k", [0, 1, 5, 20, MAX_K + 1, 10**6])
def test_top_tokens_are_those_of_a_stable_sort(device, dtype, rows, vocab, k):
    logits = gapped(randn(rows, vocab, dtype=dtype, device=device, spread=4).round())  # many equals
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)

    for op in (top_tokens, top_tokens_reference):
        actual = op(logits, k)

        assert actual.ids.dtype == torch.int32 and actual.logits.dtype == torch.float32
        assert torch.equal(actual.ids.long(), ids[:, :k]) and torch.equal(actual.logits, values[:, :k])


def test_some_rows_only(device):
    logits = gapped(randn(6, 77, dtype=torch.float32, device=device))
    rows = torch.tensor([5, 0, 3], device=device)

    for op in (top_tokens, top_tokens_reference):
        assert torch.equal(op(logits, 4, rows).ids, top_tokens_reference(logits[rows], 4).ids)


def test_masked_tokens_and_equals(device):
    """Among equals, and among the -inf, the lowest ids are reported first; -0.0 is an equal of 0.0."""
    logits = torch.tensor([[-INF, 2.0, -0.0, 2.0, 0.0, 2.0, -INF]], device=device)

    for op in (top_tokens, top_tokens_reference):
        assert op(logits, 7).ids.tolist() == [[1, 3, 5, 2, 4, 0, 6]]


def test_more_equals_than_fit(device):
    """A row of 5000 equals under a few larger ones: more candidates than a program holds."""
    logits = torch.zeros(1, 5000, device=device)
    logits[0, [4999, 7]] = torch.tensor([1.0, 2.0], device=device)

    assert top_tokens(logits, 5).ids.tolist() == [[7, 4999, 0, 1, 2]]


def test_a_row_with_nan_leaves_the_others(device):
    logits = randn(3, 320, dtype=torch.float32, device=device)
    best = top_tokens(logits, 3)
    logits[1] = float("nan")

    for op in (top_tokens, top_tokens_reference):
        assert op(logits, 3).ids[::2].tolist() == best.ids[::2].tolist()


@given(st.lists(st.sampled_from([-INF, -3.0, -0.0, 0.0, 1.0, 1.5, 60.0]), min_size=1, max_size=20), st.integers(0, 22))
@settings(max_examples=50, deadline=None)
def test_any_row_is_sorted(values, k):
    logits = torch.tensor([values])
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    with interpreting():
        assert torch.equal(top_tokens(logits, k).ids.long(), ids)

    assert torch.equal(top_tokens_reference(logits, k).ids.long(), ids)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(device):
    """Breaks at row 14134 of 151936: the offset 2**31 wraps in 32 bits."""
    rows, vocab = 14140, 151936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    logits[:, -1] = 50
    logits[:, 5] = 40

    assert top_tokens(logits[-3:], 2).ids.tolist() == [[vocab - 1, 5]] * 3
    assert top_tokens(logits, 2).ids[-2:].tolist() == [[vocab - 1, 5]] * 2


def compile_cases():
    yield lambda: top_tokens(torch.empty(2, 151936, dtype=torch.bfloat16), 20)
    yield lambda: top_tokens(torch.empty(2, 151936), 20, torch.empty(2, dtype=torch.int64))
