"""Top-k, top-p and min-p: the search against a full sort in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.harness import gapped, interpreting, randn
from tinyserve.kernels.threshold import threshold, threshold_reference

INF = float("inf")
NOISE = 1e-5  # of the row's mass: how far a float32 sum may stray from the float64 one
SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (2.0, 0, 0.3, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.3, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (0.01, 40, 0.95, 0.1),
    (1.5, 20, 0.6, 0.01),
    (1.0, 10**6, 1.0, 0.0),
]


def kept(logits, bound, last_tie):
    """[L, V]: what the pair of numbers says."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    values, bound = logits.float(), bound[:, None]
    return (values > bound) | ((values == bound) & (ids <= last_tie[:, None]))


def oracle(row, temperature, top_k, top_p, min_p):
    """Kept [V] by sorting, and whether top-p's border is nearer than float noise."""
    V = len(row)
    keep = torch.ones(V, dtype=torch.bool)
    if temperature == 0:
        return keep, False
    row = row.float()
    if min_p > 0:
        keep &= row >= row.max() + torch.tensor(temperature) * torch.tensor(min_p).log()
    if 0 < top_k < V:
        keep &= row >= row.sort(descending=True).values[top_k - 1]
    if top_p >= 1:
        return keep, False
    ranked, order = torch.where(keep, row, -INF).sort(descending=True, stable=True)
    mass = (ranked.double() / temperature).softmax(-1).cumsum(-1)
    count = int((mass < float(torch.tensor(top_p))).sum())
    small = torch.zeros(V, dtype=torch.bool)
    small[order[: count + 1]] = True
    return small & keep, bool((mass - top_p).abs().min() < NOISE)


def check(logits, rows, op):
    columns = list(zip(*rows, strict=True))
    tensors = [torch.tensor(column, device=logits.device) for column in columns]
    tensors[1] = tensors[1].to(torch.int32)
    actual = kept(logits, *op(logits, *tensors)).cpu()
    for i, row in enumerate(rows):
        expected, unsure = oracle(logits[i].cpu(), *row)
        if unsure:  # a border token more or less
            assert (actual[i] != expected).sum() <= 1, row
        else:
            assert torch.equal(actual[i], expected), row


@pytest.mark.parametrize("vocab", [1, 2, 320, 1001, 5000])
def test_threshold_is_the_sort(device, dtype, vocab):
    """Breaks at top_p 1e-6 if not one token is kept, at top_k 10**6 if it is not off."""
    logits = gapped(randn(len(SETTINGS), vocab, dtype=dtype, device=device, spread=3))

    for op in (threshold, threshold_reference):
        check(logits, SETTINGS, op)


def test_the_reference_at_a_real_size():
    logits = randn(len(SETTINGS), 49152, dtype=torch.float32, device="cpu", spread=3)
    check(logits, [*SETTINGS[:-1], (1.0, 20000, 0.999, 0.0)], threshold)


@pytest.mark.parametrize("values", [(0.0,), (0.0, 1.0), (3e38, -3e38), (1e-45, 3e-45, 0.0)])
def test_the_reference_ends_on_many_equal_candidates(values):
    """Breaks by hanging if halving the range of values makes no progress, e.g. 3e38 - -3e38 = inf."""
    logits = torch.tensor(values).repeat(5000)[None]

    check(logits, [(1.0, 0, 0.3, 0.0)], threshold)
    check(logits, [(1.0, 4999, 0.3, 0.0)], threshold)


@pytest.mark.parametrize("top_p, count", [(0.05, 1), (0.5, 5), (0.41, 5), (0.9, 9), (0.99, 10)])
def test_top_p_cuts_equal_logits_at_the_smallest_set(device, top_p, count):
    """Ten tokens with 0.1 each: 0.5 is reached by five, and by the five lowest ids."""
    logits = torch.full((1, 320), -100.0, device=device)
    logits[0, 97:107] = 0.0
    rows = [torch.tensor([x], device=device) for x in (1.0, 0, top_p, 0.0)]

    for op in (threshold, threshold_reference):
        found = kept(logits, *op(logits, rows[0], rows[1].int(), *rows[2:])).nonzero()[:, 1]

        assert found.tolist() == list(range(97, 97 + count))


def test_top_k_keeps_the_equals_of_the_last(device):
    logits = torch.tensor([[1.0, 5, 3, 3, 4, 3, -INF, 3]], device=device)
    one = torch.ones(1, device=device)

    for op in (threshold, threshold_reference):
        bound, last_tie = op(logits, one, 3 * one.int(), one, 0 * one)

        assert bound.tolist() == [3.0] and last_tie.tolist() == [7]


def test_rows_that_hold_nan_or_infinity_end_and_hurt_nobody(device):
    """Breaks by hanging if the bisection does not shrink on NaN."""
    logits = randn(5, 320, dtype=torch.float32, device=device)
    rows = [torch.full((5,), x, device=device) for x in (1.0, 5, 0.9, 0.1)]
    rows[1] = rows[1].to(torch.int32)
    good = threshold(logits, *rows)
    logits[1, 7], logits[2, 7], logits[3] = float("nan"), INF, -INF

    for op in (threshold, threshold_reference):
        bound, last_tie = op(logits, *rows)

        assert bound[[0, 4]].tolist() == good[0][[0, 4]].tolist()
        torch.testing.assert_close(
            kept(logits, bound, last_tie)[[0, 4]], kept(logits, *good)[[0, 4]], msg="the other rows changed"
        )


# Few different values, so that ties at the border are common.
LOGITS = st.lists(st.sampled_from([-INF, -30.0, -2.0, -0.0, 0.0, 0.5, 1.0, 1.0000001, 3.0]), min_size=1, max_size=30)


@given(
    LOGITS, st.sampled_from([0.01, 0.5, 1.0, 2.0]), st.integers(0, 31), st.floats(0.01, 1), st.sampled_from([0, 0.1, 1])
)
@settings(max_examples=80, deadline=None)
def test_any_row_is_the_sort(values, temperature, top_k, top_p, min_p):
    logits = torch.tensor([values])
    if logits.max() == -INF:
        return
    row = (temperature, top_k, float(torch.tensor(top_p)), float(min_p))

    check(logits, [row], threshold_reference)
    with interpreting():
        check(logits, [row], threshold)


def test_refusal_and_no_rows(device):
    none = torch.empty(0, device=device)
    assert threshold(torch.empty(0, 5, device=device), none, none.int(), none, none)[0].shape == (0,)
    with pytest.raises(ValueError, match="threshold: logits are"):
        threshold(torch.ones(2, 4, device=device), none, none.int(), none, none)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(device):
    """Breaks at row 14134 of 151936: the offset 2**31 wraps in 32 bits."""
    rows, vocab = 14140, 151936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    logits[-1, 151930:] = 50
    ones = torch.ones(rows, device=device)
    top_k = torch.zeros(rows, dtype=torch.int32, device=device)
    top_k[-1] = 6

    bound, _ = threshold(logits, ones, top_k, ones, 0 * ones)

    assert float(bound[-1]) == 50 and bool((bound[:-1] == -INF).all())


def compile_cases():
    row, top_k = torch.empty(3), torch.empty(3, dtype=torch.int32)
    yield lambda: threshold(torch.empty(3, 151936), row, top_k, row, row)
