"""What a stranger's connection may say before any route is asked, over real sockets."""

import asyncio
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cases.lag import watched
from tests.served import connect
from tinyserve.errors import ConfigError
from tinyserve.server import chunks, spoken
from tinyserve.server.serve import open_socket

from .conftest import FakeEngine, service_of, serving

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
UPGRADE = GET + b"connection: upgrade, http2-settings, close\r\n"


async def said(server, data):
    """All that the server sends until it closes."""
    reader, writer = await connect(server)
    writer.write(data)
    found = b""
    try:
        async with asyncio.timeout(8):
            while piece := await reader.read(65536):
                found += piece
    finally:
        writer.close()
    return found


def told(answer):
    """The error in an answer that closed its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    "more",
    [
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
        b"upgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n",
        b"upgrade: websocket\r\nsec-websocket-version: 99\r\n",
    ],
)
def test_an_upgrade_is_not_followed(run, more):
    """0 answers of 101: HTTP/2 and WebSocket are not spoken; a refused WebSocket kept its connection for ever."""

    async def go():
        async with serving(FakeEngine()) as server:
            answer = await said(server, UPGRADE + more + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 200") and b"version" in answer

    run(go())


def test_http_2_is_refused_once(run):
    """2,000 requests opened and closed in one write held the loop for 350 ms; then its first line got two answers."""

    async def go():
        async with serving(FakeEngine()) as server, watched() as lag:
            frames = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 4000
            answer = await said(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames)
            assert told(answer)["code"] == 505 and answer.count(b"date: ") == 1
        assert lag.worst < 0.1

    run(go())


@pytest.mark.parametrize("line", [b"a:b\r\n", b"x-some-header: with a value\r\n", b" folded\r\n"])
def test_headers_without_end_hold_nobody_up(run, line):
    """4 MB of them, from somebody without a key, held the loop for 2 s; they are a 431 that says so."""

    async def go():
        async with serving(FakeEngine()) as server, watched() as lag:
            answer = await said(server, GET + b"x: y\r\n" + line * (4_000_000 // len(line)) + b"\r\n")
        assert told(answer)["code"] == 431 and "131072 bytes" in told(answer)["message"]
        assert lag.worst < 0.1

    run(go())


@pytest.mark.parametrize(
    ("data", "status", "word"),
    [
        (b"hello\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET /version HTTP/1.1\r\n\r\n", 400, "HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "HTTP/1.1"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501, "chunked"),
        (b"GET /version HTTP/2.0\r\nhost: x\r\n\r\n" * 2, 505, "HTTP/1.1"),
        (b"POST /tokenize HTTP/3.0\r\nhost: x\r\ncontent-length: 9\r\n\r\n123", 505, "HTTP/1.1"),
    ],
)
def test_what_is_no_request_is_told_so(run, data, status, word):
    """The answers had no body: 0 bytes that say what is wrong."""

    async def go():
        async with serving(FakeEngine()) as server:
            error = told(await said(server, data))
            assert error["code"] == status and word in error["message"]

    run(go())


def test_a_whole_url_is_its_path_and_needs_the_same_key(run):
    """RFC 9112, 3.2.2: a server must take it; it was a 404. The key is asked for all the same."""

    async def go():
        async with serving(FakeEngine(), api_key=("sesame",)) as server:
            for target, status in ((b"http://x/version", 200), (b"HTTP://x/v1/models?a=1", 401), (b"http://x", 200)):
                answer = await said(server, b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
                assert answer.startswith(b"HTTP/1.1 %d" % status), target

    run(go())


def test_a_library_that_is_made_otherwise_is_one_clear_line_at_the_start(monkeypatch):
    """Its reader of chunks has other insides: every body in chunks would have been a 500, or read wrongly."""
    settings = service_of(None, port=0).config.server
    open_socket(settings).close()

    class Renamed(chunks.Chunks):
        def __getattribute__(self, name):
            if name == "_bytes_in_chunk":
                raise AttributeError(name)
            return super().__getattribute__(name)

    def refused():
        with pytest.raises(
            ConfigError, match=r"^the server cannot work with h11 \S+ and hypercorn \S+: pip install 'h11"
        ):
            open_socket(settings)

    with monkeypatch.context() as patch:
        patch.setattr(spoken, "Chunks", Renamed)
        refused()
    with monkeypatch.context() as patch:
        patch.setattr(spoken, "ChunkedReader", type("Moved", (), {}))
        refused()
    for name in ("H11Protocol", "TCPServer", "AsyncioSingleTask"):
        with monkeypatch.context() as patch:
            patch.setattr(spoken, name, type("Other", (), {}))
            refused()


def test_a_library_without_a_reader_of_chunks_is_told_too():
    """The import failed, with a traceback."""
    code = """
import h11._readers, os
del h11._readers.ChunkedReader
from tinyserve import config
from tinyserve.errors import ConfigError
from tinyserve.server.serve import open_socket
try:
    open_socket(config.build({"model": "x", "port": 0}).server)
except ConfigError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'h11>=" in found.stdout and not found.stderr


def test_the_versions_that_are_told_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for known in spoken._KNOWN:
        assert known.strip("'") in project["dependencies"]
