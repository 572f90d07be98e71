"""The masks of a step: one row of bits for each constrained sequence, computed in threads while the forward runs.

Before: matcher.py.  After: engine/engine.py (starts them), runner/runner.py (takes them when it samples).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLExecutor

from .compile import Threads
from .matcher import Matcher

SLOW_SECONDS = 0.03  # masks of a step that take longer are watched
WATCHED = 16  # steps, in which each row is computed alone, and its time is its own


class Masks:
    """The masks of one step: they can be computed once every token before it is known.

    Attributes: slots: the device row of each.
    """

    def __init__(
        self, rows: Sequence[tuple[int, Matcher]], start: Callable[[Sequence[Matcher]], Future[np.ndarray]]
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

    def begin(self) -> None:
        """Compute them: every token before the step is known. No matcher may change until they are there."""
        if self._future is None:
            self._future = self._start(self._matchers)
            if self._waiting is not None:
                self._waiting()

    def when_begun(self, work: Callable[[], None]) -> None:
        """Have `work` done as soon as they are on their way."""
        self._waiting = work

    def result(self) -> np.ndarray:
        """[R, W] int32, bit i % 32 of word i // 32 for token i; waits for it. They must have begun."""
        return self._future.result()


class MaskPool:
    """Threads that compute masks.

    Args: thread: one that takes the steps in turn; the library has more, for the rows of a step.
    Attributes: seconds, rows: spent, and masks computed, so far.
    """

    def __init__(self, thread: Threads) -> None:
        self._executor: LLExecutor | None = None
        self._thread = thread
        self._watched = 0  # steps to come
        self.seconds = 0.0
        self.rows = 0

    def masks(self, rows: Sequence[tuple[int, Matcher]]) -> Masks:
        """The masks of these (slot, matcher) rows, not begun yet."""
        return Masks(rows, lambda matchers: self._thread.submit(self._compute, matchers))

    def close(self) -> None:
        """End the threads."""
        self._thread.close(wait=False)

    def _compute(self, matchers: Sequence[Matcher]) -> np.ndarray:
        start = time.perf_counter()
        if self._executor is None:
            self._executor = LLExecutor()
        bits = np.full((len(matchers), matchers[0].width), -1, dtype=np.int32)
        libraries = [(library, row) for row, each in enumerate(matchers) if (library := each.compiled()) is not None]
        if libraries and self._watched:
            self._watched -= 1
            for library, row in libraries:
                begin = time.thread_time()
                library.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits.shape[1] * 4)
                matchers[row].spend(time.thread_time() - begin)
        elif libraries:
            self._executor.unsafe_compute_mask_ptr(libraries, bits.ctypes.data, bits.shape[1] * 4, len(bits))
            if time.perf_counter() - start > SLOW_SECONDS:
                self._watched = WATCHED
        for row, matcher in zip(bits, matchers, strict=True):
            try:
                matcher.finish(row)
            except Exception as error:  # one answer's, not the step's
                matcher.error, row[:] = error, -1
        self.seconds += time.perf_counter() - start
        self.rows += len(matchers)
        return bits
