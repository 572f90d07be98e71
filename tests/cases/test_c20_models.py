"""C20: an unknown model is a 404 on every route that would use one, and never an answer from another model.

An adapter is a model from the moment it is loaded until it is unloaded; one that cannot be used is refused then.
"""

import asyncio
import json

import pytest

from tests.lora.checkpoints import greedy, merged, write_adapter
from tests.scripted import ScriptModel

from .harness import serving, write_tiny

pytestmark = pytest.mark.anyio
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [97]},
}


@pytest.mark.parametrize("name", ["nope", "my-lora", "tin", "TINY", "tiny ", "../tiny"])
async def test_an_unknown_model_is_a_404_everywhere(tok, name):
    model = ScriptModel([97, 98])
    async with serving(model, tok) as server:
        before = model.forwards
        for path, body in BODIES.items():
            for streams in ({}, {"stream": True}):
                response = await server.http.post(path, json={**body, **streams, "model": name})
                assert response.status_code == 404, (path, response.text)
                error = response.json()["error"]
                assert "tiny" in error["message"]
                if "/messages" in path:
                    assert error["type"] == "not_found_error"
                else:
                    assert (error["code"], error["param"]) == ("model_not_found", "model")
        card = await server.http.get("/v1/models/nope")

        assert card.status_code == 404 and card.json()["error"]["code"] == "model_not_found"
        assert model.forwards == before


async def test_without_a_model_the_served_one_answers(tok):
    """As /docs says; null and the empty text mean the same."""
    async with serving(ScriptModel([97, 98]), tok) as server:
        for path, body in BODIES.items():
            for missing in ({}, {"model": None}, {"model": ""}):
                response = await server.http.post(path, json={**body, **missing})
                assert response.status_code == 200, (path, response.text)
                assert response.json().get("model", "tiny") == "tiny"


LOAD, UNLOAD, TEXT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
MINE = {"model": "my-lora", "prompt": "abc", "temperature": 0, "max_tokens": 6, "ignore_eos": True,
        "return_token_ids": True}  # fmt: skip
ON = {"enable_lora": True, "enable_admin_routes": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("base"))


async def ids(server):
    response = await server.http.post(TEXT, json=MINE)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "my-lora"
    return response.json()["choices"][0]["token_ids"]


async def names(server):
    return [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]]


async def test_an_adapter_is_a_model_exactly_while_it_is_loaded(base, tmp_path):
    """404 before, the adapter's own tokens while it is there, 404 after; also for who asks /v1/models."""
    adapter = write_adapter(tmp_path / "mine", base, rank=8)
    right = [greedy(merged(base, path), list(b"abc"), 6) for path in (adapter, None)]
    assert right[0] != right[1]
    async with serving(base, **ON) as server:
        assert (await server.http.post(TEXT, json=MINE)).json()["error"]["code"] == "model_not_found"
        loaded = await server.http.post(LOAD, json={"lora_name": "my-lora", "lora_path": str(adapter)})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'my-lora' added successfully.")

        assert await ids(server) == right[0]
        plain = (await server.http.post(TEXT, json={**MINE, "model": "tiny"})).json()
        assert (plain["model"], plain["choices"][0]["token_ids"]) == ("tiny", right[1])
        assert await names(server) == ["tiny", "my-lora"]
        card = (await server.http.get("/v1/models/my-lora")).json()
        assert (card["parent"], card["root"], card["max_model_len"]) == ("tiny", str(adapter), None)
        for path, body in BODIES.items():
            response = await server.http.post(path, json={**body, "model": "my-lora"})
            assert response.status_code == 200, (path, response.text)
            assert response.json().get("model", "my-lora") == "my-lora"
        again = await server.http.post(LOAD, json={"lora_name": "my-lora", "lora_path": str(adapter)})
        assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]

        running = asyncio.ensure_future(server.http.post(TEXT, json={**MINE, "max_tokens": 60}))
        while not server.scheduler.num_running:
            await asyncio.sleep(0)
        used = {"max_lora": "1", "waiting_lora_adapters": "", "running_lora_adapters": "my-lora"}
        assert await server.metric("lora_requests_info", **used) > 1e9
        assert (await server.http.post(UNLOAD, json={"lora_name": "my-lora"})).status_code == 200
        for path, body in BODIES.items():
            assert (await server.http.post(path, json={**body, "model": "my-lora"})).status_code == 404, path
        assert (await server.http.get("/v1/models/my-lora")).status_code == 404
        assert await names(server) == ["tiny"]
        assert (await server.http.post(UNLOAD, json={"lora_name": "my-lora"})).status_code == 404
        assert (await running).json()["choices"][0]["token_ids"][:6] == right[0]


async def test_a_useless_adapter_is_refused_when_it_is_loaded(base, tmp_path):
    """The reason is in the answer, nothing is served under the name, and the server goes on."""
    wrong = {
        tmp_path / "nowhere": "there is no such folder",
        write_adapter(tmp_path / "strange", base, prefix="base_model.model.other."): "Expected: model.layers.0.mlp",
        write_adapter(tmp_path / "large", base, rank=9): "its rank is 9, above the limit of 8",
        write_adapter(tmp_path / "dora", base, use_dora=True): "use_dora",
    }
    async with serving(base, **ON) as server:
        before = await server.control()
        for path, reason in wrong.items():
            response = await server.http.post(LOAD, json={"lora_name": "my-lora", "lora_path": str(path)})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "lora_path") and reason in error["message"], error
            assert (await server.http.post(TEXT, json=MINE)).status_code == 404
        for name in ("tiny", "a,b", "a\nb", ""):
            response = await server.http.post(LOAD, json={"lora_name": name, "lora_path": str(tmp_path / "large")})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")
        response = await server.http.post(LOAD, json={"lora_name": "my-lora", "lora_path": ""})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path")
        assert await names(server) == ["tiny"]
        assert await server.control() == before


async def test_modules_given_at_the_start_are_there_from_the_start(base, tmp_path):
    adapter = write_adapter(tmp_path / "mine", base, rank=8)
    module = json.dumps({"name": "other", "path": str(adapter)})
    options = {**ON, "lora_modules": (f"my-lora={adapter}", module), "enable_admin_routes": False}
    async with serving(base, **options) as server:
        assert await names(server) == ["tiny", "my-lora", "other"]
        assert await ids(server) == greedy(merged(base, adapter), list(b"abc"), 6)
        refused = await server.http.post(LOAD, json={"lora_name": "x", "lora_path": str(adapter)})
        assert refused.status_code == 403 and "--enable-admin-routes" in refused.json()["error"]["message"]
