"""Whatever a body holds, the answer is a 200 or a 4xx in OpenAI's shape: never a 500, never broken JSON."""

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.lag import watched
from tinyserve.errors import RequestError
from tinyserve.server import bodies as bodies_of
from tinyserve.server.anthropic import BODY as MESSAGES
from tinyserve.server.generate import BODY as GENERATE
from tinyserve.server.responses_items import BODY as RESPONSES
from tinyserve.text.messages import normalise

from .conftest import FakeEngine, client_of, events, named_events, numbered_events, strict
from .fuzzing import fuzz

BODIES = (bodies_of.CHAT, bodies_of.COMPLETION, bodies_of.TOKENIZE, bodies_of.DETOKENIZE, RESPONSES, MESSAGES, GENERATE)
NAMES = sorted({name for body in BODIES for name in body.params})
scalars = st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([2**63, -(2**63), 1e300, 0.5, 1.0])
scalars |= st.text(max_size=4) | st.sampled_from(["user", "assistant", "none", "auto", "text", "left", "tiny"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
GOOD = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]}, "/v1/completions": {"prompt": "x"},
        "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}, "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
        "/inference/v1/generate": {"token_ids": [97], "sampling_params": {}},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]}}  # fmt: skip

READERS = {
    "/inference/v1/generate": lambda response: None,
    "/v1/responses": numbered_events,
    "/v1/messages": named_events,
}


def test_no_body_is_a_server_error():
    """120 random bodies on each of seven routes; the engine's own face is faked, so a 500 would be the server's."""

    @settings(max_examples=120, deadline=None, derandomize=True)
    @given(bodies, st.booleans())
    def check(body, complete):
        async def go():
            engine = FakeEngine()
            async with client_of(engine, max_logprobs=20) as client:
                for url, good in GOOD.items():
                    sent = {**good, **body} if complete else body
                    response = await client.post(url, json=sent)
                    assert response.status_code in (200, 400, 404, 413), (url, sent, response.text)
                    if response.headers["content-type"].startswith("text/event-stream"):
                        READERS.get(url, events)(response)
                    else:
                        strict(response.text)
            assert engine.running == 0

        asyncio.run(go())

    check()


def test_refusals_stay_short_and_quick():
    """Breaks if a message shows all of what was sent: 2 MB of a wrong type came back, and took the loop's time."""
    long = [[1] * 500_000, "x" * 1_000_000, {str(i): 1 for i in range(100_000)}, nested(900)]
    names = ("temperature", "seed", "stop", "messages", "logit_bias", "stream", "model", "n", "tools", "stop_token_ids")

    async def go():
        async with client_of(FakeEngine()) as client:
            for value in long:
                for name in names:
                    response = await client.post(
                        "/v1/chat/completions", json={**GOOD["/v1/chat/completions"], name: value}
                    )
                    assert response.status_code in (400, 404, 413, 200), response.text[:300]
                    assert len(response.content) < 1500, (name, response.text[:300])

    asyncio.run(go())


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_many_prompts_are_encoded_off_the_loop():
    """600 prompts of 2000 characters were encoded between two turns of the loop: 1.2 s with a real tokenizer."""

    class Slow(FakeEngine):
        def __init__(self):
            super().__init__()
            encode, self.threads = self.tokenizer.encode, set()

            def watched(*args, **options):
                self.threads.add(threading.get_ident())
                return encode(*args, **options)[:9]

            self.tokenizer.encode = watched

    async def go():
        engine = Slow()
        async with client_of(engine) as client:
            body = {"prompt": ["x" * 2000] * 600, "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert threading.get_ident() not in engine.threads
            response = await client.post("/v1/completions", json={**body, "n": 100})
            assert response.status_code == 400 and "60000" not in response.text and "16384" in response.text

    asyncio.run(go())


def test_long_lists_and_texts_are_refused_by_their_length():
    """Looking at each of two million stop strings before refusing more than 64 took the loop 0.9 s."""
    good = GOOD["/v1/chat/completions"]
    bodies = [{name: ["a"] * 20_000} for name in ("stop", "bad_words", "allowed_token_ids", "stop_token_ids", "tools")]
    bodies += [{"stop": "x" * 9000}, {"bad_words": ["x" * 9000]}]

    async def go():
        async with client_of(FakeEngine()) as client:
            for body in bodies:
                response = await client.post("/v1/chat/completions", json={**good, **body})
                assert response.status_code == 400 and "at most" in response.text, (body.keys(), response.text)

    asyncio.run(go())


def test_requests_made_from_the_document():
    """600 of them with a kept seed, over a real engine: every status is documented, no block is lost, the control
    request answers as before. `python -m tests.server.fuzzing 20000 7` is the long run."""
    statuses, _ = asyncio.run(asyncio.wait_for(fuzz(600, 7), 250))

    assert statuses[200] > 100 and statuses[400] > 50 and statuses["left"] > 30


@pytest.mark.parametrize("kind", [{}, [], 5, {"type": "function"}])
def test_a_part_whose_type_is_no_text_is_a_400(kind):
    """Breaks if a type that cannot be hashed is looked up in a set: that was a 500."""
    with pytest.raises(RequestError, match="type"):
        normalise([{"role": "user", "content": [{"type": kind, "text": "a"}]}])


def test_what_is_only_counted_or_cut_has_a_limit_too():
    """15 MB of words took /tokenize 40 s and 1 GB, and everybody else waited for up to 6 s meanwhile."""
    most = 2**18
    cut = {"truncate_prompt_tokens": 4, "max_tokens": 1}

    async def go():
        async with client_of(FakeEngine()) as client, watched() as lag:
            for url, body, name in (
                ("/tokenize", {"prompt": "x" * most, "return_token_strs": True}, "prompt"),
                ("/detokenize", {"tokens": [120] * most}, "tokens"),
                ("/v1/completions", {"prompt": "x" * most, **cut}, "prompt"),
            ):
                found = await client.post(url, json=body)
                assert found.status_code == 200, found.text[:300]
                if url == "/tokenize":
                    assert strict(found.text)["token_strs"] == ["x"] * most
                body[name] += [120] if url == "/detokenize" else "x"
                found = await client.post(url, json=body)
                assert found.status_code == 400 and "262144" in found.text and "in parts" in found.text
        assert lag.worst < 0.15, lag

    asyncio.run(go())
