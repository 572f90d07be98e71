"""Who launches: the thread that asks, or one that has nothing else to do.

A graph is replayed in a fraction of a millisecond. Kernels launched one by one, as in a step of many prompt tokens,
take 20 to 60 ms of a thread, and once 1024 of them wait on the device, the driver lets the thread wait until a whole
step has run: 0.3 s, in which the event loop would serve nobody.

    loop     plan | do(large) | sockets, sockets | plan | do(quick): it waits | ... | plan | do(quick): at once
    thread          '- launch, launch, launch ......................... replay -'

Work is done in the order of the calls, whoever does it.

Before: workers.py, graphs.py, slots.py.  After: runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..sampling.sampler import Sampler
from ..step import Decodes, StepInput
from .batch import Shape
from .graphs import Graphs
from .slots import Rows
from .workers import Workers


class Hands:
    """Does what launches on the device, in order.

    Args: thread: that does everything; None: all is done at once, and from `start` on what takes long by a thread.
    """

    def __init__(self, thread: Workers | None = None) -> None:
        self.everything = thread is not None
        self._thread = thread
        self._last: Future[Any] | None = None  # what the thread was given last

    def start(self) -> None:
        """Have a thread, if there is none yet."""
        if self._thread is None:
            self._thread = Workers("tinyserve-launch")

    @property
    def free(self) -> bool:
        """Whether nothing is under way, so that what is quick is done at once."""
        return self._last is None or self._last.done()

    def do(self, quick: bool, work: Callable[..., Any], *args: Any) -> Any:
        """work(*args), or its Future, if it is not quick, or something before it is not done. See `done`."""
        if self.free:
            self._last = None  # it may hold tensors
        if self._thread is None or (quick and self._last is None):
            return work(*args)
        self._last = self._thread.submit(work, *args)
        return self._last

    def close(self) -> None:
        """Wait for what is under way, and take no more."""
        if self._thread is not None:
            self._thread.close()
        self._last = None


def done(given: Any) -> Any:
    """What `do` gave, as soon as it is there. Raises: what the work raised."""
    return given.result() if isinstance(given, Future) else given


def by_graph(step: StepInput, graphs: Graphs, rows: Rows, sampler: Sampler) -> bool:
    """Whether the forward of a step is a graph's, or it has none; asked before its rows are booked.

    Prompts beside which something is edited or reported run in their own shape, kernel by kernel (Runner._forward).
    Of a row that is closed and opened by this step the worse of both counts.
    """
    slices, opened = step.slices, [opening.params for opening in step.opened]
    if not slices:
        return True
    slots = slices.slots if isinstance(slices, Decodes) else [piece.slot for piece in slices]
    worn = not rows.adapted.isdisjoint(slots) or any(params.adapter for params in opened)
    shape = Shape.of(slices, adapted=worn)
    if shape.is_decode or not graphs.holds(shape):
        return graphs.holds(shape)
    asked = not (rows.scored.isdisjoint(slots) and rows.pooled.isdisjoint(slots))
    asked = asked or any(params.pooled or params.scores_from() is not None for params in opened)
    return not (asked or sampler.special(slots, opened))
