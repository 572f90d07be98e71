"""Whether requests come in and steps are planned: what a pause, and the end, change.

                 new requests    what runs
    OPEN         are taken       goes on
    HELD         queue           stands still          pause("keep")
    SHUT         are refused     goes on to its end    pause("abort"), pause("wait")
    DRAINING     are refused     goes on to its end    close, which nothing takes back
    CLOSED       are refused     has ended

Before: nothing of the engine.  After: engine.py, which asks it before each step.
"""

from __future__ import annotations

import asyncio
import enum

from ..errors import Overloaded


class State(enum.Enum):
    """See above."""

    OPEN = "open"
    HELD = "held"
    SHUT = "paused"
    DRAINING = "draining"
    CLOSED = "shutting down"


class Gate:
    """One engine's. state: changed by `move` alone."""

    def __init__(self) -> None:
        self.state = State.OPEN
        self._moved = asyncio.Event()

    @property
    def plans(self) -> bool:
        """Whether steps are planned."""
        return self.state not in (State.HELD, State.CLOSED)

    @property
    def is_paused(self) -> bool:
        return self.state in (State.HELD, State.SHUT)

    @property
    def is_ending(self) -> bool:
        return self.state in (State.DRAINING, State.CLOSED)

    def move(self, state: State) -> asyncio.Event:
        """Change the state. Returns: what the next move sets: nobody need wait then for what this one promised."""
        self.state = state
        self._moved.set()
        self._moved = asyncio.Event()
        return self._moved

    def check(self, begun: bool = False) -> None:
        """Raises: Overloaded: nothing new is taken. begun: it is a step of what runs already."""
        if self.state is State.CLOSED or (self.state in (State.SHUT, State.DRAINING) and not begun):
            raise Overloaded(f"The engine is {self.state.value} and takes no requests now.")


async def either(*events: asyncio.Event) -> None:
    """Wait for the first of them."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
