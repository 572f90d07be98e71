"""flight.py: what the loop does until a step has landed."""

import asyncio
from concurrent.futures import Future

import pytest

from tinyserve.runner import flight as module
from tinyserve.runner.flight import SPARED, Flight, Patience, Watch
from tinyserve.step import StepOutput

OUTPUT = StepOutput(step_id=1, slices=())


def watched(there, patience=None, land=lambda: OUTPUT):
    flight, left = Flight(1, Future()), []
    flight.watch = Watch(there, land, lambda: left.append(True), patience or Patience())
    return flight, left


async def outcome(flight):
    return await flight


@pytest.mark.parametrize("after", [0, 3])
def test_the_loop_lands_what_comes_soon(after):
    """There at once, or at the third look: no thread is asked, and others had a turn before each look."""
    looks, turns = [], []

    async def work():
        flight, left = watched(lambda: looks.append(len(turns)) or len(looks) > after)

        async def other():
            while True:
                turns.append(True)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert await flight is OUTPUT
        task.cancel()
        assert flight.landed and flight.waited == (after > 0) and not left

    asyncio.run(work())
    assert looks == sorted(set(looks)) and looks[0] > 0


def test_a_thread_waits_for_what_does_not_come_soon(monkeypatch):
    """No look succeeds in time: it is left to a thread once, and the next 32 flights at once."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 1e-4)
    patience = Patience()

    async def work():
        flight, left = watched(lambda: False, patience)
        waiting = asyncio.create_task(outcome(flight))
        while not left:
            await asyncio.sleep(0)
        assert not flight.landed
        flight.landing.set_result(OUTPUT)
        assert await waiting is OUTPUT and left == [True]

    asyncio.run(work())
    assert [patience.lasts() for _ in range(SPARED + 1)] == [False] * SPARED + [True]


def test_a_device_that_fails_is_told_where_it_is_awaited():
    def fails():
        raise RuntimeError("device lost")

    for flight, _ in (watched(fails), watched(lambda: True, land=fails)):
        with pytest.raises(RuntimeError, match="device lost"):
            asyncio.run(outcome(flight))


def test_a_flight_that_nobody_awaits_any_more_is_left_to_a_thread():
    async def work():
        flight, left = watched(lambda: False)
        waiting = asyncio.create_task(outcome(flight))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert left == [True]

    asyncio.run(work())
