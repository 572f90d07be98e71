"""Log-probabilities in words: records of ids become dicts of ids to `Logprob`, with the text of each token.

A token is not a character. The text of a token that ends inside a character is "" and the token that completes the
character carries all of it, so that joining the texts of the chosen tokens gives the answer. An alternative that
would only continue a character is read after the bytes that the chosen tokens before it left open.

Before: step.py (TokenLogprobs, made by the sampler).  After: streams.py, which puts the dicts into outputs.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..request import Logprob
from ..step import TokenLogprobs

_utf8 = codecs.getincrementaldecoder("utf-8")
_MOST_OPEN_BYTES = 3  # a character has at most 4 bytes


class Bytes(Protocol):
    """The part of the tokenizer that this file needs."""

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text, as UTF-8 bytes; may end inside a character."""
        ...


def _read(data: bytes) -> tuple[str, bytes]:
    """Text of `data`, and the bytes at its end that are the beginning of a character."""
    decoder = _utf8("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


class TokenTexts:
    """Texts of single tokens, in the order of one answer.

    Args:
        tokenizer: gives bytes of ids; ids without a token (a padded vocabulary) have none.
        before: token ids that stand in front; only a character that they leave open matters.
    """

    def __init__(self, tokenizer: Bytes, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._open = b""
        for token in before[-_MOST_OPEN_BYTES:]:
            self.advance(token)

    def advance(self, token: int) -> str:
        """The text of the token that was chosen next; what it leaves open goes to the one after."""
        text, self._open = _read(self._open + self._tokenizer.token_bytes(token))
        return text

    def alternative(self, token: int) -> str:
        """The text that `token` would have had at this place."""
        data = self._tokenizer.token_bytes(token)
        text, open_bytes = _read(data)
        if self._open and "\ufffd" in text:  # perhaps it continues the open character
            continued, still_open = _read(self._open + data)
            if "\ufffd" not in continued:
                text, open_bytes = continued, still_open
        return "" if open_bytes and not text else text


def named(record: TokenLogprobs, texts: TokenTexts | None, asked: Sequence[int] = ()) -> Mapping[int, Logprob]:
    """One position as a dict: the token that stands there first, then the most likely ones, best first, then `asked`.

    Args:
        texts: advanced by this position's token; None leaves `decoded_token` unset.
        asked: the ids that record.asked_logprobs belong to; those not among the others have no rank.
    """
    top = zip(record.top_tokens, record.top_logprobs, range(1, len(record.top_tokens) + 1), strict=True)
    names = {token: texts.alternative(token) if texts else None for token in (*record.top_tokens, *asked)}
    names[record.token] = texts.advance(record.token) if texts else None
    found = {record.token: Logprob(record.logprob, record.rank, names[record.token])}
    for token, logprob, rank in top:
        if token not in found:
            found[token] = Logprob(logprob, rank, names[token])
    for token, logprob in zip(asked, record.asked_logprobs if asked else (), strict=True):
        if token not in found:
            found[token] = Logprob(logprob, None, names[token])
    return found


class NamedPrompt(Sequence[Mapping[int, Logprob] | None]):
    """The same for a whole prompt: one entry per prompt token, the first None (nothing predicts it).

    Made when it is first looked at: 8192 positions with 20 alternatives take half a second, and this object is born
    on the event loop. Whoever reads it from there does so in a thread.
    """

    def __init__(self, records: Sequence[TokenLogprobs | None], prompt: Sequence[int], tokenizer: Bytes | None) -> None:
        self._records = [record for record in records[1:] if record is not None]
        self._texts = TokenTexts(tokenizer, prompt[:1]) if tokenizer else None
        self._made: tuple[Mapping[int, Logprob] | None, ...] | None = None

    def __len__(self) -> int:
        return len(self._records) + 1 if self._made is None else len(self._made)

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = (None, *(named(record, self._texts) for record in self._records))
            self._records = []
        return self._made[index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == other

    __hash__ = None


def matrix(records: Sequence[TokenLogprobs | None], start: int) -> tuple[tuple[float, ...], ...]:
    """[rows, K]: what was asked from position `start` on; row i came with prompt token start + i + 1."""
    return tuple(record.asked_logprobs for record in records[start + 1 :] if record is not None)
