"""Reported log-probabilities against torch.log_softmax and a stable sort."""

import pytest
import torch

from tests.kernels.harness import gapped, randn
from tinyserve.kernels.logprobs import logprobs, logprobs_reference

INF = float("inf")
SHAPES = [(0, 320), (1, 320), (3, 1001), (5, 1), (2, 5000), (1, 49152)]


@pytest.mark.parametrize("rows, vocab", SHAPES)
def test_logprob_and_rank_are_those_of_log_softmax(device, dtype, rows, vocab):
    """Breaks above 1e-5 relative if the sum is taken in the logits' half precision."""
    logits = gapped(randn(rows, vocab, dtype=dtype, device=device, spread=4))
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(0)).to(device)
    expected = logits.double().log_softmax(-1)
    chosen = logits.gather(1, targets[:, None])
    rank = (logits >= chosen).sum(-1)

    for op in (logprobs, logprobs_reference):
        actual = op(logits, targets)

        torch.testing.assert_close(
            actual.logprob.double(), expected.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=2e-5
        )
        torch.testing.assert_close(actual.log_z.double(), logits.double().logsumexp(-1), rtol=1e-5, atol=2e-5)
        assert actual.rank.dtype == torch.int32 and actual.rank.tolist() == rank.tolist()


def test_some_rows_only(device):
    logits = gapped(randn(6, 77, dtype=torch.float32, device=device))
    rows = torch.tensor([5, 0, 3], device=device)
    targets = torch.tensor([1, 2, 76], device=device)
    scores, expected = logprobs(logits, targets, rows), logprobs_reference(logits[rows], targets)

    torch.testing.assert_close(scores.logprob, expected.logprob)
    assert torch.equal(scores.rank, expected.rank)


def test_masked_tokens_and_equals(device):
    """Rank counts equals (3 tokens at 2.0)."""
    logits = torch.tensor([[-INF, 2.0, -0.0, 2.0, 0.0, 2.0, -INF]], device=device)

    for scores in (logprobs, logprobs_reference):
        assert scores(logits, torch.tensor([3], device=device)).rank.tolist() == [3]
        assert scores(logits, torch.tensor([2], device=device)).rank.tolist() == [5]
        assert float(scores(logits, torch.tensor([0], device=device)).logprob) == -INF


def test_one_possible_token_has_probability_one(device):
    logits = torch.full((1, 5000), -INF, device=device)
    logits[0, 4999] = -30.0

    for op in (logprobs, logprobs_reference):
        assert op(logits, torch.tensor([4999], device=device)).logprob.tolist() == [0.0]


def test_a_row_with_nan_leaves_the_others(device):
    logits = randn(3, 320, dtype=torch.float32, device=device)
    targets = torch.tensor([3, 4, 5], device=device)
    good = logprobs(logits, targets)
    logits[1] = float("nan")

    for scores in (logprobs, logprobs_reference):
        actual = scores(logits, targets)

        torch.testing.assert_close(actual.logprob[::2], good.logprob[::2])
        assert actual.rank[::2].tolist() == good.rank[::2].tolist()


def test_refusal(device):
    with pytest.raises(ValueError, match="logprobs: 2 rows of logits, targets are"):
        logprobs(torch.ones(2, 4, device=device), torch.zeros(3, device=device).int())


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(device):
    """Breaks at row 14134 of 151936: the offset 2**31 wraps in 32 bits."""
    rows, vocab = 14140, 151936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    logits[-1, -1] = 50
    targets = torch.full((rows,), vocab - 1, device=device)

    scores = logprobs(logits, targets)

    assert float(scores.logprob[-1]) == 0 and int(scores.rank[-1]) == 1


def compile_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rows in (None, torch.empty(2, dtype=torch.int64, device="meta")):

            def case(dtype=dtype, rows=rows):
                logits = torch.empty(2, 151936, dtype=dtype)
                logprobs(logits, torch.empty(2, dtype=torch.int32), rows)

            yield case
