"""C07: null, missing, empty and list content. Agents send null after every tool turn; it must not become a word."""

import pytest

from tests.scripted import ScriptModel

from .harness import CHAT, HI, serving, write_tokenizer

pytestmark = pytest.mark.anyio
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ABSENT = object()


def history(content=None, calls=(CALL,), **more):
    assistant = {"role": "assistant", **more}
    if content is not ABSENT:
        assistant["content"] = content
    if calls is not ABSENT:
        assistant["tool_calls"] = list(calls)
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    return {"model": "tiny", "messages": [{"role": "user", "content": "q"}, assistant, result], "max_tokens": 1}


def user(content):
    return {**HI, "messages": [{"role": "user", "content": content}], "max_tokens": 1}


@pytest.mark.parametrize("content", [None, ABSENT, ""], ids=["null", "missing", "empty"])
async def test_no_content_is_no_text(tok, content):
    """(a), (b), (c): 38 prompt tokens; 42 would mean that the word None went in."""
    async with serving(ScriptModel([97]), tok) as server:
        whole, _ = await server.both(CHAT, history(content))
        assert whole.usage["prompt_tokens"] == 38
        assert await server.prompt_text(history(content)) == "<|bos|>[user]q[assistant][tool]42[assistant]"


async def test_no_calls_are_as_none(tok):
    """(d): an empty list of calls gives the prompt of a message without the key."""
    async with serving(ScriptModel([97]), tok) as server:
        with_key, without = history("ok", []), history("ok", ABSENT)
        assert await server.ids(with_key) == await server.ids(without)
        counts = [(await server.ask(CHAT, body)).counts for body in (with_key, without)]
    assert counts[0] == counts[1]


async def test_arguments_that_are_not_json(tok):
    """(e): the place is named."""
    call = {**CALL, "function": {"name": "f", "arguments": "not json"}}
    async with serving(ScriptModel([97]), tok) as server:
        error = await server.refused(CHAT, history(None, [call]))

    assert "messages[1]" in error["message"]


async def test_parts_are_joined(tok):
    """(f): both texts, and no Python list."""
    async with serving(ScriptModel([97]), tok) as server:
        body = user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
        assert await server.prompt_text(body) == "<|bos|>[user]a\nb[assistant]"
        whole, _ = await server.both(CHAT, body)
    assert whole.usage["prompt_tokens"] == 21


async def test_a_user_without_content(tok):
    """(g)"""
    async with serving(ScriptModel([97]), tok) as server:
        assert "messages[0]" in (await server.refused(CHAT, user(None)))["message"]


async def test_no_messages(tok):
    """(h)"""
    async with serving(ScriptModel([97]), tok) as server:
        assert (await server.refused(CHAT, {**HI, "messages": []}))["param"] == "messages"


async def test_templates_see_arguments_as_a_mapping(tmp_path):
    """(i)"""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}"
    )
    async with serving(ScriptModel([97]), write_tokenizer(tmp_path, template=template)) as server:
        assert await server.prompt_text(history()) == "1"
        whole, _ = await server.both(CHAT, history())
    assert whole.usage["prompt_tokens"] == 1


@pytest.mark.parametrize(
    "message", [{"content": "x"}, {"role": 5, "content": "x"}, {"role": "user", "content": [{"type": "nothing"}]}]
)
async def test_messages_of_no_known_shape(tok, message):
    async with serving(ScriptModel(), tok) as server:
        assert "essage" in (await server.refused(CHAT, {"messages": [message]}))["message"]
