"""How many steps' tokens a reader gets at once: one, unless the device waits for the loop because of the readers.

A token on its way to a client takes the loop longer than the rest of its step together. With many clients and a fast
device the loop is what everybody waits for: then tokens of a few steps go out together, no more than it takes for the
device to be busy again, and each client has its own turn so that a step never wakes all of them.

Before: runner/flight.py (knows who waited for whom).  After: streams.py (whose turn is it?), engine.py (calls `note`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

MANY = 32  # streams; fewer are no burden
WINDOW = 8  # steps between two decisions
PATIENCE = 16  # windows without an idle device after which readers are woken more often again
MOST = 16  # steps together
LONGEST = 0.3  # seconds that they may take; a person reads no faster


class Pace:
    """Decides from step to step. Attributes: together: steps whose tokens go out at once."""

    def __init__(self) -> None:
        self.together = 1
        self._step = 0
        self._idle = 0  # steps of this window after which the device had nothing to do
        self._calm = 0  # windows in a row without any
        self._began = time.monotonic()

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
        now = time.monotonic()
        step, self._began = (now - self._began) / WINDOW, now
        idle, self._idle = self._idle, 0
        self._calm = 0 if idle else self._calm + 1
        if streams < MANY:
            self.together = 1
        elif idle > WINDOW // 2:
            if 2 * self.together <= min(MOST, LONGEST / step):
                self.together *= 2
        elif self._calm >= PATIENCE and self.together > 1:
            self.together //= 2
            self._calm = 0
