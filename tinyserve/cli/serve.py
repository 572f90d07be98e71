"""`tinyserve serve`: socket, engine, server, signals, in one event loop.

    bind -> listen (503) -> load -> ready -> SIGTERM or Ctrl-C -> drain -> abort -> exit

Exit codes: 0 after a signal, 1 when the engine or the model failed, 2 when an option is wrong.

Before: parse.py, server/serve.py, engine/engine.py.  After: a shell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..config import EngineConfig, prepare_cpu_environment
from ..errors import TinyserveError
from ..server.face import Service
from ..server.serve import Server, open_socket
from . import log
from .parse import chosen, read_config
from .process import SWITCH_INTERVAL, allow_files, keep_loaded

logger = logging.getLogger("tinyserve.serve")
LEAVE_SECONDS = 0.5  # for a model that loads to give up by itself, when a signal came


def run(argv: Sequence[str]) -> int:
    """Serve until a signal comes. Returns the exit code."""
    config = read_config(argv, "tinyserve serve", "Serve a model with OpenAI's HTTP API.")
    prepare_cpu_environment(config.runner.cpu_threads)
    log.set_up(config.log)
    allow_files()
    return asyncio.run(_serve(config))


async def _serve(config: EngineConfig) -> int:
    start = time.perf_counter()
    sys.setswitchinterval(SWITCH_INTERVAL)
    logger.info("tinyserve %s, model %s", __version__, config.model.model)
    if different := {name: value for name, value in chosen(config).items() if name != "model"}:
        logger.info("options: %s", ", ".join(f"{name}={value}" for name, value in different.items()))
    service = Service(config)
    server = Server(service, open_socket(config.server))
    signals = _Signals()
    await server.start()
    logger.info("listening on %s; requests get 503 until the model is loaded", server.address)
    loading = asyncio.create_task(_load(config))
    stopped = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            _leave_soon()
            return 0
        service.engine = engine = await loading
        keep_loaded()
        print(_welcome(server.address, service, time.perf_counter() - start), flush=True)
        return await _until_stopped(engine, server, stopped)
    except TinyserveError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        loading.cancel()
        stopped.cancel()
        await server.stop(config.server.shutdown_timeout if service.engine else 0.0)


def _leave_soon() -> None:
    """End the process although a thread still loads: Python would wait for it, and it may be inside a download."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    logger.info("stopped while loading the model")
    timer = threading.Timer(LEAVE_SECONDS, leave)
    timer.daemon = True
    timer.start()


async def _load(config: EngineConfig) -> Any:
    from ..engine.engine import Engine

    engine = await Engine.start(config)
    await asyncio.to_thread(engine.machine.grammars.warm)
    return engine


async def _until_stopped(engine: Any, server: Server, stopped: asyncio.Task[Any]) -> int:
    """Wait for a signal, or for the engine or the HTTP server to end by itself."""
    dead = asyncio.create_task(engine.wait_closed())
    failed = asyncio.create_task(server.wait_failed())
    await asyncio.wait({dead, failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        logger.info("stopping; a second signal ends the process at once")
        dead.cancel()
        failed.cancel()
        return 0
    for task in (dead, failed):
        if task.done() and task.exception():
            logger.error("%s", task.exception())
    return 1


class _Signals:
    """The first SIGTERM or SIGINT sets an event; the second one kills as usual."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        self.first.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def _welcome(address: str, service: Service, seconds: float) -> str:
    """What to try, once the server is ready."""
    engine, options = service.engine, service.config.server
    name = engine.served_names[0]
    url = "http://localhost" if options.uds else address
    socket = f" --unix-socket {options.uds}" if options.uds else ""
    key = " -H 'Authorization: Bearer <key>'" if options.api_key else ""
    question = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    browser = "" if options.uds else f"Chat in a browser: {url}/    Reference: {url}/docs\n\n"
    shown_key = "<key>" if options.api_key else "none"
    return f"""
Ready in {seconds:.1f} s: {name}, context {engine.max_model_len} tokens, at {address}

{browser}Try:
  curl{socket} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{json.dumps(question)}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{shown_key}")
  answer = client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)

  python -m tinyserve chat --url {url}/v1
"""
