"""C25: vectors in the asked format and order, equal to what transformers computes, whatever shares the batch."""

import asyncio
import base64

import httpx
import numpy as np
import pytest
import torch

from tests.scripted import ScriptModel

from .harness import TEXT, eventually, serving

pytestmark = pytest.mark.anyio
PATH = "/v1/embeddings"


def expected(oracle, text):
    """[64] of length 1, by transformers."""
    with torch.inference_mode():
        state = oracle.model.model(torch.tensor([list(text.encode())])).last_hidden_state[0, -1]
    return (state / state.norm()).numpy()


def vectors(reply):
    assert reply.status == 200, reply.body
    assert [each["index"] for each in reply.body["data"]] == list(range(len(reply.body["data"])))
    return [np.array(each["embedding"], dtype=np.float32) for each in reply.body["data"]]


async def test_vectors_are_those_of_transformers(tiny, oracle):
    """Texts and ids, alone and together, with chunks, cached prefixes and an answer that runs beside them."""
    texts = ["a", "bb", "a", "x" * 100, "x" * 100 + "yz", "bb"]
    async with serving(tiny, max_num_batched_tokens=32) as server:
        running = asyncio.create_task(server.ask(TEXT, {"prompt": "free", "max_tokens": 60, "ignore_eos": True}))
        together = await server.ask(PATH, {"input": texts})
        alone = [vectors(await server.ask(PATH, {"input": text}))[0] for text in texts[:2]]
        ids = vectors(await server.ask(PATH, {"input": [[97], [98, 98]]}))
        one = vectors(await server.ask(PATH, {"input": [97]}))
        raw = vectors(await server.ask(PATH, {"input": "a", "use_activation": False}))
        assert (await running).reason == "length"

    found = vectors(together)
    assert together.body["usage"] == {"prompt_tokens": 208, "total_tokens": 208}
    for text, vector in zip(texts, found, strict=True):
        assert np.abs(vector - expected(oracle, text)).max() < 1e-5
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    for other in (alone, ids, [*one, found[1]]):
        assert np.abs(np.stack(other) - np.stack(found[:2])).max() < 1e-5
    assert np.abs(raw[0] / np.linalg.norm(raw[0]) - found[0]).max() < 1e-5 and abs(np.linalg.norm(raw[0]) - 1) > 0.1


async def test_formats_and_refusals(tiny):
    async with serving(tiny) as server:
        numbers = vectors(await server.ask(PATH, {"input": "a", "encoding_format": "float"}))[0]
        packed = (await server.ask(PATH, {"input": "a", "encoding_format": "base64"})).body["data"][0]["embedding"]
        cut = await server.ask(PATH, {"input": "x" * 300, "truncate_prompt_tokens": -1})
        wrong = [
            ({"input": "a", "encoding_format": "md5"}, "encoding_format"),
            ({"input": "a", "dimensions": 8}, "dimensions"),
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": ["a", ""]}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": ["a", [97]]}, "input"),
            ({"input": [-1]}, "input"),
            ({"input": [10**6]}, "input"),
            ({"input": "x" * 300}, "input"),
            ({}, "input"),
            ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ]
        for body, param in wrong:
            reply = await server.ask(PATH, body)
            assert (reply.status, reply.error["param"]) == (400, param), (body, reply)
        long = await server.ask(PATH, {"input": "x" * 300})
        assert (await server.ask(PATH, {"input": "a", "model": "nope"})).status == 404

    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), numbers)
    assert cut.body["usage"]["prompt_tokens"] == 255
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


async def test_an_embedding_that_nobody_waits_for_ends(tok):
    """A client that leaves while its texts are computed, and an abort by the operator: a 503, and nothing is left."""
    model = ScriptModel([97])
    async with serving(model, tok, socket=True) as server:
        model.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            await server.http.post(PATH, json={"input": ["a", "bb"]}, timeout=0.2)
        await eventually(lambda: len(server.engine.streams) == 0)
        waiting = asyncio.create_task(server.ask(PATH, {"input": ["a", "bb"]}))
        await eventually(lambda: len(server.engine.streams) == 2)
        server.engine.abort(None)
        model.gate.set()
        assert (await waiting).status == 503
