"""A real Hypercorn on a real socket: clients that leave, signals, limits, and the official client."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import h11
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.errors import ConfigError
from tinyserve.server.serve import Server, open_socket
from tinyserve.server.spoken import HEADER_BYTES, Heard

from .conftest import FakeEngine, refused, service_of

HI = {"messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def serving(engine, **options):
    service = service_of(engine, port=0, **options)
    server = Server(service, open_socket(service.config.server))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def eventually(condition, seconds=1.0):
    """Wait until the condition holds; the time limit is the case's own."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "too late"
        await asyncio.sleep(0.01)


async def raw(server, path, body, headers=()):
    """Open a connection, send a POST, and give reader and writer."""
    host, port = server.address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
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
    """C21: a 64 MB string, announced or in chunks, answered within 1 s each while a stream goes on."""

    async def go():
        engine = FakeEngine(b"a" * 200, delay=0.005)
        async with serving(engine) as server, httpx.AsyncClient(base_url=server.address, timeout=20) as client:
            big = b'{"messages": "' + b"x" * 64_000_000 + b'"}'
            headers = {"content-type": "application/json"}
            start = time.monotonic()
            refused(await client.post("/v1/chat/completions", content=big, headers=headers), 413)

            async def pieces():
                for start in range(0, 20_000_000, 1_000_000):
                    yield big[start : start + 1_000_000]

            refused(await client.post("/v1/chat/completions", content=pieces(), headers=headers), 413)
            assert time.monotonic() - start < 4  # two of them, on a shared core
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
def test_a_refusal_does_not_wait_for_the_body(run, head, sent, status):
    """The answer came after 5 s of silence; with another status the connection was reset under it."""

    async def go():
        async with serving(FakeEngine(), max_body_bytes=2**16) as server:
            host, port = server.address.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            start = time.monotonic()
            writer.write(head + b"\r\nhost: x\r\ncontent-type: application/json\r\n\r\n" + sent)
            answer = await reader.readuntil(b"}}")
            assert time.monotonic() - start < 1.5
            assert answer.startswith(b"HTTP/1.1 %d" % status)
            assert (b"connection: close" in answer.lower()) == (status == 413)
            for _ in range(40):  # what is still sent must not reset the connection
                writer.write(b" " * 2**16)
                await writer.drain()
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 1.5) == b""
            writer.close()

    run(go())


def test_a_connection_is_kept_when_the_refused_body_ends(run):
    """401 before the body is read, then a good request on the same connection: 2 answers."""

    async def go():
        async with serving(FakeEngine(), api_key=("k",)) as server:
            reader, writer = await raw(server, "/v1/chat/completions", {"messages": "x" * 300_000})
            assert b" 401 " in await reader.readuntil(b"}}")
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"}"), 1.5)
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
            rest = await asyncio.wait_for(reader.read(), 2)
            assert b"[DONE]" not in rest and not rest.endswith(b"0\r\n\r\n") and engine.running == 0
            writer.close()

            host, port = server.address.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({**HI, "stream": True}).encode()
            head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await reader.readuntil(b'"content":"a"')
            writer.write_eof()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 2)
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
            host, port = server.address.removeprefix("http://").split(":")
            body = json.dumps(HI).encode()
            chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            second = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
            for length in (len(chunk), 5):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n%b%b" % (length, chunk, second)
                )
                answer = await asyncio.wait_for(reader.read(), 5)
                writer.close()
                assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1, answer
                assert b"Transfer-Encoding" in answer
            assert engine.started == 0

    run(go())


def test_stopping_lets_running_answers_end(run):
    """With 5 seconds to drain, an answer of 0.4 s ends whole, and a new request gets 503 meanwhile."""

    async def go():
        engine = FakeEngine(b"a" * 20, delay=0.02)
        service = service_of(engine, port=0)
        server = Server(service, open_socket(service.config.server))
        await server.start()
        async with httpx.AsyncClient(base_url=server.address) as client:
            running = asyncio.create_task(client.post("/v1/chat/completions", json=HI))
            await eventually(lambda: engine.running == 1)
            stopping = asyncio.create_task(server.stop(5.0))
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
        service = service_of(engine, port=0)
        server = Server(service, open_socket(service.config.server))
        await server.start()
        reader, writer = await raw(server, "/v1/chat/completions", {**HI, "stream": True})
        await reader.readuntil(b'"content":"a"')
        start = time.monotonic()
        await server.stop(0.0)
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


def test_a_port_in_use_is_said_so():
    service = service_of(None, port=0)
    bound = open_socket(service.config.server)
    bound.listen()
    taken = service_of(None, port=bound.getsockname()[1])

    with pytest.raises(ConfigError, match="cannot listen on 127"):
        open_socket(taken.config.server)
    bound.close()


async def connected(server):
    host, port = server.address.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED += b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("extension", [b"", b";a=b\r", b" \t"])
def test_a_body_in_tiny_chunks_is_read_quickly(run, extension):
    """60,000 chunks of a byte took the loop 4 s, and up to 0.7 s between two turns of everybody else."""
    body = json.dumps(HI).encode()
    filled = body + b" " * (60_000 - len(body))
    sent = b"".join(b"1%b\r\n%c\r\n" % (extension, byte) for byte in filled) + b"0\r\n\r\n"

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connected(server)
            start, longest, done = time.monotonic(), 0.0, asyncio.Event()

            async def watch():
                nonlocal longest
                while not done.is_set():
                    before = time.monotonic()
                    await asyncio.sleep(0)
                    longest = max(longest, time.monotonic() - before)

            watching = asyncio.create_task(watch())
            writer.write(CHUNKED + sent)
            head = await reader.readuntil(b"\r\n\r\n")
            done.set()
            await watching
            assert b" 200 " in head and time.monotonic() - start < 1.5 and longest < 0.2
            writer.close()

    run(go())


def test_a_body_that_goes_on_in_tiny_chunks_is_refused(run):
    """2^16 chunks may be of any size; 16 MB of one byte each would be 16 million."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connected(server)
            writer.write(CHUNKED + b"2\r\n  \r\n" * 70_000)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert b" 413 " in answer and b"chunks" in answer
            writer.close()

    run(go())


def test_blanks_in_a_chunk_without_end_hold_nobody():
    """60,000 of them behind a semicolon, as an extension that goes on: 5 s, as each may begin a match."""
    heard = Heard(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
    heard.receive_data(CHUNKED + b"1;" + b" " * 60_000)
    start = time.process_time()
    assert isinstance(heard.next_event(), h11.Request) and heard.next_event() is h11.NEED_DATA
    assert time.process_time() - start < 0.3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.data())
def test_chunks_are_those_of_h11_however_they_arrive(pieces, data):
    """Joined as they are in the body, whatever cuts there are between the reads; the next request stays whole."""
    wire = b"".join(b"%x%b\r\n%b\r\n" % (len(p), data.draw(st.sampled_from([b"", b";e", b" "])), p) for p in pieces)
    wire = CHUNKED + wire + b"0\r\na: b\r\n\r\nGET / HTTP/1.1"
    heard, found = Heard(h11.SERVER), b""
    while wire:
        cut = data.draw(st.integers(1, 60))
        heard.receive_data(wire[:cut])
        wire = wire[cut:]
        while (event := heard.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            found += event.data if isinstance(event, h11.Data) else b""
    assert found == b"".join(pieces) and heard.trailing_data[0] == b"GET / HTTP/1.1"


@pytest.mark.parametrize(
    "head", [b"0x1\r\nab", b"+1\r\na\r\n", b"1_0\r\n", b"1\r\nabc", b"-1\r\n", b"g\r\n", b" 1\r\na\r\n"]
)
def test_chunks_that_are_none_are_refused(run, head):
    """What int() takes and HTTP does not would let a second request be smuggled in."""

    async def go():
        engine = FakeEngine()
        async with serving(engine) as server:
            reader, writer = await connected(server)
            writer.write(CHUNKED + b"1\r\n{\r\n" + head)
            assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400 ")
            writer.close()

    run(go())


@pytest.mark.parametrize(
    ("path", "length", "first"),
    [("/v1/nothing", 10, b" 404 "), ("/v1/chat/completions", 10**9, b" 413 "), ("/v1/chat/completions", 0, b" 100 ")],
)
def test_a_client_that_waits_to_be_asked_hears_a_refusal_first(run, path, length, first):
    """Each of them was told to go on (100), also where nobody wanted the body."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connected(server)
            body = json.dumps(HI).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {length or len(body)}\r\n\r\n".encode())
            assert first in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
            if not length:
                writer.write(body)
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
            writer.close()

    run(go())


def test_stopping_does_not_wait_for_idle_connections(run):
    """A client that had kept its connection held the server for 3 s."""

    async def go():
        service = service_of(FakeEngine(), port=0)
        server = Server(service, open_socket(service.config.server))
        await server.start()
        used, silent = await connected(server), await connected(server)
        used[1].write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        await used[0].readuntil(b"}")
        start = time.monotonic()
        await server.stop()
        assert time.monotonic() - start < 0.5
        used[1].close()
        silent[1].close()

    run(go())
