"""Many clients that come and go: what they leave behind is nothing."""

import asyncio
import contextlib
import ctypes
import gc
import json
import random
import resource
import time
from pathlib import Path

import pytest

from tests.scripted import FlatModel
from tinyserve.grammar import compile

from .harness import serving

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600)]
CLIENTS = 1000


async def leaving(address, rng, until):
    """Connect, ask for something, read a little or nothing, and leave; again and again."""
    while time.monotonic() < until:
        stream = rng.random() < 0.6
        body = {"prompt": [rng.randrange(97, 107) for _ in range(rng.randrange(1, 60))], "stream": stream}
        body |= {"max_tokens": rng.randrange(1, 150), "n": rng.choice([1, 1, 2, 4]), "ignore_eos": True}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        reader, writer = await asyncio.open_connection(*address)
        try:
            sent = data if rng.random() < 0.9 else data[: rng.randrange(len(data))]
            writer.write(head.encode() + b"\r\n\r\n" + sent)
            await asyncio.wait_for(reader.read(rng.choice([1, 300, 4000])), rng.random() * 2)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.transport.abort() if rng.random() < 0.5 else writer.close()
        await asyncio.sleep(rng.random())


async def test_an_abort_storm_leaves_nothing(tok, pytestconfig):
    """1000 clients for `--storm` seconds, in every state: then 0 run or wait, all blocks are free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    async with serving(FlatModel(), tok, socket=True, max_num_seqs=64, num_gpu_blocks_override=600) as server:
        address = server.http.base_url.host, server.http.base_url.port
        until = time.monotonic() + pytestconfig.getoption("--storm")
        await asyncio.gather(*(leaving(address, random.Random(seed), until) for seed in range(CLIENTS)))
        await server.settled(10.0)
        aborted = await server.metric("request_success", finished_reason="abort")
        assert aborted > 50
        assert await server.metric("num_requests_running") == await server.metric("num_requests_waiting") == 0
        assert await server.metric("kv_cache_usage_perc") == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident():
    """Bytes of this process in memory, without what the allocator keeps for later: with threads it keeps much."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


KINDS = {
    "plain": lambda number: {},
    "stop strings": lambda number: {"stop": [f"never {number}"]},
    "schemas": lambda number: {"structured_outputs": {"json": {"const": f"c{number}"}}, "max_tokens": 2},
    "salts": lambda number: {"cache_salt": f"s{number}"},
}


@pytest.mark.parametrize("kind", [*KINDS, "aborted"])
async def test_memory_does_not_grow(tok, pytestconfig, monkeypatch, kind):
    """`--growth N` short requests with unique prompts: after the first tenth less than 1 KB each, and 2 MB."""
    count = pytestconfig.getoption("--growth")
    monkeypatch.setattr(compile, "CACHED", min(compile.CACHED, count // 20))  # full within the first tenth
    async with serving(FlatModel(), tok, max_num_seqs=32, num_gpu_blocks_override=300) as server:

        async def ask(number):
            body = {"prompt": f"request {number}", "max_tokens": 1, "temperature": 0}
            if kind == "aborted":
                outputs = server.engine.generate(body["prompt"])
                await anext(outputs)
                await outputs.aclose()
            else:
                await server.ask("/v1/completions", body | KINDS[kind](number))

        async def run(numbers):
            for at in range(numbers.start, numbers.stop, 16):
                await asyncio.gather(*(ask(number) for number in range(at, min(at + 16, numbers.stop))))
            await server.settled(10.0)
            gc.collect()
            return resident()

        before = await run(range(count // 10))
        after = await run(range(count // 10, count))
    measured = count - count // 10
    print(f"{kind}: {(after - before) / measured:.0f} bytes a request")
    assert after - before < 1024 * measured + 2 * 2**20
