"""How long the event loop was away: what everybody else has to wait for."""

import asyncio
import contextlib
import gc
import time

TICK = 0.002


class Lag:
    """A task that wakes every 2 ms and notes by how much it was late.

    Attributes:
        worst: seconds that the loop was away at most, as far as this process was at work meanwhile. When other
            processes have the cores, time goes by in which this one does nothing; that is not what is looked for.
    """

    def __init__(self):
        self.worst = 0.0

    async def watch(self):
        while True:
            wall, used = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK)
            away = min(time.monotonic() - wall, time.process_time() - used) - TICK
            self.worst = max(self.worst, away)


@contextlib.asynccontextmanager
async def watched():
    """Watch the loop during the block; `lag.worst` afterwards.

    What thousands of tests have left in memory is kept from Python's collector: going through it takes longer than
    what is looked for, and no server has it.
    """
    lag = Lag()
    gc.collect()
    gc.freeze()
    task = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.01)
    try:
        yield lag
    finally:
        gc.unfreeze()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
