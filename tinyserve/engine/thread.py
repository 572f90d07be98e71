"""A thread for one piece of work, which ends with it.

Unlike an executor's, such a thread can start while the interpreter exits. And it takes along the threads that the
maths library made for it: libgomp keeps a team for each thread that ever multiplied matrices, counts them all, and when
there are more than cores lets waiting ones sleep at once. With the team of the loading thread still there, a step of
two threads took half as long again as one of one thread.

Before: nothing.  After: engine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


async def in_own_thread(name: str, work: Callable[..., Any], *args: Any, daemon: bool = False) -> Any:
    """Run `work(*args)` off the loop and return its result. A caller that is cancelled does not wait for it.

    Args: daemon: the interpreter does not wait for it either; only such a thread starts while the interpreter exits.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(finish: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            finish(value)

    def run() -> None:
        try:
            finish, value = done.set_result, work(*args)
        except BaseException as error:
            finish, value = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(settle, finish, value)

    threading.Thread(target=run, name=f"tinyserve-{name}", daemon=daemon).start()
    return await done
