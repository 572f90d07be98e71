"""Compiles grammars in threads of its own, within bounds, and keeps those that were used last.

A request whose grammar is not compiled waits in the scheduler's queue (its constraint is not `ready`), while others
pass it. The library bounds its own work by counting steps, here and when masks are computed, so that no grammar can
hold a thread for long; one that needs more is refused, and nobody else notices.

Before: schema.py.  After: matcher.py (one answer's place in a grammar), engine/engine.py (tells failures).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..errors import RequestError
from ..request import Request
from ..structured import Constraint as Wanted
from .matcher import UNCONSTRAINED, Constraint, Matcher, Words
from .schema import first_line, grammar_text

THREADS = 2
CACHED = 512  # grammars
SECONDS = 20.0  # a request waits no longer for its grammar
# Steps of work, about 50,000 of them a millisecond, and sizes; beyond them the library gives up on a grammar.
BOUNDS = {"initial_lexer_fuel": 2_000_000, "step_lexer_fuel": 500_000, "max_grammar_size": 500_000}


class Tokens(Protocol):
    """What is needed of a tokenizer; text/tokenizer.Tokenizer has it."""

    vocab_size: int
    special_ids: frozenset[int]

    def token_bytes(self, index: int) -> bytes: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Threads(Protocol):
    """Threads that take work; runner/workers.Workers has this face."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]: ...
    def close(self, *, wait: bool = True) -> None: ...


class Grammars:
    """All grammars of an engine.

    Args:
        tokenizer: of the model.   vocab_size: columns of its logits.
        end_ids: tokens that end an answer; a grammar that may end allows them.
        threads: do the work, THREADS of them.
    """

    def __init__(self, tokenizer: Tokens, vocab_size: int, end_ids: Iterable[int], threads: Threads) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._threads = threads
        self._cache: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._words: Words | None = None
        self._library: LLTokenizer | None = None

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        self._threads.close(wait=False)

    def warm(self) -> None:
        """Make the vocabulary now. It holds the interpreter for a second or so, which streams would notice."""
        self._tokens()

    def constrain(self, request: Request) -> Constraint:
        """The constraint of a request, which may not be ready yet.

        Raises: RequestError: its grammar was compiled before, and is wrong.
        """
        wanted = request.constraint
        if wanted is None:
            return UNCONSTRAINED
        future = self.compiled(wanted)
        if future.done() and (error := future.exception()) is not None:
            raise error
        params = request.sampling
        begun = request.prompt_ids[len(request.prompt_ids) - request.answered :]
        return Matcher(future, lambda: self.words, wanted, params.stop_token_ids, params.min_tokens, begun)

    def compiled(self, wanted: Wanted) -> Future[LLMatcher | None]:
        """The grammar, compiled or on its way; it fails with RequestError. None: only the thought is limited."""
        key = hashlib.sha256(repr(wanted.key).encode("utf-8", "replace")).digest()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        future = self._threads.submit(self._compile, wanted)
        self._cache[key] = future
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
        return future

    @property
    def words(self) -> Words:
        """The vocabulary; made by the first grammar, in its thread."""
        with self._lock:
            if self._words is None:
                self._words = _words(self._tokenizer, self._vocab_size, self._end_ids)
            return self._words

    def _compile(self, wanted: Wanted) -> LLMatcher | None:
        words = self.words
        if wanted.kind == "thought":
            return None
        text = grammar_text(wanted, words.special)
        matcher = LLMatcher(self._tokens(), text, log_level=0, limits=LLParserLimits(**BOUNDS))
        error = matcher.get_error()
        if not error:
            matcher.compute_bitmask()  # some grammars fail at their first mask
            error = matcher.get_error()
        if error:
            raise RequestError(f"{wanted.param}: {first_line(error)}", param=wanted.param)
        if not any(matcher.compute_bitmask()):
            raise RequestError(f"{wanted.param}: nothing satisfies it.", param=wanted.param)
        return matcher

    def _tokens(self) -> LLTokenizer:
        """The vocabulary as the library has it, made once: 0.13 s of one core for 49,000 tokens, 1.3 s for 262,000."""
        words = self.words
        with self._lock:
            if self._library is None:
                self._library = LLTokenizer(
                    TokenizerWrapper(_Vocabulary(self._tokenizer, words.bytes, self._end_ids)),
                    eos_token=self._end_ids or None,
                )
            return self._library


class _Vocabulary:
    """A tokenizer as the library wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokens, tokens: list[bytes], end_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = end_ids[0] if end_ids else 0
        self._encode = tokenizer.encode

    def __call__(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts only")
        return self._encode(text, add_special_tokens=False)


def _words(tokenizer: Tokens, vocab_size: int, end_ids: list[int]) -> Words:
    size = min(tokenizer.vocab_size, vocab_size)
    tokens = [tokenizer.token_bytes(index) for index in range(size)]
    width = -(-size // 32)
    digits = np.zeros(width * 32, dtype=bool)
    for index, word in enumerate(tokens):
        digits[index] = word[:1].isdigit()
    return Words(
        bytes=tokens,
        special={tokens[index].decode("utf-8", "replace"): index for index in tokenizer.special_ids if index < size},
        digits=np.packbits(digits, bitorder="little").view("<i4"),
        end_ids=tuple(end_ids),
        width=width,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
