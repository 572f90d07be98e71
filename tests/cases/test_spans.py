"""Spans as a collector gets them: one for each request, with what was asked, what came of it, and whose trace it is."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.scripted import FlatModel
from tinyserve import config
from tinyserve.errors import ConfigError
from tinyserve.server.spans import NoSpans, Spans, spans_of

from .harness import CHAT, HI, TEXT, serving

pytestmark = pytest.mark.anyio
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def collector():
    """(URL, what was posted to it as (path, bytes))"""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()
    server.server_close()


def spans_in(posted):
    """{name of the request: (span, attributes)} of everything that was posted."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = {}
    for path, body in posted:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {each.key: plain(each.value) for each in span.attributes}
                found[values["gen_ai.request.id"]] = span, values
    return found


def plain(value):
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


async def test_each_request_becomes_a_span(tok, collector):
    """A chat, a stream of n = 2, two prompts, an abandoned stream, an embedding: 6 spans, with counts and parents."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otel]")
    url, posted = collector
    async with serving(FlatModel(), tok, socket=True, otlp_traces_endpoint=url) as server:
        chat = {**HI, "request_id": "one", "max_tokens": 3, "temperature": 0.5, "stop": ["never"]}
        assert (await server.http.post(CHAT, json=chat, headers=HEADERS)).status_code == 200
        await server.stream(TEXT, {"prompt": "x", "request_id": "two", "n": 2, "max_tokens": 4, "ignore_eos": True})
        await server.ask(TEXT, {"prompt": ["a", "bb"], "request_id": "three", "max_tokens": 1})
        body = {"prompt": "y", "request_id": "four", "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with server.http.stream("POST", TEXT, json=body) as answer:
            await anext(answer.aiter_bytes())
        await server.refused(TEXT, {"prompt": "z", "request_id": "five", "temperature": 9})
        await server.ask("/v1/embeddings", {"input": "abc", "request_id": "six"})
    found = await asyncio.to_thread(spans_in, posted)

    span, values = found["chatcmpl-one"]
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (TRACE, PARENT, "chat tiny")
    wanted = {
        "operation.name": "chat", "request.model": "tiny", "request.temperature": 0.5, "request.max_tokens": 3,
        "request.stop_sequences": ["never"], "response.finish_reasons": ["length"], "usage.input_tokens": 20,
        "usage.output_tokens": 3,
    }  # fmt: skip
    assert wanted.items() <= {key.removeprefix("gen_ai."): value for key, value in values.items()}.items()
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert sum(values[f"gen_ai.latency.{part}"] for part in parts) == pytest.approx(values["gen_ai.latency.e2e"])
    assert span.end_time_unix_nano - span.start_time_unix_nano >= 1e9 * values["gen_ai.latency.e2e"]

    _, values = found["cmpl-two-0"]
    assert values["gen_ai.request.choice.count"] == 2
    assert (values["gen_ai.response.finish_reasons"], values["gen_ai.usage.output_tokens"]) == (["length"] * 2, 8)
    assert {"cmpl-three-0", "cmpl-three-1"} <= found.keys()
    assert found["cmpl-four-0"][1]["gen_ai.response.finish_reasons"] == ["abort"]
    assert found["embd-six-0"][1]["gen_ai.operation.name"] == "embeddings"
    assert not any("five" in name for name in found)  # refused before anything ran


def test_none_are_made_unless_asked():
    assert type(spans_of(config.build({}).log)) is NoSpans
    with pytest.raises(ConfigError, match="not gRPC"):
        Spans("grpc://localhost:4317")
