"""C03: evaluation tools add up the prompt's log-probabilities; one list that is missing scores every choice 0."""

import math

import pytest

from tests.scripted import FlatModel, ScriptModel

from .harness import TEXT, close, serving

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
LISTS = ("tokens", "text_offset", "token_logprobs", "top_logprobs")


async def test_layout(tok):
    """(a), (c): four entries, the first without a number; streamed lists join to the same."""
    async with serving(ScriptModel([99, 100]), tok) as server:
        whole, stream = await server.both(TEXT, BODY)

    assert whole.text == "abcd"
    assert whole.logprobs["tokens"] == ["a", "b", "c", "d"]
    assert whole.logprobs["text_offset"] == [0, 1, 2, 3]
    assert whole.logprobs["token_logprobs"][0] is None
    assert whole.logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) and value <= 0 for value in whole.logprobs["token_logprobs"][1:])
    for name in LISTS:
        assert stream.logprobs(name) == whole.logprobs[name], name


async def test_values(tiny, oracle):
    """(a): each number is that of a reference forward, within 1e-4, and each token is among its alternatives."""
    async with serving(tiny) as server:
        whole, stream = await server.both(TEXT, {**BODY, "return_token_ids": True})
    ids = [97, 98, *whole.choices[0]["token_ids"]]
    found = whole.logprobs

    assert len(ids) == len(found["tokens"]) == 4
    for at in range(1, 4):
        assert close(found["token_logprobs"][at], oracle.logprob(ids, at))
        assert found["tokens"][at] in found["top_logprobs"][at]
        best = oracle.logits(ids[:at])[-1].log_softmax(-1).max().item()
        assert close(max(found["top_logprobs"][at].values()), best)
    assert found["token_logprobs"][1] < max(found["top_logprobs"][1].values()), "b should not be the favourite here"
    assert len(found["top_logprobs"][1]) == 2  # the favourite, and b
    for name in LISTS:
        assert stream.logprobs(name) == found[name]


async def test_the_sampled_token_is_always_there(tok):
    """(a): ten equal letters, one alternative: the drawn one appears although it need not be the first."""
    async with serving(FlatModel(), tok) as server:
        whole, _ = await server.both(TEXT, {**BODY, "temperature": 1, "seed": 3, "max_tokens": 20, "prompt": "a"})
    drawn = list(zip(whole.logprobs["tokens"], whole.logprobs["top_logprobs"], strict=True))[1:]

    assert all(token in top for token, top in drawn)
    assert any(len(top) == 2 for _, top in drawn)


async def test_no_new_tokens(tok, tiny, oracle):
    """(b): the prompt is scored and nothing is generated; usage 2/0/2."""
    for model in (ScriptModel([99, 100]), tiny):
        async with serving(model, tok) as server:
            whole, stream = await server.both(TEXT, {**BODY, "max_tokens": 0})
        assert (whole.text, whole.reason, whole.counts) == ("ab", "length", (2, 0, 2))
        assert [len(whole.logprobs[name]) for name in LISTS] == [2, 2, 2, 2]
        assert stream.logprobs("tokens") == ["a", "b"]
    assert close(whole.logprobs["token_logprobs"][1], oracle.logprob([97, 98], 1))


async def test_too_many_alternatives(tok):
    """(d): 500 is above the cap of 20, which the message names."""
    async with serving(ScriptModel(), tok) as server:
        error = await server.refused(TEXT, {**BODY, "logprobs": 500})

    assert error["param"] == "logprobs" and "20" in error["message"]
