"""What the dashboard tells of a running engine: who runs and waits, what blocks hold, the steps as a trace."""

import asyncio
from contextlib import asynccontextmanager

from tests.engine.toy import ToyRunner, letters
from tests.served import in_process, strict

from .toys import toy_service


@asynccontextmanager
async def serving(**options):
    slow = ToyRunner(letters, seconds=0.002)
    async with toy_service(runner=slow, **options) as service, in_process(service) as client:
        yield client


def test_the_state_of_a_busy_engine(run):
    """2 may run, 5 were sent: 2 run and 3 wait. Their prompt of 32 tokens is 2 shared blocks."""

    async def go():
        async with serving(max_num_seqs=2, blocks=50) as client:
            body = {"prompt": "secret words here" * 2, "max_tokens": 60, "ignore_eos": True}
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)]
            while (state := strict((await client.get("/dashboard/state")).text))["running"] < 2 or not state["steps"]:
                await asyncio.sleep(0.002)
            await asyncio.gather(*tasks)
            idle = strict((await client.get("/dashboard/state")).text)
            trace = strict((await client.get("/dashboard/trace")).text)
        return state, idle, trace

    state, idle, trace = run(go())
    states = [one["state"] for one in state["sequences"]]
    assert states == ["running", "running", "waiting", "waiting", "waiting"] and state["waiting"] == 3
    assert all(one["prompt_tokens"] == 34 and one["id"].startswith("cmpl-") for one in state["sequences"])
    assert "secret" not in str(state)
    assert len(state["blocks"]["map"]) == state["blocks"]["count"] == 49 and "2" in state["blocks"]["map"]
    assert set(idle["blocks"]["map"]) <= {"0", "1"} and idle["sequences"] == [] and idle["running"] == 0
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(steps) > 100 and {"decode", "prefill"} <= {event["name"] for event in steps}
    assert all(event["dur"] > 0 for event in steps) and sum(e["args"]["new"] for e in steps) == 300
    for line in {event["tid"] for event in steps}:
        ends = 0.0
        for event in steps:
            if event["tid"] == line:
                assert event["ts"] >= ends - 0.2
                ends = event["ts"] + event["dur"]


def test_a_large_cache_is_shown_in_part(run):
    """10000 blocks: every third one, at most 4096."""

    async def go():
        async with serving(blocks=10_000) as client:
            return strict((await client.get("/dashboard/state")).text)["blocks"]

    blocks = run(go())
    assert (blocks["stride"], blocks["count"], len(blocks["map"])) == (3, 9999, 3333)
