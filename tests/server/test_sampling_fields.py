"""Sampling fields through HTTP to a real engine (without a model): named ids, repetition, output kind, refusals."""

import pytest

from tests.engine.toy import letters, script
from tests.served import in_process
from tinyserve.errors import RequestError
from tinyserve.request import RequestOutputKind
from tinyserve.server.fields import Fields
from tinyserve.server.sampling import read_sampling

from .conftest import FakeEngine, client_of, events, refused
from .toys import toy_service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 9}
X = {"prompt": "x", "temperature": 0, "max_tokens": 9}


async def post(path, body, rule=letters, **options):
    async with toy_service(rule, **options) as service, in_process(service) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("top", [0, 2])
def test_chat_lists_named_ids_beside_the_best(run, top):
    """Named: 100 (d) and 33 (!, -20). Both are there at every token, best first, and the best `top` as well."""
    body = {**HI, "logprobs": True, "top_logprobs": top, "logprob_token_ids": [100, 33]}
    content = run(post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]

    assert len(content) == 9
    for entry in content:
        names = [one["token"] for one in entry["top_logprobs"]]
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert {"d", "!"} <= set(names) and top <= len(names) <= top + 2
        assert values == sorted(values, reverse=True)
        assert top == 0 or names[0] == entry["token"]


def test_a_stream_lists_them_too(run):
    body = {**HI, "logprobs": True, "logprob_token_ids": [33], "stream": True}
    chunks = events(run(post(CHAT, body)))
    content = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {}).get("content", ())]

    assert [[one["token"] for one in entry["top_logprobs"]] for entry in content] == [["!"]] * 9


def test_completions_have_them_in_their_dict(run):
    choice = run(post(TEXT, {**X, "logprobs": 0, "logprob_token_ids": [33]})).json()["choices"][0]

    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert set(top) == {token, "!"} and top["!"] == -20.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_repetition_is_a_finish_reason(run, stream):
    """`b c` for the third time ends the answer after 7 tokens."""
    detection = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    body = {**X, "max_tokens": 30, "repetition_detection": detection, "stream": stream}
    response = run(post(TEXT, body, script(97, *[98, 99] * 9)))
    choices = [c["choices"][0] for c in (events(response) if stream else [response.json()])]

    assert "".join(choice["text"] for choice in choices) == "abcbcbc"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("repetition", "repetition_detected")


def test_the_servers_interval_is_the_least(run):
    """--stream-interval 4 and a request that asks for 2: chunks of 1, 4 and 4 tokens."""
    body = {**X, "stream": True, "stream_interval": 2, "return_token_ids": True}
    chunks = events(run(post(TEXT, body, stream_interval=4)))

    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 4, 4]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [320], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": "ab", "logprobs": 1}, "logprob_token_ids"),
        ({"repetition_detection": [3]}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, "repetition_detection"),
        ({"repetition_detection": {"max_pattern_size": 2, "n": 1}}, "repetition_detection"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": 1.5}, "stream_interval"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"structured_outputs": {"nope": "a"}}, "structured_outputs"),
        ({"watermarking": True}, "watermarking"),
        ({"routed_experts_prompt_start": 0}, "routed_experts_prompt_start"),
        ({"prompt_logprob_token_ids": [1]}, "prompt_logprob_token_ids"),
        ({"logit_bias": {"97": 101}}, "logit_bias"),
    ],
)
def test_refusals_name_the_field(run, fields, param):
    refused(run(post(TEXT, {**X, **fields})), 400, param)


def test_off_is_accepted(run):
    off = {"watermarking": False, "thinking_token_budget": -1, "structured_outputs": {}, "seed": -1}
    assert run(post(TEXT, {**X, **off, "repetition_detection": {"max_pattern_size": 0, "min_count": 2}})).is_success


def test_only_streams_ask_for_pieces():
    assert read_sampling(Fields({}), {}, stream=True).output_kind is RequestOutputKind.DELTA
    assert read_sampling(Fields({}), {}, stream=False).output_kind is RequestOutputKind.FINAL_ONLY
    with pytest.raises(RequestError):
        read_sampling(Fields({"top_k": -2}), {})


HUGE = 123456789012345678901234567890


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"seed": HUGE}, "seed"),
        ({"n": -HUGE}, "n"),
        ({"max_tokens": HUGE}, "max_tokens"),
        ({"stop_token_ids": [5, HUGE]}, "stop_token_ids"),
        ({"priority": HUGE}, "priority"),
        ({"stream_options": {"include_usage": HUGE}, "stream": True}, "stream_options.include_usage"),
        ({"prompt": [1, HUGE]}, "prompt"),
    ],
)
def test_a_number_beyond_64_bits_is_told_as_it_was_sent(run, body, param):
    """It was told as 1.2345678901234568e+29, which is not an integer."""

    async def go():
        async with client_of(FakeEngine()) as client:
            message = refused(await client.post("/v1/completions", json={"prompt": "x", **body}), 400, param)
            assert str(HUGE) in message and "e+" not in message

    run(go())


def test_an_endless_number_is_told_in_words(run):
    """5,000 digits, which Python does not read: no 500."""

    async def go():
        async with client_of(FakeEngine()) as client:
            for digits in (4000, 5000):
                body = b'{"prompt": "x", "seed": ' + b"9" * digits + b"}"
                headers = {"content-type": "application/json"}
                message = refused(await client.post("/v1/completions", content=body, headers=headers), 400)
                assert len(message) < 120

    run(go())


def test_equal_fields_are_checked_once_and_never_taken_for_others():
    """Parameters that were asked for before are the same object; 1, 1.0 and true are not the same words."""
    first = read_sampling(Fields({"temperature": 1, "top_k": 5}), {}, max_tokens=9)
    assert read_sampling(Fields({"temperature": 1, "top_k": 5}), {}, max_tokens=9) is first
    assert read_sampling(Fields({"temperature": 1, "top_k": 5}), {}, max_tokens=8) is not first
    for wrong in ({"temperature": True}, {"top_k": 5.0}, {"top_k": True}, {"n": 1.0}):
        for _ in range(2):
            with pytest.raises(RequestError) as refusal:
                read_sampling(Fields({"temperature": 1, "top_k": 5, **wrong}), {}, max_tokens=9)
            assert refusal.value.param in wrong
    assert read_sampling(Fields({"stop": ["a"]}), {}).stop == ("a",)
