"""How many events a second the client of `tinyserve bench serve` can take: its own ceiling.

    python -m bench.client [--connections 256] [--tokens 400] [--together 1]

A server in another process does nothing but write events that were made before, one chunk each, to all connections in
turn. The figure that can be compared is the client's processor time per event; a load that needs more events a second
than fit into one core must be measured with several clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from typing import Any

from tinyserve.bench.client import Server
from tinyserve.bench.load import load, progress_bar
from tinyserve.bench.requests import Endpoint
from tinyserve.cli.process import allow_files, keep_loaded

IDENTITY = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m", "system_fingerprint": None}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(reason: str | None) -> bytes:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": reason}
    data = b"data: " + json.dumps({**IDENTITY, "choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def serve(connections: int, tokens: int, together: int, pipe: Any) -> None:
    """What the other process does: when all requests are there, `together` events to each, again and again."""
    piece = event(None) * together
    last = event("length") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    async def work() -> None:
        writers, ready = [], asyncio.Event()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writers.append(writer)
            if len(writers) == connections:
                ready.set()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=connections)
        pipe.send(server.sockets[0].getsockname()[1])
        await ready.wait()
        for writer in writers:
            writer.write(HEAD)
        for _ in range((tokens - 1) // together):
            for writer in writers:
                writer.write(piece)
            await asyncio.gather(*(writer.drain() for writer in writers))
        for writer in writers:
            writer.write(last)
            await writer.drain()
            writer.close()

    asyncio.run(work())


async def measure(port: int, connections: int) -> None:
    server, endpoint = Server(f"http://127.0.0.1:{port}"), Endpoint.of("completions", {})
    bodies, times = [b"{}"] * connections, [0.0] * connections
    run = await load(server, endpoint, bodies, times, limit=None, bar=progress_bar(0, shown=False))
    events = sum(len(record.pieces) for record in run.records)
    assert all(record.whole for record in run.records), run.records[0].error
    print(
        f"{events} events over {connections} connections in {run.seconds:.2f} s; the client took {run.cpu:.2f} s of "
        f"processor time, {run.cpu / events * 1e6:.1f} us an event: {events / run.cpu:,.0f} a second with its own core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--together", type=int, default=1, help="events that come with one read")
    options = parser.parse_args()
    allow_files()
    ours, theirs = multiprocessing.Pipe()
    sizes = options.connections, options.tokens, options.together
    other = multiprocessing.get_context("spawn").Process(target=serve, args=(*sizes, theirs))
    other.start()
    port = ours.recv()
    keep_loaded()
    began = time.monotonic()
    asyncio.run(measure(port, options.connections))
    other.join(max(0.0, 10 - (time.monotonic() - began)))


if __name__ == "__main__":
    main()
