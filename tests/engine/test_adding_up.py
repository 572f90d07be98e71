"""Metrics that add up: what was started has ended, runs or waits; tokens are those that readers got."""

import asyncio
import random
from contextlib import aclosing

from tinyserve.engine.engine import Engine
from tinyserve.request import SamplingParams

from .toy import ToyRunner, letters, machine, make_parts


class Counts:
    """Values of an engine's metrics, summed over their extra labels."""

    def __init__(self, engine):
        engine.metrics.queues(engine.stats())
        self.families = {family.name: family for family in engine.metrics.registry.collect()}

    def of(self, name, suffix="", **labels):
        samples = self.families["tinyserve:" + name].samples
        return sum(
            s.value for s in samples
            if s.name == f"tinyserve:{name}{suffix}" and labels.items() <= s.labels.items()
        )  # fmt: skip

    def total(self, name, **labels):
        return self.of(name, "_total", **labels)

    def check(self):
        assert self.total("requests_started") == (
            self.total("request_success") + self.of("num_requests_running") + self.of("num_requests_waiting")
        )


async def one(engine, rng, number, read):
    """A request of a random kind, perhaps left early; adds what its reader saw to `read`."""
    n = rng.choice([1, 1, 3, 100])
    params = SamplingParams(
        n=n,
        temperature=1.0 if n > 1 else 0.0,
        max_tokens=rng.choice([0, 1, 5, 20]),
        stop=rng.choice([(), ("a",), ("bc",)]),
        seed=number,
    )
    leave = rng.choice([None, None, None, 0, 2])
    prompt = rng.choice(["p" * 40, "q", "p" * 40 + "r", "s" * 17])
    outputs, seen = engine.generate(prompt, params, request_id=f"r{number}"), 0
    usage = {}
    async with aclosing(outputs):
        async for output in outputs:
            usage[output.index] = output.usage
            seen += 1
            if seen == leave:
                return
    read["prompt"] += sum(u.prompt_tokens for u in usage.values())
    read["generated"] += sum(u.completion_tokens for u in usage.values())
    read["ended"] += len(usage)
    read["calls"] += 1


def test_started_is_ended_running_and_waiting_at_every_moment():
    """60 requests of 1 to 100 answers, a third of them left early, a third ended by a stop string."""

    async def go():
        config, built = machine(letters, max_num_seqs=8, runner=ToyRunner(letters, seconds=0.0005))
        engine = await Engine.start(config, parts=make_parts(), machine=built)
        rng, read = random.Random(5), {"prompt": 0, "generated": 0, "ended": 0, "calls": 0}
        tasks = [asyncio.create_task(one(engine, rng, number, read)) for number in range(60)]
        while not all(task.done() for task in tasks):
            Counts(engine).check()
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        counts = Counts(engine)
        counts.check()
        assert (counts.of("num_requests_running"), counts.of("num_requests_waiting")) == (0, 0)
        finished = counts.total("request_success") - counts.total("request_success", finished_reason="abort")
        assert finished >= read["ended"]  # of calls that were left, some answers had ended
        assert counts.of("request_prompt_tokens", "_count") == counts.total("requests_started")
        assert counts.of("request_params_n", "_count") >= read["calls"]
        assert counts.of("e2e_request_latency_seconds", "_count") == counts.total("request_success")
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_tokens_are_those_of_the_answers():
    """Prompts count when their first token comes, found ones by source; nothing is left early here."""

    async def go():
        config, built = machine(letters, max_num_seqs=4)
        engine = await Engine.start(config, parts=make_parts(), machine=built)
        prompt = generated = cached = 0
        for number in range(30):
            params = SamplingParams(max_tokens=number % 7, temperature=0, stop=("ab",) if number % 3 else ())
            outputs = [o async for o in engine.generate("p" * (1 + 13 * (number % 5)), params)]
            prompt += outputs[-1].usage.prompt_tokens
            generated += outputs[-1].usage.completion_tokens
            cached += outputs[-1].usage.cached_tokens
        await asyncio.sleep(0.05)
        counts = Counts(engine)
        assert counts.total("prompt_tokens") == prompt and counts.total("generation_tokens") == generated
        assert counts.total("prompt_tokens_cached") == counts.total("prefix_cache_hits") == cached > 0
        assert counts.total("prompt_tokens_by_source") == prompt
        assert counts.total("prompt_tokens_by_source", source="local_cache_hit") == cached
        assert counts.of("request_generation_tokens", "_sum") == generated
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 60))
