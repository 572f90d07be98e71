"""Thousands of requests that are nearly right: no 5xx, no leak, no held loop, and the control request still answers."""

import asyncio

import pytest

from tests.scripted import FlatModel

from .harness import Streamed, check_error, serving, strict
from .lag import watched
from .mutate import request

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]
AT_ONCE, PATIENCE = 16, 5.0
LIMIT, ROUNDS, FEW = 0.1, 3, 1500  # rounds of a run of so few requests, beside other tests; a longer run has one


async def answer(host, port, sent):
    """(status, headers, body), or None when the client lost its patience and left."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**22)
    try:
        writer.write(sent.head + sent.body)
        data = await asyncio.wait_for(reader.read(), PATIENCE)
    except (TimeoutError, ConnectionError):
        return None
    finally:
        writer.transport.abort()
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return (
        int(status.split()[1]),
        headers,
        _unchunked(body) if "chunked" in headers.get("transfer-encoding", "") else body,
    )


def _unchunked(body):
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found, body = found + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return found


def check(found, sent):
    """What has to hold for each answer."""
    status, headers, body = found
    assert status < 500, (status, body[:500])
    kind = headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        if b"event: " not in body:  # OpenAI's chunks; other protocols have events of their own
            Streamed.parse(body.decode())
    elif kind.startswith("application/json") and sent.tame:
        parsed = strict(body)
        assert status == 200 or "error" in parsed, parsed
        if status >= 400 and parsed.get("type") != "error":
            check_error(parsed)


async def test_no_request_hurts(tok, request_count):
    """Seeds 0 .. N-1 (`--fuzz N`); a failure names its seed.

    A request that holds the loop holds it each time that it is sent. A gap that does not come again when all of them
    are sent once more was the machine's: once in some runs of all tests, whose other processes take the cores.
    """
    requests, gaps = [request(seed) for seed in range(request_count)], []
    rounds = ROUNDS if request_count <= FEW else 1
    async with serving(FlatModel(), tok, socket=True, max_num_seqs=32, num_gpu_blocks_override=400) as server:
        where = server.http.base_url
        while len(gaps) < rounds and (not gaps or gaps[-1].worst >= LIMIT):
            numbered, left = enumerate(requests), []

            async def client(numbered=numbered, left=left):
                for seed, sent in numbered:
                    found = await answer(where.host, where.port, sent)
                    if found is None:
                        left.append(seed)
                        continue
                    try:
                        check(found, sent)
                    except Exception as error:
                        raise AssertionError(f"seed {seed}: {sent.body[:300]}") from error

            async with watched() as lag:
                await asyncio.gather(*(client() for _ in range(AT_ONCE)))
            await server.settled(PATIENCE)
            gaps.append(lag)
            assert len(left) < request_count / 20, f"no answer in time: {left[:10]}"

    assert gaps[-1].worst < LIMIT, "\n\n".join(map(str, gaps))


@pytest.fixture
def request_count(pytestconfig):
    return pytestconfig.getoption("--fuzz")
