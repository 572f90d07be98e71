"""Token ids to text, piece by piece: what has been sent is never taken back, and nothing is kept back without need.

A token is not a character: one may hold half an emoji, another three words. Text is cut at code points: bytes that
could still become a character wait (at most three), bytes that cannot become U+FFFD at once, exactly as in a decode
of the whole. So the joined pieces equal Tokenizer.decode of all ids.

    ids     97        240   159   140   182        195        (end)
    text    "a"       ""    ""    ""    "\U0001f336"      ""         "\ufffd"

Before: engine/streams.py (new ids).  After: stop.py (which of this text may go out).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer

MAX_INCOMPLETE = 3  # bytes of an unfinished UTF-8 character
GENERIC_CONTEXT = 8  # ids of the prompt that a context-dependent decoder gets to see
ESCAPE_AFTER = 4  # tokens without progress after which U+FFFD is taken for good


class Detokenizer:
    """The text of one growing answer.

    Args:
        tokenizer: of the model.
        prompt_ids: what came before the answer: SentencePiece drops a leading space only at the start of everything,
            and a prompt may end inside a character that the answer completes.
        skip_special_tokens: special tokens give no text.
        spaces_between_special_tokens: False: neighbouring added tokens stand together without the decoder's spaces
            (only where special tokens are shown; byte-wise vocabularies never have such spaces).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        if tokenizer.bytewise:
            self._part: _Bytes | _Generic = _Bytes(tokenizer, prompt_ids, skip_special_tokens)
        else:
            joined = not skip_special_tokens and not spaces_between_special_tokens
            self._part = _Generic(tokenizer, prompt_ids, skip_special_tokens, joined)

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these new ids; may be empty. Ids without a token give none."""
        return self._part.push(ids)

    def finish(self) -> str:
        """What is still kept back, at the end of the answer: the start of a character becomes U+FFFD."""
        return self._part.finish()


class _Bytes:
    """For vocabularies whose text is the joined bytes of its tokens. About 1 us a token."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._bytes_of = tokenizer.token_bytes
        tail = self._visible_tail(prompt_ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        self._decode = decoder.decode
        self._inside = bool(decoder.getstate()[0])  # the prompt ends inside a character, and no text has come yet
        self._strip = tokenizer.strips_space and not tail

    def _visible_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text, enough to hold an unfinished character."""
        tail = b""
        for index in reversed(prompt_ids):
            if index not in self._hidden:
                tail = self._bytes_of(index) + tail
            if len(tail) >= MAX_INCOMPLETE:
                break
        return tail[-MAX_INCOMPLETE:]

    def push(self, ids: Iterable[int]) -> str:
        hidden, bytes_of = self._hidden, self._bytes_of
        data = b"".join([bytes_of(index) for index in ids if index not in hidden])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._own(self._decode(data)) if self._inside else self._decode(data)

    def finish(self) -> str:
        text = self._decode(b"", True)
        return self._own(text) if self._inside else text

    def _own(self, text: str) -> str:
        """Text without the U+FFFD of a character that the prompt began and nobody completed: it is the prompt's."""
        self._inside = not text
        return text.removeprefix("\ufffd")


class _Generic:
    """For decoders that look at neighbouring tokens: decode a short window twice and send the difference.

    The window starts at the last id whose text was complete, so its decode is right whatever came before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool, joined: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._alone = tokenizer.added_ids if joined else {}
        self._window = [index for index in prompt_ids[-GENERIC_CONTEXT:] if self._visible(index)]
        self._shown = len(self._window)  # ids of the window whose text is out
        self._last_added = bool(self._window) and self._window[-1] in self._alone

    def _visible(self, index: int) -> bool:
        return index not in self._hidden and self._tokenizer.has(index)

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(index) for index in ids if self._visible(index)])

    def _push_one(self, index: int) -> str:
        added = index in self._alone
        neighbours, self._last_added = added and self._last_added, added
        if neighbours:
            waiting = self.finish()
            self._window, self._shown = [index], 1
            return waiting + self._alone[index]
        self._window.append(index)
        return self._advance(final=len(self._window) - self._shown >= ESCAPE_AFTER)

    def _advance(self, *, final: bool) -> str:
        before = self._text(self._window[: self._shown])
        after = self._text(self._window)
        if after.endswith("\ufffd") and not final:
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        if not after.startswith(before):
            before = before.rstrip("\ufffd")  # the answer completed a character that the prompt began
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def finish(self) -> str:
        return self._advance(final=True) if len(self._window) > self._shown else ""
