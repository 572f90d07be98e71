"""The masks of a step: one row of bits for each constrained sequence, computed in threads while the forward runs.

Before: matcher.py.  After: engine/engine.py (starts them), runner/runner.py (takes them when it samples).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from attrs import frozen
from llguidance import LLExecutor

from .compile import Threads
from .matcher import Matcher


@frozen(eq=False)
class Masks:
    """Masks on their way. slots: the device row of each."""

    slots: tuple[int, ...]
    future: Future[np.ndarray]

    def result(self) -> np.ndarray:
        """[R, W] int32, bit i % 32 of word i // 32 for token i; waits for it."""
        return self.future.result()


class MaskPool:
    """Threads that compute masks.

    Args: thread: one that takes the steps in turn; the library has more, for the rows of a step.
    Attributes: seconds, rows: spent, and masks computed, so far.
    """

    def __init__(self, thread: Threads) -> None:
        self._executor: LLExecutor | None = None
        self._thread = thread
        self.seconds = 0.0
        self.rows = 0

    def start(self, rows: Sequence[tuple[int, Matcher]]) -> Masks:
        """Begin with the masks of these (slot, matcher) rows. No matcher may change before they are there."""
        matchers = [matcher for _, matcher in rows]
        return Masks(tuple(slot for slot, _ in rows), self._thread.submit(self._compute, matchers))

    def close(self) -> None:
        """End the threads."""
        self._thread.close(wait=False)

    def _compute(self, matchers: Sequence[Matcher]) -> np.ndarray:
        start = time.perf_counter()
        if self._executor is None:
            self._executor = LLExecutor()
        bits = np.full((len(matchers), matchers[0].width), -1, dtype=np.int32)
        libraries = [(library, row) for row, each in enumerate(matchers) if (library := each.library()) is not None]
        if libraries:
            self._executor.unsafe_compute_mask_ptr(libraries, bits.ctypes.data, bits.shape[1] * 4, len(bits))
        for row, matcher in zip(bits, matchers, strict=True):
            try:
                matcher.finish(row)
            except Exception as error:  # one answer's, not the step's
                matcher.error, row[:] = error, -1
        self.seconds += time.perf_counter() - start
        self.rows += len(matchers)
        return bits
