"""A thread with a stack of its own size: the library goes into a grammar with it, as deep as that is nested.

Before: nothing.  After: trial.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_STARTING = threading.Lock()  # the size of stacks is the process's: one at a time changes it, and changes it back
T = TypeVar("T")


def with_stack(size: int, work: Callable[[], T]) -> T:
    """Have work done in a thread with a stack of so many bytes, and wait for it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="tinyserve-deep", daemon=True)
    with _STARTING:
        before = threading.stack_size(size)  # of all threads that start now
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()
