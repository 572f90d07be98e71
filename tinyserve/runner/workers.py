"""Threads that go on working when the main thread has ended.

Python's own pools refuse work as soon as the main thread is done, while other threads of the user may still run for
hours: their engine would die under them. These threads take work until they are closed, or until the interpreter
leaves, which waits for what was submitted.

Before: nothing.  After: runner.py (one thread computes steps), engine/intake.py (a few tokenise).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_STARTING = threading.Lock()  # the size of stacks is the process's: one at a time changes it, and changes it back
_Jobs = SimpleQueue[
    "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None"
]  # None ends the thread that gets it


class Workers:
    """A few threads that take jobs in the order of `submit`.

    Args: name: of the threads, in tracebacks and tools.   stack: bytes of theirs; 0: as many as usual.
    """

    def __init__(self, name: str, count: int = 1, stack: int = 0) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._lock = threading.Lock()  # no job behind the marks that end the threads
        threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        with _STARTING:
            before = threading.stack_size(stack) if stack else 0  # of all threads that start now
            try:
                for thread in threads:
                    thread.start()
            finally:
                if stack:
                    threading.stack_size(before)
        self._end = weakref.finalize(self, _end, self._jobs, threads, count)

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Have `work(*args)` done. Raises: RuntimeError: closed."""
        job: Future[T] = Future()
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("These threads were closed and take no work any more.")
            self._jobs.put((job, work, args))
        return job

    def close(self, *, wait: bool = True) -> None:
        """Take no more work. wait: for all that was submitted; else what has not begun is cancelled."""
        with self._lock:
            found = self._end.detach()
        if found is None:
            return
        _, _, (jobs, threads, marks), _ = found
        while not wait and not jobs.empty():
            jobs.get()[0].cancel()
        _end(jobs, threads if wait else [], marks)


def _end(jobs: _Jobs, threads: list[threading.Thread], marks: int) -> None:
    for _ in range(marks):
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, work, args = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)
        del job, future, work, args  # an idle thread holds nothing
