"""The loop goes on serving while a step is computed: on the CPU a step runs in a thread of its own."""

import asyncio
import time

import pytest

from tests.scripted import ScriptModel

from .harness import TEXT, serving

pytestmark = pytest.mark.anyio


async def test_health_answers_while_a_forward_takes_its_time(tok):
    """Three forwards of 0.3 s; an answer that had to wait for one would take that long instead of under 0.15 s."""
    async with serving(ScriptModel([97] * 3, seconds=0.3), tok) as server:
        answer = asyncio.create_task(server.http.post(TEXT, json={"model": "tiny", "prompt": "x"}))
        worst = 0.0
        while not answer.done():
            start = time.monotonic()
            await server.http.get("/health")
            worst = max(worst, time.monotonic() - start)
            await asyncio.sleep(0.01)

        assert worst < 0.15
