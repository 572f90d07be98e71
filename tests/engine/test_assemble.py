"""assemble.py: the real runner, sampler and cache around scripted models, and around the small real one."""

import asyncio
import gc
import weakref

import pytest
from attrs import evolve

from tests.real_models import smollm2
from tests.scripted import FlatModel, ScriptModel
from tinyserve.config import build
from tinyserve.device import Device
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import check_compiler
from tinyserve.errors import ConfigError, NumericsError
from tinyserve.request import FinishReason, SamplingParams

from .toy import CONTEXT, answer, assert_idle, make_parts, settle

PEPPER = (97, 240, 159, 140, 182, 195, 169, 46)


async def start(model, **options):
    config = build({"model": "toy", "device": "cpu", "disable_log_stats": True, "max_num_seqs": 8, **options})
    engine = await Engine.start(config, parts=make_parts(model=model))
    model.attach(engine.machine.runner)
    return engine


def test_a_gpu_without_a_c_compiler_is_one_line(monkeypatch):
    """Triton's own error for it comes from the first launch, twenty lines deep."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    check_compiler(Device("cpu"))

    with pytest.raises(ConfigError, match="Install gcc or clang, or set CC"):
        check_compiler(Device("cuda"))

    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(ConfigError, match="Install gcc or clang, or set CC"):
        check_compiler(Device("cuda"))


def test_a_context_without_room_for_an_answer_is_warned_of(caplog):
    """It said that it was ready, and answered nothing."""

    async def work(length):
        caplog.clear()
        model = ScriptModel(PEPPER)
        config = build({"model": "toy", "device": "cpu", "disable_log_stats": True, "max_num_seqs": 8})
        engine = await Engine.start(config, parts=evolve(make_parts(model=model), max_model_len=length))
        await engine.close()
        return [record.levelname for record in caplog.records if "--max-model-len" in record.getMessage()]

    assert (asyncio.run(work(1)), asyncio.run(work(2))) == (["WARNING"], [])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_scripted_model_through_the_real_runner(depth):
    """C01 (a) and C22 beside each other: one answer is whole, the other has 2 good tokens and an error."""

    async def work():
        engine = await start(ScriptModel(PEPPER, poison={(ord("N"), 2): float("nan")}), depth=depth)
        params = SamplingParams(temperature=0, max_tokens=20)
        good, bad = await asyncio.gather(*(answer(engine.generate(text, params)) for text in ("x", "N")))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return good, bad

    (texts, _, last, _), (_, bad_ids, bad_last, _) = asyncio.run(work())
    assert (texts[0], last[0].finish_reason) == ("a\U0001f336\u00e9.", FinishReason.STOP)
    assert bad_ids[0] == PEPPER[:2] and isinstance(bad_last[0].error, NumericsError)


def test_seeded_answers_do_not_depend_on_their_neighbours():
    """FLAT at temperature 1: the answer with seed 7 alone, among five others, and with depth 2: the same 20 letters."""

    async def work(neighbours, **options):
        engine = await start(FlatModel(), **options)
        calls = [
            answer(engine.generate("Hi", SamplingParams(seed=7 + n, max_tokens=20, ignore_eos=True)))
            for n in range(1 + neighbours)
        ]
        found = await asyncio.gather(*calls)
        await engine.close()
        return found[0][0][0]

    texts = {asyncio.run(work(0)), asyncio.run(work(5)), asyncio.run(work(5, depth=2))}
    assert len(texts) == 1 and set(texts.pop()) <= set("abcdefghij")


def test_memory_comes_back():
    """After close, neither the model nor the runner nor the cache's tables are alive."""

    async def work():
        engine = await start(FlatModel())
        parts = weakref.ref(engine.parts.model), weakref.ref(engine.machine.runner), weakref.ref(engine.machine.cache)
        await answer(engine.generate("Hi", SamplingParams(max_tokens=3)))
        await engine.close()
        gc.collect()
        return [part() for part in parts]

    assert asyncio.run(work()) == [None] * 3


def test_a_context_that_does_not_fit_is_cut_and_told():
    """9 blocks of 16, one of them null: 128 tokens instead of 256; asked for by number, it is refused."""

    async def work():
        engine = await start(FlatModel(), num_gpu_blocks_override=9, block_size=16)
        found = engine.max_model_len
        await engine.close()
        return found

    assert asyncio.run(work()) == 128
    with pytest.raises(ConfigError, match="at most 128 tokens fit"):
        asyncio.run(start(FlatModel(), num_gpu_blocks_override=9, block_size=16, max_model_len=CONTEXT))


@pytest.mark.model
def test_a_real_model_names_paris():
    async def work():
        options = {"model": str(smollm2()), "device": "cpu", "use_tqdm_on_load": False, "max_model_len": 256}
        engine = await Engine.start(build({**options, "max_num_seqs": 4, "disable_log_stats": True}))
        ids = await engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        texts, _, last, _ = await answer(engine.generate(ids, SamplingParams(temperature=0, max_tokens=20)))
        await engine.close()
        return texts[0], last[0].finish_reason

    text, reason = asyncio.run(work())
    assert "Paris" in text and reason is FinishReason.STOP
