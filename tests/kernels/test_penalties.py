"""Penalties against counting by hand, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.harness import assert_close, gapped, interpreting, randn
from tinyserve.kernels.penalties import penalties, penalties_reference

SETTINGS = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -1.5), (2.0, -2.0, 2.0)]


def by_hand(logits, tokens, slots, prompt_len, positions, repetition, frequency, presence):
    out = logits.clone().float()
    for row in range(len(logits)):
        prompt = tokens[slots[row], : prompt_len[row]].tolist()
        output = tokens[slots[row], prompt_len[row] : positions[row]].tolist()
        for token in range(logits.shape[1]):
            value = float(out[row, token])
            if token in prompt or token in output:
                value = value / float(repetition[row]) if value > 0 else value * float(repetition[row])
            count = output.count(token)
            out[row, token] = value - float(frequency[row]) * count - float(presence[row]) * (count > 0)
    return out.to(logits.dtype)


def table(device, vocab, *, length=1500):
    """Rows of tokens with many repeats; NaN-like rubbish (a large id) after the known ones is never read."""
    tokens = torch.randint(0, vocab, (9, length), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    tokens[:, ::3] = 1 % vocab
    return gapped(tokens.to(device))


def arguments(device, vocab):
    slots = torch.tensor([4, 0, 8, 2, 7, 1], device=device)
    prompt_len = torch.tensor([3, 5, 1100, 1, 40, 12], dtype=torch.int32, device=device)
    positions = torch.tensor([10, 5, 1400, 2, 41, 1300], dtype=torch.int32, device=device)
    numbers = [torch.tensor(column, device=device) for column in zip(*SETTINGS, strict=True)]
    return table(device, vocab), slots, prompt_len, positions, *numbers


@pytest.mark.parametrize("vocab", [1, 77, 320, 2100])
def test_penalties_are_counted_by_hand(device, dtype, vocab):
    logits = gapped(randn(6, vocab, dtype=dtype, device=device, spread=3))
    rows = arguments(device, vocab)
    expected = by_hand(logits.cpu(), *(part.cpu() for part in rows))

    for op in (penalties, penalties_reference):
        actual = logits.clone()
        op(actual, *rows)

        assert_close(actual.cpu(), expected)
        assert torch.equal(actual[0], logits[0]), "a row without penalties changed"


def test_counts_are_zeros_again(device):
    """Breaks in the second step if one count is left behind by the first."""
    logits = randn(6, 320, dtype=torch.float32, device=device, spread=3)
    rows, counts = arguments(device, 320), torch.zeros(7, 320, dtype=torch.int32, device=device)
    first, second = logits.clone(), logits.clone()

    penalties(first, *rows, counts)
    assert not counts.any()
    penalties(second, *rows, counts)

    assert torch.equal(first, second)


def test_the_prompt_counts_for_repetition_only(device):
    """Breaks if a preempted request's output is taken for prompt: -0.5 and -1.0 would be missing."""
    logits = torch.zeros(1, 8, device=device) + 1
    tokens = torch.tensor([[1, 2, 2, 3, 3, 2, 7, 7]], dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    where = [torch.tensor([x], dtype=torch.int32, device=device) for x in (0, 3, 6)]

    for op in (penalties, penalties_reference):
        actual = logits.clone()
        op(actual, tokens, *where, 2 * one, 0.5 * one, 0.25 * one)

        assert actual.tolist() == [[1, 0.5, 0.5 - 0.5 - 0.25, 0.5 - 1.0 - 0.25, 1, 1, 1, 1]]


def test_infinities_and_ids_outside_the_vocabulary(device):
    """Breaks with an access outside the row if an image placeholder (id 10**6) is not skipped."""
    logits = torch.tensor([[float("-inf"), float("nan"), 3.0]], device=device)
    tokens = torch.tensor([[0, 1, 10**6, -1]], dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    where = [torch.tensor([x], dtype=torch.int32, device=device) for x in (0, 1, 4)]

    for op in (penalties, penalties_reference):
        actual = logits.clone()
        op(actual, tokens, *where, 2 * one, one, one)

        assert actual[0, 0] == float("-inf") and actual[0, 1].isnan() and actual[0, 2] == 3


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_row_is_counted_by_hand(data):
    vocab = data.draw(st.integers(1, 12))
    known = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=30))
    prompt = data.draw(st.integers(1, len(known)))
    numbers = [data.draw(st.floats(low, high)) for low, high in ((0.1, 3), (-2, 2), (-2, 2))]
    logits = randn(1, vocab, dtype=torch.float32, device="cpu", seed=prompt, spread=3)
    rows = [
        torch.tensor([known], dtype=torch.int32),
        *(torch.tensor([x], dtype=torch.int32) for x in (0, prompt, len(known))),
        *(torch.tensor([x]) for x in numbers),
    ]
    expected = by_hand(logits, *rows)
    other = logits.clone()

    penalties_reference(logits, *rows)
    with interpreting():
        penalties(other, *rows)

    assert_close(logits, expected)
    assert_close(other, expected)


def test_no_rows_and_refusal(device):
    none, table_ = torch.empty(0, device=device), torch.zeros(1, 4, dtype=torch.int32, device=device)
    penalties(torch.empty(0, 9, device=device), table_, none, none, none, none, none, none)
    with pytest.raises(ValueError, match="penalties: logits are"):
        penalties(torch.ones(2, 9, device=device), table_, none, none, none, none, none, none)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(device):
    """Breaks at row 14134 of 151936: the offset 2**31 wraps in 32 bits."""
    rows, vocab = 14140, 151936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    tokens = torch.full((1, 4), vocab - 1, dtype=torch.int32, device=device)
    zeros, ones = torch.zeros(rows, device=device), torch.ones(rows, device=device)

    penalties(logits, tokens, zeros.int(), ones.int(), 3 * ones.int(), ones, zeros, ones)

    assert float(logits[-1, -1]) == -1 and float(logits[-1, :-1].abs().max()) == 0


def compile_cases():
    for dtype in (torch.float32, torch.bfloat16):
        row, number = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(3, device="meta")
        yield lambda dtype=dtype, row=row, number=number: penalties(
            torch.empty(3, 151936, dtype=dtype),
            torch.empty(8, 4096, dtype=torch.int32),
            row,
            row,
            row,
            number,
            number,
            number,
        )
