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
WINDOW = 8  # steps between two decisions; fewer if they take longer than LONGEST
PATIENCE = 16  # windows without an idle device after which readers are woken more often again
BUSY, CALM = 0.8, 0.6  # shares of a window that the loop's thread works: is it behind, can it do more?
MOST = 16  # steps together
LONGEST = 0.3  # seconds that they may take; a person reads no faster


class Pace:
    """Decides from step to step. Attributes: together: steps whose tokens go out at once."""

    def __init__(self) -> None:
        self.together = 1
        self._step = 0
        self._steps = 0  # of this window
        self._idle = 0  # those of them after which the device had nothing to do
        self._calm = 0  # windows in a row in which the loop kept up
        self._began, self._worked = time.monotonic(), time.thread_time()
        self._watched = 0.0  # seconds of this window in which the thread did nothing but ask the device

    def note(self, flight: Any, flying: Iterable[Any], streams: int) -> None:
        """A flight has landed. flying: those behind it.   streams: answers that are being made."""
        self._step += 1
        self._steps += 1
        self._watched += flight.watched
        self._idle += not flight.waited and all(other.landed for other in flying)
        if streams < MANY:
            self.together = 1
        now = time.monotonic()
        if self._steps == WINDOW or now - self._began > LONGEST:
            self._decide(now, streams)

    def turn(self, number: int) -> bool:
        """Whether the stream with this number is shown the tokens of this step, and of those before."""
        return self.together == 1 or (self._step + number) % self.together == 0

    def _decide(self, now: float, streams: int) -> None:
        worked, wall, steps = time.thread_time(), now - self._began, self._steps
        share = (worked - self._worked - self._watched) / max(wall, 1e-9)
        most = min(MOST, LONGEST * steps / max(wall, 1e-9))
        behind = 2 * self._idle > steps or share > BUSY
        self._calm = 0 if self._idle or share > CALM else self._calm + 1
        self._began, self._worked, self._watched, self._idle, self._steps = now, worked, 0.0, 0, 0
        while self.together > most and self.together > 1:
            self.together //= 2  # steps have become slow: a prompt, or a pause
        if streams >= MANY and behind and 2 * self.together <= most:
            self.together *= 2
        elif not behind and self._calm >= PATIENCE and self.together > 1:
            self.together //= 2
            self._calm = 0
