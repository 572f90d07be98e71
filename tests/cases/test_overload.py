"""Too much of everything: who is refused, how, and that nobody else is hurt."""

import asyncio
import json
import time

import pytest

from tests.scripted import FlatModel, ScriptModel
from tinyserve.server import app, connections

from .harness import CHAT, HI, TEXT, Client, eventually, serving
from .lag import watched

pytestmark = pytest.mark.anyio


async def open_post(server, body, *, more=b"", announced=None):
    url = server.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    writer.write(f"{head}{announced or len(data)}\r\n\r\n".encode() + data + more)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_503_before_the_first_byte(tok, stream):
    """One row, one may wait: of four at once two get their answer and two a 503 with Retry-After, streamed or not."""
    model = ScriptModel([97] * 20, seconds=0.01)
    async with serving(model, tok, max_num_seqs=1, max_num_queued_reqs=1) as server:
        body = {"prompt": "x", "max_tokens": 20, "stream": stream}
        found = await asyncio.gather(*(server.http.post(TEXT, json=body) for _ in range(4)))
        assert sorted(response.status_code for response in found) == [200, 200, 503, 503]
        for response in found:
            if response.status_code == 503:
                assert int(response.headers["retry-after"]) >= 1
                assert "max-num-queued-reqs" in Client.read(response).error["message"]
        assert await server.metric("admission_rejections", reason="queue_reqs") == 2


async def test_too_many_queued_tokens_are_a_503(tok):
    """100 prompt tokens may wait; with one row taken, the second prompt of 60 is refused."""
    model = ScriptModel([97] * 20, seconds=0.01)
    async with serving(model, tok, max_num_seqs=1, max_num_queued_tokens=100) as server:
        body = {"prompt": "x" * 60, "max_tokens": 20}
        first = asyncio.create_task(server.http.post(TEXT, json=body))
        await eventually(lambda: server.scheduler.num_running == 1)
        found = await asyncio.gather(first, *(server.http.post(TEXT, json=body) for _ in range(2)))
        assert sorted(response.status_code for response in found) == [200, 200, 503]


async def test_a_client_that_sent_more_and_left_is_noticed(tok):
    """Bytes of a second request behind the first: the reader waited for the first answer, and saw no end before it."""
    async with serving(ScriptModel([97] * 200, seconds=0.01), tok, socket=True) as server:
        for more in (b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"x" * 1000):
            _, writer = await open_post(server, {"prompt": "x", "max_tokens": 200}, more=more)
            await eventually(lambda: server.scheduler.num_running == 1)
            writer.close()
            await server.settled()


async def test_a_client_that_reads_nothing_is_cut_off(tok, monkeypatch):
    """Its buffers fill, 0.3 s pass, the connection ends and its request with it; a minute in earnest."""
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.3)
    async with serving(ScriptModel([97] * 240), tok, socket=True, max_num_seqs=64) as server:
        url = server.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        reader._transport.pause_reading()
        body = json.dumps({"prompt": "x", "max_tokens": 240, "stream": True, "n": 60, "logprobs": 5}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
            + b"%d\r\n\r\n%b" % (len(body), body)
        )
        await eventually(lambda: server.scheduler.num_running > 0)
        await server.settled(20.0)
        writer.transport.abort()


async def test_bodies_of_all_together_have_a_limit(tok, monkeypatch):
    """Room for two bodies of 100 KB: while two are half sent, the third is a 503; when they are gone it is answered."""
    monkeypatch.setattr(app, "BODIES", 2)
    size = 100 * 1024
    async with serving(ScriptModel([97]), tok, socket=True, max_body_bytes=size) as server:
        half = b'{"prompt": "' + b"x" * (size - 100)
        held = [await open_post(server, half, announced=size) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await server.http.post(CHAT, json={**HI, "metadata": {"x": "y" * (size // 2)}})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        for _, writer in held:
            writer.transport.abort()
        await asyncio.sleep(0.1)
        assert (await server.http.post(CHAT, json={**HI, "metadata": {"x": "y" * (size // 2)}})).status_code == 200


async def test_connections_have_a_limit(tok, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    async with serving(ScriptModel([97]), tok, socket=True) as server:
        url = server.http.base_url
        held = [await asyncio.open_connection(url.host, url.port) for _ in range(3)]
        reader, _ = await asyncio.open_connection(url.host, url.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 2)
        for _, writer in held:
            writer.transport.abort()
        await asyncio.sleep(0.1)


async def test_thousands_of_answers_hold_nobody_up(tok):
    """1024 prompts of 16 answers that are given up, and 4096 answers read: the loop is never away for 0.1 s."""
    options = {"max_num_seqs": 256, "num_gpu_blocks_override": 1200, "max_num_batched_tokens": 2048}
    async with serving(FlatModel(), tok, socket=True, **options) as server:
        async with watched() as lag:
            _, writer = await open_post(server, {"prompt": ["x"] * 1024, "n": 16, "max_tokens": 99})
            await eventually(lambda: server.scheduler.num_waiting > 1000, 5.0)
            writer.transport.abort()
            await server.settled(10.0)
        assert lag.worst < 0.1
        async with watched() as lag:
            reader, writer = await open_post(server, {"prompt": "x", "n": 4096, "max_tokens": 1})
            size = 0
            while piece := await reader.read(2**16):
                size += len(piece)
                if b'"usage"' in piece:
                    break
            writer.close()
        assert size > 4096 * 50
        assert lag.worst < 0.1


async def test_the_watch_names_who_held_the_loop():
    """0.3 s of work in the loop: it was away for that long, and the function is told."""

    def hold():
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass

    async with watched() as lag:
        hold()
        await asyncio.sleep(0.01)
    assert lag.worst > 0.25
    assert " in hold" in lag.seen
