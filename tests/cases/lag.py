"""How long the event loop was away: what everybody else has to wait for."""

import asyncio
import contextlib
import time


class Lag:
    """A task that wakes every 2 ms and notes by how much it was late. worst: seconds."""

    def __init__(self):
        self.worst = 0.0
        self._last = time.monotonic()

    async def watch(self):
        while True:
            self._last = time.monotonic()
            await asyncio.sleep(0.002)
            self.worst = max(self.worst, time.monotonic() - self._last - 0.002)


@contextlib.asynccontextmanager
async def watched():
    """Watch the loop during the block; `lag.worst` afterwards."""
    lag = Lag()
    task = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.01)
    try:
        yield lag
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
