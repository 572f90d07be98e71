"""Clients that come together go on a few at a time."""

import asyncio

from tinyserve.server.turns import AT_ONCE, Turns


def test_a_few_each_time_around():
    """100 tasks, one cancelled while it waits: at most 4 each time around the loop, in order, none forgotten."""

    async def run():
        turns, rounds, now = Turns(), {}, [0]

        async def client(number):
            await turns.take()
            rounds.setdefault(now[0], []).append(number)

        tasks = [asyncio.create_task(client(number)) for number in range(100)]
        for now[0] in range(40):
            await asyncio.sleep(0)
            tasks[50].cancel()
        assert turns._left == AT_ONCE
        return list(rounds.values())

    rounds = asyncio.run(run())

    assert all(len(numbers) <= AT_ONCE for numbers in rounds)
    assert [number for numbers in rounds for number in numbers] == [number for number in range(100) if number != 50]


def test_a_single_client_does_not_wait():
    async def run():
        take = Turns().take()
        try:
            take.send(None)
        except StopIteration:
            return True

    assert asyncio.run(run())
