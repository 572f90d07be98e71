"""The whole engine on a GPU: Triton kernels, device rows and sampler against the CPU's greedy ids."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.real_models import gemma3, smollm2
from tinyserve.config import CacheOptions, EngineConfig, LoadOptions, ModelOptions, SchedulerOptions
from tinyserve.engine.engine import Engine
from tinyserve.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(600)]

REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "ref_tokens.json").read_text())
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
NEAR_TIE = 1e-3  # gap of the best two logits below which another order of additions may choose the other one


def sure(prompt):
    """The reference ids before the first near tie."""
    gaps = [gap for _, gap in prompt["top_logprob_and_margin"]]
    stop = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), len(gaps))
    return prompt["new_ids"][:stop]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}], ids=["whole", "chunks of 8"]
)
@pytest.mark.parametrize("model", [smollm2, gemma3])
def test_greedy_ids_equal_the_cpu_up_to_the_first_near_tie(model, depth, options):
    prompts = REFERENCE[model.__name__]["prompts"].values()
    config = EngineConfig(
        model=ModelOptions(model=str(model()), dtype="float32", max_model_len=256, device="cuda"),
        load=LoadOptions(use_tqdm_on_load=False),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 30),
        scheduler=SchedulerOptions(depth=depth, **options),
    )

    async def main():
        engine = await Engine.start(config)
        print(engine.machine.report)
        try:
            found = await asyncio.gather(*(ids(engine, prompt) for prompt in prompts))
            engine.machine.scheduler.check_integrity()
            return found
        finally:
            await engine.close()

    async def ids(engine, prompt):
        return [t async for output in engine.generate(prompt["prompt_ids"], GREEDY) for t in output.token_ids]

    found = asyncio.run(main())

    for tokens, prompt in zip(found, prompts, strict=True):
        wanted = sure(prompt)
        assert len(tokens) == 64
        assert tokens[: len(wanted)] == wanted
