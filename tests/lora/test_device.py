"""On a GPU: adapters through the kernels and the graphs, against merged weights; nothing compiles once it is ready."""

import asyncio

import pytest
import triton

from tests import oracles
from tests.lora.checkpoints import greedy, merged, write_adapter
from tests.lora.test_served import answer
from tinyserve.checkpoint.source import resolve
from tinyserve.config import build
from tinyserve.device import Device
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts
from tinyserve.models.registry import load_model
from tinyserve.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
COUNT = 24


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_adapters_on_a_gpu(tmp_path, eager):
    """Two adapters and the base in batches of 1 to 12, float32, depth 2: ids of merged weights, 0 compilations."""
    base = oracles.save("llama", tmp_path / "base")
    folders = [write_adapter(tmp_path / "a", base), write_adapter(tmp_path / "b", base, rank=7, seed=5, spread=0.1)]
    device, compiled = Device.pick("auto"), []
    model = load_model(resolve(str(base)), dtype="float32", device=device.torch)
    config = build(
        {
            "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_seqs": 16, "depth": 2,
            "num_gpu_blocks_override": 64, "max_model_len": 96, "block_size": 32, "enforce_eager": eager,
            "disable_log_stats": True,
        }
    )  # fmt: skip
    parts = Parts(
        model=model, tokenizer=Tokenizer.stand_in(), max_model_len=96, device=device, dtype=model.embed.weight.dtype
    )

    def hook(*, repr, **_):
        compiled.append(repr)
        return False

    async def main():
        engine = await Engine.start(config, parts=parts)
        triton.knobs.runtime.jit_cache_hook = hook
        try:
            kinds = [None, *[await engine.adapters.load(folder.name, str(folder)) for folder in folders]]
            found = []
            for count in (1, 2, 3, 12):
                jobs = [(one % 3, oracles.prompt(1 + 5 * one, seed=one)) for one in range(count)]
                given = await asyncio.gather(*(answer(engine, ids, kinds[kind], COUNT) for kind, ids in jobs))
                found += [(kind, ids, one) for (kind, ids), (one, _) in zip(jobs, given, strict=True)]
            return found
        finally:
            triton.knobs.runtime.jit_cache_hook = None
            await engine.close()

    models = [merged(base, folder) for folder in (None, *folders)]
    for kind, tokens, ids in asyncio.run(main()):
        assert ids == greedy(models[kind], tokens, COUNT), (kind, tokens)
    assert compiled == []
