"""The masks of a step: one row of bits for each constrained sequence, computed while the forward runs.

The tokens of step k come home while the forward of k+1 runs; then its masks are computed, in 0.5 to 0.8 ms for 64 rows
of usual grammars. The loop does it, and launches the choice. Threads of the library are no faster: the copies of a
compiled grammar share one lexer behind a lock, so rows of one grammar stand in line (a mask of 12 us took 1.6 ms beside
a slow one). Four lexers for four threads took 1.05 ms where the loop took 0.83: cores that sleep between steps are slow
when they wake up. First masks, and grammars that take longer, have a thread, and the library's: the loop serves others
meanwhile.

Before: matcher.py.  After: engine/engine.py (starts them), runner/runner.py (takes them when it samples).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLExecutor

from .compile import Threads
from .matcher import Matcher

LOOP_SECONDS = 4e-3  # masks of a step that take longer are computed in the thread
ROW_SECONDS = 1e-3  # a mask that takes longer is computed in the thread the next time
MEAN_SECONDS = 5e-5  # in the thread, a step of many rows was quick if a row took less
ASIDE = 15  # steps, or more if they took many times as long, until it is tried again whether they take less
MOST_ASIDE = 1000
SLOW_SECONDS = 0.03  # masks of a step that take longer are watched
WATCHED = 16  # steps, in which each row is computed alone, and its time is its own


def _plain(rows: int, width: int) -> np.ndarray:
    return np.empty((rows, width), dtype=np.int32)


class Masks:
    """The masks of one step: they can be computed once every token before it is known.

    Attributes: slots: the device row of each.
    """

    def __init__(
        self, rows: Sequence[tuple[int, Matcher]], start: Callable[[Sequence[Matcher], bool], Future[np.ndarray]]
    ) -> None:
        self.slots = tuple(slot for slot, _ in rows)
        self._matchers = [matcher for _, matcher in rows]
        self._start = start
        self._future: Future[np.ndarray] | None = None
        self._waiting: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether they are computed, or on their way."""
        return self._future is not None

    @property
    def there(self) -> bool:
        """Whether `result` does not wait."""
        return self._future is not None and self._future.done()

    def begin(self, *, waited: bool = False) -> None:
        """Compute them: every token before the step is known. No matcher may change until they are there.

        waited: the device may wait for them by now: they are there afterwards, unless they take long.
        """
        if self._future is None:
            self._future = self._start(self._matchers, waited)
            if self._waiting is not None:
                self._waiting()

    def when_begun(self, work: Callable[[], None]) -> None:
        """Have `work` done as soon as they are on their way."""
        self._waiting = work

    def result(self) -> np.ndarray:
        """[R, W] int32, bit i % 32 of word i // 32 for token i; waits for it. They must have begun.

        It is the pool's memory, which holds them until the masks of the next step begin.
        """
        return self._future.result()


class MaskPool:
    """Computes masks, of one step at a time: those of a step begin when all before it have been brought home.

    Args:
        thread: one that takes the steps in turn; the library has more, for the rows of a step.
        memory: makes a buffer [R, W] int32 that the device reads well.   most: rows of a step.
    Attributes: seconds, rows: spent, and masks computed, so far.
    """

    def __init__(self, thread: Threads, memory: Callable[[int, int], np.ndarray] = _plain, most: int = 64) -> None:
        self._executors: dict[bool, LLExecutor] = {}  # of several threads, or of one
        self._thread = thread
        self._memory = memory
        self._most = most
        self._bits: np.ndarray | None = None  # one: a step's masks begin when every step before has ended
        self._watched = 0  # steps to come
        self._aside = 0  # steps to come
        self.seconds = 0.0
        self.rows = 0

    def masks(self, rows: Sequence[tuple[int, Matcher]]) -> Masks:
        """The masks of these (slot, matcher) rows, not begun yet."""
        return Masks(rows, self._begin)

    def close(self) -> None:
        """End the threads."""
        self._thread.close(wait=False)

    def _begin(self, matchers: Sequence[Matcher], waited: bool) -> Future[np.ndarray]:
        if not waited or self._aside or self._watched or not all(each.usual for each in matchers):
            return self._thread.submit(self._compute, matchers)
        done: Future[np.ndarray] = Future()
        try:
            bits, count = self._some(matchers)
        except Exception as error:
            done.set_exception(error)
            return done
        if count < len(matchers):
            return self._thread.submit(self._compute, matchers, bits, count)
        done.set_result(bits)
        return done

    def _buffer(self, rows: int, width: int) -> np.ndarray:
        """Room for the masks of a step; what it holds is written by all."""
        if self._bits is None or len(self._bits) < rows or self._bits.shape[1] != width:
            self._bits = self._memory(max(rows, self._most), width)
        return self._bits[:rows]

    def _some(self, matchers: Sequence[Matcher]) -> tuple[np.ndarray, int]:
        """Compute masks here, one after the other, for LOOP_SECONDS. Returns: all of them, and how many are there."""
        start = now = time.perf_counter()
        bits, count = self._buffer(len(matchers), matchers[0].width), 0
        where, size = bits.ctypes.data, bits.shape[1] * 4
        for matcher in matchers:
            if (library := _library(matcher)) is not None:
                library.unsafe_compute_mask_ptr(where + count * size, size)
            if matcher.error is not None or not matcher.plain:
                _finish(matcher, bits[count])
            count, before, now = count + 1, now, time.perf_counter()
            if now - before > ROW_SECONDS:
                matcher.note(quick=False)
            if now - start > LOOP_SECONDS:
                self._aside = min(int(ASIDE * (now - start) / LOOP_SECONDS), MOST_ASIDE)
                break
        self.seconds += now - start
        self.rows += count
        return bits, count

    def _compute(self, matchers: Sequence[Matcher], bits: np.ndarray | None = None, done: int = 0) -> np.ndarray:
        """Compute masks with threads of the library; the first `done` of `bits` are there."""
        start = time.perf_counter()
        if bits is None:
            bits = self._buffer(len(matchers), matchers[0].width)
        rows, size = list(enumerate(matchers))[done:], bits.shape[1] * 4
        if self._watched:
            self._watched -= 1
            for row, each in rows:
                begin = time.thread_time()
                if (library := _library(each)) is not None:
                    library.unsafe_compute_mask_ptr(bits[row].ctypes.data, size)
                each.spend(time.thread_time() - begin)
        else:
            self._ask([(each, row) for row, each in rows], bits)
            if time.perf_counter() - start > SLOW_SECONDS:
                self._watched = WATCHED
        quick = time.perf_counter() - start < max(LOOP_SECONDS, MEAN_SECONDS * len(rows))
        for row, matcher in rows:
            _finish(matcher, bits[row])
            matcher.note(quick=quick)
        self._aside = max(self._aside - (not done), 0)
        self.seconds += time.perf_counter() - start
        self.rows += len(rows)
        return bits

    def _ask(self, rows: list[tuple[Matcher, int]], bits: np.ndarray) -> None:
        """Have the library compute masks while others run Python; rows of one lexer by one thread, if it comes so."""
        rows.sort(key=lambda one: one[0].lexer)
        asked = [(library, row) for each, row in rows if (library := _library(each)) is not None]
        if not asked:
            return
        several = rows[0][0].lexer != rows[-1][0].lexer
        if several not in self._executors:
            self._executors[several] = LLExecutor(None if several else 1)
        self._executors[several].unsafe_compute_mask_ptr(asked, bits.ctypes.data, bits.shape[1] * 4, len(bits))


def _library(matcher: Matcher) -> Any:
    """The library's matcher, if it is to be asked; what fails is one answer's, not the step's."""
    try:
        return matcher.compiled()
    except Exception as error:
        matcher.error = error
        return None


def _finish(matcher: Matcher, row: np.ndarray) -> None:
    if matcher.error is None:
        try:
            return matcher.finish(row)
        except Exception as error:  # one answer's, not the step's
            matcher.error = error
    row[:] = -1  # any token: the answer ends with the error
