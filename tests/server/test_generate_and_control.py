"""Token ids in and out, and the routes that change a running server, over a real engine without a model."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.engine.toy import ToyRunner, letters, script
from tests.served import in_process, strict

from .conftest import events, refused
from .toys import toy_service

URL = "/inference/v1/generate"
ADMIN = [
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"), ("POST", "/inference/v1/abort_requests"), ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
]  # fmt: skip


@asynccontextmanager
async def serving(rule=letters, **options):
    async with toy_service(rule, server=options) as service, in_process(service) as client:
        yield client, service.engine


async def post(body, rule=letters):
    async with serving(rule) as (client, _):
        return await client.post(URL, json=body)


def test_ids_come_out(run):
    answer = strict(run(post({"token_ids": [120], "sampling_params": {"temperature": 0, "max_tokens": 3}},
                             script(97, 98))).text)  # fmt: skip
    (choice,) = answer["choices"]

    assert choice["token_ids"][:2] == [97, 98] and len(choice["token_ids"]) == 3
    assert choice["finish_reason"] == "stop" and "text" not in choice
    assert answer["usage"]["prompt_tokens"] == 1


def test_with_text_logprobs_and_several_answers(run):
    params = {"temperature": 1, "n": 2, "seed": 3, "max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    body = {"token_ids": [120, 121], "sampling_params": params, "output_mode": "text", "request_id": "mine"}
    whole = strict(run(post(body)).text)
    streamed = run(post({**body, "stream": True, "stream_options": {"include_usage": True}})).text
    chunks = [strict(block.removeprefix("data: ")) for block in streamed.split("\n\n")[:-2]]

    assert whole["request_id"] == "mine" and [c["index"] for c in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert all(len(entry["top_logprobs"]) in (2, 3) and entry["rank"] >= 1 for entry in entries)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"), ({"token_ids": [-1]}, "token_ids"), ({"token_ids": "x"}, "token_ids"),
        ({"token_ids": [97, 1.0]}, "token_ids"), ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [9999]}, "prompt"), ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"top_p": 2}}, "top_p"), ({"features": {"a": 1}}, "features"),
        ({"sampling_params": {"max_tokens": "x"}}, "sampling_params.max_tokens"),
        ({"output_mode": "derender"}, "output_mode"), ({"stream_options": {}}, "stream_options"),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(run, body, param):
    refused(run(post({"token_ids": [97], "sampling_params": {}, **body})), 400, param)


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_admin_routes_need_their_flag_and_no_foreign_page(run, method, path):
    async def go():
        async with serving() as (client, _):
            closed = await client.request(method, path, json={})
        async with serving(enable_admin_routes=True) as (client, _):
            foreign = await client.request(method, path, json={}, headers={"origin": "http://evil"})
            opened = await client.request(method, path, json={}, headers={"origin": "http://test"})
        return closed, foreign, opened

    closed, foreign, opened = run(go())
    assert "--enable-admin-routes" in refused(closed, 403)
    refused(foreign, 403)
    if path.endswith("_lora_adapter"):
        refused(opened, 400, "lora_name")
    else:
        assert opened.status_code == 200


def test_pausing_and_going_on(run):
    """abort: the running stream ends as aborted and new ones get a 503; keep: they wait and then go on."""

    async def go():
        async with serving(enable_admin_routes=True) as (client, engine):
            body = {"prompt": "x", "max_tokens": 100, "stream": True}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.stats().running:
                await asyncio.sleep(0)
            refused(await client.post("/pause?mode=sideways"), 400, "mode")
            assert (await client.post("/pause")).json() == {"is_paused": True}
            assert events(await running)[-1]["choices"][0]["finish_reason"] == "abort"
            refused(await client.post("/v1/completions", json=body), 503)
            await client.post("/resume")
            await client.post("/pause?mode=keep")
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            waiting = asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": 3}))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await client.post("/resume")
            assert events(await waiting)[-1]["choices"][0]["finish_reason"] == "length"

    run(go())


def test_aborting_by_id_and_all(run):
    """cmpl-a has two prompts, or two beams: both end. Then everything."""

    async def go():
        async with serving(enable_admin_routes=True) as (client, engine):
            prompts = {"prompt": ["x", "y"], "max_tokens": 100}
            beams = {"prompt": "x", "max_tokens": 100, "use_beam_search": True, "n": 2, "ignore_eos": True}
            for names, body in ((["cmpl-a"], prompts), ([], prompts), (["cmpl-a"], beams), ([], beams)):
                task = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "a"}))
                while engine.stats().running < 2:
                    await asyncio.sleep(0)
                assert (await client.post("/abort_requests", json={"request_ids": names})).json() == {"aborted": 2}
                assert {c["finish_reason"] for c in (await task).json()["choices"]} == {"abort"}
            assert (await client.post("/abort_requests", json={"request_ids": ["no"]})).json() == {"aborted": 0}
            for wrong in ({"request_id": "no"}, {"": 1}):  # which would end all requests
                assert (await client.post("/abort_requests", json=wrong)).status_code == 400

    run(go())


def test_aborting_what_is_left_of_several_prompts(run):
    """The first of two prompts has ended: the second one, cmpl-a-1, is ended by the id that its client knows."""

    async def go():
        async with serving(enable_admin_routes=True) as (client, engine):
            body = {"prompt": ["x", "y"], "max_tokens": 100}
            task = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "a"}))
            while engine.stats().running < 2:
                await asyncio.sleep(0)
            assert engine.abort("cmpl-a-0") == 1
            answer = await client.post("/abort_requests", json={"request_ids": ["cmpl-a"]})
            assert answer.json() == {"aborted": 1}
            assert {c["finish_reason"] for c in (await task).json()["choices"]} == {"abort"}

    run(go())


def test_forgetting_prefixes(run):
    """40 prompt tokens: 32 are found the second time, none after the reset."""

    async def go():
        body = {"prompt": "x" * 40, "max_tokens": 1}
        found = []
        async with serving(enable_admin_routes=True, enable_prompt_tokens_details=True) as (client, _):
            for _ in range(2):
                found.append((await client.post("/v1/completions", json=body)).json()["usage"])
            assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
            found.append((await client.post("/v1/completions", json=body)).json()["usage"])
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]

    assert run(go()) == [0, 32, 0]


def test_server_info_has_no_keys(run):
    async def go():
        async with serving(api_key=["sesame-secret"]) as (client, _):
            headers = {"authorization": "Bearer sesame-secret"}
            return [await client.get("/server_info" + query, headers=headers) for query in ("", "?config_format=text")]

    whole, lines = run(go())
    assert whole.json()["model"]["max_model_len"] == 256 and whole.json()["config"]["server"]["api_key"] == "1 keys"
    assert "max_num_seqs=" in lines.json()["config"]
    assert "sesame" not in whole.text + lines.text


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": ["x" * 100, "y" * 100]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200}]}),
])  # fmt: skip
def test_the_progress_of_a_prompt(run, path, body):
    """200 prompt tokens in steps of 16: the numbers grow, the answer is the same as without."""

    async def go():
        slow = {"runner": ToyRunner(letters, seconds=0.03), "max_num_batched_tokens": 16, "max_num_seqs": 4}
        async with toy_service(**slow) as service, in_process(service) as client:
            asked = {**body, "stream": True, "return_progress": True, "temperature": 0, "max_tokens": 3}
            chunks = events(await client.post(path, json=asked))
            refused(await client.post(path, json={**asked, "stream": False}), 400, "return_progress")
        return chunks

    chunks = run(go())
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(told) >= 2 and {t["total"] for t in told} <= {100, 200}
    assert [t["processed"] for t in told] == sorted(t["processed"] for t in told)
    assert all(chunk["choices"] for chunk in chunks[len(told) :])


def test_a_prompt_of_ids_may_be_as_long_as_the_context(run):
    """20,000 ids were "at most 16384 are allowed", whatever the model's context is."""
    body = {"token_ids": [97] * 20_000, "sampling_params": {"max_tokens": 1}}
    told = refused(run(post(body)), 400)
    assert "context length" in told and "20000" in told
