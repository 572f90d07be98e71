"""How many steps' tokens a reader gets at once: one, unless everybody waits for the loop because of the readers.

A token on its way to a client takes the loop longer than the rest of its step together. With many clients and a fast
device the loop is what everybody waits for: its thread works all the time, or steps have always landed when it comes to
look, or clients come faster than it lets them in. Then tokens of a few steps go out together, no more than it takes
for that to end, and each client has its own turn so that a step never wakes all of them.

Before: runner/flight.py (knows who waited for whom).  After: streams.py (whose turn is it?), engine.py (calls `note`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

MANY = 32  # streams; fewer are no burden
WINDOW = 8  # steps between two decisions; fewer if they take longer than LONGEST, or
EVIDENT = 2  # steps in a row after which the device had nothing to do, or
CROWD = 16  # clients that came meanwhile, each of whom
ARRIVAL = 1e-3  # seconds of the loop's thread are for: only what of a window is left is for readers
PATIENCE = 16  # windows without an idle device after which readers are woken more often again
BUSY, CALM = 0.8, 0.6  # shares of a window that the loop's thread works: is it behind, can it do more?
ENOUGH = 16  # of them are worth a step while another one is under way
MOST = 32  # steps together
LONGEST = 0.3  # seconds that they may take where readers are not what they wait for; a person reads no faster
SHORTER = 0.75  # of its time a step takes once readers are woken half as often, where they are what it waits for


class Pace:
    """Decides from step to step.

    Attributes:
        together: steps whose tokens go out at once.
        came: clients since the last decision.   crowded: they came faster than they are let in.
    """

    def __init__(self) -> None:
        self.together = 1
        self.came = 0
        self.crowded = False
        self._step = 0
        self._steps = 0  # of this window
        self._idle = 0  # those of them after which the device had nothing to do
        self._calm = 0  # windows in a row in which the loop kept up
        self._began, self._worked = time.monotonic(), time.thread_time()
        self._watched = 0.0  # seconds of this window in which the thread did nothing but ask the device
        self._before = math.inf  # seconds that a step took before readers were last made to wait, or not to wait

    def note(self, flight: Any, flying: Iterable[Any], streams: int) -> None:
        """A flight has landed. flying: those behind it.   streams: answers that are being made."""
        self._step += 1
        self._steps += 1
        self._watched += flight.watched
        self._idle += not flight.waited and all(other.landed or other.starved for other in flying)
        if streams < MANY:
            self.together = 1
        now = time.monotonic()
        evident = (self._steps >= EVIDENT and (self.crowded or self._idle == self._steps)) or self.came >= CROWD
        if self._steps >= WINDOW or evident or now - self._began > LONGEST:
            self._decide(now, streams)

    def enough(self, waiting: int) -> bool:
        """Whether a step should be planned behind another one. waiting: requests that are not let in."""
        return not self.crowded or waiting >= ENOUGH

    def turn(self, number: int) -> bool:
        """Whether the stream with this number is shown the tokens of this step, and of those before."""
        return self.together == 1 or (self._step + number) % self.together == 0

    def turns(self) -> range:
        """The remainders, by MOST, of the numbers of those streams."""
        return range(-self._step % self.together, MOST, self.together)

    def _decide(self, now: float, streams: int) -> None:
        worked, wall, steps = time.thread_time(), max(now - self._began, 1e-9), self._steps
        share, step = (worked - self._worked - self._watched) / wall, wall / steps
        idle = 2 * self._idle > steps
        self.crowded = self.came * ARRIVAL > wall / 2
        behind = idle or share > BUSY or self.crowded
        self._calm = 0 if self._idle or share > CALM else self._calm + 1
        self._began, self._worked, self._watched = now, worked, 0.0
        self._idle = self._steps = self.came = 0
        helps = step < SHORTER * self._before  # so that they wait no longer although they are woken less often
        if self.together > 1 and self.together * step > LONGEST and not helps:
            while self.together > 1 and self.together * step > LONGEST:
                self.together //= 2  # steps have become slow: a prompt, or a pause
            self._before = step
        elif streams >= MANY and behind:
            if 2 * self.together <= MOST and (2 * self.together * step <= LONGEST or (idle and helps)):
                self.together *= 2
                self._before = step
        elif self._calm >= PATIENCE and self.together > 1:
            self.together //= 2
            self._calm = 0
