"""C22: logits that are no numbers end their own request; no token is made of them, and nobody else notices."""

import asyncio

import pytest

from tests.scripted import ScriptModel

from .harness import TEXT, Streamed, recorded, serving

pytestmark = pytest.mark.anyio
BAD = "N" + "".join(chr(97 + i % 26) for i in range(39))  # more than two blocks
GOOD = "Y" + BAD[1:]
BODY = {"model": "tiny", "temperature": 0, "max_tokens": 6, "return_token_ids": True}


class OneInfinity(ScriptModel):
    """One logit of the row is +inf; the others are what the script says."""

    def logits(self, hidden):
        rows = super().logits(hidden)
        for row, (step, first) in zip(rows, hidden.int().tolist(), strict=True):
            if (first, step) == (ord("N"), 2):
                row[33] = float("inf")
        return rows


def model(kind):
    if kind == "one":
        return OneInfinity(b"abcdef", seconds=0.01)
    return ScriptModel(b"abcdef", seconds=0.01, poison={(ord("N"), 2): float(kind)})


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("kind", ["nan", "one", "-inf", "inf"])
async def test_bad_logits_end_their_own_request(tok, kind, logprobs):
    """Two good tokens, then an error event and [DONE], or a 500; a counter goes up; the prompt's blocks are gone."""
    async with serving(model(kind), tok) as server:
        steps = recorded(server)
        bodies = [{**BODY, "prompt": prompt, "logprobs": logprobs} for prompt in (BAD, GOOD)]
        streams = await asyncio.gather(*(server.http.post(TEXT, json={**body, "stream": True}) for body in bodies))
        assert any(len(step.slices) == 2 for step in steps), "they did not share a batch"
        bad, good = (Streamed.parse(response.text) for response in streams)
        assert await server.metric("corrupted_requests") == 1
        failed, fine = await asyncio.gather(*(server.ask(TEXT, body) for body in bodies))
        assert await server.metric("corrupted_requests") == 2
        assert await server.metric("request_success", finished_reason="error") == 2
        retry = await server.ask(TEXT, {**bodies[0], "max_tokens": 2})

    assert bad.text == "ab" and bad.reasons == {}
    assert [token for chunk in bad.chunks for token in chunk["choices"][0]["token_ids"]] == [97, 98]
    assert "token 3" in bad.error["message"] and bad.error["code"] == 500
    assert failed.status == 500 and failed.error == bad.error
    assert good.text == fine.text == "abcdef" and fine.reason == "length"
    assert retry.text == "ab"
    assert retry.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert fine.usage["prompt_tokens_details"]["cached_tokens"] == 32  # the good one's blocks are still a prefix


async def test_bad_from_the_first_token(tok):
    """Known before the first byte: an HTTP error, no stream."""
    async with serving(ScriptModel(b"abc", poison={(ord("N"), 0): float("nan")}), tok) as server:
        error = await server.refused(TEXT, {**BODY, "prompt": BAD}, 500)

    assert "token 1" in error["message"]


async def test_two_samples_of_a_bad_prompt(tok):
    """The second waits for the first's prompt; it ends with it, and nothing is left over."""
    async with serving(ScriptModel(b"abc", poison={(ord("N"), 0): float("nan")}), tok) as server:
        await server.refused(TEXT, {**BODY, "prompt": BAD, "n": 2, "temperature": 1}, 500)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, ["allowed_token_ids", "bad_words"]),
        ({"structured_outputs": {"json": {"const": 1}}, "bad_words": ["<|eos|>"]}, ["structured_outputs"]),
    ],
)
async def test_a_request_that_forbids_every_token_is_told_so(tok, fields, named):
    """It is the sender's mistake, not the server's: a 400 that names the fields; streamed, an error event."""
    async with serving(ScriptModel([97, 98, 99]), tok) as server:
        body = {"prompt": "x", "max_tokens": 5, **fields}
        reply = await server.ask(TEXT, body)
        assert reply.status == 400 and all(name in reply.error["message"] for name in named)
        stream = await server.http.post(TEXT, json={**body, "stream": True})
        assert "No token is left" in stream.text
