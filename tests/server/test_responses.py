"""The responses API: whole, streamed, continued, kept, followed, cancelled; and through the official client."""

import asyncio
import json

import openai
import pytest

from tests.served import in_process, strict
from tinyserve.server import responses_store
from tinyserve.server.app import create_app
from tinyserve.server.blocks import CALL, TEXT, THOUGHT, Blocks, Part
from tinyserve.server.errors import Failure
from tinyserve.server.responses_writer import ResponseWriter, Shape

from .conftest import FakeEngine, client_of, numbered_events, refused, service_of

URL = "/v1/responses"


async def post(body, engine=None, **options):
    async with client_of(engine or FakeEngine(), **options) as client:
        return await client.post(URL, json={"input": "Hi", **body})


def test_a_whole_response(run):
    answer = strict(run(post({"instructions": "Be brief", "metadata": {"a": "b"}})).text)
    (item,) = answer["output"]

    assert answer["id"].startswith("resp_") and (answer["object"], answer["status"]) == ("response", "completed")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in item["content"]] == [("output_text", "abc")]
    assert answer["usage"]["output_tokens"] == 4
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + 4
    assert (answer["metadata"], answer["instructions"], answer["model"]) == ({"a": "b"}, "Be brief", "tiny")


def test_the_order_of_events(run):
    events = numbered_events(run(post({"stream": True})))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]

    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 3, "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert deltas == ["a", "b", "c"]
    assert events[2]["item"]["content"] == [] and events[0]["response"]["output"] == []
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_one_is_incomplete(run, stream):
    response = run(post({"max_output_tokens": 2, "stream": stream}))
    answer = numbered_events(response)[-1]["response"] if stream else strict(response.text)

    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"


def test_logprobs_join_to_the_whole_ones(run):
    """Each token is listed once, also the end token, which has no text."""
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = strict(run(post(body)).text)["output"][0]["content"][0]["logprobs"]
    events = numbered_events(run(post({**body, "stream": True})))
    pieces = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]

    assert [entry["token"] for entry in whole] == ["a", "b", "c", ""]
    assert pieces == whole[:3]
    assert next(event for event in events if event["type"].endswith("text.done"))["logprobs"] == whole


def test_items_become_messages(run):
    engine = FakeEngine()
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "think"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "message", "role": "user", "content": "next"},
    ]
    run(post({"input": items, "instructions": "i"}, engine))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

    assert engine.chats[0][0] == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning": "think", "tool_calls": [
            {"id": "c1", **call}, {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "next"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": []}, "input"), ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": ["x", {"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": 3}, "temperature"),
        ({"background": True, "store": False}, "background"), ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"), ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"include": ["file_search_call.results"]}, "include"), ({"truncation": "none"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"cache_salt": ""}, "cache_salt"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(run, body, param):
    engine = FakeEngine()

    refused(run(post(body, engine)), 400, param)
    assert engine.started == 0


async def turns(*calls, engine=None, **options):
    """Several calls of one server, (method, path, body or a function of the answers so far)."""
    found = []
    async with client_of(engine or FakeEngine(), **options) as client:
        for method, path, body in calls:
            path = path(found) if callable(path) else path
            found.append(await client.request(method, path, json=body(found) if callable(body) else body))
    return found


def id_of(found, number=0):
    return strict(found[number].text)["id"]


def test_a_later_response_goes_on_from_a_kept_one(run):
    """Instructions are not carried over; the answer is."""
    engine = FakeEngine()
    run(turns(
        ("POST", URL, {"input": "one", "instructions": "i"}),
        ("POST", URL, lambda found: {"input": "two", "previous_response_id": id_of(found), "stream": True}),
        engine=engine,
    ))  # fmt: skip

    assert engine.chats[1][0] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "two"},
    ]


def test_kept_ones_can_be_read_and_deleted(run):
    path = lambda found: f"{URL}/{id_of(found)}"
    found = run(turns(("POST", URL, {"input": "x"}), ("GET", path, None), ("DELETE", path, None), ("GET", path, None)))

    assert strict(found[1].text) == strict(found[0].text)
    assert strict(found[2].text)["deleted"] is True
    refused(found[3], 404, "response_id")


def test_what_must_not_be_kept_is_not(run):
    path = lambda found: f"{URL}/{id_of(found)}"
    found = run(turns(("POST", URL, {"input": "x", "store": False}), ("GET", path, None), ("POST", URL, {
        "input": "y", "previous_response_id": "resp_nope"})))  # fmt: skip

    refused(found[1], 404)
    refused(found[2], 404)


def test_the_store_is_bounded(run, monkeypatch):
    """3 are allowed; the fourth drops the oldest. Bytes are counted back to 0 when all are deleted."""
    monkeypatch.setattr(responses_store, "MAX_KEPT", 3)
    service = service_of(FakeEngine())

    async def go():
        async with in_process(service) as client:
            ids = [strict((await client.post(URL, json={"input": "x" * 50})).text)["id"] for _ in range(4)]
            statuses = [(await client.get(f"{URL}/{name}")).status_code for name in ids]
            for name in ids[1:]:
                await client.delete(f"{URL}/{name}")
        return statuses

    assert run(go()) == [404, 200, 200, 200]
    assert (service.responses.size, len(service.responses.kept)) == (0, 0)


def test_in_the_background(run):
    """Answered at once as queued; there when it is done; its events can be read from any of them on."""

    async def go():
        engine = FakeEngine(delay=0.01)
        service = service_of(engine)
        async with in_process(service) as client:
            begun = strict((await client.post(URL, json={"input": "x", "background": True})).text)
            assert begun["status"] == "queued" and service.inflight == 1
            while (now := strict((await client.get(f"{URL}/{begun['id']}")).text))["status"] != "completed":
                await asyncio.sleep(0.005)
            assert now["output"][0]["content"][0]["text"] == "abc" and service.inflight == 0
            refused(await client.get(f"{URL}/{begun['id']}?stream=true"), 400, "stream")
            streamed = numbered_events(await client.post(URL, json={"input": "x", "background": True, "stream": True}))
            follow = f"{URL}/{streamed[0]['response']['id']}?stream=true&starting_after="
            again = await client.get(f"{follow}4")
            assert (await client.get(f"{follow}{len(streamed) - 1}")).text == ""  # all of them are known
            told = refused(await client.get(f"{follow}{len(streamed)}"), 400, "starting_after")
        numbers = [json.loads(b.split("data: ")[1])["sequence_number"] for b in again.text.split("\n\n")[:-1]]
        assert streamed[-1]["type"] == "response.completed"
        assert numbers == list(range(5, len(streamed)))
        assert f"the last one has the number {len(streamed) - 1}" in told

    run(go())


def test_a_background_response_can_be_cancelled(run):
    """The engine runs nothing afterwards; what there is stays."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.005)
        service = service_of(engine)
        async with in_process(service) as client:
            name = strict((await client.post(URL, json={"input": "x", "background": True})).text)["id"]
            while not strict((await client.get(f"{URL}/{name}")).text)["output"]:
                await asyncio.sleep(0.005)
            ended = strict((await client.post(f"{URL}/{name}/cancel")).text)
            assert ended["status"] == "cancelled" and ended["output"][0]["content"][0]["text"].startswith("a")
            assert (engine.running, service.inflight) == (0, 0)
            foreground = strict((await client.post(URL, json={"input": "x", "max_output_tokens": 1})).text)["id"]
            refused(await client.post(f"{URL}/{foreground}/cancel"), 400)

    run(go())


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_who_follows_a_response_is_told_of_its_end(run, how):
    """The events just ended, also for those who looked later; and nothing said how many tokens there had been."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.005)
        service = service_of(engine)
        async with in_process(service) as client:
            body = {"input": "x", "background": True, "stream": True}
            following = asyncio.create_task(client.post(URL, json=body))
            while not engine.running:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            (name,) = service.responses.kept
            on = {"input": "y", "previous_response_id": name}
            refused(await client.post(URL, json=on), 400, "previous_response_id")
            await (client.post(f"{URL}/{name}/cancel") if how == "cancel" else client.delete(f"{URL}/{name}"))
            last = numbered_events(await following)[-1]
            if how == "cancel":
                again = await client.get(f"{URL}/{name}?stream=true&starting_after={last['sequence_number'] - 1}")
                assert json.loads(again.text.split("data: ")[1]) == last
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
        assert last["response"]["usage"]["output_tokens"] == len(last["response"]["output"][0]["content"][0]["text"])

    run(go())


def test_a_reader_that_leaves_does_not_end_a_background_response(run):
    async def go():
        engine = FakeEngine(b"abcdef", delay=0.01)
        service = service_of(engine)
        sent = []

        async def receive():
            if not sent:
                sent.append(1)
                return {"type": "http.request", "body": b'{"input":"x","background":true,"stream":true}'}
            await asyncio.sleep(0.02)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": URL, "headers": [(b"content-type", b"application/json")],
                 "query_string": b""}  # fmt: skip
        await create_app(service)(scope, receive, send)
        (kept,) = service.responses.kept.values()
        assert kept.running
        await kept.run.ended()
        assert kept.writer.snapshot()["output"][0]["content"][0]["text"] == "abcdef"

    run(go())


def test_a_failure_in_a_stream(run):
    events = numbered_events(run(post({"stream": True}, FakeEngine(fail_at=2))))

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "NaN" in refused(run(post({"stream": True}, FakeEngine(fail_at=0))), 500)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(Failure(400, "wrong form"), "invalid_prompt"), (Failure(503, "later"), "rate_limit_exceeded"),
     (Failure(500, "oh"), "server_error")],
)  # fmt: skip
def test_a_failure_says_whose_fault_it_is(failure, code):
    """A form that cannot be compiled was a server_error, for which programs ask again and again."""
    writer = ResponseWriter({}, Shape(tokenizer=None, prompt_tokens=1))
    writer.failed(failure)
    assert writer.snapshot()["error"] == {"code": code, "message": failure.message}


def test_a_conversation_that_is_too_long(run):
    """Refused by default; with "auto", the oldest messages go, never the system's and never the last."""
    items = [{"role": "user", "content": f"{n:03}" * 20} for n in range(5)]
    engine = FakeEngine()
    refused(run(post({"input": items}, engine)), 400)
    run(post({"input": items, "instructions": "sys", "truncation": "auto"}, engine))
    kept = [message["content"][:3] for message in engine.chats[-1][0]]

    assert kept[0] == "sys" and kept[-1] == "004" and len(kept) < 6
    refused(run(post({"input": "x" * 300, "truncation": "auto"})), 400)


def test_thoughts_and_calls_have_items_of_their_own():
    """A reader that finds a thought, a text and a call; the arguments come in pieces."""
    found = iter([[Part(THOUGHT, "hm")], [Part(TEXT, "ok "), Part(CALL, '{"x"', name="f")], [Part(CALL, ":1}")]])
    from tinyserve.request import FinishReason, Output, Usage

    writer = ResponseWriter({"id": "r"}, Shape(tokenizer=None, prompt_tokens=1, reader=lambda output: next(found)))
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    written = [writer.events(Output(request_id="x", usage=usage)) for _ in range(2)]
    written.append(writer.events(Output(request_id="x", usage=usage, finish_reason=FinishReason.STOP)))
    kinds = [line[7:] for line in b"".join(written).decode().splitlines() if line.startswith("event")]
    output = writer.snapshot()["output"]

    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[2]["arguments"] == '{"x":1}' and output[2]["name"] == "f"
    assert kinds.count("response.function_call_arguments.delta") == 2
    assert kinds.count("response.output_item.done") == 3
    assert writer.messages()[0]["reasoning"] == "hm" and len(writer.messages()[0]["tool_calls"]) == 1


def test_blocks_open_and_close_in_turn():
    blocks = Blocks()
    steps = [(s.what, s.block.index) for s in blocks.add([Part(TEXT, "a"), Part(TEXT, "b"), Part(CALL, "", name="f"),
                                                          Part(CALL, "", name="g")])]  # fmt: skip
    steps += [(s.what, s.block.index) for s in blocks.end()]

    assert steps == [("open", 0), ("more", 0), ("more", 0), ("close", 0), ("open", 1), ("close", 1), ("open", 2),
                     ("close", 2)]  # fmt: skip


def test_the_official_client(run):
    async def go():
        http = client_of(FakeEngine())
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http) as client:
            first = await client.responses.create(model="tiny", input="Hi")
            assert (first.output_text, first.status, first.usage.output_tokens) == ("abc", "completed", 4)
            second = await client.responses.create(model="tiny", input="more", previous_response_id=first.id)
            assert (await client.responses.retrieve(second.id)).output_text == "abc"
            stream = await client.responses.create(model="tiny", input="Hi", stream=True)
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert texts == ["a", "b", "c"]
            async with client.responses.stream(model="tiny", input="Hi") as helper:
                async for _ in helper:
                    pass
                assert (await helper.get_final_response()).output_text == "abc"
            await client.responses.delete(first.id)

    run(go())


def test_the_official_client_lists_what_a_response_answers(run):
    """The route did not exist. All pages joined are all items, each once; an earlier answer is one of them."""

    async def go():
        http = client_of(FakeEngine(max_model_len=999))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http) as client:
            first = await client.responses.create(model="tiny", input="Hi")
            own = first.output[0].id
            more = [
                {"role": "user", "content": [{"type": "input_text", "text": f"word {number}"}], "id": "same"}
                for number in range(30)
            ]
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            given = [*more, call, {"type": "function_call_output", "call_id": "c", "output": "42"}]
            second = await client.responses.create(model="tiny", input=given, previous_response_id=first.id)
            newest = await client.responses.input_items.list(second.id)
            assert (len(newest.data), newest.has_more) == (20, True)
            assert [item.type for item in newest.data[:3]] == ["function_call_output", "function_call", "message"]
            items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=7)]
            assert [item.content[0].text for item in items[:3]] == ["Hi", "abc", "word 0"] and items[1].id == own
            assert len({item.id for item in items}) == len(items) == 34
            down = [item.id async for item in client.responses.input_items.list(second.id)]
            assert down == [item.id for item in reversed(items)]
            last = await client.responses.input_items.list(first.id, after=(await _ids(client, first.id))[0])
            assert last.data == [] and last.has_more is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_items.list("resp_none")

    async def _ids(client, name):
        return [item.id async for item in client.responses.input_items.list(name)]

    run(go())


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=no", "after"),
     ("include=zz", "include")],
)  # fmt: skip
def test_what_a_list_of_items_asks_for_is_read(run, query, param):
    async def go():
        async with client_of(FakeEngine()) as client:
            name = (await client.post("/v1/responses", json={"input": "x"})).json()["id"]
            return await client.get(f"/v1/responses/{name}/input_items?{query}")

    refused(run(go()), 400, param)


@pytest.mark.parametrize(
    ("query", "param"),
    [("stream=banana", "stream"), ("include[]=zz", "include[]"), ("include=a", "include"),
     ("starting_after=x&stream=true", "starting_after"), ("starting_after=-1&stream=true", "starting_after"),
     ("starting_after=-1", "starting_after"), ("starting_after=3", "starting_after"),
     ("include_obfuscation=2", "include_obfuscation"), ("include[]=message.output_text.logprobs&stream=false", None)],
)  # fmt: skip
def test_what_a_look_asks_for_is_read(run, query, param):
    """stream=banana and include[]=zz were a 200, as if nothing had been asked."""

    async def go():
        async with client_of(FakeEngine()) as client:
            name = (await client.post("/v1/responses", json={"input": "x"})).json()["id"]
            return await client.get(f"/v1/responses/{name}?{query}")

    found = run(go())
    assert found.status_code == 200 if param is None else refused(found, 400, param)
