"""Everything around the generating routes: models, tokens, health, keys, origins, errors of the transport."""

import asyncio
import gzip

import pytest

from tests.served import in_process, strict
from tinyserve.errors import EngineDead, Overloaded
from tinyserve.server.app import ROUTES

from .conftest import FakeEngine, client_of, refused, service_of

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}


async def call(method, url, engine=None, *, options=None, **arguments):
    async with client_of(engine or FakeEngine(), **(options or {})) as client:
        return await client.request(method, url, **arguments)


def test_models(run):
    listed = strict(run(call("GET", "/v1/models")).text)
    one = strict(run(call("GET", "/v1/models/alias")).text)
    assert strict(run(call("GET", "/v1/models/")).text) == strict(run(call("GET", "/v1/models")).text)

    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    assert (one["id"], one["max_model_len"], one["root"], one["object"]) == ("alias", 256, "tiny-folder", "model")


@pytest.mark.parametrize("url", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_a_404_that_names_the_known_ones(run, url):
    response = run(call("POST", url, json={**HI, "model": "nope", "prompt": "x", "tokens": [1]}))

    assert "tiny" in refused(response, 404, "model")
    assert strict(response.text)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("url", "told"),
    [("/v1/rerank", "reranking is not built yet"), ("/v1/audio/transcriptions", "audio is not built yet"),
     ("/v1/chat/completion", "nearest one is /v1/chat/comp"), ("/nothing/like/it", "no route /nothing/like/it.")],
)  # fmt: skip
def test_a_route_that_is_not_there_is_told_with_what_is(run, url, told):
    assert told in refused(run(call("POST", url, json={})), 404)


def test_a_form_of_curl_is_told_with_the_cure(run):
    """Its type was elided in the middle: 'application/...rm-urlencoded'."""
    kind = "application/x-www-form-urlencoded"
    told = refused(run(call("POST", CHAT, content=b"{}", headers={"content-type": kind})), 400)
    assert kind in told and "-H 'Content-Type: application/json'" in told


def test_an_unknown_card_is_a_404(run):
    refused(run(call("GET", "/v1/models/no/such")), 404, "model")


def test_tokenize_and_detokenize(run):
    found = strict(run(call("POST", "/tokenize", json={"prompt": "hé", "return_token_strs": True})).text)
    chat = strict(run(call("POST", "/tokenize", json=HI)).text)
    back = strict(run(call("POST", "/detokenize", json={"tokens": found["tokens"]})).text)

    assert (found["count"], found["max_model_len"], found["token_strs"][0]) == (3, 256, "h")
    assert chat["count"] == 20
    assert back == {"prompt": "hé"}


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_bad_token_requests(run, url, body, param):
    refused(run(call("POST", url, json=body)), 400, param)


def test_health_version_load_metrics(run):
    for method, url in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert run(call(method, url)).status_code == 200
    assert "version" in run(call("GET", "/version")).json()
    assert run(call("GET", "/load")).json() == {"server_load": 0}
    metrics = run(call("GET", "/metrics"))
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "tinyserve:num_requests_running" in metrics.text


def test_answers_are_counted_by_route(run):
    engine = FakeEngine()
    run(call("POST", CHAT, engine, json=HI))
    run(call("GET", "/nowhere/at/all", engine))
    text = engine.metrics.exposition()[0].decode()

    assert f'http_requests_total{{handler="{CHAT}",method="POST",status="200"}} 1.0' in text
    assert 'http_requests_total{handler="none",method="GET",status="404"} 1.0' in text


def test_answers_are_measured_by_route(run):
    engine = FakeEngine()
    response = run(call("POST", CHAT, engine, json=HI))
    text = engine.metrics.exposition()[0].decode()

    assert f'http_request_duration_seconds_count{{handler="{CHAT}",method="POST"}} 1.0' in text
    assert f'http_request_size_bytes_sum{{handler="{CHAT}"}} {len(response.request.content)}.0' in text
    assert f'http_response_size_bytes_sum{{handler="{CHAT}"}} {len(response.content)}.0' in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("text", "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0"),
        ("JSON", 'JSON {"named_metrics":{"kv_cache_usage_perc":0.0,"num_requests_waiting":0}}'),
        ("xml", None),
    ],
)
def test_load_balancers_may_ask_how_busy_it_is(run, asked, told):
    headers = {"endpoint-load-metrics-format": asked}

    assert run(call("POST", CHAT, json=HI, headers=headers)).headers.get("endpoint-load-metrics") == told
    assert "endpoint-load-metrics" not in run(call("GET", "/version", headers=headers)).headers


def test_a_scrape_shows_the_queues_of_the_moment(run):
    engine = FakeEngine()
    engine.running = 3
    text = run(call("GET", "/metrics", engine)).text

    assert 'tinyserve:num_requests_running{engine="0",model_name="tiny"} 3.0' in text


def test_nothing_is_answered_while_loading(run):
    service_free = None
    for method, url in (("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT), ("GET", "/metrics")):
        response = run(loading(method, url))
        refused(response, 503, service_free)
        assert int(response.headers["retry-after"]) >= 1
    assert run(loading("GET", "/version")).status_code == 200


async def loading(method, url):
    async with client_of(None) as client:
        return await client.request(method, url, json=HI if method == "POST" else None)


def test_a_dead_engine_is_a_503(run):
    engine = FakeEngine()
    engine.dead = EngineDead("The loop ended.")

    refused(run(call("GET", "/health", engine)), 503)
    refused(run(call("POST", CHAT, engine, json=HI)), 503)
    assert run(call("GET", "/metrics", engine)).status_code == 200


def test_a_full_queue_says_when_to_come_back(run):
    class Full(FakeEngine):
        async def generate(self, prompt, sampling=None, **options):
            raise Overloaded("The queue is full.", retry_after=7)
            yield

    response = run(call("POST", CHAT, Full(), json={**HI, "stream": True}))

    refused(response, 503)
    assert response.headers["retry-after"] == "7"


def test_an_unexpected_error_is_a_500_without_details(run):
    class Broken(FakeEngine):
        async def encode_chat(self, messages, **options):
            raise KeyError("secret")

    message = refused(run(call("POST", CHAT, Broken(), json=HI)), 500)
    assert "secret" not in message


@pytest.mark.parametrize("key", [None, "wrong", "sésame", ""])
def test_a_wrong_key_is_a_401(run, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    response = run(call("POST", CHAT, json=HI, headers=headers, options={"api_key": ["right", "other"]}))

    refused(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", [b"Bearer right", b"bearer other", b"Bearer  right "])
def test_any_of_the_keys_opens(run, header):
    options = {"api_key": ["right", "other"]}

    assert run(call("POST", CHAT, json=HI, headers={"Authorization": header}, options=options)).status_code == 200
    assert run(call("GET", "/health", options=options)).status_code == 200


def test_every_route_but_the_probes_asks_for_the_key(run):
    """Walks the routes themselves, so that a new one is closed until it is named here."""
    answers = {
        (method, path): run(call(method, path.replace("{name:path}", "tiny"), options={"api_key": ["k"]})).status_code
        for method, path, _ in ROUTES
    }
    open_paths = {path for (_, path), status in answers.items() if status != 401}

    assert open_paths == {
        "/health",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/metrics/",
        "/docs",
        "/openapi.json",
        "/",
        "/dashboard",
        "/web/{name}",
    }
    assert run(call("GET", "/anything", options={"api_key": ["k"]})).status_code == 401


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("a.b.example.org", True),
        ("example.org", False),
        ("notexample.org", False),
        ("evil.test", False),
        ("evil.test:localhost", False),
        ("localhost.evil.test", False),
        ("", False),
    ],
)
def test_only_known_names_are_answered_to(run, host, allowed):
    """With --allowed-hosts, a name of somebody else (DNS rebinding) gets a 403; probes ask by address and may."""
    options = {"allowed_hosts": "localhost,::1,*.example.org"}
    headers = {"host": host}
    response = run(call("POST", CHAT, options=options, json={**HI, "max_tokens": 1}, headers=headers))

    assert response.status_code == 200 if allowed else refused(response, 403)
    assert run(call("GET", "/health", options=options, headers=headers)).status_code == 200
    assert run(call("GET", "/v1/models", headers=headers)).status_code == 200  # off by default


def test_made_up_methods_and_paths_add_no_series(run):
    """A label value that a client chooses would grow the metrics for ever."""
    engine = FakeEngine()
    for number in range(20):
        run(call(f"FOO{number}", f"/v1/x{number}", engine))
        run(call(f"FOO{number}", CHAT, engine))
    series = [
        line for line in engine.metrics.exposition()[0].decode().splitlines() if line.startswith("http_requests_t")
    ]

    assert len(series) <= 4, series


def test_browsers_of_other_sites_need_an_allowed_origin(run):
    asked = {"Origin": "http://site", "Access-Control-Request-Method": "POST"}
    closed = run(call("OPTIONS", CHAT, headers=asked))
    opened = run(call("OPTIONS", CHAT, headers=asked, options={"allowed_origins": ["http://site"], "api_key": ["k"]}))

    refusal = run(
        call(
            "POST",
            CHAT,
            json=HI,
            headers={"Origin": "http://site"},
            options={"allowed_origins": ["*"], "api_key": ["k"]},
        )
    )

    assert refusal.status_code == 401 and refusal.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in closed.headers
    assert opened.headers["access-control-allow-origin"] == "http://site"


@pytest.mark.parametrize(
    "body",
    [
        b"{:", b"", b"[]", b"null", b'{"a": 1,}', b'{"a": "\xff"}', b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}',
        b'{"temperature": Infinity}', b'{"a": "\\ud83c"}', b'{"a": ' + b'{"a":' * 2000 + b"1" + b"}" * 2001, b'"x"',
        b"\xef\xbb\xbf{}",
    ],
    ids=range(14),
)  # fmt: skip
def test_bodies_that_are_no_json_object(run, body):
    """C21: malformed, nested 100000 deep (Python's parser would raise RecursionError), not UTF-8: all 400."""
    refused(run(call("POST", CHAT, content=body, headers=JSON)), 400)


def test_null_bytes_in_text_are_only_data(run):
    assert (
        run(
            call("POST", CHAT, content=b'{"messages":[{"role":"user","content":"a\\u0000"}]}', headers=JSON)
        ).status_code
        == 200
    )


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_other_media_types_are_refused(run, kind):
    assert "application/json" in refused(run(call("POST", CHAT, content=b"{}", headers={"content-type": kind})), 400)


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd, gzip"])
def test_a_compressed_body_is_told_so(run, coding):
    """It was "not valid JSON: str is not valid UTF-8"."""
    headers = {**JSON, "content-encoding": coding}
    told = refused(run(call("POST", CHAT, content=gzip.compress(b"{}"), headers=headers)), 400)
    assert coding in told and "uncompressed" in told


def test_media_type_with_parameters(run):
    headers = {"content-type": "Application/JSON; charset=utf-8"}

    assert (
        run(call("POST", CHAT, content=b'{"messages":[{"role":"user","content":"a"}]}', headers=headers)).status_code
        == 200
    )


def test_sizes(run):
    """C21: a body above the cap and too many messages are a 413, large headers a 431."""
    big = {"messages": [{"role": "user", "content": "x" * 5000}]}
    many = {"messages": [{"role": "user", "content": "x"}] * 10_001}
    options = {"max_body_bytes": 4096}

    refused(run(call("POST", CHAT, json=big, options=options)), 413)
    refused(run(call("POST", CHAT, json=many)), 413, "messages")
    refused(run(call("POST", CHAT, json=HI, headers={"x-big": "x" * 70_000})), 431)
    refused(run(call("POST", CHAT, json=HI, headers={f"x-{i}": "x" for i in range(300)})), 431)


def test_unknown_paths_and_methods(run):
    refused(run(call("GET", CHAT)), 405)
    refused(run(call("POST", "/v1/models", json={})), 405)
    refused(run(call("GET", "/v1/nothing")), 404)
    refused(run(call("POST", "/v1/rerank", json={})), 404)


def test_a_proxy_prefix_does_not_open_a_guarded_path(run):
    """With --root-path /api the router also answers /api/v1/...; the key is asked for there as well."""

    async def status(path):
        service = service_of(FakeEngine(), api_key="k", root_path="/api")
        async with in_process(service, root_path="/api") as client:
            return (await client.get(path)).status_code

    assert [run(status(path)) for path in ("/v1/models", "/api/v1/models", "/api/health")] == [401, 401, 200]


def test_a_long_path_is_not_sent_back_whole(run):
    assert len(refused(run(call("GET", "/" + "a" * 60_000)), 404)) < 300


def test_health_fails_when_no_step_ends_any_more(run):
    """61 seconds without a step while requests wait is a 503; 59 is not."""

    async def go():
        engine = FakeEngine()
        async with client_of(engine) as client:
            for seconds, status in ((0.0, 200), (59.0, 200), (61.0, 503)):
                engine.stalled_seconds = seconds
                assert (await client.get("/health")).status_code == status

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancellation_that_nobody_asked_for_is_told_and_logged(run, caplog, stream):
    """Breaks if it passes for the connection's own: 500 with 0 bytes, and 0 lines in the log."""

    class Cancelled(FakeEngine):
        async def generate(self, prompt, sampling=None, **options):
            if stream:
                yield self._output(prompt, sampling, 0, 9, 0)
            await self._gone()

        async def _gone(self):
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    async def go():
        async with client_of(Cancelled()) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
            pair = await client.post("/v1/completions", json={"prompt": ["x", "y"], "stream": stream})
            return answer, pair

    for answer in run(go()):
        assert answer.status_code == (200 if stream else 500) and '"InternalServerError"' in answer.text
    assert len(caplog.records) == 2


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-32-be", "latin-1"])
def test_a_body_in_another_encoding_is_told_so(run, coding):
    """It was "surrogates not allowed", which says nothing to who sent it."""
    body = '{"messages": "é"}'.encode(coding)
    assert "UTF-8" in refused(run(call("POST", CHAT, content=body, headers=JSON)), 400)


def test_a_long_method_is_not_sent_back(run):
    assert len(refused(run(call("X" * 5000, CHAT)), 405)) < 300


@pytest.mark.parametrize(
    ("url", "body", "named"),
    [(url, {name: value}, name) for url in (CHAT, "/v1/completions") for name, value in (
        ("metadata", 5), ("metadata", {"a": 1}), ("store", "yes"), ("service_tier", 1), ("user", ["x"]),
        ("safety_identifier", {}), ("prompt_cache_key", 0),
    )] + [
        (CHAT, {"verbosity": [{}]}, "verbosity"), (CHAT, {"verbosity": "loud"}, "verbosity"),
        ("/v1/responses", {"metadata": {"a": []}}, "metadata"), ("/v1/responses", {"user": 5}, "user"),
        ("/v1/responses", {"text": {"verbosity": 5}}, "text.verbosity"),
        ("/v1/responses", {"reasoning": {"summary": "x"}}, "reasoning.summary"),
        ("/v1/responses", {"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
    ],
)  # fmt: skip
def test_fields_without_effect_have_their_types(run, url, body, named):
    """Any value passed: a client that mixes two fields up was never told."""
    good = {CHAT: HI, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}[url]
    refused(run(call("POST", url, json={**good, **body})), 400, named)


def test_fields_without_effect_change_nothing(run):
    more = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "user": "u", "verbosity": "low"}
    engine = FakeEngine()
    plain, with_them = (strict(run(call("POST", CHAT, engine, json=body)).text) for body in (HI, {**HI, **more}))

    assert with_them["choices"] == plain["choices"] and with_them["usage"] == plain["usage"]
    assert engine.calls[0][:2] == engine.calls[1][:2] and engine.chats[0] == engine.chats[1]
