"""Log-probabilities in OpenAI's two layouts.

Chat: a list of {token, logprob, bytes, top_logprobs}. Completions: parallel lists of tokens, offsets into the text,
logprobs, and one dict of alternatives per position. JSON has no infinity, so -inf is written as -9999.0.

Before: request.py (Logprob).  After: openai_chat.py, openai_completions.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..request import Logprob, Output

LOWEST = -9999.0
Entry = Mapping[int, Logprob]


def finite(value: float) -> float:
    """`value`, or LOWEST in the place of -inf and NaN."""
    return value if math.isfinite(value) else LOWEST


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What the token adds to a text, as bytes."""
    return tokenizer.token_bytes(token)


def token_name(tokenizer: Any, token: int, found: Logprob | None, *, ids_as_text: bool) -> str:
    """How a token is written: its text, or token_id:N."""
    if ids_as_text:
        return f"token_id:{token}"
    if found is not None and found.decoded_token is not None:
        return found.decoded_token
    return token_bytes(tokenizer, token).decode("utf-8", "replace")


def chat_logprobs(
    outputs: Iterable[Output], tokenizer: Any, *, top: int, named: Sequence[int] = (), ids_as_text: bool
) -> dict[str, Any]:
    """{"content": [...]}, one entry per token of the answer, each with its `top` best alternatives (-1: all).

    named: ids that are listed as well, after those that rank higher.
    """

    def described(token: int, found: Logprob) -> dict[str, Any]:
        name = token_name(tokenizer, token, found, ids_as_text=ids_as_text)
        return {"token": name, "logprob": finite(found.logprob), "bytes": list(token_bytes(tokenizer, token))}

    content = []
    for output in outputs:
        for token, entry in zip(output.token_ids, output.logprobs or (), strict=False):
            best = sorted(entry.items(), key=lambda item: -item[1].logprob)
            best = [item for place, item in enumerate(best) if top == -1 or place < top or item[0] in named]
            content.append({**described(token, entry[token]), "top_logprobs": [described(*item) for item in best]})
    return {"content": content}


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> list[dict[str, Any] | None] | None:
    """One object per prompt token: id -> logprob, rank and text; null for the first, which nothing predicts."""
    if entries is None:
        return None
    return [
        entry
        and {
            str(token): {"logprob": finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token, found in entry.items()
        }
        for entry in entries
    ]


class TextLogprobs:
    """The layout of completions, built piece by piece; offsets count on from piece to piece.

    Args: start: offset of the first token in the choice's text.   ids_as_text: write tokens as token_id:N.
    """

    def __init__(self, tokenizer: Any, *, ids_as_text: bool, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._ids_as_text = ids_as_text
        self._offset = start

    def piece(self, tokens: Sequence[int], entries: Sequence[Entry | None]) -> dict[str, Any]:
        """The four lists for these tokens. An entry of None (first prompt token) has null instead of numbers."""
        names, values, tops, offsets = [], [], [], []
        for token, entry in zip(tokens, entries, strict=False):
            found = entry[token] if entry else None
            text = token_name(self._tokenizer, token, found, ids_as_text=False)
            names.append(token_name(self._tokenizer, token, found, ids_as_text=self._ids_as_text))
            values.append(None if found is None else finite(found.logprob))
            tops.append(None if entry is None else self._top(entry))
            offsets.append(self._offset)
            self._offset += len(text)
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}

    def _top(self, entry: Entry) -> dict[str, float]:
        best_last = sorted(
            entry.items(), key=lambda item: item[1].logprob
        )  # of two tokens with one text, the best stays
        named = {
            token_name(self._tokenizer, token, found, ids_as_text=self._ids_as_text): finite(found.logprob)
            for token, found in best_last
        }
        return dict(reversed(named.items()))


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces of TextLogprobs as one."""
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [value for piece in pieces for value in piece[name]] for name in names}
