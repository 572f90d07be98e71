"""`tinyserve serve`: socket, engine, server, signals, in one event loop.

    bind -> listen (503) -> load -> ready -> SIGTERM or Ctrl-C -> drain -> abort -> exit

Exit codes: 0 after a signal, 1 when the engine or the model failed, 2 when an option is wrong.

Before: parse.py, server/serve.py, engine/engine.py.  After: a shell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from shlex import quote
from typing import Any

from .. import __version__
from ..config import EngineConfig, ServerOptions, prepare_cpu_environment
from ..errors import TinyserveError
from ..server.face import Service
from ..server.serve import Server, open_socket
from . import log
from .parse import chosen, read_config
from .process import SWITCH_INTERVAL, Signals, allow_files, forget_output, keep_loaded, leave_soon

logger = logging.getLogger("tinyserve.serve")


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
    signals = Signals()
    await server.start()
    logger.info("listening on %s; requests get 503 until the model is loaded", server.address)
    loading = asyncio.create_task(_load(config))
    stopped = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            logger.info("stopped while loading the model")
            leave_soon(0)
            return 0
        service.engine = engine = await loading
        keep_loaded()
        _ready(server.address, service, time.perf_counter() - start)
        return await _until_stopped(engine, server, stopped)
    except TinyserveError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        loading.cancel()
        stopped.cancel()
        await server.stop(config.server.shutdown_timeout if service.engine else 0.0)


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


def _ready(address: str, service: Service, seconds: float) -> None:
    """Say that it is: to people with what they may try, to machines in a record like all others."""
    if service.config.log.log_format == "text":
        _greet(_welcome(address, service, seconds))
    else:
        logger.info("%s", _told(address, service, seconds))


def _told(address: str, service: Service, seconds: float) -> str:
    name, length = log.printable(service.engine.served_names[0]), service.engine.max_model_len
    return f"Ready in {seconds:.1f} s: {name}, context {length} token{'s' * (length != 1)}, at {address}"


def _greet(text: str) -> None:
    """Print it. A server serves, also where nobody reads what it prints."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("standard output takes nothing (%s); the greeting is not shown", error.strerror)
        forget_output()


def _welcome(address: str, service: Service, seconds: float) -> str:
    """What to try, once the server is ready: each line works as it is pasted, but for a key, which is not shown.

    Python's lines are not indented: it would not take them."""
    engine, options = service.engine, service.config.server
    name, url = engine.served_names[0], _url(address, options)
    question = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    socket = f" --unix-socket {quote(options.uds)}" if options.uds else ""
    key = " -H 'Authorization: Bearer <key>'" if options.api_key else ""
    browser = "" if options.uds else f"Chat in a browser: {url}/    Reference: {url}/docs\n\n"
    arguments = f'base_url="{url}/v1", api_key="{"<key>" if options.api_key else "none"}"'
    imports = "from openai import OpenAI"
    if options.uds:
        imports = f"import httpx\n{imports}"
        arguments += f",\n  http_client=httpx.Client(transport=httpx.HTTPTransport(uds={_python(options.uds)}))"
    return f"""
{_told(address, service, seconds)}

{browser}Try:
  curl{socket} {quote(f"{url}/v1/chat/completions")}{key} -H 'Content-Type: application/json' \\
    -d {quote(json.dumps(question))}

{imports}
client = OpenAI({arguments})
answer = client.chat.completions.create(
  model={_python(name)}, messages={json.dumps(question["messages"])})
print(answer.choices[0].message.content)
{_terminal(address, url, options)}{_remarks(options)}"""


def _python(text: str) -> str:
    """A text as Python has it. JSON writes some letters as two halves, which no client could send."""
    return json.dumps(text) if text.isascii() else repr(text)


def _url(address: str, options: ServerOptions) -> str:
    """Where clients find this server, under a name to which it answers."""
    scheme = "https" if options.ssl_certfile else "http"
    named = [host for host in options.allowed_hosts if "*" not in host]
    if options.uds:
        return f"{scheme}://{named[0] if named else 'localhost'}"
    host, _, port = address.partition("://")[2].rpartition(":")
    if "*" in options.allowed_hosts or not named or host.strip("[]") in (each.strip("[]") for each in named):
        return address
    name = named[0]
    if name.count(":") > 1 and not name.startswith("["):
        name = f"[{name}]"
    return (
        f"{scheme}://{name}" if name.rpartition(":")[2].isdigit() and "[" not in name else f"{scheme}://{name}:{port}"
    )


def _terminal(address: str, url: str, options: ServerOptions) -> str:
    """How to chat from a terminal: nothing where it cannot, as it has no certificate to show."""
    if options.ssl_ca_certs or (options.uds and (options.ssl_certfile or options.allowed_hosts)):
        return ""
    key = " --api-key '<key>'" if options.api_key else ""
    return f"\n  python -m tinyserve chat --url {quote(address if options.uds else f'{url}/v1')}{key}\n"


def _remarks(options: ServerOptions) -> str:
    """What a line above cannot hold."""
    lines = []
    if options.api_key:
        lines.append("<key>: one that this server was given; chat reads it from TINYSERVE_API_KEY, too.")
    if options.ssl_certfile:
        lines.append("TLS: ask under the certificate's name. If no authority that this machine knows has signed it:")
        lines.append(
            f"  curl --cacert {quote(options.ssl_certfile)}; for Python, SSL_CERT_FILE={quote(options.ssl_certfile)}"
        )
    if options.ssl_ca_certs:
        lines.append("Clients need a certificate of their own: curl --cert FILE --key FILE.")
    return "".join(f"\n{line}" for line in lines) + ("\n" if lines else "")
