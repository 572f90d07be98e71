"""Compiles grammars in threads of its own, within bounds, and keeps those that were used last.

A request whose grammar is not compiled waits in the scheduler's queue (its constraint is not `ready`), while others
pass it. Each grammar is tried in a process first (trial.py), so that none can hold a thread, or take memory, for long.
Nearly all are compiled within milliseconds; those that are not go to a thread of their own, and nobody waits for them.

Before: trial.py.  After: matcher.py (one answer's place in a grammar), engine/engine.py (tells failures).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..errors import Overloaded, RequestError
from ..request import Request
from ..structured import Constraint as Wanted
from .bits import forbid
from .matcher import UNCONSTRAINED, Constraint, Matcher
from .ordinary import Ordinary
from .sayings import explained
from .trial import RETRY_SECONDS, NoChild, TooMuch, Trial, compiled
from .words import Tokens, Words, words_of

CACHED = 512  # grammars
CACHED_BYTES = 512 * 2**20
LETTERS, SHORT = r'[^"\\\x00-\x1F\x7F]', (2, 4, 6)  # of a JSON text
KNOWN, KNOWN_CHARACTERS = 1024, 256  # texts whose ids are kept, and their length
WAIT_SECONDS = 20.0  # a request waits no longer for its grammar
QUICK_SECONDS, SECONDS = 0.3, 3.0  # of one core, that a grammar may take at first, and in the thread for slow ones


class Threads(Protocol):
    """Threads that take work; runner/workers.Workers has this face."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]: ...
    def close(self, *, wait: bool = True) -> None: ...


class Compiled(Future["LLMatcher | None"]):
    """A grammar, compiled or on its way.

    Attributes:
        bytes: of memory that it takes.
        begun: time.monotonic() when its thread turned to it; None: it waits for others before it.
    """

    bytes = 0
    begun: float | None = None

    def late(self, wanted: Wanted) -> Exception:
        """Why it is not there after WAIT_SECONDS, most of which it waited for others or was tried itself."""
        if self.begun is not None and time.monotonic() - self.begun > WAIT_SECONDS / 2:
            return RequestError(
                f"{wanted.param}: it could not be compiled within {WAIT_SECONDS:.0f} seconds; make it simpler.",
                param=wanted.param,
            )
        return Overloaded(
            f"{wanted.param}: {WAIT_SECONDS:.0f} seconds went by with grammars of other requests, which were first. "
            "Retry later.",
            retry_after=RETRY_SECONDS,
        )


class Grammars:
    """All grammars of an engine.

    Args:
        tokenizer: of the model.   vocab_size: columns of its logits.
        end_ids: tokens that end an answer; a grammar that may end allows them.
        quick, slow: one thread each, with a stack of PARENT_STACK (trial.py), for most grammars and for those that take
            longer. No other thread is started for a grammar: where memory is short for a moment, one may never begin.
    """

    def __init__(
        self, tokenizer: Tokens, vocab_size: int, end_ids: Iterable[int], *, quick: Threads, slow: Threads
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._quick, self._slow = quick, slow
        self._trials: dict[float, Trial] = {}  # by the seconds that they give a grammar
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._words: Words | None = None
        self._library: LLTokenizer | None = None

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        for threads in (self._quick, self._slow):
            threads.close(wait=False)
        for trial in self._trials.values():
            trial.close()
        for future in self._cache.values():
            future.cancel()

    def warm(self) -> None:
        """Make the vocabulary now. It holds the interpreter for a second or so, which streams would notice."""
        self._tokens()
        self._trial(QUICK_SECONDS).start()

    def constrain(self, request: Request) -> Constraint:
        """The constraint of a request, which may not be ready yet.

        Raises: RequestError: its grammar was compiled before, and is wrong.
        """
        wanted = request.constraint
        if wanted is None:
            return UNCONSTRAINED
        future = self.compiled(wanted)
        if future.done() and (error := future.exception()) is not None:
            if isinstance(error, RequestError):
                raise error.with_traceback(None)  # else it would keep the frames of every request that ever got it
            self._cache.pop(_key(wanted), None)  # no grammar's fault, and those that waited were told
            future = self.compiled(wanted)
        params = request.sampling
        begun = request.prompt_ids[len(request.prompt_ids) - request.answered :]
        return Matcher(future, lambda: self.words, wanted, params.stop_token_ids, params.min_tokens, begun)

    def compiled(self, wanted: Wanted) -> Compiled:
        """The grammar, compiled or on its way; None: only the thought is limited.

        It fails with RequestError, or with what is no grammar's fault, and is then kept until the next one asks.
        """
        key = _key(wanted)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        future = self._cache[key] = Compiled()
        self._quick.submit(self._settle, future, wanted, QUICK_SECONDS)
        while len(self._cache) > CACHED or sum(each.bytes for each in self._cache.values()) > CACHED_BYTES:
            self._cache.popitem(last=False)
        return future

    def _settle(self, future: Compiled, wanted: Wanted, seconds: float) -> None:
        """Compile within so many seconds, and say what came of it."""
        if future.cancelled():
            return
        future.begun = time.monotonic()
        try:
            matcher, future.bytes = self._compile(wanted, seconds)
            future.set_result(matcher)
        except TooMuch as error:
            if seconds < SECONDS:
                future.begun = None
                self._slow.submit(self._settle, future, wanted, SECONDS)
                return
            future.set_exception(RequestError(f"{wanted.param}: {error}.", param=wanted.param))
        except MemoryError:
            future.set_exception(NoChild("no memory is left"))
        except BaseException as error:
            future.set_exception(error)

    @property
    def words(self) -> Words:
        """The vocabulary; made by the first grammar, in its thread."""
        with self._lock:
            if self._words is None:
                self._words = words_of(self._tokenizer, self._vocab_size, self._end_ids)
            return self._words

    def _compile(self, wanted: Wanted, seconds: float) -> tuple[LLMatcher | None, int]:
        if wanted.kind == "thought":
            return None, 0
        verdict = self._trial(seconds).run(wanted, seconds)
        error = verdict.error
        if not error:
            tokens = self._tokens()
            matcher = compiled(tokens, verdict.text)
            mask = matcher.compute_bitmask()  # some grammars fail at their first mask
            error = explained(matcher.get_error() or "")
        if error:
            raise RequestError(f"{wanted.param}: {error}", param=wanted.param)
        first = np.frombuffer(mask, dtype=np.int32).copy()
        if not first.any():
            raise RequestError(f"{wanted.param}: nothing satisfies it.", param=wanted.param)
        if self.words.no_end is not None:
            forbid(first, self.words.no_end)
            if not first.any():
                raise RequestError(
                    f"{wanted.param}: only an empty text satisfies it, and this model has no token that ends one.",
                    param=wanted.param,
                )
        return matcher, verdict.bytes

    def _trial(self, seconds: float) -> Trial:
        words = self.words
        with self._lock:
            if seconds not in self._trials:
                self._trials[seconds] = Trial(words.width * 32, words.special, words.ends)
            return self._trials[seconds]

    def _tokens(self) -> LLTokenizer:
        """The vocabulary as the library has it, made once: 0.13 s of one core for 49,000 tokens, 1.3 s for 262,000."""
        words = self.words
        with self._lock:
            if self._library is None:
                self._library = LLTokenizer(
                    TokenizerWrapper(_Vocabulary(self._tokenizer, words)),
                    eos_token=list(words.ends),
                    slices=_slices(),
                )
            return self._library


def _slices() -> list[str]:
    """Sets of tokens whose masks the library keeps, the library's own and short ones.

    Where a text may have only a few letters more, tokens of so many need not be looked at one by one.
    """
    blanks, *texts = LLTokenizer.general_slices()
    return [blanks, *(LETTERS + f"{{1,{most}}}" for most in SHORT), *texts]


def _key(wanted: Wanted) -> bytes:
    return hashlib.sha256(repr(wanted.key).encode("utf-8", "replace")).digest()


class _Vocabulary:
    """A tokenizer as the library wants it. What a grammar spells out is text, also where it looks like a special token:
    it is written with ordinary ones."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokens, words: Words) -> None:
        self.tokens = words.bytes if words.no_end is None else [*words.bytes, b""]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = words.ends[0]
        self._encode = tokenizer.encode
        self._special = tokenizer.special_ids
        self._ordinary: Ordinary | None = None  # made when a text needs it
        self._known: dict[str, list[int]] = {}  # short texts, which are asked for again in each answer

    def __call__(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts only")
        found = self._known.get(text)
        if found is None:
            found = self._encode(text, add_special_tokens=False)
            if not self._special.isdisjoint(found):
                self._ordinary = self._ordinary or Ordinary(self._encode, self.tokens, self._special)
                found = self._ordinary.encode(text)
            if len(self._known) >= KNOWN:
                self._known.clear()
            if len(text) <= KNOWN_CHARACTERS:
                self._known[text] = found
        return found
