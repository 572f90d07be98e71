"""Bit masks and edits of single tokens, against loops over Python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.harness import gapped, interpreting, randn
from tinyserve.kernels.token_mask import ANY, edit_tokens, edit_tokens_reference, token_mask, token_mask_reference

INF, NAN = float("inf"), float("nan")
FOREVER = 2**31 - 1


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("vocab, words", [(1, 1), (31, 1), (33, 2), (320, 10), (320, 12), (320, 9), (5000, 157)])
def test_a_cleared_bit_forbids(device, dtype, vocab, words):
    """320 tokens with 9 words: ids 288 to 319 are forbidden. With 12 words the last 64 bits mean nothing."""
    logits = gapped(randn(5, vocab, dtype=dtype, device=device))
    logits[3, 0] = NAN
    masks = torch.randint(
        -(2**31), 2**31, (3, words + 1), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    masks = masks.to(device)[:, :words]
    rows = torch.tensor([4, 0, 2], device=device)
    expected = logits.clone()
    for mask, row in zip(masks.tolist(), rows.tolist(), strict=True):
        for token in range(vocab):
            if token // 32 >= words or not (mask[token // 32] >> (token % 32)) & 1:
                expected[row, token] = -INF

    for op in (token_mask, token_mask_reference):
        actual = logits.clone()
        op(actual, masks, rows)

        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def by_hand(logits, edits, tokens, slots, prompt_len, positions):
    out = logits.clone()
    for row, token, value, until, suffix in edits:
        output = tokens[slots[row], prompt_len[row] : positions[row]].tolist()
        wanted = [x for x in suffix if x != ANY]
        if len(output) < until and output[len(output) - len(wanted) :] == wanted and 0 <= token < logits.shape[1]:
            out[row, token] += value
    return out


def packed(edits, device="cpu"):
    rows, ids, values, until, suffix = zip(*edits, strict=True)
    return (
        int32(rows, device), int32(ids, device), torch.tensor(values, device=device), int32(until, device),
        int32(suffix, device).view(len(edits), -1),
    )  # fmt: skip


TOKENS = [[9, 1, 2, 3, 1, 2, 0, 0], [1, 2, 2, 1, 2, 8, 8, 8], [5, 5, 5, 5, 5, 5, 5, 5]]
EDITS = [  # row, id, value, until, suffix; row 0 has the output 3 1 2, row 1 none, row 2 five tokens
    (0, 0, 5.0, FOREVER, (ANY, ANY)),
    (0, 0, -INF, 4, (ANY, ANY)),  # min_tokens 4, three exist: forbidden, and the bias above is lost
    (0, 1, -INF, 3, (ANY, ANY)),  # min_tokens 3, three exist: allowed
    (0, 2, -INF, FOREVER, (1, 2)),
    (0, 3, -INF, FOREVER, (2, 1)),
    (0, 4, -INF, FOREVER, (ANY, 2)),
    (0, 4, -INF, FOREVER, (ANY, 2)),
    (1, 0, -INF, FOREVER, (1, 2)),  # only the prompt ends so
    (1, 1, -INF, FOREVER, (ANY, 2)),
    (1, 2, -100.0, 1, (ANY, ANY)),
    (2, 3, -INF, FOREVER, (5, 5)),
    (2, 6, 1.0, FOREVER, (ANY, ANY)),  # no such token
    (2, -1, 1.0, FOREVER, (ANY, ANY)),
]


def test_edits_follow_the_history(device):
    logits = gapped(randn(3, 6, dtype=torch.float32, device=device))
    history = (gapped(int32(TOKENS, device)), *(int32(x, device) for x in ([0, 1, 2], [3, 5, 1], [6, 5, 6])))
    expected = by_hand(logits, EDITS, *history)

    for op in (edit_tokens, edit_tokens_reference):
        actual = logits.clone()
        op(actual, *packed(EDITS, device), *history)

        assert torch.equal(actual, expected)
        assert (actual == -INF).nonzero().tolist() == [[0, 0], [0, 2], [0, 4], [2, 3]]


def test_an_edit_does_not_hide_nan(device):
    logits = torch.tensor([[NAN, INF, 1.0]], device=device)
    history = (int32([[0, 0]], device), int32([0], device), int32([1], device), int32([1], device))
    edits = packed([(0, token, -INF, FOREVER, ()) for token in range(3)], device)

    for op in (edit_tokens, edit_tokens_reference):
        actual = logits.clone()
        op(actual, *edits, *history)

        assert actual.isnan().tolist() == [[True, True, False]] and actual[0, 2] == -INF


def test_many_edits(device):
    """1000 edits over several programs; an index within a block only would miss those after 128."""
    logits = torch.zeros(2, 2000, device=device)
    history = (int32([[0, 0]], device), int32([0, 0], device), int32([1, 1], device), int32([1, 2], device))
    edits = [(token % 2, token, float(token), FOREVER, ()) for token in range(0, 2000, 2)]
    edits += [(1, token, -float(token), FOREVER, ()) for token in range(1, 2000, 2)]

    edit_tokens(logits, *packed(edits, device), *history)

    assert logits[0].tolist() == [float(token) if token % 2 == 0 else 0.0 for token in range(2000)]
    assert logits[1].tolist() == [-float(token) if token % 2 else 0.0 for token in range(2000)]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_edit_is_the_loop(data):
    token = st.integers(0, 2)
    known = data.draw(st.lists(token, min_size=6, max_size=6))
    prompt, end = sorted((data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))))
    word = st.lists(token, max_size=3).map(lambda w: (ANY,) * (3 - len(w)) + tuple(w))
    edits = [
        (0, i, data.draw(st.sampled_from([-INF, 2.0])), data.draw(st.integers(0, 6)), data.draw(word)) for i in range(4)
    ]
    logits = torch.zeros(1, 4)
    history = (int32([known]), int32([0]), int32([prompt]), int32([end]))
    expected = by_hand(logits, edits, *history)
    other = logits.clone()

    edit_tokens_reference(logits, *packed(edits), *history)
    with interpreting():
        edit_tokens(other, *packed(edits), *history)

    assert torch.equal(logits, expected) and torch.equal(other, expected)


def test_refusals_and_nothing_to_do(device):
    logits, row = torch.zeros(2, 40, device=device), int32([0], device)
    token_mask(logits, int32([], device).view(0, 2), int32([], device))
    with pytest.raises(ValueError, match="token_mask: masks are"):
        token_mask(logits, torch.zeros(1, 2, device=device), row)
    with pytest.raises(ValueError, match="must be float32"):
        edit_tokens(logits.half(), row, row, row.float(), row, row[:, None], row[:, None], row, row, row)
    with pytest.raises(ValueError, match="edit_tokens: 1 rows, 0 ids"):
        edit_tokens(logits, row, row[:0], row.float(), row, row[:, None], row[:, None], row, row, row)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(device):
    """Breaks at row 14134 of 151936: the offset 2**31 wraps in 32 bits."""
    rows, vocab = 14140, 151936
    logits = torch.zeros(rows, vocab, device=device)
    last = int32([rows - 1], device)
    many = torch.zeros(rows, dtype=torch.int32, device=device)
    mask = torch.full((1, vocab // 32), -1, dtype=torch.int32, device=device)
    mask[0, -1] = 0

    token_mask(logits, mask, last)
    edit_tokens(logits, *packed([(rows - 1, 0, 7.0, FOREVER, ())], device), many[:1, None], many, many, many)

    assert bool((logits[-1, -32:] == -INF).all()) and float(logits[-1, 0]) == 7
    assert float(logits[:-1].abs().max()) == 0


def compile_cases():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield lambda dtype=dtype: token_mask(
            torch.empty(3, 151936, dtype=dtype),
            torch.empty(2, 4748, dtype=torch.int32),
            torch.empty(2, dtype=torch.int64),
        )

    def edits():
        row = torch.empty(3, dtype=torch.int32)
        edit_tokens(torch.empty(3, 151936), row, row, torch.empty(3), row, torch.empty(3, 2, dtype=torch.int32),
                    torch.empty(8, 4096, dtype=torch.int32), row, row, row)  # fmt: skip

    yield edits
