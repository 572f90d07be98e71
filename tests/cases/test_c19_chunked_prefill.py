"""C19: a prompt computed in chunks is the prompt computed at once; those who are decoding meanwhile lose no step."""

import asyncio

import pytest

from .harness import TEXT, Oracle, close, eventually, recorded, serving, write_tiny

pytestmark = pytest.mark.anyio
LENGTHS = (5, 8, 9, 16, 17, 37)
COUNT = 8
BUDGET = 8
# logits as they are, all 320 of them
LOGITS = {"logprobs_mode": "raw_logits", "max_logprobs": -1}
BODY = {
    "model": "tiny", "temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True,
    "logprobs": 320, "return_tokens_as_token_ids": True,
}  # fmt: skip


def prompt(length, first=0):
    return [33 + (7 * i * i + 11 * length + first) % 220 for i in range(length)]


PROMPTS = [prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module", params=[16, 80], ids=["head16", "head80"])
def folder(request, tmp_path_factory):
    """TINY with the usual head size, and (c) with 80."""
    return write_tiny(tmp_path_factory.mktemp("heads"), head_dim=request.param)


def ids(answer):
    return answer.choices[0]["token_ids"]


async def together(folder, **options):
    """The answers to all prompts at once, while one more request is decoding; and the steps."""
    async with serving(folder, **LOGITS, **options) as server:
        steps = recorded(server)
        decoder = {**BODY, "prompt": prompt(3), "max_tokens": 60, "logprobs": None}
        decoding = asyncio.create_task(server.ask(TEXT, decoder))
        await eventually(lambda: len(steps) >= 3, 5)
        answers = await asyncio.gather(*(server.ask(TEXT, {**BODY, "prompt": ids}) for ids in PROMPTS))
        return answers, await decoding, steps


async def test_any_budget_gives_the_same(folder):
    """Greedy tokens and last-position logits, within 1e-4 of a reference forward, at 8 tokens a step and unlimited."""
    oracle = Oracle(folder)
    small, decoded, steps = await together(folder, max_num_batched_tokens=BUDGET)
    large, decoded_too, _ = await together(folder)

    assert max(step.num_tokens for step in steps) == BUDGET
    assert ids(decoded) == ids(decoded_too) == oracle.greedy(prompt(3), 60)
    for tokens, chunked, whole in zip(PROMPTS, small, large, strict=True):
        assert ids(chunked) == ids(whole) == oracle.greedy(tokens, COUNT)
        expected = oracle.logits(tokens)[-1].tolist()
        for answer in (chunked, whole):
            found = answer.logprobs["top_logprobs"][0]
            assert len(found) == 320
            assert all(close(found[f"token_id:{token}"], value) for token, value in enumerate(expected))


async def test_who_samples_when(folder):
    """No token before the last chunk of a prompt; the decoding request gets one in every step until it ends."""
    _, decoded, steps = await together(folder, max_num_batched_tokens=BUDGET)
    lengths, chunked, decoder, served = {}, set(), None, 0
    for step in steps:
        for opening in step.opened:
            lengths[opening.slot] = opening.prompt_len
            decoder = opening.slot if decoder is None else decoder
        for piece in step.slices:
            assert piece.samples == (piece.start + piece.count >= lengths[piece.slot])
            if not piece.samples:
                chunked.add(piece.slot)
        mine = [piece for piece in step.slices if piece.slot == decoder and piece.samples]
        if served < 60:
            assert len(mine) == 1, "the decoding request was left out"
            served += 1
    assert served == decoded.usage["completion_tokens"] == 60
    assert len(chunked) >= 4  # those of 9, 16, 17 and 37 tokens


@pytest.mark.parametrize("budget", [{}, {"max_num_batched_tokens": 16}], ids=["unlimited", "16"])
async def test_a_cached_prefix_beside_none(folder, budget):
    """(b): 32 cached tokens and none in one batch: no error from a part of length zero, and the same answers."""
    oracle = Oracle(folder)
    cached, fresh = prompt(37), prompt(5, first=9)
    async with serving(folder, **LOGITS, **budget) as server:
        await server.ask(TEXT, {**BODY, "prompt": cached, "max_tokens": 1})
        steps = recorded(server)
        bodies = [{**BODY, "prompt": tokens} for tokens in (cached, fresh)]
        hit, miss = await asyncio.gather(*(server.ask(TEXT, body) for body in bodies))

    assert [piece.start for step in steps for piece in step.slices[:2]][:2] == [32, 0]
    assert len(steps[0].slices) == 2
    assert hit.usage["prompt_tokens_details"]["cached_tokens"] == 32
    assert miss.usage["prompt_tokens_details"]["cached_tokens"] == 0
    for tokens, answer in ((cached, hit), (fresh, miss)):
        assert ids(answer) == oracle.greedy(tokens, COUNT)
        found, expected = answer.logprobs["top_logprobs"][0], oracle.logits(tokens)[-1].tolist()
        assert all(close(found[f"token_id:{token}"], value) for token, value in enumerate(expected))
