"""The app behind a socket: bound before the model loads, closed after the last answer.

    open_socket -> Server.start (answers 503) -> service.engine = ... (answers) -> SIGTERM -> drain -> abort -> closed

Hypercorn runs inside the engine's event loop. On the first signal no new request is taken, nor one whose body has not
come as a whole; running ones get `--shutdown-timeout` seconds to end, then they are aborted and their streams end
properly.

Before: app.py.  After: cli/serve.py (the command), notebooks that start a server in a cell.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import time
from pathlib import Path

import anyio
from hypercorn.config import Config

from ..config import ServerOptions
from ..errors import ConfigError
from .app import create_app
from .connections import Patience, serve
from .face import Service
from .spoken import HEADER_BYTES, check_libraries
from .tls import Certificates

BACKLOG = 1024
LAST_WORDS = 2.0  # seconds for aborted answers to leave, and for connections to close


def open_socket(options: ServerOptions) -> socket.socket:
    """Bind the address. Raises: ConfigError: it is in use or not ours, or the libraries do not fit."""
    check_libraries()
    if options.uds:
        return _unix_socket(options.uds)
    try:
        found = socket.getaddrinfo(options.host or None, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # the latter: no name can have such a part
        reason = getattr(error, "strerror", None) or error
        cure = " Stop what listens there, or choose another --port; 0 takes a free one." if _taken(error) else ""
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {reason}.{cure}") from None
    return bound


def _taken(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE


def _unix_socket(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            if _answers(path):
                raise ConfigError(f"cannot listen on {path}: another server does. Stop it, or choose another --uds.")
            os.unlink(path)  # left by a server that was killed
        bound.bind(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}.") from None
    return bound


def _answers(path: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except BlockingIOError:
            return True  # it has more connections than it takes at once
        except OSError:
            return False
    return True


def _entry(path: str) -> tuple[int, int] | None:
    """What tells a socket in the file system from another one of the same name; None: there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def address_of(bound: socket.socket, options: ServerOptions) -> str:
    """The URL, or the path of a unix socket, that clients use."""
    if options.uds:
        return f"unix:{options.uds}"
    host, port = bound.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if options.ssl_certfile else 'http'}://{shown}:{port}"


class Server:
    """A running HTTP server. Make it, `await start()`, and `await stop(...)` in the end."""

    def __init__(self, service: Service, bound: socket.socket) -> None:
        self.service = service
        self.address = address_of(bound, service.config.server)
        self._bound = bound
        self._entry = _entry(service.config.server.uds) if service.config.server.uds else None
        self._closing = asyncio.Event()
        self._patience = Patience()
        self._certificates = Certificates(service.config.server) if service.config.server.ssl_certfile else None
        self._watch: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to answer, with 503 until `service.engine` is set."""
        self._bound.listen(BACKLOG)  # from here on clients may connect; they are answered a moment later
        with anyio.fail_after(1):
            pass  # anyio imports what it needs on this kind of loop, 20 ms that the first request would wait for
        settings = hypercorn_config(self.service.config.server, self._certificates)
        if self._certificates is not None:
            self._watch = asyncio.create_task(self._certificates.watch(), name="tinyserve-tls")
        serving = serve(create_app(self.service), settings, self._bound, self._closing, self._patience)
        self._task = asyncio.create_task(serving, name="tinyserve-http")

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, let running ones end for `drain_seconds`, abort the rest, close."""
        self.service.draining = True
        self._patience.end()
        deadline = time.monotonic() + drain_seconds
        if self.service.engine is not None:
            await self._until_idle(deadline)
            await self.service.engine.close(0.0)
        await self._until_idle(time.monotonic() + LAST_WORDS)
        self._closing.set()
        await self.service.spans.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=LAST_WORDS)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._entry is not None and self._entry == _entry(self.service.config.server.uds):
            os.unlink(self.service.config.server.uds)

    async def _until_idle(self, deadline: float) -> None:
        while self.service.inflight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def wait_failed(self) -> None:
        """Return only when the HTTP server ended by itself. Raises: its error."""
        await asyncio.shield(self._task)


class _Settings(Config):
    """Hypercorn's, with a TLS context that can be given new certificates."""

    certificates: Certificates | None = None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        context = super().create_ssl_context()
        return context if context is None else self.certificates.attach(context)


def hypercorn_config(options: ServerOptions, certificates: Certificates | None = None) -> Config:
    """Hypercorn's settings."""
    config = _Settings()
    config.certificates = certificates
    config.root_path = options.root_path
    config.keep_alive_timeout = 0  # once connections.Idle says that it is over
    config.backlog = BACKLOG
    config.graceful_timeout = LAST_WORDS
    config.h11_max_incomplete_size = HEADER_BYTES
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.accesslog = config.errorlog = None
    if options.ssl_certfile:
        config.certfile, config.keyfile = options.ssl_certfile, options.ssl_keyfile
        config.ca_certs = options.ssl_ca_certs
        if options.ssl_ca_certs:
            config.verify_mode = ssl.CERT_REQUIRED
    return config
