"""The masks of a step: one row of bits for each constrained sequence, computed while the forward runs.

The tokens of step k come home while the forward of k+1 runs; then its masks are computed, in 0.5 to 0.8 ms for 64 rows
of usual grammars. Where steps are short, processes that watch for tokens do it (replicas.py), and the loop does what
they have not done; then it launches the choice. Threads of the library are no faster than the loop: the copies of a
compiled grammar share one lexer behind a lock, so rows of one grammar stand in line (a mask of 12 us took 1.6 ms beside
a slow one). Four lexers for four threads took 1.05 ms where the loop took 0.83: cores that sleep between steps are slow
when they wake up. First masks, and grammars that take longer, have a thread, and the library's: the loop serves others
meanwhile.

Before: matcher.py, replicas.py.  After: engine/engine.py (starts them), runner/runner.py (takes them when it samples).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from attrs import frozen
from llguidance import LLExecutor

from .compile import Threads
from .matcher import Matcher
from .replicas import MaskProcesses, NoReplicas, Rows

LOOP_SECONDS = 4e-3  # masks of a step that take longer are computed in the thread
ROW_SECONDS = 1e-3  # a mask that takes longer is computed in the thread the next time
MEAN_SECONDS = 5e-5  # in the thread, a step of many rows was quick if a row took less
ASIDE = 15  # steps, or more if they took many times as long, until it is tried again whether they take less
MOST_ASIDE = 1000
SLOW_SECONDS = 0.03  # masks of a step that take longer are watched
WATCHED = 16  # steps, in which each row is computed alone, and its time is its own


def _plain(rows: int, width: int) -> np.ndarray:
    return np.empty((rows, width), dtype=np.int32)


@frozen(eq=False)
class Placed:
    """Masks where processes have put them.

    Args: bits: [P, W] int32, others too.   places: row there of each.   room: for a copy in order.
    """

    bits: np.ndarray
    places: np.ndarray
    room: Callable[[int, int], np.ndarray]

    def ordered(self) -> np.ndarray:
        """The same in order."""
        room = self.room(len(self.places), self.bits.shape[1])
        return np.take(self.bits, self.places, axis=0, out=room, mode="clip")


class Masks:
    """The masks of one step: they can be computed once every token before it is known.

    Attributes:
        slots: the device row of each.
        launched: to be told when the choice that they are for is, and whether the device had waited for it.
    """

    def __init__(
        self,
        rows: Rows,
        start: Callable[[Rows, bool], Future[np.ndarray | Placed]],
        launched: Callable[[bool], None] = bool,
    ) -> None:
        self.slots = tuple([slot for slot, _ in rows])
        self._rows = rows
        self.launched = launched
        self._start = start
        self._future: Future[np.ndarray | Placed] | None = None
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
            self._future = self._start(self._rows, waited)
            if self._waiting is not None:
                self._waiting()

    def when_begun(self, work: Callable[[], None]) -> None:
        """Have `work` done as soon as they are on their way."""
        self._waiting = work

    def result(self) -> np.ndarray:
        """[R, W] int32, bit i % 32 of word i // 32 for token i; waits for it. They must have begun.

        It is the pool's memory, which holds them until the masks of the next step begin.
        """
        found = self._future.result()
        return found.ordered() if isinstance(found, Placed) else found

    def placed(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The same without a copy: masks, of others too, and the row of each of these there; None: as `result`.

        As long as the rows stay the same, the places are the same object.
        """
        found = self._future.result()
        return (found.bits, found.places) if isinstance(found, Placed) else (found, None)


class MaskPool:
    """Computes masks, of one step at a time: those of a step begin when all before it have been brought home.

    Args:
        thread: one that takes the steps in turn; the library has more, for the rows of a step.
        memory: makes a buffer [R, W] int32 that the device reads well.   most: rows of a step.
        replicas: processes that compute masks, if there are any.
    Attributes: seconds, rows: spent here, and masks that steps had, so far.   replicas: see above.
    """

    def __init__(
        self,
        thread: Threads,
        memory: Callable[[int, int], np.ndarray] = _plain,
        most: int = 64,
        replicas: MaskProcesses | None = None,
    ) -> None:
        self._executors: dict[bool, LLExecutor] = {}  # of several threads, or of one
        self._thread = thread
        self._memory = memory
        self._most = most
        self._bits: np.ndarray | None = None  # one: a step's masks begin when every step before has ended
        self._watched = 0  # steps to come
        self._aside = 0  # steps to come
        self.replicas: MaskProcesses = replicas or NoReplicas()
        self.seconds = 0.0
        self.rows = 0

    def masks(self, rows: Rows) -> Masks:
        """The masks of these (slot, matcher) rows, not begun yet."""
        self.replicas.follow(rows)
        return Masks(rows, self._begin, self.replicas.note)

    def close(self) -> None:
        """End the threads and the processes."""
        self._thread.close(wait=False)
        self.replicas.close()

    def _begin(self, rows: Rows, waited: bool) -> Future[np.ndarray | Placed]:
        start, count = time.perf_counter(), len(rows)
        left = self.replicas.missing(rows) if waited else range(count)
        todo, bits = [(row, rows[row][1]) for row in left], None
        done: Future[np.ndarray | Placed] = Future()
        if len(todo) < count:
            bits, places = self.replicas.placed() if not todo and self.replicas.direct else (None, None)
            if bits is None:
                bits = self._buffer(count, rows[0][1].width)
                self.replicas.copy(bits)
            self.seconds += time.perf_counter() - start
            self.rows += count - len(todo)
            if not todo:
                done.set_result(bits if places is None else Placed(bits, places, self._buffer))
                return done
        if not waited or self._aside or self._watched or not all([each.usual for _, each in todo]):
            return self._thread.submit(self._compute, todo, bits, count)
        try:
            if bits is None:
                bits = self._buffer(count, rows[0][1].width)
            made = self._some(todo, bits)
        except Exception as error:
            done.set_exception(error)
            return done
        if made < len(todo):
            return self._thread.submit(self._compute, todo[made:], bits, count, True)
        done.set_result(bits)
        return done

    def _buffer(self, rows: int, width: int) -> np.ndarray:
        """Room for the masks of a step; what it holds is written by all."""
        if self._bits is None or len(self._bits) < rows or self._bits.shape[1] != width:
            self._bits = self._memory(max(rows, self._most), width)
        return self._bits[:rows]

    def _some(self, rows: Sequence[tuple[int, Matcher]], bits: np.ndarray) -> int:
        """Compute masks here, one after the other, for LOOP_SECONDS. Returns: how many are there."""
        start = now = time.perf_counter()
        count, where, size = 0, bits.ctypes.data, bits.shape[1] * 4
        for row, matcher in rows:
            write_mask(matcher, bits[row], where + row * size)
            count, before, now = count + 1, now, time.perf_counter()
            if now - before > ROW_SECONDS:
                matcher.note(quick=False)
            if now - start > LOOP_SECONDS:
                self._aside = min(int(ASIDE * (now - start) / LOOP_SECONDS), MOST_ASIDE)
                break
        self.seconds += now - start
        self.rows += count
        return count

    def _compute(
        self, rows: Sequence[tuple[int, Matcher]], bits: np.ndarray | None, count: int, begun: bool = False
    ) -> np.ndarray:
        """Compute masks with threads of the library.

        Args: rows: their place among the `count` of the step.   begun: the loop has done some, and took long.
        """
        start = time.perf_counter()
        if bits is None:
            bits = self._buffer(count, rows[0][1].width)
        size = bits.shape[1] * 4
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
        self._aside = max(self._aside - (not begun), 0)
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


def write_mask(matcher: Matcher, row: np.ndarray, address: int) -> None:
    """Compute one mask: to `row` [W] int32, which lies at `address`. What fails is the matcher's error."""
    if (library := _library(matcher)) is not None:
        library.unsafe_compute_mask_ptr(address, row.nbytes)
    if matcher.error is not None or not matcher.plain:
        _finish(matcher, row)


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
