"""C14: a prompt at, over and far over the limit. Nothing is cut silently, and nobody waits for impossible blocks."""

import pytest

from .harness import CHAT, TEXT, recorded, serving

pytestmark = pytest.mark.anyio


def prompt(length):
    return {"model": "tiny", "prompt": "a" * length, "temperature": 0}


async def test_room_for_one_token(tiny):
    """255 tokens: one more, and the reason is the length."""
    async with serving(tiny) as server:
        whole, _ = await server.both(TEXT, prompt(255))

    assert (whole.counts, whole.reason) == ((255, 1, 256), "length")


@pytest.mark.parametrize("length", [256, 300])
async def test_no_room(tiny, length):
    """Both numbers in the message, in both modes, within 100 ms and before any forward pass."""
    async with serving(tiny) as server:
        steps = recorded(server)
        error = await server.refused(TEXT, prompt(length))
        quickest = min([(await server.ask(TEXT, prompt(length))).seconds for _ in range(5)])
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a" * (length - 18)}]}
        of_chat = await server.refused(CHAT, chat)
        assert steps == []

    for found in (error, of_chat):
        assert found["code"] == "context_length_exceeded"
        assert "256" in found["message"] and str(length) in found["message"]
    assert quickest < 0.1


async def test_a_prompt_that_the_pool_can_never_hold(tiny):
    """(d): 8 blocks are 128 tokens: the smaller limit is announced, 200 tokens are refused at once, 100 are served."""
    async with serving(tiny, num_gpu_blocks_override=9) as server:
        (card,) = (await server.http.get("/v1/models")).json()["data"]
        steps = recorded(server)
        error = await server.refused(TEXT, prompt(200))
        assert steps == []
        whole, _ = await server.both(TEXT, {**prompt(100), "max_tokens": 500, "ignore_eos": True})

    limit = card["max_model_len"]
    assert 128 <= limit <= 129  # the last token of an answer needs no place in the cache
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"] and "200" in error["message"]
    assert (whole.counts, whole.reason) == ((100, limit - 100, limit), "length")
