"""`tinyserve run-batch`: a file of requests in OpenAI's batch format is answered without a server.

    python -m tinyserve run-batch -i requests.jsonl -o answers.jsonl --model MODEL

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [...]}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
     "error": null}

Each line goes through the app that a server has (server/app.py), so that it is answered, or refused, as over HTTP; what
is no request at all gets its `error`. Lines are read when there is room for them and written when they are done: a file
of any size takes little memory, answers come in any order, and what is there when the run is stopped stays.

Before: server/app.py, engine/engine.py, parse.py.  After: a shell.

Source: OpenAI's API reference, the request input and output objects of batches.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import logging
import os
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import IO, Any

import orjson
from attrs import evolve

from ..config import EngineConfig, prepare_cpu_environment
from ..errors import ConfigError, EngineError, RequestError, shown
from ..server.app import create_app
from ..server.face import Service
from . import log
from .parse import read_config
from .process import SWITCH_INTERVAL, keep_loaded

logger = logging.getLogger("tinyserve.batch")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
WAITING = 2  # times --max-num-seqs: requests that are under way, so that the next step never lacks one
_HELP = (
    "Answer a file of requests. Options of its own: -i FILE (--input-file) and -o FILE (--output-file), JSON lines, - "
    "for standard input and output; --max-concurrency N: requests at the same time [twice --max-num-seqs]."
)


def run(argv: Sequence[str]) -> int:
    """Answer a file. Returns: 0 when every line got an answer or its error. Raises: ConfigError, EngineError."""
    options, rest = _options(argv)
    config = _unguarded(read_config(rest, "tinyserve run-batch", _HELP))
    source = _opened(options.input_file, "-i", "rb")  # a wrong name is told before a model is loaded
    sink = _opened(options.output_file, "-o", "ab")  # what it holds is kept until there is something to answer with
    prepare_cpu_environment(config.runner.cpu_threads)
    log.set_up(config.log)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        with contextlib.closing(source), contextlib.closing(sink):
            asyncio.run(_answer(config, source, sink, options.max_concurrency))
    except OSError as error:
        raise EngineError(f"the batch ended early: {error}") from error
    return 0


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-i", "--input-file", "--input_file")
    parser.add_argument("-o", "--output-file", "--output_file")
    parser.add_argument("--max-concurrency", "--max_concurrency", type=int)
    try:
        found, rest = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit) as error:
        raise ConfigError(f"run-batch: {error}") from None
    if {"-h", "--help"} & set(rest):
        return found, rest
    for name in ("input_file", "output_file"):
        if not getattr(found, name):
            raise ConfigError(f"run-batch needs --{name.replace('_', '-')} FILE, or - for the standard one.")
    if found.max_concurrency is not None and found.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1.")
    names = found.input_file, found.output_file
    if "-" not in names and all(map(os.path.exists, names)) and os.path.samefile(*names):
        raise ConfigError("--input-file and --output-file are the same file.")
    return found, rest


def _unguarded(config: EngineConfig) -> EngineConfig:
    """Without what protects a server from strangers: nobody else asks, and no line may be refused for it."""
    return evolve(
        config,
        server=evolve(config.server, api_key=(), allowed_hosts=(), root_path=""),
        scheduler=evolve(config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None),
    )


def _opened(name: str, option: str, mode: str) -> IO[bytes]:
    if name == "-":
        return (sys.stdin if mode == "rb" else sys.stdout).buffer
    if "://" in name:
        raise ConfigError(f"{option} {name}: files of this machine only; fetch or send it with curl.")
    try:
        return open(name, mode)
    except OSError as error:
        raise ConfigError(f"{option} {name}: {error.strerror or error}.") from None


async def _answer(config: EngineConfig, source: IO[bytes], sink: IO[bytes], most: int | None) -> None:
    """Load the model, answer every line, let go of the model."""
    from ..engine.engine import Engine

    engine = await Engine.start(config, offline=True)
    try:
        await asyncio.to_thread(engine.machine.grammars.warm)
        keep_loaded()
        if stat.S_ISREG(os.fstat(sink.fileno()).st_mode) and sink is not sys.stdout.buffer:
            sink.truncate(0)
        batch = Batch(Service(config, engine), sink)
        await batch.run(source, most or WAITING * engine.machine.max_running)
        logger.info("%s", batch.report())
        engine.check_health()
    finally:
        await engine.close()


class Batch:
    """Answers lines with a service's app.

    Args: sink: where answers go, a line each.
    Attributes: answered, refused: how many lines so far; refused ones have another status than 200, or an error.
    """

    def __init__(self, service: Service, sink: IO[bytes]) -> None:
        self._app = create_app(service)
        self._sink = sink
        self._start = time.monotonic()
        self.answered = self.refused = 0

    async def run(self, lines: Iterator[bytes] | IO[bytes], most: int) -> None:
        """Answer all lines, at most so many at the same time."""
        waiting, turn = (line for line in lines if line.strip()), asyncio.Lock()

        async def worker() -> None:
            while (line := await following()) is not None:
                await self._one(line)

        async def following() -> bytes | None:
            async with turn:
                return await asyncio.to_thread(next, waiting, None)  # which may wait for another program

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(most):
                    tasks.create_task(worker())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _one(self, line: bytes) -> None:
        custom, response, error = None, None, None
        try:
            asked = _parsed(line)
            custom = asked.get("custom_id")
            response = await self._asked(*_checked(asked))
        except RequestError as wrong:
            error = {"code": "invalid_request", "message": str(wrong)}
        self.answered += 1
        self.refused += error is not None or response["status_code"] != 200
        answer = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom, "response": response, "error": error}
        self._sink.write(orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE))
        self._sink.flush()

    async def _asked(self, path: str, body: bytes) -> dict[str, Any]:
        """What the app answers."""
        status, data = await call(self._app, path, body)
        parsed = orjson.loads(data)
        return {"status_code": status, "request_id": parsed.get("id") or uuid.uuid4().hex, "body": parsed}

    def report(self) -> str:
        """A line for the log."""
        seconds = time.monotonic() - self._start
        return f"{self.answered} requests in {seconds:.1f} s, {self.refused} of them refused or failed"


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        asked = orjson.loads(line.removeprefix(codecs.BOM_UTF8))  # which some editors put before a file's first line
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The line is not valid JSON: {error}.") from None
    if not isinstance(asked, dict):
        raise RequestError("The line must be a JSON object.")
    return asked


def _checked(asked: dict[str, Any]) -> tuple[str, bytes]:
    """Path and body of a request. Raises: RequestError: it cannot be one of a batch."""
    url, body = asked.get("url"), asked.get("body")
    if asked.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, got {shown(asked['method'])}.", param="method")
    if url not in ROUTES:
        raise RequestError(f"url must be one of {', '.join(ROUTES)}, got {shown(url)}.", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be a JSON object.", param="body")
    for name in ("stream", "background"):
        if body.get(name):
            raise RequestError(f"{name}: answers of a batch come whole; leave it out.", param=name)
    return url, orjson.dumps(body)


async def call(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """POST a JSON body to an ASGI app in this process. Returns: the status and the body of its answer."""
    lengths = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": lengths,
        "client": None, "server": None,
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, pieces = 500, []

    async def receive() -> Any:
        for message in messages:
            return message
        await asyncio.Event().wait()  # nobody leaves

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(pieces)
