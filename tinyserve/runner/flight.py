"""A step on its way: launched, not yet landed.

The engine holds a deque of flights and awaits the oldest. Awaiting always gives other tasks a turn, also when the
result is already there: otherwise a fast device would starve the sockets that share the loop.

Before: runner/runner.py (makes it).  After: engine/engine.py (awaits it).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from ..errors import EngineDead
from ..step import StepOutput


def pass_on(done: Future[StepOutput], landing: Future[StepOutput]) -> None:
    """Give what a job came to on to the future that is waited for."""
    error = done.exception() if not done.cancelled() else EngineDead("The runner is closed.")
    if error is None:
        landing.set_result(done.result())
    else:
        landing.set_exception(error)


class Flight:
    """Awaitable for the StepOutput of one launched step.

    Args:
        step_id: of the StepInput.
        landing: resolved by the runner's worker thread with the output or with what went wrong.
    Attributes: waited: whether the loop came to wait for it before it had landed.
    """

    __slots__ = ("landing", "step_id", "waited")

    def __init__(self, step_id: int, landing: Future[StepOutput]) -> None:
        self.step_id = step_id
        self.landing = landing
        self.waited = False

    @property
    def landed(self) -> bool:
        return self.landing.done()

    def __await__(self) -> Generator[Any, None, StepOutput]:
        yield from asyncio.sleep(0).__await__()
        if not self.landing.done():
            self.waited = True
            loop, landed = asyncio.get_running_loop(), asyncio.Event()

            def tell(_: Future[StepOutput]) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(landed.set)

            self.landing.add_done_callback(tell)
            yield from landed.wait().__await__()
        error = self.landing.exception()
        if error is not None and (not isinstance(error, Exception) or isinstance(error, StopIteration)):
            # StopIteration, SystemExit, CancelledError ... mean something to asyncio: nobody would hear of the failure
            raise RuntimeError(f"the step raised {error!r}") from error
        return self.landing.result()
