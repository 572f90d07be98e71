"""A real Hypercorn on a real socket: clients that leave, signals, limits, and the official client."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

from tests.served import connect, eventually
from tinyserve.errors import ConfigError
from tinyserve.server import connections, serve
from tinyserve.server.serve import open_socket

from .conftest import FakeEngine, refused, service_of, serving

HI = {"messages": [{"role": "user", "content": "Hi"}]}


async def raw(server, path, body, headers=()):
    """Open a connection, send a POST, and give reader and writer."""
    reader, writer = await connect(server)
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *headers,
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()
    return reader, writer


def test_a_client_that_leaves_a_stream_aborts_it(run):
    """C17 a, d: within 1 s nothing runs any more, for one and for two samples."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.02)
        async with serving(engine) as server:
            for n in (1, 2):
                reader, writer = await raw(server, "/v1/chat/completions", {**HI, "stream": True, "n": n})
                await reader.readuntil(b'"content":"a"')
                assert engine.running == n
                writer.close()
                await eventually(lambda: engine.running == 0)

    run(go())


def test_a_client_that_leaves_before_the_whole_answer_aborts_it(run):
    """C17 b: within 1 s; also when it only half-closed and then reset."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.02)
        async with serving(engine) as server:
            for path, body in (
                ("/v1/chat/completions", HI),
                ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 99}),
            ):
                _, writer = await raw(server, path, body)
                await eventually(lambda: engine.running > 0)
                writer.transport.abort()
                await eventually(lambda: engine.running == 0)

    run(go())


def test_a_client_that_leaves_the_queue_never_runs(run):
    """C17 c: queued behind others, gone: no step is ever made for it."""

    async def go():
        engine = FakeEngine(queued=asyncio.Event())
        async with serving(engine) as server:
            _, writer = await raw(server, "/v1/chat/completions", {**HI, "stream": True})
            await eventually(lambda: engine.running == 1)
            writer.close()
            await eventually(lambda: engine.running == 0)
            engine.queued.set()
            await asyncio.sleep(0.05)
            assert engine.steps == 0

    run(go())


def test_the_official_client(run):
    """Whole and streamed chat, completions, models and errors, as `openai` reads them."""

    async def go():
        async with serving(FakeEngine(b"Paris"), api_key="k") as server:
            client = openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="k", max_retries=0)
            whole = await client.chat.completions.create(model="tiny", logprobs=True, **HI)
            stream = await client.chat.completions.create(
                model="tiny", stream=True, stream_options={"include_usage": True}, n=2, **HI
            )
            chunks = [chunk async for chunk in stream]
            text = await client.completions.create(model="tiny", prompt="x", echo=True, logprobs=1)
            models = [model.id async for model in client.models.list()]
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(model="nope", **HI)
            with pytest.raises(openai.AuthenticationError):
                await openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="x", max_retries=0).models.list()
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="tiny", temperature=9, **HI)
            await client.close()
        assert whole.choices[0].message.content == "Paris"
        assert whole.choices[0].logprobs.content[0].token == "P"
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == 1)
            == "Paris"
        )
        assert chunks[-1].usage.completion_tokens == 12
        assert text.choices[0].text == "xParis"
        assert models == ["tiny", "alias"]
        assert unknown.value.code == "model_not_found"

    run(go())


def test_an_error_in_a_stream_reaches_the_official_client(run):
    async def go():
        async with serving(FakeEngine(b"Paris", fail_at=2)) as server:
            client = openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="k", max_retries=0)
            stream = await client.chat.completions.create(model="tiny", stream=True, **HI)
            with pytest.raises(openai.APIError, match="NaN"):
                async for _ in stream:
                    pass
            await client.close()

    run(go())


def test_a_body_above_the_cap_gets_its_413(run):
    """C21: 64 MB announced, or 20 MB in chunks, are refused while a stream goes on; the next request is answered."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.005)
        async with serving(engine) as server, httpx.AsyncClient(base_url=server.address, timeout=20) as client:
            big = b'{"messages": "' + b"x" * 64_000_000 + b'"}'
            headers = {"content-type": "application/json"}
            going_on = asyncio.create_task(client.post("/v1/chat/completions", json={**HI, "stream": True}))
            refused(await client.post("/v1/chat/completions", content=big, headers=headers), 413)

            async def pieces():
                for start in range(0, 20_000_000, 1_000_000):
                    yield big[start : start + 1_000_000]

            refused(await client.post("/v1/chat/completions", content=pieces(), headers=headers), 413)
            assert (await going_on).text.endswith("data: [DONE]\n\n")
            assert (await client.post("/v1/chat/completions", json=HI)).status_code == 200

    run(go())


@pytest.mark.parametrize(
    ("head", "sent", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 900000000", b"{", 413),
        (b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked", b"20000\r\n" + b" " * 2**17, 413),
        (b"POST /v1/nothing HTTP/1.1\r\ncontent-length: 900000000", b"{", 404),
        (b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 900000000", b"{", 413),
    ],
)
def test_a_refusal_does_not_wait_for_the_body(run, monkeypatch, head, sent, status):
    """The answer came after 5 s of silence, which never ends here; with another status the connection was reset under
    it."""
    monkeypatch.setattr(connections, "QUIET_SECONDS", 3600.0)

    async def go():
        async with serving(FakeEngine(), max_body_bytes=2**16) as server:
            reader, writer = await connect(server)
            writer.write(head + b"\r\nhost: x\r\ncontent-type: application/json\r\n\r\n" + sent)
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 %d" % status)
            assert (b"connection: close" in answer.lower()) == (status == 413)
            for _ in range(40):  # what is still sent must not reset the connection
                writer.write(b" " * 2**16)
                await writer.drain()
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()

    run(go())


def test_a_connection_is_kept_when_the_refused_body_ends(run, monkeypatch):
    """401 before the body is read, then a good request on the same connection: 2 answers."""
    monkeypatch.setattr(connections, "QUIET_SECONDS", 3600.0)

    async def go():
        async with serving(FakeEngine(), api_key=("k",)) as server:
            reader, writer = await raw(server, "/v1/chat/completions", {"messages": "x" * 300_000})
            assert b" 401 " in await reader.readuntil(b"}}")
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"}")
            writer.close()

    run(go())


def test_the_stream_of_a_half_closed_connection_is_seen_to_be_cut(run):
    """`nc -N` and some proxies end their side after the request: no last chunk in 1.1, a reset in 1.0, never [DONE]."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.02)
        async with serving(engine) as server:
            reader, writer = await raw(server, "/v1/chat/completions", {**HI, "stream": True})
            await reader.readuntil(b'"content":"a"')
            writer.write_eof()
            rest = await reader.read()
            assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n") and engine.running == 0
            writer.close()

            reader, writer = await connect(server)
            body = json.dumps({**HI, "stream": True}).encode()
            head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await reader.readuntil(b'"content":"a"')
            writer.write_eof()
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    run(go())


def test_a_header_of_a_megabyte_gets_its_431(run):
    async def go():
        async with serving(FakeEngine()) as server, httpx.AsyncClient(base_url=server.address, timeout=20) as client:
            refused(await client.post("/v1/chat/completions", json=HI, headers={"x-big": "x" * 1_000_000}), 431)
            assert (await client.post("/v1/chat/completions", json=HI)).status_code == 200

    run(go())


def test_two_lengths_are_refused_and_the_connection_closed(run):
    """Breaks if Content-Length and Transfer-Encoding are taken together: what follows was smuggled (0 answers)."""

    async def go():
        engine = FakeEngine()
        async with serving(engine) as server:
            body = json.dumps(HI).encode()
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            second = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
            for length in (len(chunk), 5):
                reader, writer = await connect(server)
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n%b%b" % (length, chunk, second)
                )
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1, answer
                assert b"Transfer-Encoding" in answer
            assert engine.started == 0

    run(go())


def test_stopping_lets_running_answers_end(run):
    """With 20 seconds to drain, an answer of 0.4 s ends whole, and a new request gets 503 meanwhile."""

    async def go():
        engine = FakeEngine(b"a" * 20, delay=0.02)
        async with serving(engine) as server, httpx.AsyncClient(base_url=server.address, timeout=20) as client:
            running = asyncio.create_task(client.post("/v1/chat/completions", json=HI))
            await eventually(lambda: engine.running == 1)
            stopping = asyncio.create_task(server.stop(20.0))
            await asyncio.sleep(0.05)
            refused(await client.get("/health"), 503)
            refused(await client.post("/v1/chat/completions", json=HI), 503)
            answer = await running
            await stopping
        assert answer.json()["choices"][0]["finish_reason"] == "stop"

    run(go())


def test_stopping_at_once_ends_streams_properly(run):
    """Without time to drain, the stream ends with finish_reason abort and [DONE], and the port is free."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.02)
        async with serving(engine) as server:
            reader, writer = await raw(server, "/v1/chat/completions", {**HI, "stream": True})
            await reader.readuntil(b'"content":"a"')
            start = time.monotonic()
        rest = await reader.read()
        writer.close()
        assert b'"finish_reason":"abort"' in rest and b"[DONE]" in rest
        assert time.monotonic() - start < 3
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as client:
                await client.get(server.address + "/health")

    run(go())


def test_a_unix_socket(run, tmp_path):
    async def go():
        path = str(tmp_path / "s")
        async with serving(FakeEngine(), uds=path) as server:
            assert server.address == f"unix:{path}"
            transport = httpx.AsyncHTTPTransport(uds=path)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                assert (await client.get("/health")).status_code == 200
        assert not (tmp_path / "s").exists()

    run(go())


def test_a_unix_socket_in_use_stays_its_servers(run, tmp_path):
    """A second server took it without a word, and the first one's end deleted the second one's. One left by a server
    that was killed is replaced."""

    async def go():
        path = str(tmp_path / "s")
        left = socket.socket(socket.AF_UNIX)
        left.bind(path)
        left.close()
        async with serving(FakeEngine(), uds=path):
            with pytest.raises(ConfigError, match="another server does"):
                open_socket(service_of(None, uds=path).config.server)
            (tmp_path / "s").unlink()
            bound = open_socket(service_of(None, uds=path).config.server)
        assert (tmp_path / "s").is_socket()
        bound.close()

    run(go())


@pytest.mark.parametrize("host", ["x" * 64, "a..b", "é" * 63], ids=["long", "empty", "long when encoded"])
def test_a_name_that_no_host_can_have_is_told(host):
    with pytest.raises(ConfigError, match="cannot listen on"):
        open_socket(service_of(None, host=host).config.server)


def test_a_port_in_use_is_said_so():
    service = service_of(None, port=0)
    bound = open_socket(service.config.server)
    bound.listen()
    taken = service_of(None, port=bound.getsockname()[1])

    with pytest.raises(ConfigError, match=r"cannot listen on 127.* another --port; 0 takes a free one"):
        open_socket(taken.config.server)
    bound.close()


@pytest.mark.parametrize(
    ("path", "length", "first"),
    [("/v1/nothing", 10, b" 404 "), ("/v1/chat/completions", 10**9, b" 413 "), ("/v1/chat/completions", 0, b" 100 ")],
)
def test_a_client_that_waits_to_be_asked_hears_a_refusal_first(run, path, length, first):
    """Each of them was told to go on (100), also where nobody wanted the body. Behind a refusal comes no body, so that
    the next request on that connection would be taken for it: it is closed."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            body = json.dumps(HI).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {length or len(body)}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert first in head and (b"connection: close" in head.lower()) == bool(length)
            if not length:
                writer.write(body)
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.close()

    run(go())


def test_stopping_does_not_wait_for_idle_connections(run, monkeypatch):
    """A client that had kept its connection held the server for 3 s; here it would for an hour."""
    monkeypatch.setattr(serve, "LAST_WORDS", 3600.0)

    async def go():
        async with serving(FakeEngine()) as server:
            used, silent = await connect(server), await connect(server)
            used[1].write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            await used[0].readuntil(b"}")
        used[1].close()
        silent[1].close()

    run(go())


@pytest.mark.parametrize(
    "half", [b"content-length: 900\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n5\r\n{", b"content"]
)
def test_stopping_does_not_wait_for_half_a_request(run, monkeypatch, caplog, half):
    """Half of a body held the server for all of its time, an hour here, and asyncio wrote of a CancelledError."""
    monkeypatch.setattr(serve, "LAST_WORDS", 3600.0)

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + half)
            body = b"\r\n\r\n" in half
            await (eventually(lambda: server.service.inflight == 1) if body else asyncio.sleep(0.05))
            await server.stop(3600.0)
            answer = await reader.read()
            assert not body or (answer.startswith(b"HTTP/1.1 503 ") and b"connection: close" in answer)
            writer.close()

    run(go())
    assert not caplog.records


def test_stopping_does_not_wait_for_what_is_read_and_forgotten(run, monkeypatch, caplog):
    """The body behind a refusal may go on for an hour here."""
    monkeypatch.setattr(serve, "LAST_WORDS", 3600.0)
    monkeypatch.setattr(connections, "QUIET_SECONDS", 3600.0)

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            writer.write(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            await server.stop(3600.0)
            writer.close()

    run(go())
    assert not caplog.records


@pytest.mark.parametrize(
    ("version", "expected", "status"),
    [("1.1", "200-ok", 417), ("1.1", "100-continue, x=y", 417), ("1.1", "100-CONTINUE", 200), ("1.0", "200-ok", 200)],
)
def test_an_expectation_that_cannot_be_met_is_refused(run, version, expected, status):
    """It was ignored. RFC 9110, 10.1.1; a client of HTTP/1.0 cannot know of any."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            head = f"GET /version HTTP/{version}\r\nhost: x\r\nexpect: {expected}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert status == 200 or json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 417
            writer.close()

    run(go())


def test_a_connection_whose_expectation_was_refused_is_closed(run):
    """The client sends no body then: what it asked next was taken for that."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 200-ok\r\ncontent-length: 500\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 417 ") and head.count(b"connection: close") == 1
            writer.close()
            reader, writer = await connect(server)  # the client that waits, too: it was told twice
            writer.write(
                b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue, foo\r\nexpect: 100-continue\r\n"
                b"content-length: 500\r\n\r\n"
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 417 ") and head.count(b"connection: close") == 1
            writer.close()

    run(go())


def test_a_request_that_waits_for_its_turn_is_no_silent_client(run, monkeypatch):
    """Of 3,000 that came at once 1,700 were closed without a word, when the server came to them after 5 s."""
    monkeypatch.setattr(connections, "KEEP_ALIVE", 0.05)

    async def late(_):
        await asyncio.sleep(0.2)

    monkeypatch.setattr(connections.Turns, "take", late)

    async def go():
        async with serving(FakeEngine()) as server:
            for sent in (b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /vers", b""):
                reader, writer = await connect(server)
                writer.write(sent)
                answer = await asyncio.wait_for(reader.read(), 10)  # until it is closed, as half a head still is
                assert answer.startswith(b"HTTP/1.1 200 ") if sent.endswith(b"\n") else b"200" not in answer
                writer.close()

    run(go())


def test_a_timer_that_rings_before_the_sockets_are_looked_at_ends_nothing(run):
    """After SIGSTOP and SIGCONT it does: of 50 requests that had come meanwhile, 46 were closed without a word."""
    ended = []

    async def action():
        ended.append(True)

    async def go():
        reader = connections._Reader(connections.Turns())
        idle = connections.Idle(set(), reader)
        await idle.restart(None, action)
        idle._over()
        reader.feed_data(b"G")
        await asyncio.sleep(0.01)
        assert not ended
        await idle.stop()

    run(go())


def test_requests_that_come_together_are_answered_in_turn(run):
    """100 in one write, with bodies, on one connection: 100 answers in their order, and then it is kept."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            sent = b""
            for number in range(100):
                body = json.dumps({"prompt": "x" * (number + 1)}).encode()
                sent += b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                sent += b"content-length: %d\r\n\r\n%b" % (len(body), body)
            writer.write(sent)
            for number in range(100):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["count"] == number + 1
            writer.close()

    run(go())


def test_the_head_of_a_stream_comes_with_its_first_piece(run):
    """Each write costs some 50 us: the head and the first event are one, and so are the last event and the end."""

    async def go():
        writes = []

        class Transport:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

            def write(self, data):
                writes.append(data)
                self._inner.write(data)

        made = connections._Protocol.connection_made
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections._Protocol, "connection_made", lambda self, inner: made(self, Transport(inner)))
            async with serving(FakeEngine(b"ab")) as server:
                reader, writer = await raw(server, "/v1/chat/completions", {**HI, "stream": True, "max_tokens": 2})
                await reader.readuntil(b"0\r\n\r\n")
                writer.close()
        first, last = writes
        assert b" 200 " in first and b'"content":"a"' in first
        assert b'"content":"b"' in last and b"[DONE]" in last and last.endswith(b"0\r\n\r\n")

    run(go())


def test_a_connection_without_a_request_ends_after_its_time(run, monkeypatch):
    """A new one, one with half a head, and one that was used; an answer that takes longer than that is whole."""
    monkeypatch.setattr(connections, "KEEP_ALIVE", 0.05)

    async def go():
        async with serving(FakeEngine(b"a" * 20, delay=0.01)) as server:
            silent, half = await connect(server), await connect(server)
            half[1].write(b"GET /version HTTP/1.1\r\nhost")
            used = await raw(server, "/v1/chat/completions", HI)
            assert b"a" * 20 in await used[0].readuntil(b"a" * 20)
            for reader, writer in (silent, half, used):
                await reader.read()
                writer.close()

    run(go())
