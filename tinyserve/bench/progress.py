"""How far a measurement is, on stderr, and its end where somebody does not want to wait for the rest.

    measuring: 1 warm-up and 3 runs, each of 256 requests with 163840 tokens; Ctrl-C shows what was measured so far
    warm-up 1 of 1: 31.2 s, about 94 s left
    run 2 of 3: 57 of 256 requests answered after 10 s        every 10 s, while a run lasts

Before: measure.py.  After: command.py, serve.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from .measure import Measured, Work

EVERY = 10.0  # seconds between two lines of one run


@contextlib.contextmanager
def sigterm_cancels() -> Iterator[None]:
    """While this is entered, SIGTERM cancels the task, as asyncio does after Ctrl-C."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    with contextlib.suppress(RuntimeError, ValueError):  # in another thread, which gets no signal
        loop.add_signal_handler(signal.SIGTERM, me.cancel)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)


class Progress:
    """Runs one after the other, each told of. Attributes: runs: what the timed ones that are over took."""

    def __init__(self, work: Work, warmup: int, runs: int) -> None:
        self.runs: list[Measured] = []
        self._warmup, self._runs = warmup, runs
        self._requests = len(work.prompts)
        self._tokens = sum(map(len, work.prompts)) + sum(work.outputs)
        self._answers = 0
        self._name, self._began = "", 0.0

    def answered(self) -> None:
        """One more request of this run has its answer."""
        self._answers += 1

    async def all(self, once: Callable[[], Awaitable[Measured]]) -> None:
        """Do every run, warm-ups first."""
        warm = f"{self._warmup} warm-up{'s' * (self._warmup != 1)} and " if self._warmup else ""
        tell(
            f"measuring: {warm}{self._runs} run{'s' * (self._runs != 1)}, each of {self._requests} "
            f"request{'s' * (self._requests != 1)} with {self._tokens} tokens; Ctrl-C shows what was measured so far"
        )
        names = [("warm-up", number, self._warmup) for number in range(1, self._warmup + 1)]
        names += [("run", number, self._runs) for number in range(1, self._runs + 1)]
        for done, (kind, number, count) in enumerate(names, start=1):
            self._name, self._began, self._answers = f"{kind} {number} of {count}", time.monotonic(), 0
            beats = asyncio.create_task(self._beat())
            try:
                found = await once()
            finally:
                beats.cancel()
            if kind == "run":
                self.runs.append(found)
            left = found.seconds * (len(names) - done)
            tell(f"{self._name}: {found.seconds:.1f} s" + (f", about {left:.0f} s left" if left else ""))

    async def stopped_by_signals(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for it. Returns: whether SIGTERM or Ctrl-C ended it. Raises: CancelledError: before a run was over."""
        try:
            with sigterm_cancels():
                await work
        except asyncio.CancelledError:
            tell(f"stopped in {self._name}, after {len(self.runs)} of {self._runs} runs")
            if not self.runs:
                raise
            asyncio.current_task().uncancel()
            return True
        return False

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            after = time.monotonic() - self._began
            tell(f"{self._name}: {self._answers} of {self._requests} requests answered after {after:.0f} s")


def tell(line: str) -> None:
    """Write a line to stderr."""
    print(line, file=sys.stderr, flush=True)
