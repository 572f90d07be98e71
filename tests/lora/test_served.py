"""Adapters through the whole engine, against transformers with the same adapter merged into its weights."""

import asyncio
import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.kernels.harness import interpreting
from tests.lora.checkpoints import ATTENTION, greedy, logits, merged, write_adapter
from tests.models.batching import Paged
from tinyserve.checkpoint.source import resolve
from tinyserve.config import build
from tinyserve.device import Device
from tinyserve.engine.adapters import Desk
from tinyserve.engine.engine import Engine
from tinyserve.engine.llm import _adapters
from tinyserve.engine.parts import Parts, Phases, load_parts
from tinyserve.errors import CheckpointError, ConfigError, RequestError
from tinyserve.lora.adapters import LoadedAdapters
from tinyserve.lora.batch import Adapted, Worn
from tinyserve.lora.names import places, read_adapter
from tinyserve.models import registry
from tinyserve.models.registry import family, load_model
from tinyserve.quant.cpu import cpu_formats
from tinyserve.quant.detect import online
from tinyserve.quant.plain import Plain
from tinyserve.request import LoRARequest, SamplingParams
from tinyserve.text.tokenizer import Tokenizer

COUNT = 64
FAMILIES = ("llama", "qwen3", "gemma3")
FUSED = ("phi3", "gpt2", "gpt-neox")  # one stored module fills all parts; transposed; in groups


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of a family's checkpoint and two adapters for it, made once."""
    found = {}

    def get(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            base = oracles.save(name, folder / "base")
            all_of_it = {"gpt2": ("c_attn", "c_proj", "c_fc"), "gpt-neox": ("query_key_value", "dense"),
                         "phi3": ("qkv_proj", "o_proj", "gate_up_proj")}.get(name)  # fmt: skip
            first = write_adapter(folder / "a", base, **({"targets": all_of_it} if all_of_it else {}))
            targets = all_of_it or (*ATTENTION, "up_proj")
            second = write_adapter(folder / "b", base, targets=targets, rank=7, use_rslora=True, seed=5, spread=0.1)
            found[name] = base, first, second
        return found[name]

    return get


@pytest.fixture(scope="module")
def right(made):
    """The greedy answer of transformers with adapter 1, 2 or none (0), computed once."""
    found = {}

    def get(name, kind, tokens):
        key = name, kind, tuple(tokens)
        if key not in found:
            base, *folders = made(name)
            found[key] = greedy(merged(base, [None, *folders][kind]), tokens, COUNT)
        return found[key]

    return get


def open_model(folder):
    return load_model(resolve(str(folder)), dtype="float32")


def dressed(model, folders):
    """The model with two places, which hold these adapters."""
    layers = places(model, family(model.config.architecture).WEIGHTS)
    adapted, known = Adapted(layers, 2, 8, torch.device("cpu")), LoadedAdapters(2)
    adapted.reserve(64)
    for folder in folders:
        rank, found = read_adapter(str(folder), layers, 8)
        known.place(known.load(folder.name, str(folder), rank, adapted.packed(found)), ())
    adapted.apply(known.moves())
    return adapted


@pytest.mark.parametrize("name", (*FAMILIES, *FUSED))
def test_logits_equal_those_of_merged_weights(name, made):
    """1e-4, for two adapters and the base in one batch, prefilled together and decoded together."""
    base, *adapters = made(name)
    model = open_model(base)
    adapted = dressed(model, adapters)
    paged, counts = Paged(model), (9, 5, 12)
    rows = [paged.add(oracles.prompt(count + 2, seed=seed)) for seed, count in enumerate(counts)]
    worn = torch.tensor([1, 2, 0], dtype=torch.int32)

    adapted.wear(True, worn, torch.repeat_interleave(torch.arange(3), torch.tensor(counts)))
    steps = [paged.step(dict(zip(rows, counts, strict=True)))]
    for _ in range(2):
        adapted.wear(True, worn, torch.arange(3))
        steps.append(paged.step(dict.fromkeys(rows, 1)))

    for row, folder in zip(rows, (*adapters, None), strict=True):
        expected = logits(merged(base, folder), paged.rows[row].tokens)
        torch.testing.assert_close(torch.cat([step[row] for step in steps]), expected, atol=1e-4, rtol=0)
    adapted.close()
    assert not any(isinstance(place.layer.format, Worn) for place in adapted.layers)


def test_the_kernels_add_the_same(made):
    """In Triton's interpreter, where products of one token fold their norm in unless the step wears an adapter."""
    base, *adapters = made("llama")
    tokens, worn = oracles.prompt(5), torch.tensor([1, 0], dtype=torch.int32)
    found = {}
    with interpreting():
        model = open_model(base)
        adapted = dressed(model, adapters)
        paged = Paged(model, block_size=16)
        rows = [paged.add(tokens) for _ in range(2)]
        layer = adapted.layers[0].layer
        for counts in ((3, 3), (1, 1), (1, 0)):
            adapted.wear(True, worn, torch.repeat_interleave(torch.arange(2), torch.tensor(counts)))
            assert not layer.folds
            step = paged.step({row: count for row, count in zip(rows, counts, strict=True) if count})
            for row, given in step.items():
                found.setdefault(row, []).append(given)
        adapted.wear(False, worn, torch.tensor([1]))
        assert layer.folds
        found[rows[1]].append(paged.step({rows[1]: 1})[rows[1]])

    for row, folder in zip(rows, (adapters[0], None), strict=True):
        torch.testing.assert_close(torch.cat(found[row]), logits(merged(base, folder), tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["as the CPU packs", "int8"])
def test_weights_may_be_quantised(made, tmp_path, kind):
    """Within 20 % of merged weights in full numbers, as the base is; without the adapter it is more than half."""
    base, adapter, _ = made("llama")
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / "model.safetensors")
    save_file({name: one.bfloat16() for name, one in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    formats = online(kind) or cpu_formats()
    model, tokens = load_model(resolve(str(tmp_path)), dtype="float32", format_for=formats), oracles.prompt(6)
    adapted, paged, worn = dressed(model, [adapter]), Paged(model), torch.tensor([1, 0], dtype=torch.int32)
    assert kind != "int8" or not any(isinstance(place.layer.format.below, Plain) for place in adapted.layers)
    rows = [paged.add(tokens) for _ in range(2)]
    adapted.wear(True, worn, torch.arange(2).repeat_interleave(6))
    found = paged.step(dict.fromkeys(rows, 6))

    def apart(row, folder):
        expected = logits(merged(base, folder), tokens)
        return (found[row] - expected).norm() / expected.norm()

    assert apart(rows[0], adapter) < 0.2 and apart(rows[1], None) < 0.2 and apart(rows[1], adapter) > 0.5


def start(model, **options):
    config = build(
        {
            "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 12, "scheduler_reserve_full_isl": False,
            "max_model_len": 96, "device": "cpu", "enable_lora": True, "max_lora_rank": 8, "disable_log_stats": True,
            **options,
        }
    )  # fmt: skip
    parts = Parts(
        model=model, tokenizer=Tokenizer.stand_in(), max_model_len=96, device=Device.pick("cpu"),
        dtype=model.embed.weight.dtype,
    )  # fmt: skip
    return Engine.start(config, parts=parts)


async def answer(engine, tokens, adapter=None, count=COUNT):
    """Ids of a greedy answer, and how many prompt tokens were found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    ids, cached = [], 0
    async for output in engine.generate(tokens, params, adapter=adapter):
        if output.error is not None:
            raise output.error
        ids += output.token_ids
        cached = output.usage.cached_tokens
    return ids, cached


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("depth, tight, places", [(1, False, 2), (2, True, 1)])
def test_64_tokens_equal_those_of_merged_weights(name, made, right, depth, tight, places):
    """Chunks of 12 tokens, prefix cache, a pool too small for all at once, one place for two adapters, depth 2."""
    base, *folders = made(name)
    shared = oracles.prompt(20)
    blocks = {"gemma3": 36}.get(name, 17) if tight else 300  # gemma3 has more groups

    async def main():
        engine = await start(open_model(base), depth=depth, num_gpu_blocks_override=blocks, max_loras=places)
        try:
            a, b = [await engine.adapters.load(folder.name, str(folder)) for folder in folders]
            kinds = (a, b, None, a)
            found = await asyncio.gather(*(answer(engine, shared, kind) for kind in kinds))
            again = await answer(engine, shared, b)
            engine.machine.scheduler.check_integrity()
            return [ids for ids, _ in (*found, again)], [cached for _, cached in (*found, again)], engine.stats()
        finally:
            await engine.close()

    ids, cached, stats = asyncio.run(main())
    first, second, plain = (right(name, kind, shared) for kind in (1, 2, 0))
    assert ids == [first, second, plain, first, second]
    assert len({tuple(one) for one in (first, second, plain)}) == 3
    assert cached[-1] == 16 or tight  # two full blocks of the same adapter's
    assert cached[1] == cached[2] == 0  # never those of another
    assert bool(stats.preemptions) == tight


def test_a_name_given_again_finds_no_old_blocks(made, right):
    """Unload and load another under the same name: the answer is the new one's; who began before ends as it began."""
    base, first, second = made("llama")
    prompt = oracles.prompt(20)

    async def main():
        engine = await start(open_model(base), num_gpu_blocks_override=80)
        try:
            adapters = engine.adapters
            old = await answer(engine, prompt, await adapters.load("mine", str(first)))
            running = asyncio.ensure_future(answer(engine, prompt, adapters.find("mine")))
            while not engine.machine.scheduler.num_running:
                await asyncio.sleep(0)
            adapters.unload("mine")
            assert adapters.find("mine") is None
            new = await answer(engine, prompt, await adapters.load("mine", str(second)))
            return old, await running, new
        finally:
            await engine.close()

    old, running, new = asyncio.run(main())
    assert old[0] == running[0] == right("llama", 1, prompt)
    assert running[1] == 16
    assert new == (right("llama", 2, prompt), 0)


def test_an_idle_engine_with_adapters_answers_like_one_without(made, right):
    base, first, _ = made("llama")
    prompt = oracles.prompt(20)

    async def main(load):
        engine = await start(open_model(base), num_gpu_blocks_override=80)
        try:
            if load:
                await engine.adapters.load("mine", str(first))
            return await answer(engine, prompt)
        finally:
            await engine.close()

    assert asyncio.run(main(False))[0] == asyncio.run(main(True))[0] == right("llama", 0, prompt)


def test_memory_comes_back(made):
    """After close, no layer of the model is alive; what reads adapters for them kept all of them."""
    base, first, _ = made("llama")

    async def main():
        model = open_model(base)
        layer = weakref.ref(model.layers[0].attn.qkv)
        engine = await start(model, num_gpu_blocks_override=80)
        del model
        await answer(engine, oracles.prompt(5), await engine.adapters.load("mine", str(first)), count=2)
        await engine.close()
        gc.collect()
        return layer()

    assert asyncio.run(main()) is None


def test_what_many_ask_for_is_read_once(made):
    """8 callers at once got "is loaded already", all but the first; 8 prompts with load_inplace made 8 adapters."""
    base, first, _ = made("llama")
    plain, anew = (LoRARequest("mine", 1, str(first), load_inplace=inplace) for inplace in (False, True))

    async def main():
        engine = await start(open_model(base), num_gpu_blocks_override=80)
        try:
            at_once = await asyncio.gather(*(engine.adapters.of(plain) for _ in range(8)))
            again = await _adapters(engine, [anew, None, anew, plain, *[anew] * 5])
            return at_once, again
        finally:
            await engine.close()

    at_once, again = asyncio.run(main())
    assert len(set(at_once)) == 1
    assert again[1] is None and {one.number for one in again if one} == {2}


@pytest.mark.parametrize("targets, rank, most", [(("q_proj",), 2, 0.05), (("q_proj", "up_proj"), 8, 0.5)])
def test_the_host_keeps_what_an_adapter_has(made, tmp_path, targets, rank, most):
    """Each adapter took what one of all modules at full rank takes: 17.7 MB for SmolLM2, here 20 times too much.

    A place that held a larger one before keeps none of its numbers.
    """
    base, large, _ = made("llama")
    folder = write_adapter(tmp_path / "c", base, targets=targets, rank=rank)
    model = open_model(base)
    adapted = dressed(model, [large, folder])
    _, found = read_adapter(str(folder), adapted.layers, 8)
    packed = adapted.packed(found)
    row = adapted.weights[1].clone()
    packed.unpack(adapted.weights[0])

    assert packed.numbers.nbytes < most * adapted.weights[0].nbytes and row.any()
    assert torch.equal(adapted.weights[0], row)


def test_numbers_that_the_model_cannot_hold_are_refused(made, tmp_path):
    """1e6 is infinite in float16, and every answer with it was an error."""
    base, *_ = made("llama")
    layers = dressed(open_model(base), []).layers
    adapted = Adapted(layers, 1, 8, torch.device("cpu"))
    adapted.dtype = torch.float16
    with pytest.raises(CheckpointError, match="too large for float16"):
        adapted.packed(read_adapter(str(write_adapter(tmp_path, base, spread=1e6)), layers, 8)[1])


def test_no_more_adapters_are_loaded_than_allowed(made):
    """A third of two is refused, and one that replaces another is not; a LoRARequest has the one that was asked for
    longest ago forgotten. Their memory had no bound."""
    base, first, _ = made("llama")

    async def main():
        engine = await start(open_model(base), num_gpu_blocks_override=80, max_cpu_loras=2)
        desk = engine.adapters
        try:
            await desk.load("a", str(first))
            await desk.load("b", str(first))
            with pytest.raises(RequestError, match="--max-cpu-loras allows"):
                await desk.load("c", str(first))
            await desk.load("b", str(first), replace=True)
            desk.unload("a")
            found = []
            for name in "cdcec":
                await desk.of(LoRARequest(name, 1, str(first)))
                found.append("".join(one.name for one in desk.loaded))
            return found
        finally:
            await engine.close()

    assert asyncio.run(main()) == ["bc", "bd", "bc", "be", "bc"]


def test_room_is_made_only_of_what_lora_requests_loaded():
    """One of --lora-modules for which a LoRARequest had asked, too, was evicted: its name became a 404. A folder that
    could not be read cost an adapter that was good."""

    def read(path):
        if path == "/wrong":
            raise CheckpointError("there is no such folder")
        return 8, None

    async def main():
        desk, found = Desk(LoadedAdapters(1), read, served=(), most=2), []
        desk.load_now("a=/a")

        async def ask(name, path=None, **more):
            await desk.of(LoRARequest(name, 1, path or f"/{name}", **more))
            found.append("".join(one.name for one in desk.loaded))

        await ask("a")
        await ask("a", load_inplace=True)
        await ask("b")
        for wrong in (ask("c", "/wrong"), ask("c,"), ask("b", "/other")):
            with pytest.raises(RequestError):
                await wrong
        assert [one.name for one in desk.loaded] == ["a", "b"]
        await ask("c")
        await desk.load("c", "/c", replace=True)  # now it is one of those that are asked for by name
        with pytest.raises(RequestError, match="as many as --max-cpu-loras allows"):
            await ask("d")
        return found

    assert asyncio.run(main()) == ["a", "a", "ab", "ac"]


def test_the_limit_of_adapters_holds_those_of_the_command_line():
    with pytest.raises(ConfigError, match=r"--max-cpu-loras \(1\) must be at least --max-loras \(2\)"):
        build({"enable_lora": True, "max_loras": 2, "max_cpu_loras": 1})


def test_adapters_of_the_start_are_checked_before_weights_are_read(made, tmp_path, monkeypatch):
    """A wrong folder was found only after the model: minutes of reading. Here 0 tensors are read."""
    base, good, _ = made("llama")
    wide, damaged = (write_adapter(tmp_path / name, base, rank=9) for name in ("wide", "damaged"))
    (damaged / "adapter_model.safetensors").write_bytes(b"no tensors")

    def read(*args, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(registry, "load_model", read)
    for modules, message in (
        (("a=/does/not/exist",), "no such folder"),
        ((f"a={good}", f"b={wide}"), "its rank is 9, above the limit of 8"),
        ((f"a={damaged}",), "damaged"),
        ((f"a={good}", f"a={good}"), "there twice"),
        ((f"tiny={good}",), "name of the model itself"),
    ):
        options = {"enable_lora": True, "max_lora_rank": 8, "lora_modules": modules, "served_model_name": ("tiny",)}
        with pytest.raises(ConfigError, match=message):
            load_parts(build({"model": str(base), "device": "cpu", **options}), Phases())
