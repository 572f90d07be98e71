"""C16: ids that the model does not have and values that are no numbers never reach the sampler."""

import json
import math

import pytest

from tests.scripted import VOCAB

from .harness import CHAT, HI, TEXT, serving

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 8}


async def test_only_a(tiny):
    async with serving(tiny) as server:
        whole, _ = await server.both(TEXT, {**BODY, "logit_bias": {"97": 100}})
        chat, _ = await server.both(CHAT, {**HI, "temperature": 0, "max_tokens": 8, "logit_bias": {"97": 100}})

    assert whole.text == chat.text == "a" * 8


async def test_never_a(tiny, oracle):
    """After a prompt whose most likely next token is the letter a, so that the bias has something to forbid."""
    ids = next(
        [byte, other] for byte in range(32, 127) for other in range(32, 127) if favourite(oracle, [byte, other]) == 97
    )
    async with serving(tiny) as server:
        body = {**BODY, "prompt": ids}
        free, _ = await server.both(TEXT, body)
        whole, _ = await server.both(TEXT, {**body, "logit_bias": {"97": -100}, "max_tokens": 40})

    assert free.text.startswith("a")
    assert "a" not in whole.text


def favourite(oracle, ids):
    return oracle.logits(ids)[-1].argmax().item()


async def test_an_added_token_is_a_valid_id(tiny):
    """The tokenizer's base size is not the limit."""
    async with serving(tiny) as server:
        body = {**BODY, "return_token_ids": True, "max_tokens": 40}
        never, _ = await server.both(TEXT, {**body, "logit_bias": {"261": -100}})
        only, _ = await server.both(TEXT, {**body, "logit_bias": {"261": 100}})

    assert 261 not in never.choices[0]["token_ids"]
    assert set(only.choices[0]["token_ids"]) == {261} and only.text == ""


@pytest.mark.parametrize(
    "bias",
    ['{"320": 5}', '{"-1": 5}', '{"abc": 1}', '{"97": 1e999}', '{"97": 1e30}', '{"97": true}', '{"97": "1"}', "[]"],
)
async def test_what_is_refused(tiny, bias):
    async with serving(tiny) as server:
        for path, fields in ((TEXT, '"prompt": "x"'), (CHAT, '"messages": [{"role": "user", "content": "x"}]')):
            await server.refused(path, raw='{"model": "tiny", ' + fields + ', "logit_bias": ' + bias + "}")


async def test_everything_shifted_equally(tiny):
    """Each id 0-265 at -100: a text, and numbers that are numbers."""
    async with serving(tiny) as server:
        body = {
            **BODY,
            "logit_bias": {str(token): -100 for token in range(266)},
            "logprobs": 5,
            "return_token_ids": True,
        }
        whole, _ = await server.both(TEXT, body)
        every = {**body, "logit_bias": {str(token): -100 for token in range(VOCAB)}}
        shifted, _ = await server.both(TEXT, every)
        plain, _ = await server.both(TEXT, {**body, "logit_bias": None})

    assert len(whole.choices[0]["token_ids"]) == 8
    assert all(math.isfinite(value) for value in whole.logprobs["token_logprobs"])
    assert shifted.choices[0]["token_ids"] == plain.choices[0]["token_ids"]


async def test_too_many_entries(tiny):
    """50 000 are above the cap, which the message names."""
    async with serving(tiny) as server:
        bias = {str(token): 1 for token in range(50_000)}
        error = await server.refused(TEXT, raw=json.dumps({**BODY, "logit_bias": bias}))

    assert error["param"] == "logit_bias" and "16384" in error["message"]
