"""Sockets: accept, let Hypercorn speak HTTP on each, and send the pieces of a stream on a short way.

Hypercorn and h11 read requests, keep the state of each connection, and write the head and the end of each answer
(spoken.py). Between these two, a streamed answer is nothing but chunks, and of those there is one per token and
client; each costs 20 us on its way through their layers. So chunks are framed here and given to the socket directly.

A client that does not read is waited for, but not for ever: what waits for it in memory is bounded by the socket's
buffer and its own answer (engine/streams.py), and after a minute without progress the connection is cut. A client that
is answered before it has sent its whole body may read the answer at once; what it still sends is read and forgotten,
as a socket that closes with unread bytes takes back what it has said.

A client that ends its side of the connection counts as one that left: from here both look the same until something is
sent, and what waits in the queue sends nothing. Its stream ends without an end, so that nobody takes it for whole.

Before: app.py (the ASGI app), spoken.py, turns.py.  After: serve.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config

from .errors import Stopping
from .spoken import Connection
from .turns import AT_ONCE, Turns

MAX_CONNECTIONS = 16384  # at the same time; each takes some 50 KB
KEEP_ALIVE = 5.0  # seconds for the head of the next request, or of the first one
WRITE_SECONDS = 60.0  # that a client may take to read what fills the socket's buffer
LINGER_SECONDS, QUIET_SECONDS = 30.0, 2.0  # that a client may go on to send what was refused, and be silent meanwhile
_RESET = struct.pack("ii", 1, 0)  # linger for 0 seconds


async def serve(app: Any, settings: Config, bound: socket.socket, closing: asyncio.Event, patience: Patience) -> None:
    """Answer on a socket until `closing` is set; then let open connections end for `settings.graceful_timeout`.

    Args: patience: with bodies that come slowly; it ends when no more requests are taken.
    """
    loop, context = asyncio.get_running_loop(), WorkerContext(None)
    tasks: set[asyncio.Task[Any]] = set()
    idle: set[Idle] = set()
    turns = Turns()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        wire = Wire(writer, patience)
        connection = Connection(ASGIWrapper(partial(_on_wire, app, wire)), loop, settings, context, {}, reader, writer)
        connection.idle_task = Idle(idle, reader)
        wire.connection = connection
        try:
            await connection
        except asyncio.CancelledError:  # its time to end has passed, below; asyncio would write of it
            writer.transport.abort()

    tls = settings.create_ssl_context() if settings.ssl_enabled else None
    server = await loop.create_server(
        lambda: _Protocol(_Reader(turns), connected),
        sock=bound,
        ssl=tls,
        ssl_handshake_timeout=settings.ssl_handshake_timeout if tls else None,
        backlog=AT_ONCE,  # also how many it accepts at once
    )
    bound.listen(settings.backlog)
    try:
        await closing.wait()
    finally:
        server.close()
        await context.terminated.set()  # idle connections end now, others after their answer
        for one in list(idle):
            one.end()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=settings.graceful_timeout)
            for task in late:
                task.cancel()


class Patience:
    """With clients that have not sent a body as a whole. A server that stops has none: it will not answer them."""

    def __init__(self) -> None:
        self._over = False
        self._waiting: set[asyncio.Timeout] = set()

    def end(self) -> None:
        """Wait for nobody any more."""
        if not self._over:
            self._over = True
            for limit in self._waiting:
                limit.reschedule(0)

    async def wait(self, receive: Callable[[], Awaitable[Any]]) -> Any:
        """The next message of a body. Raises: Stopping: it is not here, and the server stops."""
        try:
            async with asyncio.timeout(0 if self._over else None) as limit:
                self._waiting.add(limit)
                try:
                    return await receive()
                finally:
                    self._waiting.discard(limit)
        except TimeoutError:
            raise Stopping from None


class Idle:
    """A connection's time without a request. Hypercorn has a task for it, and one more in it, made and cancelled with
    each request; here they are made when the time is over.

    Args: all: of a server; it is in there meanwhile.   reader: the time begins anew while it has what nobody has read.
    """

    def __init__(self, all: set[Idle], reader: _Reader) -> None:
        self._all = all
        self._reader = reader
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def restart(self, _group: Any, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to wait. action: what comes after KEEP_ALIVE seconds."""
        await self.stop()
        self._action = action
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._over)
        self._all.add(self)

    async def stop(self) -> None:
        """A request has come, or the connection has ended."""
        self._all.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _over(self, looked: bool = False) -> None:
        if self._reader.waiting:  # the client has said something: it is this server that is late
            self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._over)
        elif not looked:  # a process that was stopped meanwhile hears of its timers before it hears of its sockets
            self._timer = asyncio.get_running_loop().call_later(0, self._over, True)
        else:
            self.end()

    def end(self) -> None:
        """The time is over."""
        self._all.discard(self)
        self._timer.cancel()
        self._task = asyncio.get_running_loop().create_task(self._action())


class _Reader(asyncio.StreamReader):
    """Hands on what a client sent when it is this connection's turn: parsing the requests of a thousand takes 0.1 s.

    Attributes: waiting: something has come that was not handed on.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self.waiting = False

    def feed_data(self, data: bytes) -> None:
        self.waiting = True
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        data = await super().read(n)
        await self._turns.take()
        self.waiting = len(data) == n
        return data


class _Protocol(asyncio.StreamReaderProtocol):
    """Notes that the client has left at the moment it does, also while nobody reads what it sent last."""

    def __init__(self, reader: asyncio.StreamReader, connected: Any) -> None:
        super().__init__(reader, connected)
        self.gone = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


class Wire:
    """The socket under one connection. Args: writer: which Hypercorn writes to as well, before and after.

    Attributes: connection: Hypercorn's side of it.   patience: see serve.
    """

    connection: Connection

    def __init__(self, writer: asyncio.StreamWriter, patience: Patience) -> None:
        self._writer = writer
        self.patience = patience
        self._transport = writer.transport
        self.gone = writer.transport.get_protocol().gone

    async def chunk(self, data: bytes) -> None:
        """Send a piece of an answer in chunks. Waits for a slow client; cuts off one that is stuck."""
        transport = self._transport
        if transport.is_closing():
            return  # the reading side has noticed, or will at once, and ends the answer
        transport.write(self.connection.take() + _chunk(data))
        if transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._writer.drain()
            except (TimeoutError, ConnectionError):
                transport.abort()

    def cut(self) -> None:
        """End the connection with a reset, which no client takes for the end of an answer."""
        with contextlib.suppress(OSError):
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Sender:
    """An answer's `send`: chunks of a stream go to the wire, all else to Hypercorn.

    Attributes:
        begun, ended: how far the answer is.
        held: its end is held back, as the request is not whole; all that the client reads of it has been sent.
    """

    def __init__(self, wire: Wire, request: _Receiver, scope: Any, send: Any) -> None:
        self._wire = wire
        self._request = request
        self._send = send
        self._able = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self._chunked = False
        self.begun = self.ended = self.held = False

    async def __call__(self, message: Any) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            more = message.get("more_body", False)
            if self._chunked and more:
                if message["body"]:  # an empty chunk would end the answer
                    await self._wire.chunk(message["body"])
                return
            self.ended = not more
            if self._chunked and message["body"]:
                self._wire.connection.keep(_chunk(message["body"]))
                message = {**message, "body": b""}
            self.held = self.ended and self._request.unread
            if self.held:
                message = {**message, "more_body": True}
        elif kind == "http.response.start":
            self.begun = True
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self._chunked = self._able and message["status"] == 200 and not sized
        await self._together(message)
        if self.begun and not self.ended:
            asyncio.get_running_loop().call_soon(self._wire.connection.write_kept)

    async def _together(self, message: Any) -> None:
        """Send by Hypercorn what it makes of a message, as one write: a head with what comes right behind it."""
        connection = self._wire.connection
        connection.corked = True
        try:
            await self._send(message)
        finally:
            connection.corked = False
        if message["type"] == "http.response.body":
            await connection.flush()

    async def finish(self) -> None:
        """Say the end that was held back, once the client has sent all, or too much, or nothing more."""
        await self._request.swallow()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class _Receiver:
    """A request's `receive`. Hypercorn stops reading when more than one request has come, and hears of no end then."""

    def __init__(self, wire: Wire, scope: Any, receive: Any) -> None:
        self._gone = wire.gone
        self._wire = wire
        self._receive = receive
        self._whole = False
        lengths = {value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        self._has_body = bool(lengths - {b"0"})

    @property
    def unread(self) -> bool:
        """Whether there is a body of which some has not been read."""
        return self._has_body and not self._whole

    async def swallow(self) -> None:
        """Read what is left of the body and forget it."""
        with contextlib.suppress(TimeoutError, Stopping):
            async with asyncio.timeout(LINGER_SECONDS), asyncio.timeout(QUIET_SECONDS) as quiet:
                while self.unread and (await self())["type"] != "http.disconnect":
                    quiet.reschedule(asyncio.get_running_loop().time() + QUIET_SECONDS)

    async def __call__(self) -> Any:
        if not self._whole:
            await self._wire.connection.invite()
            message = await self._wire.patience.wait(self._receive)
            self._whole = not message.get("more_body", False)
            return message
        await self._gone.wait()  # Hypercorn notices too, later or never, and through two tasks more
        return {"type": "http.disconnect"}


async def _on_wire(app: Any, wire: Wire, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    request = _Receiver(wire, scope, receive)
    answer = _Sender(wire, request, scope, send)
    try:
        with contextlib.suppress(ConnectionError):
            await app(scope, request, answer)
            if answer.held:
                await answer.finish()
    finally:  # cancelled too, by a server that stops
        if answer.begun and not answer.ended and scope["http_version"] == "1.0":
            wire.cut()  # the end of a connection is the end of an answer to this client
