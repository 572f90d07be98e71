"""C04: two choices have random numbers of their own, one prompt between them, and their usage comes last."""

import pytest

from tests.scripted import FlatModel

from .harness import CHAT, HI, serving

pytestmark = pytest.mark.anyio
BODY = {**HI, "n": 2, "seed": 7, "temperature": 1, "max_tokens": 5}


async def test_usage_comes_last(tok):
    """(a): 20/10/30 in a chunk without choices; the texts differ, and the whole answer has the same pair."""
    async with serving(FlatModel(), tok) as server:
        whole, stream = await server.both(CHAT, {**BODY})
        counted = await server.stream(CHAT, {**BODY, "stream_options": {"include_usage": True}})

    assert set(counted.deltas) == {0, 1}
    assert counted.reasons == {0: "length", 1: "length"}
    *others, last = counted.chunks
    assert last["choices"] == []
    assert {name: last["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")} == {
        "prompt": 20, "completion": 10, "total": 30
    }  # fmt: skip
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in others)
    assert counted.texts[0] != counted.texts[1]
    assert counted.texts == stream.texts == whole.texts
    assert whole.counts == (20, 10, 30)


async def test_no_usage_unless_asked(tok):
    """(b)"""
    async with serving(FlatModel(), tok) as server:
        stream = await server.stream(CHAT, BODY)

    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in stream.chunks)


async def test_stream_options_without_a_stream(tok):
    """(c)"""
    async with serving(FlatModel(), tok) as server:
        body = {**BODY, "stream": False, "stream_options": {"include_usage": True}}
        reply = await server.ask(CHAT, body)

    assert (reply.status, reply.error["param"]) == (400, "stream_options")
