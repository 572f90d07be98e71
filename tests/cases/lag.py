"""How long the event loop was away: what everybody else has to wait for."""

import asyncio
import contextlib
import ctypes
import gc
import resource
import sys
import threading
import time

TICK = 0.002
SUSPECT = 0.06  # seconds away after which it is noted what each thread does


class Lag:
    """A task that wakes every 2 ms and notes by how much it was late, and a thread that notes who kept it.

    The thread takes its turn like every other. Python's faulthandler has one that does not (`dump_traceback_later`): it
    reads frames while they come and go, and now and then that ends the process, in which no handler of signals runs.

    Attributes:
        worst: seconds that the loop was away at most, as far as this process was at work meanwhile. When other
            processes have the cores, time goes by in which this one does nothing; that is not what is looked for.
        seen: what the threads did then, or right after a library that did not let go of the interpreter.
    """

    def __init__(self):
        self.worst, self.seen = 0.0, ""
        self._since, self._noted = time.monotonic(), ""  # of the tick under way

    async def watch(self):
        while True:
            wall, used, before = time.monotonic(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
            self._since, self._noted = wall, ""
            await asyncio.sleep(TICK)
            away = min(time.monotonic() - wall, time.process_time() - used) - TICK
            if away > self.worst:
                self.worst, self.seen = away, f"{_spent(before)}\n{self._noted}"

    def note(self, ended):
        """What the thread does until `ended` is set."""
        while not ended.wait(SUSPECT / 4):
            if not self._noted and time.monotonic() - self._since > SUSPECT:
                self._noted = _stacks()

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
    task, ended = asyncio.create_task(lag.watch()), threading.Event()
    thread = threading.Thread(target=lag.note, args=(ended,))
    thread.start()
    try:
        await asyncio.sleep(0.01)
        yield lag
    finally:
        gc.unfreeze()
        ended.set()
        thread.join()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _spent(before):
    """What all threads have used since then: parsing is the user's time, giving memory back is the system's."""
    after = resource.getrusage(resource.RUSAGE_SELF)
    names = ("utime", "stime", "minflt", "majflt", "nvcsw", "nivcsw")
    return ", ".join(f"{name} {getattr(after, 'ru_' + name) - getattr(before, 'ru_' + name):.4g}" for name in names)


def _stacks():
    """The stack of each thread, the innermost call first; without the lines' text, whose files take long to read."""
    found = []
    for number, frame in sys._current_frames().items():
        found.append(f"thread {number:#x}")
        while frame is not None:
            found.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
    return "\n".join(found)
