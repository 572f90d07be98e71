"""C21: the worst caller gets a 4xx within a second, and everybody else's stream goes on."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.scripted import ScriptModel

from .harness import CHAT, HI, TEXT, Client, Streamed, serving

pytestmark = pytest.mark.anyio
BODY = {**HI, "max_tokens": 2}
GOOD = json.dumps(BODY).encode()
SECOND = 1.0
GAP = 0.5  # seconds without news that a stream may see while others misbehave; its steps take 10 ms


@asynccontextmanager
async def busy(tok):
    """A server on a socket, with a stream that must not be held up."""
    async with serving(ScriptModel([97] * 400, seconds=0.01), tok, socket=True) as server:
        gaps, stop = [], asyncio.Event()
        listener = asyncio.create_task(listen(server, gaps, stop))
        await asyncio.sleep(0.1)
        yield server
        stop.set()
        await listener
        assert max(gaps) < GAP, f"a stream waited {max(gaps):.2f} s"


async def listen(server, gaps, stop):
    """Stream until told to stop; note the time between two pieces."""
    while not stop.is_set():
        body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "temperature": 0, "stream": True}
        async with server.http.stream("POST", TEXT, json=body) as response:
            last, text = time.monotonic(), ""
            async for piece in response.aiter_text():
                now = time.monotonic()
                gaps.append(now - last)
                last, text = now, text + piece
        assert Streamed.parse(text).text == "a" * 100


async def post(server, content, *, path=CHAT, **headers):
    """POST bytes; read whatever comes, also when the server answers before it has read all of it."""
    where = urlsplit(str(server.http.base_url))
    start = time.monotonic()
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=2**24)
    names = {
        "host": "x",
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
    }
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {**names, **headers}.items()]
    writer.write(f"POST {path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n")
    for at in range(0, len(content), 2**18):
        writer.write(content[at : at + 2**18])
        await writer.drain()
    answer = await reader.read()
    seconds = time.monotonic() - start
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body, seconds


async def refused(server, content, *statuses, **headers):
    """The message of a refusal in JSON, given within a second."""
    status, body, seconds = await post(server, content, **headers)
    assert status in statuses, body[:500]
    assert seconds < SECOND
    answer = httpx.Response(status, content=body, headers={"content-type": "application/json"})
    return Client.read(answer).error["message"]


MALFORMED = {
    "brace and colon": b"{:",
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "trailing comma": GOOD[:-1] + b",}",
    "not UTF-8": GOOD.replace(b"Hi", b"\xff\xfe"),
    "half of a surrogate pair": GOOD.replace(b"Hi", b"\\ud83c"),
    "deep": b"[" * 100_000,
    "deep and closed": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


async def test_malformed_bodies(tok):
    """400 for each, named in the message."""
    async with busy(tok) as server:
        for name, content in MALFORMED.items():
            message = await refused(server, content, 400)
            assert "JSON" in message, (name, message)


async def test_nesting_that_parses(tok):
    """900 levels pass the parser; whatever reads them later must not run out of stack: never a 500."""
    async with busy(tok) as server:
        nested = b"[" * 900 + b"]" * 900
        for field in (
            b"metadata",
            b"chat_template_kwargs",
            b"documents",
            b"tools",
            b"stop",
            b"logit_bias",
            b"messages",
        ):
            status, body, seconds = await post(server, GOOD[:-1] + b', "' + field + b'": ' + nested + b"}")
            assert status in (200, 400) and seconds < SECOND, (field, body)
            inner = b'{"x": ' + nested + b"}"
            status, body, seconds = await post(server, GOOD[:-1] + b', "' + field + b'": ' + inner + b"}")
            assert status in (200, 400) and seconds < SECOND, (field, body)


async def test_wrong_media_types(tok):
    """text/plain is what browsers send to foreign sites without asking first."""
    async with busy(tok) as server:
        await refused(server, GOOD, 400, 415, **{"content-type": "text/plain"})
        await refused(server, GOOD, 400, 415, **{"content-type": "text/plain", "origin": "https://evil.example"})
        status, _, _ = await post(server, GOOD, **{"content-type": "Application/JSON; charset=utf-8"})
        assert status == 200


async def test_sizes(tok):
    """64 MB, announced or not, and 10^6 messages, tiny or usual, are 413; a header of 1 MB is 431."""
    async with busy(tok) as server:
        large = GOOD.replace(b"Hi", b"x" * 64 * 2**20)
        assert "bytes" in await refused(server, large, 413)
        usual = b'{"model": "tiny", "messages": [' + b",".join([b'{"role":"user","content":"x"}'] * 10**6) + b"]}"
        await refused(server, usual, 413)
        for tiny in (b"{}", b'{"role":""}'):
            await refused(server, b'{"messages": [' + b",".join([tiny] * 10**6) + b"]}", 413)
        await refused(server, b'{"messages": [' + b",".join([b"0"] * 10**6) + b"]}", 400, 413)
        await refused(server, GOOD, 431, x_long="y" * 2**20)


async def test_a_large_body_without_a_length(tok):
    """Sent in chunks: refused as soon as the cap is passed."""
    async with busy(tok) as server:

        async def pieces():
            for _ in range(64):
                yield b"x" * 2**20

        start = time.monotonic()
        response = await server.http.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
        assert (response.status_code, time.monotonic() - start < 2 * SECOND) == (413, True)
        assert Client.read(response).error


async def test_fields_that_nobody_knows_yet(tok):
    """store and metadata are ignored; developer is system."""
    async with serving(ScriptModel([97, 98, 99]), tok) as server:
        plain, _ = await server.both(CHAT, BODY)
        extra, _ = await server.both(CHAT, {**BODY, "store": True, "metadata": {}, "x": [1]})
        assert (extra.text, extra.counts) == (plain.text, plain.counts)
        system, developer = (
            {**BODY, "messages": [{"role": role, "content": "s"}, *HI["messages"]]} for role in ("system", "developer")
        )
        assert await server.ids(system) == await server.ids(developer)
        assert (await server.ask(CHAT, developer)).counts == (await server.ask(CHAT, system)).counts


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("GET", "/v1/nothing", 404), ("POST", "/", 405)]
)
async def test_routes(tok, method, path, status):
    async with serving(ScriptModel([97]), tok) as server:
        response = await server.http.request(method, path, content=GOOD)
        reply = Client.read(response)
        assert reply.status == status and reply.error
        assert status != 405 or response.headers["allow"]
