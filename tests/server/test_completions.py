"""The completions route: prompt forms, echo, logprobs layout, zero tokens."""

import pytest

from .conftest import FakeEngine, client_of, events, refused, strict

URL = "/v1/completions"


async def post(body, engine=None, **options):
    async with client_of(engine or FakeEngine(), **options) as client:
        return await client.post(URL, json=body)


def test_a_whole_answer(run):
    answer = strict(run(post({"prompt": "x"})).text)

    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "abc")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 4)


def test_a_stream_has_no_role_and_ends_with_the_reason(run):
    chunks = events(run(post({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}})))

    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a", "b", "c", ""]
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [("a", 2, 1), (["a", "bb"], 4, 3), ([97], 2, 1), ([[97], [98, 98]], 4, 3)],
)
def test_prompt_forms(run, prompt, choices, tokens):
    """C15: index = prompt * n + answer; each prompt is counted once whatever n."""
    body = {"prompt": prompt, "n": 2, "seed": 1}
    answer = strict(run(post(body)).text)
    chunks = events(run(post({**body, "stream": True})))

    assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
    assert answer["usage"]["prompt_tokens"] == tokens
    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == set(range(choices))


@pytest.mark.parametrize("prompt", [["a", [97]], [], [[]], "", ["a", ""], None, 5, [True], [[97], []], [1.5], [-1]])
def test_prompts_that_are_none(run, prompt):
    engine = FakeEngine()

    refused(run(post({"prompt": prompt}, engine)), 400, "prompt")
    assert engine.started == 0


def test_too_many_prompts(run):
    assert "1024" in refused(run(post({"prompt": ["a"] * 1025})), 400, "prompt")


@pytest.mark.parametrize("more", [{"n": 128}, {"n": 128, "use_beam_search": True, "temperature": 0}])
def test_too_many_answers_to_all_prompts(run, more):
    body = {"prompt": ["a"] * 129, "max_tokens": 1, **more}
    assert "129 prompts with 128 answers" in refused(run(post(body)), 400, "n")


def test_echo_with_logprobs(run):
    """C03: text abcd, offsets 0..3, null for the first token only."""
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    choice = strict(run(post(body, FakeEngine(b"cd"))).text)["choices"][0]
    logprobs = choice["logprobs"]

    assert choice["text"] == "abcd"
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -1.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"b": -1.5}, {"c": -0.5}, {"d": -0.5}]
    assert choice["prompt_logprobs"] is None


def test_streamed_echo_joins_to_the_whole_one(run):
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    whole = strict(run(post(body, FakeEngine(b"cd"))).text)["choices"][0]
    chunks = [c["choices"][0] for c in events(run(post({**body, "stream": True}, FakeEngine(b"cd"))))]

    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values


def test_echo_without_new_tokens(run):
    """C03 b: 200, text ab, two entries, usage 2/0/2."""
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = strict(run(post(body)).text)
    choice = answer["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert len(choice["logprobs"]["tokens"]) == 2
    assert [answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")] == [2, 0, 2]


def test_zero_tokens_without_echo(run):
    """C13: 200, empty text, no completion token, reason length."""
    answer = strict(run(post({"prompt": "ab", "max_tokens": 0})).text)
    chunks = events(run(post({"prompt": "ab", "max_tokens": 0, "stream": True})))

    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert [c["choices"][0]["finish_reason"] for c in chunks] == ["length"]


def test_echo_of_ids_is_their_text(run):
    assert strict(run(post({"prompt": [104, 105], "echo": True})).text)["choices"][0]["text"] == "hiabc"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 500}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"prompt_embeds": "abc"}, "prompt_embeds"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_fields_are_named(run, body, param):
    refused(run(post({"prompt": "x", **body})), 400, param)


def test_sixteen_tokens_when_nothing_is_said(run):
    engine = FakeEngine(b"a" * 400)
    for body in ({}, {"max_tokens": None}):
        answer = strict(run(post({"prompt": "x", **body}, engine)).text)
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [256, 300, 3000])
def test_a_prompt_at_the_context_is_refused(run, stream, length):
    """C14: 256 and 300 tokens against a context of 256."""
    engine = FakeEngine()
    response = run(post({"prompt": "a" * length, "stream": stream}, engine))

    message = refused(response, 400)
    assert ("at least 1025" if length > 1024 else f"has {length} tokens") in message and engine.steps == 0
    assert strict(response.text)["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("side", "kept"), [("left", "cd"), ("right", "ab"), (None, "cd")]
)  # fmt: skip
def test_truncation(run, side, kept):
    engine = FakeEngine()
    run(post({"prompt": "abcd", "truncate_prompt_tokens": 2, "truncation_side": side}, engine))
    run(post({"prompt": "a" * 999, "truncate_prompt_tokens": -1}, engine))

    assert bytes(engine.calls[0][0]).decode() == kept
    assert len(engine.calls[1][0]) == 255


def test_prompt_logprobs_on_their_own(run):
    answer = strict(run(post({"prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True})).text)["choices"][0]

    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["98"]["rank"] == 1
    assert answer["prompt_token_ids"] == [97, 98]
    assert answer["logprobs"] is None


def test_one_bad_prompt_ends_all(run):
    """An error of one of several prompts is the error of the request, and nothing keeps running."""
    engine = FakeEngine(fail_at=1)
    response = run(post({"prompt": ["a", "b", "c"]}, engine))

    refused(response, 500)
    assert engine.running == 0 and engine.started == engine.ended
