"""Anthropic's messages: whole, streamed, counted; blocks in and out; errors in its shape; through its own client."""

import anthropic
import pytest

from tinyserve.request import FinishReason, Output, Usage
from tinyserve.server.anthropic_writer import MessageWriter, Shape
from tinyserve.server.blocks import CALL, TEXT, THOUGHT, Part

from .conftest import FakeEngine, client_of, named_events, serving, strict

URL = "/v1/messages"
HI = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}


async def post(body, engine=None, url=URL, headers=None, **options):
    async with client_of(engine or FakeEngine(), **options) as client:
        return await client.post(url, json={**HI, **body}, headers=headers)


def failed(response, status, kind):
    assert response.status_code == status, response.text
    error = strict(response.text)
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    return error["error"]["message"]


def test_a_whole_message(run):
    answer = strict(run(post({})).text)

    assert answer["id"].startswith("msg_") and (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [{"type": "text", "text": "abc"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": 20, "output_tokens": 4, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0
    }  # fmt: skip


def test_cached_tokens_are_told_apart_on_request(run):
    usage = strict(run(post({}, enable_prompt_tokens_details=True)).text)["usage"]

    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (18, 2)


def test_the_order_of_events(run):
    events = named_events(run(post({"stream": True})))

    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert "".join(event["delta"]["text"] for event in events[2:5]) == "abc"
    assert events[0]["message"]["usage"]["output_tokens"] == 0 and events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_one(run, stream):
    response = run(post({"max_tokens": 2, "stream": stream}))
    answer = named_events(response)[-2]["delta"] if stream else strict(response.text)

    assert answer["stop_reason"] == "max_tokens"


def test_blocks_become_messages(run):
    engine = FakeEngine()
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
                                          {"type": "redacted_thinking", "data": "?"},
                                          {"type": "text", "text": "look"},
                                          {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1",
                                      "content": [{"type": "text", "text": "42"}]},
                                     {"type": "tool_result", "tool_use_id": "t2"},
                                     {"type": "text", "text": "go on"}]},
    ]  # fmt: skip
    run(post({"messages": said, "system": [{"type": "text", "text": "sys"}]}, engine))

    assert engine.chats[0][0] == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "look", "reasoning": "hm", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip


def test_an_answer_that_was_begun_is_continued(run):
    engine = FakeEngine()
    run(post({"messages": [*HI["messages"], {"role": "assistant", "content": "The"}]}, engine))

    assert engine.chats[0][1]["continue_final_message"] and not engine.chats[0][1]["add_generation_prompt"]


def test_what_goes_to_the_template(run):
    engine = FakeEngine()
    run(post({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, engine))

    expected = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    assert engine.chats[0][1]["chat_template_kwargs"] == expected


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": [1]}]}]},
         "messages[0].content[0].input"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [1]}, "stop_sequences"), ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"), ({"system": 5}, "system"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"tools": [{"name": "f"}]}, "tools"), ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(run, body, named):
    engine = FakeEngine()

    assert named in failed(run(post(body, engine)), 400, "invalid_request_error")
    assert engine.started == 0


def test_counting(run):
    """The same number as the message's own usage; max_tokens is not needed."""
    response = run(post({"max_tokens": None}, url=URL + "/count_tokens"))

    thinking = {"type": "enabled", "budget_tokens": 2000}
    with_budget = run(post({"max_tokens": None, "thinking": thinking}, url=URL + "/count_tokens"))

    assert strict(response.text) == {"input_tokens": 20}
    assert strict(with_budget.text) == {"input_tokens": 20}


def test_errors_have_the_other_shape_everywhere(run):
    failed(run(post({"model": "nope"})), 404, "not_found_error")
    failed(run(post({}, api_key=["k"])), 401, "authentication_error")
    failed(run(post({}, FakeEngine(fail_at=0))), 500, "api_error")
    events = named_events(run(post({"stream": True}, FakeEngine(fail_at=2))))
    assert events[-1]["error"]["type"] == "api_error"
    assert run(post({}, api_key=["k"], headers={"x-api-key": "k"})).status_code == 200


def test_a_call_and_a_thought_are_blocks():
    found = iter([[Part(THOUGHT, "hm")], [Part(TEXT, "ok"), Part(CALL, '{"x"', name="f")], [Part(CALL, ":1}")]])
    writer = MessageWriter(Shape(name="m", model="t", prompt_tokens=1, reader=lambda output: next(found)))
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    for reason in (None, None, FinishReason.STOP):
        writer.add(Output(request_id="x", usage=usage, finish_reason=reason))
    answer = strict(writer.body())

    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == {"x": 1} and answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"a":99999999999999999999999999999999}', None), (r'{"a":"\ud800"}', None), ('{"a":1e999}', None),
        ('{"a":1.50, "b": [ ]}', None), ('{"a":NaN}', "{}"), ('{"a":', "{}"), ('{"a":' + "[" * 5000, "{}"),
    ],
)  # fmt: skip
def test_arguments_stay_as_they_were_written(written, sent):
    """The first two were a 500 for want of a type that holds them, 1e999 became null, and a deep one was a 500 too."""
    shape = Shape(name="m", model="t", prompt_tokens=1, reader=lambda output: [Part(CALL, written, name="f")])
    writer = MessageWriter(shape)
    writer.add(
        Output(request_id="x", usage=Usage(prompt_tokens=1, completion_tokens=3), finish_reason=FinishReason.STOP)
    )

    assert b'"input":' + (sent or written).encode() + b"}" in writer.body()


def test_the_official_client(run):
    async def go():
        async with (
            serving(FakeEngine(), api_key=["k"]) as server,
            anthropic.AsyncAnthropic(base_url=server.address, api_key="k") as client,
        ):
            message = await client.messages.create(**HI)
            assert (message.content[0].text, message.stop_reason, message.usage.output_tokens) == ("abc", "end_turn", 4)
            async with client.messages.stream(**HI) as stream:
                assert [text async for text in stream.text_stream] == ["a", "b", "c"]
                assert (await stream.get_final_message()).usage.output_tokens == 4
            counted = await client.messages.count_tokens(model="tiny", messages=HI["messages"])
            assert counted.input_tokens == 20
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**HI, "model": "nope"})

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_an_overload_and_no_fault(run, caplog, stream):
    """It was a 500 with an error in the log, for what an operator had asked for."""
    engine = FakeEngine(b"a" * 50)
    engine.closing.set()

    response = run(post({"stream": stream}, engine))

    body = response.text.removeprefix("event: error\ndata: ")
    assert response.status_code == 503 and strict(body)["error"]["type"] == "overloaded_error"
    assert not caplog.records
