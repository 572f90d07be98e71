"""Crowds of unlike readers, paced at random: each gets the answer of a lone request, whole, once and counted right.

Answers that share a backlog, tokens kept for a stream's next turn, stop strings across them, aborts, readers who leave,
preemptions, pauses and a close in the middle all meet here; `joint` says that convoys (scheduling/convoy.py) did, too.
"""

import asyncio
import contextlib
import random

import pytest

from tinyserve.request import FinishReason, RequestOutputKind, SamplingParams
from tinyserve.scheduling.convoy import Convoy

from .toy import EOS, letters, start

DELTA, FINAL_ONLY, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE
STOPS = ["ab", "fa"]
KINDS = [{}, {}, {}, {"stop": STOPS}, {"logprobs": 2}, {"n": 3, "seed": 3, "temperature": 0.01}, {"detokenize": False}]


def rule(tokens, prompt_len):
    """Letters, and now and then an end after the sixth."""
    ends = sum(tokens) % 37 == 0 and len(tokens) - prompt_len > 6
    return {**({EOS: -0.01} if ends else {}), **letters(tokens, prompt_len)}


def right(prompt, count):
    """The ids of a lone answer."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        scores = rule(tokens, len(prompt))
        tokens.append(max(scores, key=scores.get))
        if tokens[-1] == EOS:
            break
    return tuple(tokens[len(prompt) :])


async def read(engine, draw, name, reasons):
    """One reader from arrival to end, who checks all that it is given."""
    prompt = [draw.randrange(97, 107) for _ in range(draw.randrange(1, 40))]
    fields, kind = draw.choice(KINDS), draw.choice([DELTA, FINAL_ONLY, CUMULATIVE])
    params = {"temperature": 0, "max_tokens": draw.randrange(4, 120), "output_kind": kind, **fields}
    leaves = draw.random() < 0.1
    if draw.random() < 0.1:
        asyncio.get_running_loop().call_later(draw.random() * 0.2, engine.abort, name)
    texts, ids, last = {}, {}, {}
    async with contextlib.aclosing(engine.generate(prompt, SamplingParams(**params), request_id=name)) as outputs:
        async for output in outputs:
            index, whole = output.index, kind is CUMULATIVE
            assert index not in last or not (kind is FINAL_ONLY or last[index].finished)
            texts[index] = output.text if whole else texts.get(index, "") + output.text
            ids[index] = output.token_ids if whole else ids.get(index, ()) + output.token_ids
            last[index] = output
            if leaves and len(ids[index]) > 9:
                return
    assert len(last) == fields.get("n", 1)
    for index, output in last.items():
        judge(params, right(prompt, params["max_tokens"]), ids[index], texts[index], output)
        reasons.append(output.finish_reason)


def judge(params, want, got, text, last):
    """Ids are a prefix of the right ones, whole unless something ended them; text and counts are those of the ids."""
    shown = "".join(chr(token) for token in got if token != EOS)
    assert got == want[: len(got)] and last.usage.completion_tokens == last.metrics.num_generation_tokens == len(got)
    if last.stop_reason in STOPS:
        assert min(shown.find(stop) for stop in STOPS if stop in shown) == len(shown) - 2
        shown = shown[:-2]
    elif last.finish_reason is not FinishReason.ABORT:
        assert got == want and not any(stop in shown for stop in params.get("stop", ()))
    assert text == ("" if params.get("detokenize") is False else shown)


@pytest.mark.parametrize(("depth", "blocks", "seqs", "interval"), [(1, 300, 64, 1), (2, 300, 4, 1), (3, 40, 16, 5)])
@pytest.mark.parametrize("ends", ["by themselves", "by a close"])
def test_each_reader_of_a_crowd_gets_its_own_answer(depth, blocks, seqs, interval, ends, monkeypatch):
    """60 readers; the pace changes at random between 1 and 16 steps, and the engine pauses twice."""
    draw, joint, reasons, land = random.Random(depth), [], [], Convoy.land
    monkeypatch.setattr(Convoy, "land", lambda self, tokens: joint.append(land(self, tokens)) or joint[-1])

    def note(pace, *_):
        pace._step += 1
        pace.together = draw.choice([1, 2, 4, 8, 16]) if draw.random() < 0.05 else pace.together

    monkeypatch.setattr("tinyserve.engine.pace.Pace.note", note)

    async def work():
        engine = await start(rule, depth=depth, blocks=blocks, max_num_seqs=seqs, stream_interval=interval)
        scheduler, cache = engine.machine.scheduler, engine.machine.cache
        readers = [asyncio.create_task(read(engine, random.Random(i), f"r{i}", reasons)) for i in range(60)]
        for _ in range(2):
            await asyncio.sleep(0.05)
            await engine.pause("keep")
            scheduler.check_integrity()
            engine.resume()
        if ends == "by themselves":
            await asyncio.gather(*readers)
        await engine.close()
        await asyncio.gather(*readers, return_exceptions=True)
        scheduler.check_integrity()
        assert not scheduler.has_work and cache.num_free == cache.num_blocks
        for reader in readers:
            error = reader.exception()
            assert error is None or (ends == "by a close" and "shut down" in str(error)), error

    asyncio.run(work())

    assert ends == "by a close" or (any(joint) and len(reasons) > 50)
