"""C18: with six blocks for four requests of four blocks each, some are put back and computed again; none may notice."""

import asyncio

import pytest

from tests.scripted import FlatModel

from .harness import TEXT, close, serving

pytestmark = pytest.mark.anyio
BLOCKS = 7  # six, and the null block
COUNT = 40
PROMPTS = [[32 + 16 * number + i for i in range(16)] for number in range(4)]
BODY = {"model": "tiny", "max_tokens": COUNT, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


async def alone_and_crowded(model, folder=None, *, stream=False, **extra):
    """Answers to the four prompts, each with nobody else, and all at once in the small pool."""
    bodies = [{**BODY, **extra, "prompt": ids, "seed": number} for number, ids in enumerate(PROMPTS)]
    async with serving(model() if folder else model, folder) as server:
        alone = [await server.ask(TEXT, body) for body in bodies]
        assert await server.metric("num_preemptions") == 0
    async with serving(model() if folder else model, folder, num_gpu_blocks_override=BLOCKS) as server:
        ask = server.stream if stream else server.ask
        crowded = await asyncio.gather(*(ask(TEXT, body) for body in bodies))
        assert await server.metric("num_preemptions") > 0, "the test proves nothing"
    assert all(answer.usage["completion_tokens"] == COUNT for answer in alone)
    return alone, crowded


def ids(answer):
    return answer.choices[0]["token_ids"]


async def test_greedy(tiny, oracle):
    """Each text equals its single run, which is the reference's."""
    alone, crowded = await alone_and_crowded(tiny)

    for prompt, one, many in zip(PROMPTS, alone, crowded, strict=True):
        assert ids(many) == ids(one) == oracle.greedy(prompt, COUNT)
        assert (many.text, many.counts, many.reason) == (one.text, (16, COUNT, 16 + COUNT), "length")


async def test_penalties_still_see_the_output(tiny):
    """(b): what was generated before the preemption still counts as output."""
    plain, _ = await alone_and_crowded(tiny)
    alone, crowded = await alone_and_crowded(tiny, frequency_penalty=0.5)

    assert [ids(answer) for answer in crowded] == [ids(answer) for answer in alone]
    assert any(ids(one) != ids(other) for one, other in zip(plain, alone, strict=True)), "the penalty did nothing"


async def test_logprobs(tiny):
    """(c): 40 entries, those of the single run within 1e-4."""
    alone, crowded = await alone_and_crowded(tiny, logprobs=2)

    for one, many in zip(alone, crowded, strict=True):
        assert ids(many) == ids(one)
        assert len(many.logprobs["token_logprobs"]) == COUNT
        assert many.logprobs["tokens"] == one.logprobs["tokens"]
        assert many.logprobs["text_offset"] == one.logprobs["text_offset"]
        assert all(map(close, many.logprobs["token_logprobs"], one.logprobs["token_logprobs"]))
        for found, expected in zip(many.logprobs["top_logprobs"], one.logprobs["top_logprobs"], strict=True):
            assert found.keys() == expected.keys()
            assert all(close(found[token], expected[token]) for token in found)


async def test_streams(tiny):
    """(d): no delta is repeated or missing."""
    alone, crowded = await alone_and_crowded(tiny, stream=True)

    for one, many in zip(alone, crowded, strict=True):
        assert many.text == one.text
        assert [token for chunk in many.chunks for token in chunk["choices"][0]["token_ids"]] == ids(one)
        assert many.reasons == {0: "length"}


async def test_random_numbers_go_on(tok):
    """(e): they continue where they were, they do not start again."""
    alone, crowded = await alone_and_crowded(FlatModel, tok, temperature=1)

    assert [ids(answer) for answer in crowded] == [ids(answer) for answer in alone]
    assert len({tuple(ids(answer)) for answer in alone}) == 4
