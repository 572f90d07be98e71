"""C20: an unknown model is a 404 on every route that would use one, and never an answer from another model.

Adapters are not built yet, so the name of one is an unknown model like any other.
"""

import pytest

from tests.scripted import ScriptModel

from .harness import serving

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
