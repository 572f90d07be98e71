"""Running a step's kernels: one by one, or replayed as a device graph.

`Graphs` is the seam: the runner hands over the whole computation of a step (forward, logits, sampling) and the batch
that it reads. `Eager` launches kernel by kernel, which is right for the CPU and for large steps. A captured variant
replays a decode step from the batch's fixed addresses; it takes the same call and falls back to eager for shapes that
it does not hold.

Before: runner/batch.py.  After: runner/runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from .batch import Batch

Result = TypeVar("Result")


class Graphs(Protocol):
    """Runs the computation of one step."""

    def run(self, batch: Batch, compute: Callable[[Batch], Result]) -> Result:
        """Return compute(batch), or the result of a graph that does the same."""
        ...

    def close(self) -> None:
        """Free captured graphs and their memory."""
        ...


class Eager:
    """Launches every kernel of every step. Holds nothing."""

    def run(self, batch: Batch, compute: Callable[[Batch], Result]) -> Result:
        """Return compute(batch)."""
        return compute(batch)

    def close(self) -> None:
        """Nothing to free."""
