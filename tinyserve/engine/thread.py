"""A thread for one piece of work at the end of an engine's life.

Before: nothing.  After: engine.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


async def in_own_thread(work: Callable[[], None]) -> None:
    """Run `work` off the loop, also while the interpreter exits, when executors take nothing any more."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=run, name="tinyserve-close", daemon=True).start()
    await asyncio.shield(done)
