"""C17: a client that goes away leaves nothing behind, wherever its request was, and its prefix stays for a retry."""

import asyncio
import json
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.scripted import ScriptModel

from .harness import CHAT, HI, TEXT, eventually, recorded, serving

pytestmark = pytest.mark.anyio
LONG = "".join(chr(97 + i % 26) for i in range(40))  # two whole blocks and a half
BODY = {"model": "tiny", "prompt": LONG, "max_tokens": 200, "temperature": 0}


@asynccontextmanager
async def slow(tok, **options):
    """A server on a socket whose steps take 20 ms."""
    async with serving(ScriptModel([97] * 400, seconds=0.02), tok, socket=True, **options) as server:
        yield server


async def connect(server, path, body):
    """Open a connection of our own and send a POST; gives reader and writer."""
    where = urlsplit(str(server.http.base_url))
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def chunks(reader, count):
    """The text of the next events of a completion's stream."""
    text = ""
    while count:
        event = await asyncio.wait_for(reader.readuntil(b"\n\n"), 10)
        if b'"text":' in event:
            text += json.loads(event[event.index(b"{") :])["choices"][0]["text"]
            count -= 1
    return text


async def aborted(server):
    return await server.metric("request_success", finished_reason="abort")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_in_the_middle_of_a_stream(tok, reset):
    """(a), (e): after 3 chunks; all is back within 1 s, and a retry finds the whole blocks of the old prompt."""
    async with slow(tok) as server:
        reader, writer = await connect(server, TEXT, {**BODY, "stream": True})
        text = await chunks(reader, 3)
        assert server.scheduler.num_running == 1
        writer.transport.abort() if reset else writer.close()
        await server.settled(1.0)
        assert await aborted(server) == 1

        retry = await server.ask(TEXT, {**BODY, "prompt": LONG + text, "max_tokens": 2})

    assert text == "aaa" and retry.text == "aa"
    assert retry.usage["prompt_tokens_details"]["cached_tokens"] >= 32


async def test_before_the_whole_answer(tok):
    """(b): both routes."""
    async with slow(tok) as server:
        for count, (path, body) in enumerate(((TEXT, BODY), (CHAT, {**HI, "max_tokens": 200})), start=1):
            steps = recorded(server)
            _, writer = await connect(server, path, body)
            await eventually(lambda steps=steps: len(steps) > 3, 5)
            writer.close()
            await server.settled(1.0)
            assert await aborted(server) == count


async def test_in_the_queue(tok):
    """(c): behind a full batch, streaming and not: no prefill ever starts, and the one who runs is not disturbed."""
    async with slow(tok, max_num_seqs=1) as server:
        steps = recorded(server)
        running = asyncio.create_task(server.ask(TEXT, {**BODY, "max_tokens": 60}))
        await eventually(lambda: server.scheduler.num_running == 1, 5)
        for count, stream in enumerate((True, False), start=1):
            _, writer = await connect(server, TEXT, {**BODY, "prompt": "queued", "stream": stream})
            await eventually(lambda: server.scheduler.num_waiting == 1, 5)
            writer.close()
            await eventually(lambda: server.scheduler.num_waiting == 0, 1.0)
            assert await aborted(server) == count
        assert not running.done()
        assert (await running).text == "a" * 60

    opened = [bytes(opening.tokens[: opening.prompt_len]) for step in steps for opening in step.opened]
    assert LONG.encode() in opened and b"queued" not in opened


async def test_with_two_samples(tok):
    """(d): both end, and each counts as aborted."""
    async with slow(tok) as server:
        body = {**BODY, "n": 2, "temperature": 1, "seed": 1, "stream": True}
        reader, writer = await connect(server, TEXT, body)
        await chunks(reader, 6)
        assert server.scheduler.num_running == 2
        writer.close()
        await server.settled(1.0)
        assert await aborted(server) == 2


async def test_while_the_second_sample_waits_for_the_first(tok):
    """A long prompt is computed for the first sample; the second never starts when the client leaves meanwhile."""
    model = ScriptModel([97] * 400)
    async with serving(model, tok, socket=True) as server:
        steps = recorded(server)
        model.gate.clear()
        _, writer = await connect(server, TEXT, {**BODY, "n": 2, "temperature": 1, "stream": True})
        await eventually(lambda: len(steps) == 1, 5)
        writer.close()
        await eventually(lambda: len(server.engine.streams) == 0, 1.0)
        model.gate.set()
        await server.settled(1.0)
        assert await aborted(server) == 2
        assert sum(len(step.opened) for step in steps) == 1


async def test_with_several_prompts(tok):
    """One connection, three prompts: all of them end."""
    async with slow(tok) as server:
        reader, writer = await connect(server, TEXT, {**BODY, "prompt": ["x", "y", "z"], "stream": True})
        await chunks(reader, 6)
        assert server.scheduler.num_running == 3
        writer.close()
        await server.settled(1.0)
        assert await aborted(server) == 3
