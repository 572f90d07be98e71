"""Grammars that wait for their turn, and for each who waits for it.

    enter --> [first tries] --take--> quick thread --enter--> [second] [third] --take--> slow thread
                   '--- nobody waits for it any more: dropped ---'

A grammar is tried for a short while first. One that is not done then stands in another line, behind those that have
been tried less: so many that take long hold up an ordinary one no longer than their short tries.

A grammar is held by the requests that wait for it. When the last one has ended, it is dropped before its turn comes. A
request that was told to come back later leaves a mark: the grammar keeps its place until then.

Before: trial.py.  After: compile.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ..errors import Overloaded, RequestError, retold
from ..structured import Constraint as Wanted
from .trial import RETRY_SECONDS

MOST, MOST_CHARACTERS = 1024, 2**24  # grammars that may wait, and of their texts together
WAIT_SECONDS = 20.0  # a request waits no longer for its grammar
KEPT_SECONDS = 15.0  # after that a grammar whose requests were told to retry has lost its place


class Crowded(Overloaded):
    """Too many grammars wait already."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(
            f"{wanted.param}: too many grammars of other requests wait to be compiled. Retry later.",
            retry_after=RETRY_SECONDS,
        )


class Compiled(Future[Any]):
    """A grammar, compiled or on its way. Who asks for its error gets one of his own.

    Args: key: equal for equal grammars.
    Attributes:
        bytes: of memory that it takes.   text: of it, for the library; "" for none.
        begun: time.monotonic() when its trial began; None: it waits for others before it, or for the child to start.
        held: requests that wait for it, or use it.   kept: time.monotonic() until which it is not dropped; None: it was
            never held, so nobody knows who waits.   dropped: it never will be compiled.
    """

    bytes = 0
    text = ""
    begun: float | None = None
    held = 0
    kept: float | None = None
    dropped = False

    def __init__(self, key: bytes = b"") -> None:
        super().__init__()
        self.key = key

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of a Future; the frames of one who is told do not stay with the next."""
        error = super().exception(timeout)
        return None if error is None else retold(error)

    def result(self, timeout: float | None = None) -> Any:
        """As of a Future."""
        error = self.exception(timeout)
        if error is None:
            return super().result()
        try:
            raise error
        finally:
            del error

    @property
    def blameless(self) -> bool:
        """Whether it failed, or was dropped, through no fault of its own."""
        if self.dropped or self.cancelled():
            return True
        error = super().exception() if self.done() else None
        return error is not None and not isinstance(error, RequestError)

    def late(self, wanted: Wanted) -> Exception:
        """Why it is not there after WAIT_SECONDS, most of which it waited for others or was tried itself.

        It keeps its place for those who are told to come back.
        """
        if self.begun is not None and time.monotonic() - self.begun > WAIT_SECONDS / 2:
            return RequestError(
                f"{wanted.param}: it could not be compiled within {WAIT_SECONDS:.0f} seconds; make it simpler.",
                param=wanted.param,
            )
        self.kept = time.monotonic() + KEPT_SECONDS
        return Overloaded(
            f"{wanted.param}: {WAIT_SECONDS:.0f} seconds went by with grammars of other requests, which were first, or "
            "with the start of the process that tries them. Retry later.",
            retry_after=RETRY_SECONDS,
        )


class Line:
    """Grammars in the order of their turns. Used from any thread.

    Args: tries: how often one is tried, at most.   bounded: else any number may wait.
    """

    def __init__(self, tries: int, *, bounded: bool = True) -> None:
        self._bounded = bounded
        self._waiting: list[dict[Compiled, Wanted]] = [{} for _ in range(tries)]  # by the tries before
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def enter(self, compiled: Compiled, wanted: Wanted, tried: int = 0) -> bool:
        """Let a grammar wait for its next try. Returns: whether anybody waits for it. Raises: Crowded: a new one."""
        with self._lock:
            if not tried and self._crowded(wanted):
                raise Crowded(wanted)
            if self._given_up(compiled):
                return False
            compiled.begun = None
            self._waiting[tried][compiled] = wanted
            return True

    def take(self, tries: Sequence[int]) -> tuple[Compiled, Wanted, int] | None:
        """The next one for which somebody waits, of those that were tried so often, and how often it was; the fewer,
        the sooner."""
        with self._lock:
            for tried in tries:
                while self._waiting[tried]:
                    compiled = next(iter(self._waiting[tried]))
                    wanted = self._waiting[tried].pop(compiled)
                    if not self._given_up(compiled):
                        return compiled, wanted, tried
        return None

    def hold(self, compiled: Compiled) -> bool:
        """Wait for a grammar until `release`. Returns: False: it was dropped meanwhile."""
        with self._lock:
            compiled.held += not compiled.dropped
            return not compiled.dropped

    def release(self, compiled: Compiled) -> None:
        """Wait no longer. The last one who does lets the grammar be dropped, if its turn has not come."""
        with self._lock:
            compiled.held -= 1
            compiled.kept = compiled.kept or 0.0
            if any(compiled in waiting for waiting in self._waiting) and self._given_up(compiled):
                for waiting in self._waiting:
                    waiting.pop(compiled, None)

    def close(self) -> None:
        """Drop all that wait."""
        with self._lock:
            for waiting in self._waiting:
                for compiled in waiting:
                    compiled.cancel()
                waiting.clear()

    def _given_up(self, compiled: Compiled) -> bool:
        """Whether nobody waits for it any more; it is dropped then."""
        if compiled.held or compiled.kept is None or compiled.kept > time.monotonic():
            return False
        compiled.dropped = True
        compiled.cancel()
        return True

    def _crowded(self, wanted: Wanted) -> bool:
        """Whether there is no room for another one, now that those are gone for which nobody has come back."""
        if not self._bounded or (len(self) < MOST and self._characters(wanted) <= MOST_CHARACTERS):
            return False
        for waiting in self._waiting:
            for compiled in [each for each in waiting if self._given_up(each)]:
                del waiting[compiled]
        return len(self) >= MOST or self._characters(wanted) > MOST_CHARACTERS

    def _characters(self, wanted: Wanted) -> int:
        """Of the texts that wait, and this one."""
        return sum(len(each.text) for waiting in self._waiting for each in waiting.values()) + len(wanted.text)
