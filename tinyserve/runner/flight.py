"""A step on its way: launched, not yet landed.

The engine holds a deque of flights and awaits the oldest. Awaiting always gives other tasks a turn, also when the
result is already there: otherwise a fast device would starve the sockets that share the loop.

Who waits usually sleeps: a thread of the runner waits for the device, builds the output and wakes the loop, which is
0.3 to 0.7 ms after the device was done. Where the device is waiting by then for what the loop does next, that is too
long (grammars: the masks of many rows). Such a flight is watched: between the turns of other tasks the loop itself asks
the device, and a thread waits only for what does not come within a millisecond.

Before: runner/runner.py (makes it).  After: engine/engine.py (awaits it).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from attrs import define, frozen

from ..errors import EngineDead
from ..step import StepOutput

WATCHED_ROWS = 32  # of a step, at least: the masks of fewer are there long before the forward ends, however it is known
LOOK_SECONDS = 1e-3  # that a flight is watched at most
SPARED = 32  # flights that are not watched after one that did not land in time: the device takes long
TURN_SECONDS = 1e-4  # a turn of the other tasks that took longer was not spent on watching


def wake(waiter: asyncio.Future[None]) -> None:
    """Let who awaits go on, unless it was cancelled meanwhile."""
    if not waiter.done():
        waiter.set_result(None)


def pass_on(done: Future[StepOutput], landing: Future[StepOutput]) -> None:
    """Give what a job came to on to the future that is waited for."""
    error = done.exception() if not done.cancelled() else EngineDead("The runner is closed.")
    if error is None:
        landing.set_result(done.result())
    else:
        landing.set_exception(error)


@define
class Patience:
    """Whether flights are worth watching. spared: how many to come are not."""

    spared: int = 0

    def lasts(self) -> bool:
        """Whether the next one is."""
        lasts = not self.spared
        self.spared -= not lasts
        return lasts


@frozen
class Watch:
    """How the loop finds out itself that a step has landed.

    Args:
        there: whether the device is done.   land: gives the output then.
        leave: has a thread do both instead, and resolve the flight's landing.
        patience: loses it when this flight does not land in time.
    """

    there: Callable[[], bool]
    land: Callable[[], StepOutput]
    leave: Callable[[], Any]
    patience: Patience


class Flight:
    """Awaitable for the StepOutput of one launched step.

    Args:
        step_id: of the StepInput.
        landing: resolved by the runner's worker thread with the output or with what went wrong.
    Attributes:
        waited: whether the loop came to wait for it before it had landed.
        starved: whether the device had done all that it could of it, and nothing else, before the rest was launched.
        watch: what it is watched with, if it is; nobody resolves `landing` then, until it is awaited.
        watched: seconds that the loop did nothing else.
    """

    __slots__ = ("landing", "starved", "step_id", "waited", "watch", "watched")

    def __init__(self, step_id: int, landing: Future[StepOutput]) -> None:
        self.step_id = step_id
        self.landing = landing
        self.waited = False
        self.starved = False
        self.watch: Watch | None = None
        self.watched = 0.0

    @property
    def landed(self) -> bool:
        return self.landing.done() or (self.watch is not None and self.watch.there())

    def __await__(self) -> Generator[Any, None, StepOutput]:
        yield from asyncio.sleep(0).__await__()
        if self.watch is not None:
            yield from self._look(self.watch)
        if not self.landing.done():
            self.waited = True
            loop = asyncio.get_running_loop()
            landed = loop.create_future()

            def tell(_: Future[StepOutput]) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(wake, landed)

            self.landing.add_done_callback(tell)
            yield from landed
        error = self.landing.exception()
        if error is not None and (not isinstance(error, Exception) or isinstance(error, StopIteration)):
            # StopIteration, SystemExit, CancelledError ... mean something to asyncio: nobody would hear of the failure
            raise RuntimeError(f"the step raised {error!r}") from error
        return self.landing.result()

    def _look(self, watch: Watch) -> Generator[Any, None, None]:
        """Ask the device between the turns of others, and land the step if it is done in time."""
        start = now = time.perf_counter()
        self.watch = None
        try:
            while not watch.there():
                self.waited = True
                if now - start > LOOK_SECONDS:
                    watch.patience.spared = SPARED
                    return watch.leave()
                yield from asyncio.sleep(0).__await__()
                before, now = now, time.perf_counter()
                self.watched += now - before if now - before < TURN_SECONDS else 0.0
            self.landing.set_result(watch.land())
        except Exception as error:
            self.landing.set_exception(error)
        except BaseException:  # the loop's task was cancelled meanwhile
            with contextlib.suppress(RuntimeError):  # so was the runner closed
                watch.leave()
            raise
