"""Clients that people use, against a running server with a real model: the two official libraries, and curl."""

import asyncio
import json
import math
import shutil
import subprocess
import time

import anthropic
import openai
import pydantic
import pytest

from .hosted import KEY, QUESTION, hosting

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def hosted():
    with hosting() as server:
        yield server


@pytest.fixture
def client(hosted):
    with openai.OpenAI(base_url=hosted.address + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_openai_chat_whole_streamed_and_with_the_helper(client):
    asked = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    with client.chat.completions.stream(**asked) as stream:
        helped = stream.get_final_completion()

    assert "Paris" in text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == whole.usage.model_copy(update={"prompt_tokens_details": None})
    assert helped.choices[0].message.content == text
    assert "".join(entry.token for entry in whole.choices[0].logprobs.content).startswith(text)
    assert client.models.list().data[0].id == "smol"


def test_openai_structured_parse(client):
    """A pydantic class as the form of the answer."""

    class City(pydantic.BaseModel):
        name: str
        european: bool

    asked = {"model": "smol", "temperature": 0, "max_tokens": 40}
    messages = [{"role": "user", "content": "Which city is the capital of France? Answer as JSON."}]
    parsed = client.chat.completions.parse(**asked, messages=messages, response_format=City).choices[0].message.parsed
    response = client.responses.parse(
        model="smol", temperature=0, max_output_tokens=40, input=messages[0]["content"], text_format=City
    )

    assert isinstance(parsed, City) and isinstance(response.output_parsed, City)


def test_openai_forced_tools(client):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}}}  # fmt: skip
    asked = {"model": "smol", "temperature": 0, "max_tokens": 60, "tools": [tool], "tool_choice": "required",
             "parallel_tool_calls": False}  # fmt: skip
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    whole = client.chat.completions.create(**asked, messages=messages)
    with client.chat.completions.stream(**asked, messages=messages) as stream:
        streamed = stream.get_final_completion()
    (call,) = whole.choices[0].message.tool_calls

    assert whole.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_openai_async_at_once(hosted):
    """Eight questions of one client at a time: each gets what it would get alone."""

    async def go():
        async with openai.AsyncOpenAI(base_url=hosted.address + "/v1", api_key=KEY) as client:
            asked = [
                client.completions.create(model="smol", prompt=f"{n}, {n + 1}, {n + 2},", max_tokens=4, temperature=0)
                for n in range(8)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    together, again = asyncio.run(go()), asyncio.run(go())
    assert together == again and together[1].strip().startswith("4")


def test_scores_of_given_texts_as_evaluations_ask_for_them(client):
    """lm-eval's way: a batch of id lists with echo and one new token; the last entry is the new token's and is left
    out. The right continuation is likelier than a wrong one, and it is what greedy decoding would say."""

    def ids(text):
        return client.post("/../tokenize", body={"prompt": text}, cast_to=dict)["tokens"]

    context = "The capital of France is"
    start, prompts = len(ids(context)), [ids(context + " Paris"), ids(context + " banana")]
    made = client.completions.create(model="smol", prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0)
    found = []
    for choice, prompt in zip(sorted(made.choices, key=lambda c: c.index), prompts, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(prompt) + 1 and logprobs.token_logprobs[0] is None
        values, tops = logprobs.token_logprobs[start:-1], logprobs.top_logprobs[start:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    (right, greedy), (wrong, never) = found

    assert -3 < right < 0 and wrong < right - 3 and math.isfinite(wrong)
    assert greedy and not never


def test_openai_embeddings(client):
    """The client asks for base64 by itself; likeness of meaning shows even in a model that was not made for it."""
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by two percent."]
    found = [each.embedding for each in client.embeddings.create(model="smol", input=texts).data]
    numbers = client.embeddings.create(model="smol", input=texts[0], encoding_format="float").data[0].embedding

    def likeness(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert likeness(found[0], numbers) == pytest.approx(1, abs=1e-4)
    assert likeness(found[0], found[1]) > likeness(found[0], found[2])


def test_openai_responses(client):
    first = client.responses.create(model="smol", input=QUESTION[0]["content"], temperature=0, max_output_tokens=24)
    second = client.responses.create(
        model="smol", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=24
    )
    with client.responses.stream(
        model="smol", input=QUESTION[0]["content"], temperature=0, max_output_tokens=24
    ) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_response()

    assert "Paris" in first.output_text and second.usage.input_tokens > first.usage.input_tokens
    assert streamed.output_text == first.output_text and kinds[0] == "response.created"
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_anthropic(hosted):
    asked = {"model": "smol", "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}},
                                                "required": ["city"]}}  # fmt: skip
    with anthropic.Anthropic(base_url=hosted.address, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
        counted = client.messages.count_tokens(model="smol", messages=QUESTION)
        called = client.messages.create(**{**asked, "max_tokens": 60}, tools=[tool], tool_choice={"type": "any"})

    assert "Paris" in whole.content[0].text and text == whole.content[0].text
    assert counted.input_tokens == whole.usage.input_tokens
    assert called.stop_reason == "tool_use" and called.content[-1].input == {"city": "Oslo"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(hosted):
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, "stream": True}
    command = ["curl", "-sN", hosted.address + "/v1/chat/completions", "-H", "Content-Type: application/json"]
    allowed = [*command, "-H", f"Authorization: Bearer {KEY}", "-d", json.dumps(body)]
    lines = subprocess.run(allowed, capture_output=True, text=True, timeout=60).stdout.splitlines()
    refused = subprocess.run([*command, "-d", "{}"], capture_output=True, text=True, timeout=60).stdout

    assert lines[-2] == "data: [DONE]" and all(line.startswith("data: ") for line in lines[::2])
    assert json.loads(refused)["error"]["code"] == 401


def test_errors_are_the_clients_own(client, hosted):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smol", messages=QUESTION, top_p=3)
    assert caught.value.param == "top_p"
    with (
        openai.OpenAI(base_url=hosted.address + "/v1", api_key="wrong") as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_a_client_that_leaves_a_stream_frees_everything(client, hosted):
    with client.chat.completions.create(model="smol", messages=QUESTION, max_tokens=900, stream=True) as stream:
        for _ in zip(range(5), stream, strict=False):
            pass
    engine = hosted.service.engine

    def busy():
        now = engine.stats()
        return now.running, now.waiting, now.kv_usage

    end = time.monotonic() + 2
    while busy() != (0, 0, 0.0) and time.monotonic() < end:
        time.sleep(0.01)
    assert busy() == (0, 0, 0.0)
