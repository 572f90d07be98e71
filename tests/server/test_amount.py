"""server/amount.py: what is counted, against a character by character reading."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.server import amount
from tinyserve.server.errors import TooLarge

WEIGHTS = {",": 1, ":": 6, "{": 4, "[": 2, '"': 1}
texts = st.text(st.sampled_from('a",\\:{[ '), max_size=12)
values = st.recursive(texts | st.integers(), lambda v: st.lists(v, max_size=4) | st.dictionaries(texts, v, max_size=4))


def slowly(text):
    found, inside, escaped = 0, False, False
    for letter in text:
        quote = letter == '"' and not escaped
        if quote or not inside:
            found += WEIGHTS.get(letter, 0)
        inside ^= quote
        escaped = letter == "\\" and not escaped
    return found


def test_the_count_equals_a_slow_one_at_any_slice(monkeypatch):
    """Slices of 7 bytes cut through strings and through runs of backslashes."""
    monkeypatch.setattr(amount, "SLICE", 7)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(values)
    def check(value):
        body = json.dumps(value)
        assert amount._outside_strings(body.encode()) == slowly(body) <= amount._at_most(body.encode())

    check()


def test_too_many_values_and_messages_are_refused():
    """With 32 KB of body, 1024 numbers are the most; text does not count, wherever it has commas."""
    amount.check_amount(b"[" + b"1," * 1000 + b"1]", 2**15)
    amount.check_amount(b'["' + b'a, \\", ' * 3000 + b'"]', 2**15)
    with pytest.raises(TooLarge, match="1024 numbers"):
        amount.check_amount(b"[" + b"1," * 1024 + b"1]", 2**15)
    with pytest.raises(TooLarge, match="10000 messages"):
        amount.check_amount(b'{"role":""}' * 10_001, 2**30)
