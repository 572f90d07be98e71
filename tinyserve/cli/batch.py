"""`tinyserve run-batch`: a file of requests in OpenAI's batch format is answered without a server.

    python -m tinyserve run-batch -i requests.jsonl -o answers.jsonl --model MODEL

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [...]}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
     "error": null}

Each line goes through the app that a server has (server/app.py), so that it is answered, or refused, as over HTTP; what
is no request at all gets its `error`. Lines are read when there is room for them and written when they are done: a file
of any size takes little memory, answers come in any order, and what is there when the run is stopped stays.

Exit codes: 0 when every line has its answer or its error, 1 when not, 2 for a wrong option, 128 and the signal's number
when one came, 141 when nobody reads the answers.

Before: server/app.py, engine/engine.py, parse.py, batch_files.py.  After: a shell.

Source: OpenAI's API reference, the request input and output objects of batches.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from attrs import evolve

from ..config import EngineConfig, prepare_cpu_environment
from ..errors import ConfigError, RequestError, shown
from ..options import parse_size
from ..server.app import create_app
from ..server.face import Service
from . import log
from .batch_files import Line, Sink, Source, open_both
from .parse import Parser, read_config
from .process import SWITCH_INTERVAL, Signals, keep_loaded, leave_soon

logger = logging.getLogger("tinyserve.batch")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
WAITING = 2  # times --max-num-seqs: requests that are under way, so that the next step never lacks one
MOST_AT_ONCE = 2**16
BESIDE_BODY = 64 * 1024  # bytes that a line may have besides a body of --max-body-bytes
REMEMBERED = 2**20  # custom ids that are looked out for, should they come again
_HELP = """\
Answer a file of requests in OpenAI's batch format, without a server. A line of the file:

  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1, 2, 3,", "max_tokens": 8}}

A url is one of %s.
A line of the answers has the custom_id, and response.body or an error; answers come in the order in which they end."""


def run(argv: Sequence[str]) -> int:
    """Answer a file. Returns: 0 when every line got an answer or its error. Raises: ConfigError, EngineError."""
    options, rest = _options(argv)
    config = _unguarded(read_config(rest, "tinyserve run-batch", _HELP % ", ".join(ROUTES), _own))
    # a wrong name is told before a model is loaded, and what -o holds is kept until there is something to answer with
    most = config.server.max_body_bytes + BESIDE_BODY
    source, sink = open_both(options.input_file, options.output_file, most)
    prepare_cpu_environment(config.runner.cpu_threads)
    log.set_up(config.log)
    sys.setswitchinterval(SWITCH_INTERVAL)
    with contextlib.closing(source), contextlib.closing(sink):
        return asyncio.run(_answer(config, source, sink, options.max_concurrency))


def _own(parser: Any) -> None:
    """Add the options that no other command has."""
    more = {"metavar": "FILE"}
    parser.add_argument("-i", "--input-file", **more, help="requests, one a line; - is standard input (needed)")
    parser.add_argument("-o", "--output-file", **more, help="answers, one a line; - is standard output (needed)")
    parser.add_argument("--max-concurrency", metavar="N", help="requests at the same time [twice --max-num-seqs]")
    for name in ("input_file", "output_file", "max_concurrency"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the others."""
    parser = Parser(add_help=False, allow_abbrev=False)
    _own(parser)
    found, rest = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(rest):
        return found, rest
    for name in ("input_file", "output_file"):
        if not getattr(found, name):
            raise ConfigError(f"run-batch needs --{name.replace('_', '-')} FILE, or - for the standard one.")
    if found.max_concurrency is not None:
        try:
            found.max_concurrency = parse_size(found.max_concurrency)
        except ValueError as error:
            raise ConfigError(f"--max-concurrency {error}.") from None
        if not 1 <= found.max_concurrency <= MOST_AT_ONCE:
            raise ConfigError(f"--max-concurrency must be at least 1 and at most {MOST_AT_ONCE}.")
    return found, rest


def _unguarded(config: EngineConfig) -> EngineConfig:
    """Without what protects a server from strangers: nobody else asks, and no line may be refused for it."""
    return evolve(
        config,
        server=evolve(config.server, api_key=(), allowed_hosts=(), root_path=""),
        scheduler=evolve(config.scheduler, max_num_queued_reqs=None, max_num_queued_tokens=None),
    )


async def _answer(config: EngineConfig, source: Source, sink: Sink, most: int | None) -> int:
    """Load the model, answer every line, let go of the model. Returns: the exit code."""
    signals = Signals()
    stopped = asyncio.create_task(signals.first.wait())
    loading = asyncio.create_task(_load(config))
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        logger.warning("stopped by %s while loading the model; nothing is written", signals.number.name)
        leave_soon(128 + signals.number)
        return 128 + signals.number
    engine = await loading
    try:
        keep_loaded()
        sink.clear()
        batch = Batch(Service(config, engine), sink)
        running = asyncio.create_task(batch.run(source.lines(), most or WAITING * engine.machine.max_running))
        dead = asyncio.create_task(engine.wait_closed())
        try:
            await asyncio.wait({running, dead, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not running.done():
                logger.warning("stopped by %s: %s; all that is written stays", signals.number.name, batch.report())
                leave_soon(128 + signals.number)  # also where a line cannot be written, as nobody reads
                return 128 + signals.number
            for task in (dead, running):
                if task.done():
                    await task  # which raises what ended it
        finally:
            for task in (running, dead):
                task.cancel()
            await asyncio.wait({running, dead})
        logger.info("%s", batch.report())
        engine.check_health()
        return 0
    finally:
        stopped.cancel()
        await engine.close()


async def _load(config: EngineConfig) -> Any:
    from ..engine.engine import Engine

    engine = await Engine.start(config, offline=True)
    await asyncio.to_thread(engine.machine.grammars.warm)
    return engine


class Batch:
    """Answers lines with a service's app.

    Args: sink: where answers go, a line each.
    Attributes: answered, refused: how many lines so far; refused ones have another status than 200, or an error.
    """

    def __init__(self, service: Service, sink: Sink) -> None:
        self._app = create_app(service)
        self._most = service.config.server.max_body_bytes
        self._sink = sink
        self._start = time.monotonic()
        self._ids: set[int] = set()
        self.answered = self.refused = self.repeated = 0

    async def run(self, lines: AsyncIterator[Line], most: int) -> None:
        """Answer all lines, at most so many at the same time."""
        turn = asyncio.Lock()

        async def worker() -> None:
            while (line := await following()) is not None:
                await self._one(line)

        async def following() -> Line | None:
            async with turn:
                return await anext(lines, None)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(most):
                    tasks.create_task(worker())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _one(self, line: Line) -> None:
        custom, response, error, name = None, None, None, uuid.uuid4().hex
        try:
            if not line.data:
                raise RequestError(f"It has {line.size} bytes; a body may have {self._most} (--max-body-bytes).")
            asked = _parsed(line.data)
            custom = self._custom(asked)
            response = await self._asked(name, *_checked(asked))
        except RequestError as wrong:
            error = {"code": "invalid_request", "message": f"Line {line.number}: {wrong}"}
        self.answered += 1
        self.refused += error is not None or response["status_code"] != 200
        answer = {"id": f"batch_req_{name}", "custom_id": custom, "response": response, "error": error}
        await self._sink.write(orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE))

    def _custom(self, asked: dict[str, Any]) -> Any:
        """The name of a request, by which its answer is found. Raises: RequestError: it is no name."""
        custom = asked.get("custom_id")
        if isinstance(custom, (dict, list)):
            raise RequestError(f"custom_id must be a text, got {shown(custom)}.", param="custom_id")
        if custom is not None:
            self.repeated += hash(custom) in self._ids
            if len(self._ids) < REMEMBERED:
                self._ids.add(hash(custom))
        return custom

    async def _asked(self, name: str, path: str, body: bytes) -> dict[str, Any]:
        """What the app answers. name: under which it is asked, and which the log has."""
        status, data = await call(self._app, path, body, name)
        parsed = orjson.loads(data)
        return {"status_code": status, "request_id": parsed.get("id") or name, "body": parsed}

    def report(self) -> str:
        """A line for the log."""
        seconds = time.monotonic() - self._start
        again = f"; {self.repeated} have the custom_id of another line" if self.repeated else ""
        return f"{self.answered} requests in {seconds:.1f} s, {self.refused} of them refused or failed{again}"


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        asked = orjson.loads(line.removeprefix(codecs.BOM_UTF8))  # which some editors put before a file's first line
    except orjson.JSONDecodeError as error:
        raise RequestError(f"It is not valid JSON: {error}.") from None
    if not isinstance(asked, dict):
        raise RequestError("It must be a JSON object.")
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
    try:
        return url, orjson.dumps(body)
    except TypeError:  # what can be read may be nested more deeply than what can be written
        raise RequestError("body is nested too deeply.", param="body") from None


async def call(app: Any, path: str, body: bytes, name: str) -> tuple[int, bytes]:
    """POST a JSON body to an ASGI app in this process. Returns: the status and the body of its answer."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-request-id", name.encode())]
    headers.append((b"content-length", b"%d" % len(body)))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
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
