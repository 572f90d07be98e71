"""What a process needs that answers, or asks, a thousand times at once: files, few pauses of Python's own, signals that
are answered, and an end even where a thread or a reader is stuck.

Before: nothing.  After: serve.py, batch.py, bench.py, __main__.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import select
import signal
import sys
import threading

LEAVE_SECONDS = 0.5  # for threads to give up by themselves, when a signal came
SWITCH_INTERVAL = 5e-4  # seconds that a busy thread may keep the interpreter from the loop; Python's own 5e-3 is felt
# objects: Python's own 700 cost a tenth of the time that serving a token takes. Of 2 times 5000, as many as a burst of
# clients leaves alive, one look takes 4 ms; of 5 times 5000 it took 10, and 17 on a slow host. All that a thousand
# streams hold takes 0.3 s, which is seldom, but not so seldom that what requests leave behind (2 KB each) would take
# longer than that.
COLLECT_AFTER = 5_000, 2, 125


def allow_files() -> None:
    """As many open files as the system lets us have: a connection is one, and the usual 1024 are few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_loaded() -> None:
    """What is loaded by now stays; the collector need not look at it again, and seldom at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


class Signals:
    """The first SIGTERM or SIGINT sets an event; the second one kills as usual. Attributes: number: which one came."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.number: signal.Signals | None = None
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread, which gets no signal then either
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        self.number = number
        self.first.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def leave_soon(code: int) -> None:
    """End the process although a thread still works: Python would wait for it, and it may be inside a download."""

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):
                stream.flush()
        os._exit(code)

    timer = threading.Timer(LEAVE_SECONDS, leave)
    timer.daemon = True
    timer.start()


def reader_left() -> bool:
    """Whether standard output, or standard error, is a pipe that nobody reads any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            poll.register(stream.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def forget_output() -> None:
    """Whatever is still to be written to standard output goes nowhere, so that Python does not try again at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
