"""Answers that are shown once: tokens are held instead of being made outputs, and nothing of them is lost."""

import asyncio

import pytest

from tinyserve.request import FinishReason, RequestOutputKind, SamplingParams
from tinyserve.text.detokenize import Detokenizer

from .toy import ToyRunner, answer, letters, start

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def whole(kind, **fields):
    async def work():
        engine = await start(letters)
        found = await answer(engine.generate("x", SamplingParams(max_tokens=30, output_kind=kind, **fields)))
        await engine.close()
        return found

    return asyncio.run(work())


@pytest.mark.parametrize("fields", [{}, {"n": 3, "seed": 5}, {"detokenize": False}, {"stop": ["e"]}, {"logprobs": 1}])
def test_an_answer_shown_once_equals_the_streamed_one(fields):
    """Text, ids, finish reason, usage, and the number of outputs: one for each answer."""
    texts, ids, last, _ = whole(DELTA, **fields)
    final_texts, final_ids, final_last, pieces = whole(FINAL_ONLY, **fields)

    assert (final_texts, final_ids) == (texts, ids)
    assert len(pieces) == len(last)
    for index, output in last.items():
        assert final_last[index].finish_reason is output.finish_reason
        assert final_last[index].usage == output.usage
        assert final_last[index].metrics.num_generation_tokens == output.usage.completion_tokens


def test_what_was_held_is_shown_when_the_answer_is_aborted():
    """Some of 200 tokens are there when abort comes: the one output has exactly as many ids as usage says."""

    async def work():
        runner = ToyRunner(letters, seconds=0.005)
        engine = await start(letters, runner=runner)
        params = SamplingParams(max_tokens=200, output_kind=FINAL_ONLY, ignore_eos=True)
        reading = asyncio.create_task(answer(engine.generate("x", params, request_id="r")))
        while runner.steps < 20:
            await asyncio.sleep(0.005)
        assert engine.abort("r") == 1
        texts, ids, last, pieces = await reading
        await engine.close()
        return texts, ids, last, pieces

    texts, ids, last, pieces = asyncio.run(work())

    assert len(pieces) == 1 and last[0].finish_reason is FinishReason.ABORT
    assert 1 < len(ids[0]) == last[0].usage.completion_tokens < 200
    assert len(texts[0]) == len(ids[0])


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_one_answer_without_text_does_not_end_the_others(kind, monkeypatch):
    """Of 8 answers of 60 tokens the one that begins with "h" gets text for 20 tokens, then an error at once when it is
    streamed, and at its end otherwise; the other 7 are whole."""
    push = Detokenizer.push

    def fails(self, ids):
        self.count = getattr(self, "count", 0) + len(ids)
        if self.first == ord("h") and self.count > 20:
            raise ValueError("no text")
        return push(self, ids)

    made = Detokenizer.__init__

    def first(self, tokenizer, prompt_ids, **options):
        made(self, tokenizer, prompt_ids, **options)
        self.first = prompt_ids[0]

    monkeypatch.setattr(Detokenizer, "push", fails)
    monkeypatch.setattr(Detokenizer, "__init__", first)

    async def work():
        engine = await start(letters)
        params = SamplingParams(max_tokens=60, output_kind=kind, ignore_eos=True, temperature=0)
        found = await asyncio.gather(*(answer(engine.generate(name, params)) for name in "abcdefgh"))
        left = len(engine.streams)
        await engine.close()
        return found, left

    found, left = asyncio.run(work())

    *others, (texts, ids, last, _) = found
    assert [len(text[0]) for text, *_ in others] == [60] * 7 and left == 0
    assert last[0].finish_reason is FinishReason.ERROR and "turned into text" in str(last[0].error)
    assert len(ids[0]) < 60 and (kind is FINAL_ONLY or len(texts[0]) == 20)
