"""C05: streamed tool arguments join to valid JSON, equal to the call that is not streamed."""

import json

import pytest

from tests.scripted import ScriptModel, byte_tokenizer

from .harness import CHAT, HI, serving

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASK = {**HI, "tools": [F], "max_tokens": 200, "temperature": 0}
GIVEN = {"cmd": "mkdir {a,b", "e": "", "n": 42}
CALL = '<tool_call>\n{"name": "f", "arguments": {"cmd": "mkdir {a,b", "e": "", "n": 42}}\n</tool_call>'


def script(text):
    return ScriptModel(byte_tokenizer().encode(text).ids)


def calls_of(stream):
    """The calls that a client puts together from the deltas of choice 0; content; deltas."""
    calls, content, pieces = {}, "", []
    for chunk in stream.chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls", ()):
                pieces.append(piece)
                call = calls.setdefault(piece["index"], {"name": [], "id": [], "arguments": ""})
                call["name"] += [name] if (name := piece["function"].get("name")) else []
                call["id"] += [piece["id"]] if piece.get("id") else []
                call["arguments"] += piece["function"].get("arguments", "")
    return calls, content, pieces


async def both(text, tok, **body):
    async with serving(script(text), tok, tool_call_parser="hermes") as server:
        return await server.both(CHAT, {**ASK, **body})


@pytest.mark.anyio
@pytest.mark.parametrize("held", [False, True])
async def test_a_call_is_streamed_as_it_is_told(tok, held):
    """a: one name, one id, an index in every delta; the join parses; reason tool_calls; no markup.

    held: by a grammar, so that arguments are passed on as they come; else when they are whole.
    """
    assert len(script(CALL).script) == 70
    whole, stream = await both(CALL, tok, tools=[{**F, "function": {**F["function"], "strict": held}}])
    calls, content, pieces = calls_of(stream)
    assert list(calls) == [0] and content == "" and all("index" in piece for piece in pieces)
    assert calls[0]["name"] == ["f"] and len(calls[0]["id"]) == 1
    assert json.loads(calls[0]["arguments"]) == GIVEN
    assert len(pieces) > 10 if held else len(pieces) == 2
    message = whole.choices[0]["message"]
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "f"
    assert call["function"]["arguments"] == calls[0]["arguments"]
    assert message["content"] is None and whole.reason == "tool_calls"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', {}, ""),
        ('<tool_call>\n{"arguments": {"cmd": "mkdir {a,b", "e": "", "n": 42}, "name": "f"}\n</tool_call>', GIVEN, ""),
        ("ok " + CALL, GIVEN, "ok "),
    ],
)
async def test_other_calls(tok, text, arguments, content):
    """b: no arguments; c: arguments before the name; d: text first."""
    whole, stream = await both(text, tok)
    calls, streamed, _ = calls_of(stream)
    assert json.loads(calls[0]["arguments"]) == arguments and calls[0]["name"] == ["f"]
    assert streamed == content and (whole.choices[0]["message"]["content"] or "") == content
    assert whole.reason == "tool_calls"


@pytest.mark.anyio
async def test_a_cut_call_has_reason_length(tok):
    """e: 30 tokens; the arguments are a beginning of the whole ones."""
    whole, stream = await both(CALL, tok, max_tokens=40)
    calls, _, _ = calls_of(stream)
    assert whole.reason == "length" and calls[0]["arguments"]
    assert json.dumps(GIVEN).startswith(calls[0]["arguments"])
    whole, stream = await both(CALL, tok, max_tokens=30)
    assert whole.reason == "length"


@pytest.mark.anyio
async def test_what_is_no_call_is_text(tok):
    """f: the whole text as content, reason stop."""
    text = '<tool_call>\n{"name": f}\n</tool_call>'
    whole, stream = await both(text, tok)
    assert whole.text == stream.text == text
    assert whole.reason == "stop" and "tool_calls" not in whole.choices[0]["message"]


@pytest.mark.anyio
async def test_a_call_that_breaks_is_text_on_every_route(tok):
    """The stream showed a call with the arguments {"a": and then, as the whole answer does, all of it as text."""
    text = 'Hm. <tool_call>\n{"name": "f", "arguments": {"a":NaN}}\n</tool_call>'
    async with serving(script(text), tok, tool_call_parser="hermes") as server:
        whole, stream = await server.both(CHAT, ASK)
        assert whole.text == stream.text == text and whole.reason == "stop" and not calls_of(stream)[0]
        asked = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **F["function"]}], "temperature": 0}
        (item,) = (await server.ask("/v1/responses", asked)).body["output"]
        assert item["content"][0]["text"] == text
        found = await told(server, "/v1/responses", asked)
        assert "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta") == text
        assert [each["item"]["type"] for each in found if each["type"].endswith("item.added")] == ["message"]
        tool = {"name": "f", "input_schema": {"type": "object"}}
        asked = {**HI, "tools": [tool], "max_tokens": 200, "temperature": 0}
        answer = (await server.ask("/v1/messages", asked)).body
        assert answer["content"] == [{"type": "text", "text": text}] and answer["stop_reason"] == "end_turn"
        found = await told(server, "/v1/messages", asked)
        assert "".join(each["delta"]["text"] for each in found if each["type"] == "content_block_delta") == text


async def told(server, path, body):
    """The events of a stream whose events have names."""
    lines = (await server.http.post(path, json={**body, "stream": True})).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.anyio
@pytest.mark.parametrize("burst", [2, 3, 5, 8])
async def test_bursts_give_the_same_join(tok, burst):
    async with serving(script(CALL), tok, tool_call_parser="hermes") as server:
        stream = await server.stream(CHAT, {**ASK, "stream_interval": burst})
    calls, content, _ = calls_of(stream)
    assert (json.loads(calls[0]["arguments"]), content, stream.reasons) == (GIVEN, "", {0: "tool_calls"})


@pytest.mark.anyio
async def test_parallel_calls_and_only_the_first(tok):
    """Two calls have indexes 0 and 1; parallel_tool_calls false keeps one."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>'
    _, stream = await both(text, tok)
    calls, content, _ = calls_of(stream)
    assert [json.loads(calls[index]["arguments"]) for index in (0, 1)] == [{"a": 1}, {}]
    assert content == "" and calls[0]["id"] != calls[1]["id"]
    whole, stream = await both(text, tok, parallel_tool_calls=False)
    assert list(calls_of(stream)[0]) == [0] and len(whole.choices[0]["message"]["tool_calls"]) == 1
