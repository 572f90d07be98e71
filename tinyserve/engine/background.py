"""An engine in a thread of its own, for callers that have no event loop, or one of their own.

A call from any thread runs as a coroutine on the engine's loop and is waited for. It ends in one of three ways: by
itself, by an interrupt of its thread, which cancels it there, or by a close from another thread, an error here.

Before: engine.py.  After: llm.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..errors import TinyserveError
from .engine import Engine
from .progress import Progress

T = TypeVar("T")
CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError)


class Background:
    """An event loop in a thread, and the engine that lives there."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinyserve-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], progress: Progress | None = None) -> T:
        """Run a coroutine there and wait for it; an interrupt, or an error of the bar, cancels it and comes out here.

        Raises: TinyserveError: this is a forked process, which has no such thread; or that thread itself.
        """
        try:
            self.check()
        except TinyserveError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            if progress is not None:
                progress.show(future)
            return future.result()
        except CANCELLED:
            raise TinyserveError("This LLM was closed.") from None
        except BaseException:
            future.cancel()
            raise

    def check(self) -> None:
        """Raises: TinyserveError: see `run`."""
        if threading.current_thread() is self._thread:
            raise TinyserveError("An LLM cannot be used from its own thread: the call would wait for itself.")
        if self.forked:
            raise TinyserveError(
                "This LLM belongs to the process that made it: its threads do not exist in a forked one. Make the LLM "
                "in the process that uses it, or start that process with multiprocessing's 'spawn'."
            )

    def close(self) -> None:
        """Close the engine and end the thread. Safe to call twice, and while the interpreter exits."""
        if self._loop.is_closed() or self.forked:
            return
        engine, self.engine = self.engine, None
        self.run(_last(engine))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def leave(self) -> None:
        """Close because nobody has the LLM any more. The collector finds that, in whatever thread it happens to run:
        one of the engine's own would wait for itself. Or the interpreter ends, whose main thread must wait for it."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close, name="tinyserve-close").start()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process


async def _last(engine: Engine | None) -> None:
    """Close the engine, then end calls of other threads that wait for something else of it: for their turn, say; or
    its start, which was interrupted."""
    if engine is not None:
        await engine.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
