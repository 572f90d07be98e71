"""A vocabulary as grammars see it: bytes, which tokens are special, and which end an answer.

A model may have no token that ends an answer. The library wants one all the same: it gets an id behind all tokens,
which no model can write, so the places where an answer may end are known and every token stays one of the answer.

Before: bits.py.  After: matcher.py, compile.py.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from attrs import frozen

from .bits import of_bytes, width


class Tokens(Protocol):
    """What is needed of a tokenizer; text/tokenizer.Tokenizer has it."""

    vocab_size: int
    special_ids: frozenset[int]

    def token_bytes(self, index: int) -> bytes: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@frozen(eq=False)
class Words:
    """A vocabulary.

    Args:
        bytes: of each token.   special: special tokens by their text.
        digits: mask [width] int32 of the tokens that begin with a digit.
        letters: the same of those that begin with an ASCII letter, but for the e of a number.
        end_ids: tokens that end an answer.   no_end: the library's end token if there are none: behind all others.
        width: words of 32 bits in a mask.
        encode: ids of a text.
    """

    bytes: list[bytes]
    special: Mapping[str, int]
    digits: np.ndarray
    letters: np.ndarray
    end_ids: tuple[int, ...]
    no_end: int | None
    width: int
    encode: Callable[[str], list[int]]

    @property
    def ends(self) -> tuple[int, ...]:
        """The library's end tokens, at least one."""
        return self.end_ids if self.no_end is None else (self.no_end,)


def words_of(tokenizer: Tokens, vocab_size: int, end_ids: list[int]) -> Words:
    """The tokens that the model can write. Args: vocab_size: columns of its logits."""
    size = min(tokenizer.vocab_size, vocab_size)
    tokens = [tokenizer.token_bytes(index) for index in range(size)]
    end_ids = [token for token in end_ids if token < size]
    words = width(size, end_ids)
    begins = np.zeros(words * 32, dtype=np.uint8)
    begins[: len(tokens)] = [word[0] if word else 0 for word in tokens]
    return Words(
        bytes=tokens,
        special={tokens[index].decode("utf-8", "replace"): index for index in tokenizer.special_ids if index < size},
        digits=of_bytes(begins, b"0123456789"),
        letters=of_bytes(begins, bytes(set(string.ascii_letters.encode()) - set(b"eE"))),
        end_ids=tuple(end_ids),
        no_end=None if end_ids else size,
        width=words,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
