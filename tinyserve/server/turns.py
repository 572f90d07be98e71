"""A thousand clients that come in the same moment are let in a few at a time, so that running streams go on meanwhile.

What a request costs until it is queued is a millisecond of the loop. Tasks that become ready together run together, and
nobody else gets a turn until all of them have run: with a thousand, for a second.

Before: nothing.  After: connections.py (connections), app.py (requests).
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4  # a turn for every 256 units of what a step gave (engine/streams.py), or the device waits for the crowd


class Turns:
    """Lets at most `AT_ONCE` through each time around the event loop, in their order."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Go on, at once if few have gone on in this time around."""
        loop = asyncio.get_running_loop()
        if self._left == AT_ONCE:
            loop.call_soon(self._next, loop)
        if not self._left:
            self._waiting.append(turn := loop.create_future())
            await turn
        else:
            self._left -= 1

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has left
                turn.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE:
            loop.call_soon(self._next, loop)
