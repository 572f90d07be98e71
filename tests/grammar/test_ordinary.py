"""Texts that look like special tokens, in a form that demands them."""

import pytest

from tests.scripted import EOS
from tinyserve.grammar.ordinary import Ordinary

from .harness import TOKENIZER, allowed, matcher

MARK = "a<|eot|>b"
WITH_MARKS = [
    ({"json": {"const": MARK}}, f'"{MARK}"'), ({"choice": [MARK, "x"]}, MARK), ({"regex": "a<\\|eot\\|>b"}, MARK),
    ({"grammar": f'start: "{MARK}"'}, MARK), ({"json": {"enum": ["<|eos|>"]}}, '"<|eos|>"'),
    ({"json": {"type": "object", "properties": {MARK: {"type": "null"}}, "required": [MARK]}}, f'{{"{MARK}": null}}'),
    ({"json": {"const": "<|bos|><think><|eot"}}, '"<|bos|><think><|eot"'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), WITH_MARKS)
def test_the_marks_of_special_tokens_are_text_in_a_form(form, text):
    """ "a<|im_end|>b" as a const was 400 after the answer began: "the answer cannot go on within it"."""
    match, said = matcher(**form), bytearray()
    for _ in range(60):
        may = allowed(match)
        wanted = [token for token in may if match.width and token != EOS and token < 266]
        token = next((t for t in wanted if text.encode()[len(said) :].startswith(TOKENIZER.token_bytes(t))), EOS)
        assert token in may and token not in TOKENIZER.special_ids - {EOS}
        match.advance(token)
        assert match.error is None
        if token == EOS:
            break
        said += TOKENIZER.token_bytes(token)
    assert said.decode() == text and match.ended


BYTES = [bytes([byte]) for byte in range(256)]


def test_marks_are_written_with_the_longest_tokens():
    """A tokenizer that puts a blank before each text is not asked for the pieces between marks."""
    tokens = [b"<s>", b"<", b"s", b">", b"s>", b" a", b"a"]
    blank = Ordinary(lambda text, **_: [0] if text == "<s>" else [5], tokens, frozenset({0}))
    assert blank.encode("a<s>a") == [6, 1, 4, 6]
    assert blank.encode(" a") == [5] and blank.encode("<s><s>") == [1, 4, 1, 4]


def test_what_cannot_be_written_ends_the_ids():
    """A vocabulary without ">": the ids are those of the beginning, and nothing behind the gap."""
    encoder = Ordinary(lambda text, **_: [3] * len(text), [b"<s>", b"<", b"s", b"a"], frozenset({0}))
    assert encoder.encode("a<s>a") == [3, 1, 2]


def test_without_special_tokens_a_text_is_encoded_in_one_piece():
    asked = []
    plain = Ordinary(lambda text, **_: asked.append(text) or list(text.encode()), BYTES, frozenset())
    assert plain.encode("abc") == list(b"abc") and asked == ["abc"]
