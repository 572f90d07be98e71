"""Compiles grammars in threads of its own, within bounds, and keeps those that were used last.

A request whose grammar is not compiled waits in the scheduler's queue (its constraint is not `ready`), while others
pass it. Each grammar is tried in a process first (trial.py), so that none can hold a thread, or take memory, for long.
Nearly all are compiled within milliseconds; those that are not go to a thread of their own, and nobody else waits for
them (line.py).

Before: trial.py, line.py.  After: matcher.py (one answer's place in a grammar), engine/engine.py (tells failures).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..errors import Overloaded, RequestError, TinyserveError
from ..request import Request
from ..structured import Constraint as Wanted
from .bits import forbid
from .line import Compiled, Line
from .matcher import UNCONSTRAINED, Constraint, Matcher
from .ordinary import Ordinary
from .sayings import explained
from .trial import RETRY_SECONDS, NoChild, TooMuch, Trial, compiled
from .words import Tokens, Words, words_of

QUICK, SLOW = (0,), (1, 2)  # how often a grammar was tried before, in which thread
CACHED = 512  # grammars
CACHED_BYTES = 512 * 2**20
MOST_BYTES, SMALL_BYTES = 2**30, 2**20  # that grammars in use may take together, and that one may always have
LETTERS, SHORT = r'[^"\\\x00-\x1F\x7F]', (2, 4, 6)  # of a JSON text
KNOWN, KNOWN_CHARACTERS = 1024, 256  # texts whose ids are kept, and their length
# Of one core, that a grammar may take: at first, then in the thread for slow ones, and there at last.
QUICK_SECONDS, LONGER_SECONDS, SECONDS = 0.1, 0.5, 3.0


class Threads(Protocol):
    """Threads that take work; runner/workers.Workers has this face."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]: ...
    def close(self, *, wait: bool = True) -> None: ...


class Grammars:
    """All grammars of an engine.

    Args:
        tokenizer: of the model.   vocab_size: columns of its logits.
        end_ids: tokens that end an answer; a grammar that may end allows them.
        patient: whoever asks waits for as long as it takes: all requests are of one user, who has no server to ask.
        quick, slow: one thread each, with a stack of PARENT_STACK (trial.py), for most grammars and for those that take
            longer. No other thread is started for a grammar: where memory is short for a moment, one may never begin.
    """

    def __init__(
        self,
        tokenizer: Tokens,
        vocab_size: int,
        end_ids: Iterable[int],
        *,
        quick: Threads,
        slow: Threads,
        patient: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._quick, self._slow = quick, slow
        self._trials: dict[bool, Trial] = {}  # of the slow thread, and of the other
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._line = Line(tries=3, bounded=not patient)
        self.patient = patient
        self._freed = threading.Condition()  # the cache's lock; somebody uses a grammar no longer
        self._closed = False
        self._lock = threading.Lock()
        self._words: Words | None = None
        self._library: LLTokenizer | None = None

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        with self._freed:
            self._closed = True
            self._freed.notify_all()
        for threads in (self._quick, self._slow):
            threads.close(wait=False)
        for trial in self._trials.values():
            trial.close()
        self._line.close()
        for future in self._cache.values():
            future.cancel()

    def warm(self) -> None:
        """Make the vocabulary now. It holds the interpreter for a second or so, which streams would notice."""
        self.library()
        self._trial(slow=False).start()

    def constrain(self, request: Request) -> Constraint:
        """The constraint of a request, which may not be ready yet.

        Raises: RequestError: its grammar was compiled before, and is wrong. Overloaded: too many wait.
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

    def compiled(self, wanted: Wanted) -> Compiled:
        """The grammar, compiled or on its way; None: only the thought is limited.

        It fails with RequestError, or with what is no grammar's fault: then it is compiled anew for who asks when all
        were told that held it. Raises: Overloaded: too many wait.
        """
        key = _key(wanted)
        with self._freed:
            found = self._cache.get(key)
            if found is not None and not (found.blameless and (found.dropped or not found.held)):
                self._cache.move_to_end(key)
                return found
            future = Compiled(key)
            self._line.enter(future, wanted)
            self._cache[key] = future
            self._cache.move_to_end(key)
            self._shrink()
        self._quick.submit(self._try_all, QUICK)
        return future

    def hold(self, wanted: Wanted) -> Compiled:
        """As `compiled`, for somebody who waits for it, or uses it, until `release`: it is there for so long.

        Raises: Overloaded: too many wait.
        """
        while not self._line.hold(found := self.compiled(wanted)):
            pass  # it was dropped in this moment
        return found

    def release(self, compiled: Compiled) -> None:
        """Wait for a grammar no longer. One for which nobody waits is not compiled, if its turn has not come."""
        self._line.release(compiled)
        with self._freed:
            if compiled.dropped and self._cache.get(compiled.key) is compiled:
                del self._cache[compiled.key]
            self._freed.notify_all()

    @contextlib.contextmanager
    def held(self, wanted: Wanted) -> Iterator[Compiled]:
        """`hold` for as long as the context."""
        found = self.hold(wanted)
        try:
            yield found
        finally:
            self.release(found)

    def _make_room(self, wanted: Wanted, more: int) -> None:
        """For one that takes so many bytes. Raises: Overloaded: those that are in use leave none."""
        with self._freed:
            self._shrink(more)
            while more > SMALL_BYTES and more + sum(each.bytes for each in self._cache.values()) > MOST_BYTES:
                if not self.patient or self._closed:
                    told = "the grammars of running requests leave no memory for one that takes so much"
                    raise Overloaded(f"{wanted.param}: {told}. Retry later.", retry_after=RETRY_SECONDS)
                self._freed.wait(1.0)
                self._shrink(more)

    def _shrink(self, more: int = 0) -> None:
        """Forget those that were not used for longest, for one that takes so much more: not those that somebody holds
        or waits for."""
        size, count = more + sum(each.bytes for each in self._cache.values()), len(self._cache)
        free = [(key, each) for key, each in self._cache.items() if each.done() and not each.held]
        for key, each in free:
            if count <= CACHED and size <= CACHED_BYTES:
                break
            del self._cache[key]
            count, size = count - 1, size - each.bytes

    def _try_all(self, tries: Sequence[int]) -> None:
        """Try the grammars whose turn it is, of those that were tried so often before."""
        while (taken := self._line.take(tries)) is not None:
            self._try(*taken)

    def _try(self, future: Compiled, wanted: Wanted, tried: int) -> None:
        """Try a grammar once more, and say what came of it."""
        seconds = min((QUICK_SECONDS, LONGER_SECONDS, SECONDS)[tried], SECONDS)
        try:
            if wanted.kind != "thought":
                self._trial(tried > 0).make_ready()
            future.begun = time.monotonic()
            matcher, future.bytes, future.text = self._compile(wanted, seconds, tried > 0)
            future.set_result(matcher)
        except TooMuch as error:
            if seconds == SECONDS:
                future.set_exception(RequestError(f"{wanted.param}: {error}.", param=wanted.param))
            elif self._line.enter(future, wanted, tried + 1):
                self._slow.submit(self._try_all, SLOW)
        except TinyserveError as error:
            future.set_exception(error.with_traceback(None))  # whose frames hold what it was compiled with
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

    def _compile(self, wanted: Wanted, seconds: float, slow: bool) -> tuple[LLMatcher | None, int, str]:
        if wanted.kind == "thought":
            return None, 0, ""
        verdict = self._trial(slow).run(wanted, seconds)
        error = verdict.error
        if not error:
            self._make_room(wanted, verdict.bytes)
            tokens = self.library()
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
        return matcher, verdict.bytes, verdict.text

    def _trial(self, slow: bool) -> Trial:
        words = self.words
        with self._lock:
            if slow not in self._trials:
                self._trials[slow] = Trial(words.width * 32, words.special, words.ends)
            return self._trials[slow]

    def library(self, short: Iterable[int] = SHORT) -> LLTokenizer:
        """The vocabulary as the library has it, made once: 0.13 s of one core for 49,000 tokens, 1.3 s for 262,000.

        short: letters of tokens whose masks are kept, see `_slices`.
        """
        words = self.words
        with self._lock:
            if self._library is None:
                self._library = LLTokenizer(
                    TokenizerWrapper(_Vocabulary(self._tokenizer, words)),
                    eos_token=list(words.ends),
                    slices=_slices(short),
                )
            return self._library


def _slices(short: Iterable[int]) -> list[str]:
    """Sets of tokens whose masks the library keeps, the library's own and short ones.

    Where a text may have only a few letters more, tokens of so many need not be looked at one by one.
    """
    blanks, *texts = LLTokenizer.general_slices()
    return [blanks, *(LETTERS + f"{{1,{most}}}" for most in short), *texts]


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
