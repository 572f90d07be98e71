"""Work off the loop in a thread of its own."""

import asyncio
import threading

import pytest

from tinyserve.engine.thread import in_own_thread


def alive(name):
    return any(thread.name == name for thread in threading.enumerate())


def test_the_thread_ends_with_its_work():
    """Breaks if a loading thread lives on: its team of OpenMP threads makes steps of several threads slow."""

    async def main():
        result = await in_own_thread("sum", lambda *numbers: (sum(numbers), threading.current_thread()), 1, 2)
        result[1].join(5)
        return result[0]

    assert asyncio.run(main()) == 3
    assert not alive("tinyserve-sum")


def test_errors_come_to_who_waits():
    """Breaks if a failed load is never heard of."""

    def fail():
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        asyncio.run(in_own_thread("fail", fail))


def test_a_cancelled_caller_does_not_wait():
    """Breaks if Ctrl-C while loading waits for the load, or if its late result is an error in a closed loop."""
    go, errors = threading.Event(), []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        task = asyncio.create_task(in_own_thread("slow", go.wait, 10))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert errors == []
