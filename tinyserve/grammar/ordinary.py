"""Ids of a text that looks like a special token, without that token.

    a<|im_end|>b   ->   a  <  |  im  _  end  |>  b

A tokenizer takes the mark for the token; a grammar that demands the letters of it cannot take that. So the marks are
cut out, and written with the longest tokens that are not special, one after the other.

Before: text/tokenizer.py.  After: compile.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

LONGEST = 64  # bytes of a token that is tried


class Ordinary:
    """Encodes with ordinary tokens.

    Args:
        encode: ids of a text, as the tokenizer has it.   tokens: bytes of each id.   special: ids that must not come.
    """

    def __init__(self, encode: Callable[..., list[int]], tokens: Sequence[bytes], special: frozenset[int]) -> None:
        self._encode = encode
        self._tokens = tokens
        self._special = special
        texts = {tokens[index].decode("utf-8", "replace") for index in special if index < len(tokens)} - {""}
        # Without a special token: what is nowhere in a text.
        self._marks = re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'})")
        self._ids = {word: index for index, word in enumerate(tokens) if word and index not in special}

    def encode(self, text: str) -> list[int]:
        """Ids whose bytes are those of the text, or of its beginning: the vocabulary may not have all bytes. The
        library forces what is here, and asks again."""
        found: list[int] = []
        for number, part in enumerate(self._marks.split(text)):
            ids, whole = (self._longest if number % 2 else self._usual)(part)
            found += ids
            if not whole:
                break
        return found

    def _usual(self, text: str) -> tuple[list[int], bool]:
        """As the tokenizer has it, unless it adds something, such as a blank before it."""
        found = self._encode(text, add_special_tokens=False)
        same = b"".join(self._tokens[index] for index in found) == text.encode()
        return (found, True) if same and self._special.isdisjoint(found) else self._longest(text)

    def _longest(self, text: str) -> tuple[list[int], bool]:
        """The longest tokens, and whether they come to the end of the text."""
        data, found, at = text.encode(), [], 0
        while at < len(data):
            ends = range(min(len(data), at + LONGEST), at, -1)
            index = next((self._ids[data[at:end]] for end in ends if data[at:end] in self._ids), None)
            if index is None:
                return found, False
            found.append(index)
            at += len(self._tokens[index])
        return found, True
