"""What a request costs the server until its last byte is sent, when the model costs nothing.

    python -m bench.arrivals [--requests 2000] [--at-once 64] [--route chat|completions] [--keep] [--profile]

Processor time of the server's process for each request, of streams with two tokens: all of it; the sockets alone (an
app that reads the body and sends as many pieces); the app called without a socket; the engine called with ids. Clients
are another process. What the rest of a stream costs is `bench.streams`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import sys
import time

from tinyserve import config
from tinyserve.cli.process import SWITCH_INTERVAL, keep_loaded
from tinyserve.request import SamplingParams
from tinyserve.server import app as apps
from tinyserve.server import connections, serve
from tinyserve.server.face import Service
from tinyserve.text.template import ChatTemplate

from . import streams

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
WORDS = "The quick brown fox jumps over the lazy dog and runs through the forest until night falls. "
BODIES = {
    "chat": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": WORDS}]},
    "completions": {"prompt": list(WORDS.encode())},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
HEADERS = {
    "host": "127.0.0.1:8000", "user-agent": "bench/1.0", "accept": "*/*", "accept-encoding": "gzip, deflate",
    "content-type": "application/json", "authorization": "Bearer none",
}  # fmt: skip
TOKENS = 2


def body_of(route: str) -> bytes:
    more = {"model": "script", "max_tokens": TOKENS, "temperature": 0.7, "ignore_eos": True, "stream": True}
    return json.dumps({**BODIES[route], **more}).encode()


def request_of(route: str, keep: bool) -> bytes:
    """A request as bytes on the wire."""
    body = body_of(route)
    headers = {**HEADERS, "content-length": str(len(body)), "connection": "keep-alive" if keep else "close"}
    lines = [f"POST {PATHS[route]} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def clients(port: int, count: int, at_once: int, data: bytes, keep: bool, pipe) -> None:
    """What the other process does; tells how many answers were whole."""

    async def one(number: int) -> int:
        whole, ends = 0, None
        for _ in range(number, count, at_once):
            reader, writer = ends or await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            answer = await reader.readuntil(b"0\r\n\r\n")
            whole += answer.startswith(b"HTTP/1.1 200")
            ends = (reader, writer) if keep else writer.close()
        return whole

    async def work() -> int:
        return sum(await asyncio.gather(*map(one, range(at_once))))

    pipe.send(asyncio.run(work()))


class Meter:
    """Processor time of this process while a block runs; of the best of its runs, for each request."""

    def __init__(self, count: int, profile: bool) -> None:
        self._count = count
        self._profiler = cProfile.Profile() if profile else None

    async def best(self, name: str, work, runs: int = 3) -> float:
        found = []
        for _ in range(runs):
            begin = time.process_time()
            if self._profiler:
                self._profiler.enable()
            await work()
            if self._profiler:
                self._profiler.disable()
            found.append((time.process_time() - begin) / self._count * 1e6)
        print(f"{name:40} {min(found):7.0f} us a request   (of {', '.join(f'{one:.0f}' for one in found)})")
        return min(found)

    def tell(self) -> None:
        if self._profiler:
            pstats.Stats(self._profiler).sort_stats("tottime").print_stats(70)


async def over_sockets(port: int, options: argparse.Namespace, data: bytes) -> None:
    ours, theirs = multiprocessing.Pipe()
    details = (port, options.requests, options.at_once, data, options.keep, theirs)
    other = multiprocessing.get_context("spawn").Process(target=clients, args=details)
    other.start()
    theirs.close()
    while not ours.poll():
        await asyncio.sleep(0.05)
    assert ours.recv() == options.requests
    other.join()


async def bare(_scope, receive, send) -> None:
    """An app that does nothing with what it reads."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(TOKENS):
        await send({"type": "http.response.body", "body": b"data: " + b"x" * 200 + b"\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def call_app(app, path: str, body: bytes, count: int, at_once: int) -> None:
    """The requests, as an ASGI server would hand them on."""
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    headers.append((b"content-length", b"%d" % len(body)))

    async def one() -> None:
        news: asyncio.Queue = asyncio.Queue()
        for message in ({"body": body, "more_body": True}, {"body": b"", "more_body": False}):
            news.put_nowait({"type": "http.request", **message})
        ended = []

        async def send(message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended.append(message)

        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "root_path": "", "query_string": b"", "headers": list(headers), "scheme": "http", "server": ("x", 80),
            "client": ("y", 1), "extensions": {}, "state": {}, "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, news.get, send)
        assert ended

    for _ in range(count // at_once):
        await asyncio.gather(*(one() for _ in range(at_once)))


async def call_engine(engine, count: int, at_once: int, prompt: list[int]) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.7, ignore_eos=True)

    async def one() -> None:
        async for _ in engine.generate(prompt, sampling):
            pass

    for _ in range(count // at_once):
        await asyncio.gather(*(one() for _ in range(at_once)))


async def measure(options: argparse.Namespace) -> None:
    settings = config.build(
        {"model": "script", "port": 0, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "disable_log_stats": True}
    )
    engine = await streams.engine_of(settings, template=ChatTemplate(TEMPLATE))
    meter, data = Meter(options.requests, options.profile), request_of(options.route, options.keep)

    service = Service(settings, engine)
    server = serve.Server(service, serve.open_socket(settings.server))
    await server.start()
    port = int(server.address.rsplit(":", 1)[1])
    await over_sockets(port, options, data)
    await meter.best("all of it", lambda: over_sockets(port, options, data))
    if not options.all:
        bound, closing = serve.open_socket(settings.server), asyncio.Event()
        form = serve.hypercorn_config(settings.server)
        task = asyncio.create_task(connections.serve(bare, form, bound, closing, connections.Patience()))
        await asyncio.sleep(0.1)
        await meter.best("sockets alone", lambda: over_sockets(bound.getsockname()[1], options, data))
        closing.set()
        await task
        app, path, body = apps.create_app(service), PATHS[options.route], body_of(options.route)
        await meter.best("app and engine", lambda: call_app(app, path, body, options.requests, options.at_once))
        ids = BODIES["completions"]["prompt"]
        await meter.best("engine alone", lambda: call_engine(engine, options.requests, options.at_once, ids))
    await server.stop()
    meter.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--route", choices=list(PATHS), default="chat")
    parser.add_argument("--keep", action="store_true", help="keep connections for the next request")
    parser.add_argument("--all", action="store_true", help="only the whole")
    parser.add_argument("--profile", action="store_true")
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_loaded()
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
