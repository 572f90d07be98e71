"""The chat route: order of a stream, usage, logprobs, template options, and what is refused."""

import asyncio
import json

import pytest

from tinyserve.server.app import create_app

from .conftest import FakeEngine, client_of, events, refused, service_of, strict

URL = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


async def post(body, engine=None, **options):
    async with client_of(engine or FakeEngine(), **options) as client:
        return await client.post(URL, json={**HI, **body})


def test_a_whole_answer(run):
    answer = strict(run(post({"model": "alias"})).text)
    choice = answer["choices"][0]

    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert choice["message"]["content"] == "abc"
    assert (choice["message"]["role"], choice["finish_reason"], choice["stop_reason"]) == ("assistant", "stop", None)
    assert "tool_calls" not in choice["message"]
    assert answer["usage"] == {
        "prompt_tokens": 20, "total_tokens": 24, "completion_tokens": 4, "prompt_tokens_details": None
    }  # fmt: skip


def test_a_stream_has_role_deltas_finish_in_this_order(run):
    chunks = events(run(post({"stream": True})))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta.get("content", "") for delta in deltas[1:]] == ["a", "b", "c", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks)


def test_two_choices_and_usage(run):
    """C04: usage 20/10/30, the prompt counted once; the usage chunk has an empty list of choices and comes last."""
    body = {"n": 2, "temperature": 1, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(run(post(body, FakeEngine(b"abcdefgh"))))
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert len(chunk["choices"]) == 1 and chunk.get("usage") is None
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")

    assert texts == {0: "abcde", 1: "abcde"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}


def test_usage_in_every_chunk_starts_at_zero(run):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(run(post({"stream": True, "stream_options": options})))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4, 4]


def test_the_operator_can_force_usage_and_details(run):
    options = {"enable_force_include_usage": True, "enable_prompt_tokens_details": True}
    chunks = events(run(post({"stream": True}, **options)))

    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "usage" in chunks[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"97": 1e30}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_json": 5}, "guided_json"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "n": 0}, "n"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "presence_penalty": 0.5}, "presence_penalty"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"stream_interval": 0}, "stream_interval"),
    ],
)
def test_bad_fields_are_named(run, body, param):
    engine = FakeEngine()

    refused(run(post(body, engine)), 400, param)
    assert engine.steps == 0


def test_null_means_default(run):
    names = [
        "temperature", "top_p", "top_k", "n", "stop", "max_tokens", "top_logprobs", "logprobs", "seed", "tools",
        "tool_choice", "response_format", "stream_options", "logit_bias", "user", "chat_template", "priority",
    ]  # fmt: skip

    assert run(post(dict.fromkeys(names))).status_code == 200


def test_harmless_fields_are_ignored(run):
    body = {
        "store": True, "metadata": {}, "user": "me", "service_tier": "auto", "best_of": 1,
        "response_format": {"type": "text"}, "parallel_tool_calls": False, "include_reasoning": False,
        "length_penalty": 1.0, "use_beam_search": False,
    }  # fmt: skip

    assert run(post(body)).status_code == 200


@pytest.mark.parametrize("body", [{"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}, {"tools": []}])
def test_no_tools_is_like_no_tools(run, body):
    engine = FakeEngine()
    plain = strict(run(post({}, engine)).text)["usage"]
    other = strict(run(post(body, engine)).text)["usage"]

    assert plain == other


def test_tools_that_must_not_be_called_stay_out_of_the_prompt(run):
    engine = FakeEngine()
    run(post({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, engine))

    assert "tools" not in engine.chats[0][1]


def test_the_newer_limit_wins_and_the_context_is_the_default(run):
    engine = FakeEngine()
    run(post({"max_tokens": 9, "max_completion_tokens": 5}, engine))
    run(post({}, engine))

    assert [sampling.max_tokens for _, sampling, _ in engine.calls] == [5, None]


def test_defaults_of_the_model_stand_behind_the_request(run):
    engine = FakeEngine()
    engine.default_sampling = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    run(post({"top_k": 5, "temperature": None}, engine))
    sampling = engine.calls[0][1]

    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 5, 7)


def test_logprobs_layout(run):
    engine = FakeEngine("é!".encode())
    answer = strict(run(post({"logprobs": True, "top_logprobs": 1}, engine)).text)
    content = answer["choices"][0]["logprobs"]["content"]

    assert [entry["bytes"] for entry in content] == [[195], [169], [33], list(b"<|eos|>")]
    assert content[2]["token"] == "!"
    assert content[2]["logprob"] == -9999.0
    assert len(content[0]["top_logprobs"]) == 1


def test_streamed_logprobs_join_to_the_whole_ones(run):
    body = {"logprobs": True, "top_logprobs": 1}
    whole = strict(run(post(body)).text)["choices"][0]["logprobs"]["content"]
    chunks = events(run(post({**body, "stream": True})))
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]

    assert streamed == whole


def test_token_ids_on_request(run):
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True}
    answer = strict(run(post(body)).text)
    chunks = events(run(post({**body, "stream": True})))

    assert answer["choices"][0]["token_ids"] == [97, 98, 99, 260]
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"
    assert len(answer["prompt_token_ids"]) == 20
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == [97, 98, 99, 260]


def test_continuing_the_last_message_with_echo(run):
    engine = FakeEngine()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = strict(run(post(body, engine)).text)
    chunks = events(run(post({**body, "stream": True}, engine)))

    assert answer["choices"][0]["message"]["content"] == "So abc"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "So abc"
    assert engine.chats[0][1]["add_generation_prompt"] is False


def test_template_variables_of_server_and_request(run):
    engine = FakeEngine()
    defaults = {"default_chat_template_kwargs": {"a": 1, "b": 1}}
    run(post({"chat_template_kwargs": {"b": 2}, "reasoning_effort": "low"}, engine, **defaults))

    assert engine.chats[0][1]["chat_template_kwargs"] == {
        "a": 1, "b": 2, "reasoning_effort": "low", "enable_thinking": True, "thinking": True
    }  # fmt: skip


def test_a_trusted_request_may_bring_a_template(run):
    engine = FakeEngine()

    assert run(post({"chat_template": "x"}, engine, trust_request_chat_template=True)).status_code == 200
    assert engine.chats[0][1]["chat_template"] == "x"


def test_a_prompt_without_room_is_refused_before_the_stream(run):
    body = {"messages": [{"role": "user", "content": "a" * 300}], "stream": True}
    response = run(post(body))
    message = refused(response, 400)

    assert strict(response.text)["error"]["code"] == "context_length_exceeded"
    assert "256" in message and "318" in message


def test_a_failure_before_the_first_output_is_a_500(run):
    """C22: NaN at the first step is an HTTP status, streamed or not."""
    for stream in (False, True):
        assert "NaN" in refused(run(post({"stream": stream}, FakeEngine(fail_at=0))), 500)


def test_a_failure_in_a_stream_is_an_event_before_done(run):
    """C22: two good tokens, then the error, then [DONE]; no finish reason is made up."""
    chunks = events(run(post({"stream": True}, FakeEngine(fail_at=2))))

    assert "NaN" in chunks[-1]["error"]["message"]
    assert chunks[-1]["error"]["code"] == 500
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "ab"


def test_a_failure_of_a_whole_answer_is_a_500(run):
    assert "NaN" in refused(run(post({}, FakeEngine(fail_at=2))), 500)


def test_request_ids_come_from_header_body_or_chance(run):
    async def ids():
        async with client_of(FakeEngine(), enable_request_id_headers=True) as client:
            header = await client.post(URL, json={**HI, "request_id": "b"}, headers={"X-Request-Id": "h"})
            body = await client.post(URL, json={**HI, "request_id": "b"})
            return header, body

    header, body = run(ids())

    assert (header.json()["id"], header.headers["x-request-id"]) == ("chatcmpl-h", "h")
    assert body.json()["id"] == "chatcmpl-b"
    assert len(body.headers["x-request-id"]) == 32


def test_options_reach_the_engine(run):
    engine = FakeEngine()
    run(post({"priority": -3, "cache_salt": "s", "stream_interval": 4}, engine))
    _, sampling, options = engine.calls[0]

    assert (options["priority"], options["cache_salt"], sampling.stream_interval) == (-3, "s", 4)


def test_beams_are_written_as_choices(run):
    """n is the width, also at temperature 0; each beam has its own text, tokens and reason."""
    answer = strict(
        run(post({"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 3, "logprobs": True})).text
    )

    assert [choice["message"]["content"] for choice in answer["choices"]] == ["abc", "ab"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert answer["usage"]["completion_tokens"] == 6
    assert len(answer["choices"][0]["logprobs"]["content"]) == 3


def test_requests_are_logged_when_asked(run, caplog):
    caplog.set_level("DEBUG", logger="tinyserve.requests")
    run(post({"temperature": 0.5}))
    assert not caplog.records
    run(post({"temperature": 0.5, "request_id": "r"}, enable_log_requests=True, max_log_len=5))

    assert "received chatcmpl-r: 20 prompt tokens, temperature=0.5, max_tokens=None" in caplog.text
    assert "prompt of chatcmpl-r: [{'ro\n" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        {"stop": ["x\nINFO forged" * 40] * 4},
        {"logit_bias": {str(token): 1 for token in range(3, 100)}},
        {"allowed_token_ids": list(range(3, 100))},
        {"structured_outputs": {"choice": ["a\nINFO forged " + "x" * 9_000, "b"] * 50}},
    ],
)
def test_a_request_is_one_short_line(run, caplog, body):
    """A line was as long as the body, 200,000 characters of a choice."""
    caplog.set_level("INFO", logger="tinyserve.requests")
    run(post(body, enable_log_requests=True))

    (line,) = [record.getMessage() for record in caplog.records]
    assert next(iter(body)) in line and line.isprintable() and len(line) < 2000


@pytest.mark.parametrize("name", ["a\nERROR forged", "a\r\nx: y", "a\u2028b\x1b[2J"])
def test_a_request_id_cannot_forge_log_lines(run, caplog, name):
    caplog.set_level("INFO", logger="tinyserve.requests")
    body = run(post({"request_id": name}, enable_log_requests=True)).json()

    assert body["id"].isprintable() and body["id"].startswith("chatcmpl-a?")
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize(
    ("url", "body"), [(URL, HI), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})]
)
def test_a_silent_stream_gets_comments(run, url, body):
    """Queued for 0.3 s with an interval of 0.05: comments come first, then the answer as ever; 0 sends none."""

    async def go(interval):
        engine = FakeEngine(queued=asyncio.Event())
        asyncio.get_running_loop().call_later(0.3, engine.queued.set)
        async with client_of(engine, sse_keep_alive_interval=interval) as client:
            response = await client.post(url, json={**body, "stream": True})
        return response.text

    noisy, quiet = run(go(0.05)), run(go(0))
    assert noisy.startswith(": ") and 2 <= noisy.count(": still working\n\n") <= 7
    assert "working" not in quiet and noisy.count("data: ") == quiet.count("data: ")


def test_a_reader_that_does_not_read_costs_no_time(run):
    """Breaks if the task that breaks the silence of a stream spins while a piece of it waits for the socket."""

    async def go():
        app = create_app(service_of(FakeEngine(b"abc"), sse_keep_alive_interval=0.01))
        asked, turns, blocked = (
            iter([{"type": "http.request", "body": json.dumps({**HI, "stream": True}).encode()}]),
            0,
            0,
        )

        async def receive():
            return next(asked, None) or await asyncio.sleep(60)

        async def send(message):
            nonlocal blocked
            if message["type"] == "http.response.body":
                blocked += 1
                await asyncio.sleep(60)

        scope = {"type": "http", "method": "POST", "path": URL, "headers": [(b"content-type", b"application/json")]}
        task = asyncio.create_task(app({**scope, "query_string": b""}, receive, send))
        while not blocked:
            await asyncio.sleep(0)
        loop, real = asyncio.get_running_loop(), asyncio.get_running_loop().call_soon

        def counted(*arguments, **options):
            nonlocal turns
            turns += 1
            return real(*arguments, **options)

        loop.call_soon = counted
        await asyncio.sleep(0.3)
        task.cancel()
        assert turns < 200, turns

    run(go())


def test_the_fingerprint_tells_servers_apart(run):
    """Equal for equal options, another for another seed; in whole answers and in every chunk."""
    first, again = (strict(run(post({})).text)["system_fingerprint"] for _ in range(2))
    other = strict(run(post({}, seed=5)).text)["system_fingerprint"]
    chunks = events(run(post({"stream": True})))

    assert first == again != other and first.startswith("tinyserve-")
    assert {chunk["system_fingerprint"] for chunk in chunks} == {first}
