"""On a GPU: graphs, depth and chunks change no greedy id, and nothing compiles once the engine is ready."""

import asyncio
import json
import random

import pytest
import triton

from tinyserve.config import CacheOptions, EngineConfig, LoadOptions, ModelOptions, RunnerOptions, SchedulerOptions
from tinyserve.engine.engine import Engine
from tinyserve.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 5000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    # Their layers share what they work out on the device from the step: rows and lengths, chunks, factors.
    "deepseek": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "head_dim": None,
        "num_key_value_heads": 8, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "llama4": {
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 512,
        "attention_chunk_size": 64, "floor_scale": 8, "attn_scale": 0.5,
    },
}  # fmt: skip
BATCHES = (1, 2, 3, 8, 17, 64)
WAYS = (({}, 0.0), ({}, 6.0), ({"depth": 2}, 6.0), ({"depth": 2, "max_num_batched_tokens": 64}, 0.0))


def config(folder, family, *, dtype="float32", depth=1, eager=False, **scheduler):
    folder = folder / family
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    return EngineConfig(
        model=ModelOptions(model=str(folder), dtype=dtype, device="cuda", max_model_len=1200),
        load=LoadOptions(load_format="dummy", use_tqdm_on_load=False),
        cache=CacheOptions(kv_cache_memory_bytes=1 << 30),
        scheduler=SchedulerOptions(**{"max_num_seqs": 64, "depth": depth} | scheduler),
        runner=RunnerOptions(enforce_eager=eager),
    )


def prompts(count):
    draw = random.Random(count)
    return [[draw.randrange(5000) for _ in range(draw.choice((1, 2, 15, 16, 17, 63, 100, 255)))] for _ in range(count)]


def params(index, tokens):
    kinds = (
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "seed": index},
        {"temperature": 0, "repetition_penalty": 1.2},
    )
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **kinds[index % 4])


async def ids(engine, prompt, sampling):
    return [t async for output in engine.generate(prompt, sampling) for t in output.token_ids]


def answers(settings, idle=0.0):
    """The ids of every batch, from one engine. idle: seconds in which it may record more graphs."""

    async def main():
        engine = await Engine.start(settings)
        try:
            await asyncio.sleep(idle)
            found = {}
            for count in BATCHES:
                texts = enumerate(prompts(count))
                found[count] = await asyncio.gather(*(ids(engine, p, params(i, 24)) for i, p in texts))
            engine.machine.scheduler.check_integrity()
            return found
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_depth_and_chunks_change_no_id(tmp_path, family):
    """95 prompts in batches of 1 to 64, alone and together; float32, where another order of additions moves little.

    A graph pads a batch of 17, so the keys of its sequences are cut into other parts: one draw of 23 may notice that.
    """
    plain = answers(config(tmp_path, family, eager=True))

    for options, idle in WAYS[: None if family in ("llama", "qwen3") else 1]:
        found = answers(config(tmp_path, family, **options), idle)
        noticed = 0  # by draws, which lie nearer to each other than the best two of a greedy row
        for count in BATCHES:
            pairs = zip(found[count], plain[count], strict=True)
            wrong = [i for i, (one, other) in enumerate(pairs) if one != other]
            assert [i for i in wrong if i % 4 != 2] == [], f"{options}, batch {count}"
            noticed += len(wrong)
        chunked = "max_num_batched_tokens" in options  # that moves logits more; else only padding does
        assert chunked or noticed <= 1, options


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_nothing_compiles_after_ready(tmp_path, eager):
    """Prompts of 1 to 1000 tokens, batches of 1 to 100, greedy, sampled and with log-probabilities: 0 compilations."""
    compiled = []

    def hook(*, repr, **_):
        compiled.append(repr)
        return False

    async def main():
        settings = config(tmp_path, "qwen3", dtype="bfloat16", depth=2, eager=eager, max_num_seqs=100)
        engine = await Engine.start(settings)
        triton.knobs.runtime.jit_cache_hook = hook
        try:
            kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0, "logprobs": 3}]
            kinds += [{"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0, "repetition_penalty": 1.2}]
            kinds += [{"temperature": 0, "prompt_logprobs": 1}, {"temperature": 1.0, "min_p": 0.1, "min_tokens": 3}]
            for kind in kinds:
                sampling = SamplingParams(max_tokens=4, ignore_eos=True, **kind)
                for length in (1, 15, 16, 17, 255, 1000):
                    await ids(engine, [5] * length, sampling)
                for count in (1, 2, 3, 8, 100):
                    await asyncio.gather(*(ids(engine, [5] * (1 + i % 40), sampling) for i in range(count)))
        finally:
            triton.knobs.runtime.jit_cache_hook = None
            await engine.close()

    asyncio.run(main())

    assert compiled == []
