"""C13: max_tokens is an upper bound: absent, null, 0, too large, and of a wrong type."""

import pytest

from tests.scripted import CONTEXT, ScriptModel

from .harness import CHAT, HI, TEXT, serving

pytestmark = pytest.mark.anyio
PROMPT = {"model": "tiny", "prompt": "p" * 10, "temperature": 0}
TALK = {**HI, "temperature": 0}  # 20 tokens


@pytest.fixture
def model():
    return ScriptModel([97] * 400)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}], ids=["absent", "null"])
async def test_the_default(tok, model, limit):
    """Chat: up to the context, 256 - 20; completions: the historical 16."""
    async with serving(model, tok) as server:
        text, _ = await server.both(TEXT, {**PROMPT, **limit})
        chat, _ = await server.both(CHAT, {**TALK, **limit})

    assert (text.counts, text.reason) == ((10, 16, 26), "length")
    assert (chat.counts, chat.reason) == ((20, CONTEXT - 20, CONTEXT), "length")


async def test_zero(tok, model):
    """Completions: an empty answer; chat: 400, by either name."""
    async with serving(model, tok) as server:
        text, _ = await server.both(TEXT, {**PROMPT, "max_tokens": 0})
        assert (text.text, text.reason, text.counts) == ("", "length", (10, 0, 10))
        for name in ("max_tokens", "max_completion_tokens"):
            assert (await server.refused(CHAT, {**TALK, name: 0}))["param"] == name


@pytest.mark.parametrize("wrong", [-1, 1.5, "5"])
async def test_what_is_no_limit(tok, model, wrong):
    async with serving(model, tok) as server:
        assert (await server.refused(TEXT, {**PROMPT, "max_tokens": wrong}))["param"] == "max_tokens"
        for name in ("max_tokens", "max_completion_tokens"):
            assert (await server.refused(CHAT, {**TALK, name: wrong}))["param"] == name


async def test_more_than_the_room_left(tok, model):
    """10000 is clamped, the same on all routes."""
    async with serving(model, tok) as server:
        text, _ = await server.both(TEXT, {**PROMPT, "max_tokens": 10_000})
        chat, _ = await server.both(CHAT, {**TALK, "max_tokens": 10_000})
        newer, _ = await server.both(CHAT, {**TALK, "max_completion_tokens": 10_000})

    assert (text.counts, text.reason) == ((10, CONTEXT - 10, CONTEXT), "length")
    assert (chat.counts, chat.reason) == (newer.counts, newer.reason) == ((20, CONTEXT - 20, CONTEXT), "length")


async def test_the_newer_name_wins(tok, model):
    async with serving(model, tok) as server:
        chat, _ = await server.both(CHAT, {**TALK, "max_completion_tokens": 5, "max_tokens": 9})

    assert (chat.usage["completion_tokens"], chat.reason) == (5, "length")
