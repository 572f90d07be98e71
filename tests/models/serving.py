"""A loaded model behind the whole engine, with everything on that may disturb an answer."""

import asyncio

from attrs import frozen

from tinyserve.config import build
from tinyserve.device import Device
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts
from tinyserve.request import SamplingParams
from tinyserve.text.tokenizer import Tokenizer

COUNT = 64


@frozen
class Served:
    """ids, logprobs: of each prompt's answer, logprobs if they were asked for. preemptions: how often one gave its
    blocks back. cached: prompt tokens found, by prompt."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    preemptions: int
    cached: list[int]


def serve(model, prompts, *, blocks, block_size=8, max_model_len=96, chunk=12, logprobs=None, **more):
    """COUNT greedy tokens of each prompt through chunks, a prefix cache and a pool too small for all at once.

    The last prompt is sent when the others are done, so that it finds the beginning that it shares with them.
    """
    config = build(
        {
            "block_size": block_size, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": chunk,
            "max_num_seqs": 4, "scheduler_reserve_full_isl": False, "max_model_len": max_model_len,
            "device": model.embed.weight.device.type, **more,
        }
    )  # fmt: skip
    parts = Parts(
        model=model, tokenizer=Tokenizer.stand_in(), max_model_len=max_model_len,
        device=Device.pick(config.model.device), dtype=model.embed.weight.dtype,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=logprobs)

    async def one(engine, prompt):
        ids, found, cached = [], [], 0
        async for output in engine.generate(prompt, params):
            ids += output.token_ids
            found += [next(iter(place.values())).logprob for place in output.logprobs or ()]
            cached = output.usage.cached_tokens
        return ids, found, cached

    async def main():
        engine = await Engine.start(config, parts=parts)
        try:
            found = await asyncio.gather(*(one(engine, prompt) for prompt in prompts[:-1]))
            found.append(await one(engine, prompts[-1]))
            engine.machine.scheduler.check_integrity()
            ids, chosen, cached = map(list, zip(*found, strict=True))
            return Served(ids, chosen, engine.stats().preemptions, cached)
        finally:
            await engine.close()

    return asyncio.run(main())
