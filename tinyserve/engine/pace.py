"""How many steps' tokens a reader gets at once: one, unless everybody waits for the loop because of the readers.

A token on its way to a client takes the loop longer than the rest of its step together. With many clients and a fast
device the loop is what everybody waits for: its thread works all the time, or steps have always landed when it comes to
look. Then tokens of a few steps go out together, no more than it takes for that to end, and each client has its own
turn so that a step never wakes all of them.

Before: runner/flight.py (knows who waited for whom).  After: streams.py (whose turn is it?), engine.py (calls `note`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

MANY = 32  # streams; fewer are no burden
WINDOW = 8  # steps between two decisions
PATIENCE = 16  # windows without an idle device after which readers are woken more often again
BUSY, CALM = 0.8, 0.6  # shares of a window that the loop's thread works: is it behind, can it do more?
MOST = 16  # steps together
LONGEST = 0.3  # seconds that they may take; a person reads no faster


class Pace:
    """Decides from step to step. Attributes: together: steps whose tokens go out at once."""

    def __init__(self) -> None:
        self.together = 1
        self._step = 0
        self._idle = 0  # steps of this window after which the device had nothing to do
        self._calm = 0  # windows in a row in which the loop kept up
        self._began, self._worked = time.monotonic(), time.thread_time()

    def note(self, flight: Any, flying: Iterable[Any], streams: int) -> None:
        """A flight has landed. flying: those behind it.   streams: answers that are being made."""
        self._step += 1
        self._idle += not flight.waited and all(other.landed for other in flying)
        if self._step % WINDOW == 0:
            self._decide(streams)

    def turn(self, number: int) -> bool:
        """Whether the stream with this number is shown the tokens of this step, and of those before."""
        return self.together == 1 or (self._step + number) % self.together == 0

    def _decide(self, streams: int) -> None:
        now, worked = time.monotonic(), time.thread_time()
        wall, share = now - self._began, (worked - self._worked) / max(now - self._began, 1e-9)
        behind = self._idle > WINDOW // 2 or share > BUSY
        self._calm = 0 if self._idle or share > CALM else self._calm + 1
        self._began, self._worked, self._idle = now, worked, 0
        if streams < MANY:
            self.together = 1
        elif behind:
            if 2 * self.together <= min(MOST, LONGEST * WINDOW / wall):
                self.together *= 2
        elif self._calm >= PATIENCE and self.together > 1:
            self.together //= 2
            self._calm = 0
