"""How long the event loop was away: what everybody else has to wait for."""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import resource
import tempfile
import time

TICK = 0.002
SUSPECT = 0.06  # seconds away after which it is noted what each thread does


class Lag:
    """A task that wakes every 2 ms and notes by how much it was late.

    Attributes:
        worst: seconds that the loop was away at most, as far as this process was at work meanwhile. When other
            processes have the cores, time goes by in which this one does nothing; that is not what is looked for.
        seen: what the threads did then. It is written by a thread that needs no interpreter, since who holds the loop
            for long is often a library that does not let go of that.
    """

    def __init__(self):
        self.worst, self.seen = 0.0, ""

    async def watch(self):
        with tempfile.TemporaryFile("w+") as file:
            while True:
                wall, used, before = time.monotonic(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
                faulthandler.dump_traceback_later(SUSPECT, file=file)
                try:
                    await asyncio.sleep(TICK)
                finally:
                    faulthandler.cancel_dump_traceback_later()
                away = min(time.monotonic() - wall, time.process_time() - used) - TICK
                if away > self.worst:
                    file.seek(0)
                    self.worst, self.seen = away, f"{_spent(before)}\n{file.read()}"
                file.seek(0)
                file.truncate()

    def __repr__(self):
        return f"the loop was away for {self.worst:.3f} s at most\n{self.seen}"


@contextlib.asynccontextmanager
async def watched():
    """Watch the loop during the block; `lag.worst` afterwards.

    What thousands of tests have left in memory is kept from Python's collector, and what they have freed is given back
    now rather than by the first thread that frees the end of it: either takes longer than what is looked for, and no
    server has that.
    """
    lag = Lag()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):  # other systems have another library
        ctypes.CDLL(None).malloc_trim(0)
    task = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.01)
    try:
        yield lag
    finally:
        gc.unfreeze()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _spent(before):
    """What all threads have used since then: parsing is the user's time, giving memory back is the system's."""
    after = resource.getrusage(resource.RUSAGE_SELF)
    names = ("utime", "stime", "minflt", "majflt", "nvcsw", "nivcsw")
    return ", ".join(f"{name} {getattr(after, 'ru_' + name) - getattr(before, 'ru_' + name):.4g}" for name in names)
