"""What a connection may speak: HTTP/1.1 and 1.0, and of these only what the routes need.

Hypercorn also speaks HTTP/2 and WebSocket, to whoever asks, before any route or key is looked at. No client of these
routes does, and both are more than a stranger should have: 64 KB of HTTP/2 frames can open and close a thousand
requests, which held the loop for 0.3 s, and a WebSocket that was refused stayed open for ever. So an `Upgrade` is not
followed, as HTTP allows, and a request of any other version of HTTP, which the first line of HTTP/2 looks like, is a
505. A proxy in front may speak what it likes.

What cannot be read as a request is refused here, in the shape of all refusals (errors.py).

A client that waits to be asked for its body (Expect: 100-continue) is asked once a route wants it: a refusal that needs
no body is heard before one is sent. No body comes then, so nothing else can on that connection: it is closed.

Before: errors.py, chunks.py.  After: connections.py.

Source: RFC 9110 section 7.8 (Upgrade may be ignored); RFC 9112 section 3.2.2 (a whole URL in the place of the path);
RFC 9110 section 10.1.1 (Expect).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import h11
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import AsyncioSingleTask
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol

from ..errors import ConfigError
from .chunks import LEAST, ChunkedReader, Chunks
from .errors import Failure

HEADER_BYTES = 128 * 1024  # that are read before giving up; app.py refuses half of it. All of it is parsed in 50 ms
SWALLOW_SECONDS = 2.0  # what a refused client still sends is read, or it would not see the refusal
_KNOWN = ("'h11>=0.14,<0.17'", "'hypercorn>=0.17,<0.19'")  # as in pyproject.toml
_REFUSED = {
    400: "This is not a request of HTTP/1.1.",
    413: f"The body comes in too many chunks of less than {LEAST} bytes; send larger ones, or a Content-Length.",
    431: f"The headers have more than {HEADER_BYTES} bytes.",
    505: "Only HTTP/1.1 and HTTP/1.0 are understood.",
    501: "Of transfer encodings, only chunked is understood.",
}


class Connection(TCPServer):
    """One connection, from its first byte to its last.

    Attributes: corked: what is sent is kept, to be one write with what follows; a write costs more than making it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.corked = False
        self._unsent = b""

    def keep(self, data: bytes) -> None:
        """Write this behind what is kept, once more is written."""
        self._unsent += data

    def take(self) -> bytes:
        """What is kept, for whoever writes it now."""
        data, self._unsent = self._unsent, b""
        return data

    async def flush(self) -> None:
        """Send what is kept, as anything else is sent."""
        if self._unsent:
            await super().protocol_send(RawData(self.take()))

    def write_kept(self) -> None:
        """Hand what is kept to the socket."""
        if self._unsent and not self.writer.is_closing():
            self.writer.write(self.take())

    async def _read_data(self) -> None:
        made = self.protocol.protocol  # for HTTP/1.1: no other is offered, and nothing has been read yet
        parts = (made.task_group, made.connection_state, made.ssl, made.client, made.server, made.send)
        self.protocol = Spoken(made.app, made.config, made.context, *parts)
        await super()._read_data()

    async def invite(self) -> None:
        """Ask for the body, if the client waits for that."""
        await self.protocol.invite()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            self._unsent += event.data
            if not self.corked:
                await self.flush()
            return
        await self.flush()
        if isinstance(event, Closed) and self.protocol.refused:
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                if self.writer.can_write_eof():  # not with TLS
                    self.writer.write_eof()
                async with asyncio.timeout(SWALLOW_SECONDS):
                    while await self.reader.read(MAX_RECV):
                        pass
        await super().protocol_send(event)


class Heard(h11.Connection):
    """h11's state of a connection, with another reader of chunks, and silent about who waits to be asked."""

    they_are_waiting_for_100_continue = False  # Hypercorn would ask for every body at once; see Spoken.invite

    def next_event(self) -> Any:
        """What has come next."""
        event = super().next_event()
        if isinstance(event, h11.Request) and isinstance(self._reader, ChunkedReader):
            self._reader = Chunks()
        return event


class Spoken(H11Protocol):
    """HTTP/1.1 and 1.0. Attributes: refused: something came that cannot be read; nothing after it will be."""

    refused = False

    def __init__(self, app: Any, config: Any, *parts: Any) -> None:
        super().__init__(app, config, *parts)
        self.connection = Heard(h11.SERVER, max_incomplete_event_size=config.h11_max_incomplete_size)

    async def invite(self) -> None:
        """Ask for the body, if the client waits for that: it has sent none of it, and has had no answer."""
        if self.connection.client_is_waiting_for_100_continue:
            headers = self.config.response_headers("h11")
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=headers))

    async def stream_send(self, event: StreamEvent) -> None:
        """A part of an answer."""
        if isinstance(event, Response) and self.connection.client_is_waiting_for_100_continue:
            others = [pair for pair in event.headers if pair[0].lower() != b"connection"]
            event = replace(event, headers=[*others, (b"connection", b"close")])
        await super().stream_send(event)

    async def handle(self, event: Event) -> None:
        """What came over the connection, or its end."""
        if not (self.refused and isinstance(event, RawData)):
            await super().handle(event)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Go on with HTTP/1.1, whatever the request would rather have."""

    async def _create_stream(self, request: h11.Request) -> None:
        if not request.http_version.startswith(b"1."):
            await self._send_error_response(505)
            await self.send(Closed())
            return
        headers = [pair for pair in request.headers.raw_items() if pair[0].lower() != b"upgrade"]
        target = _path(request.target)
        if len(headers) < len(request.headers) or target is not request.target:
            version = request.http_version
            request = h11.Request(method=request.method, target=target, headers=headers, http_version=version)
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        self.refused = True
        body = Failure(status_code, _REFUSED.get(status_code, "This request cannot be read.")).body()
        headers = [
            (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close"),
            *self.config.response_headers("h11"),
        ]  # fmt: skip
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def check_libraries() -> None:
    """Try what this file and chunks.py take for granted of h11's and Hypercorn's insides, which no document promises.

    Raises: ConfigError: they are of a version that is made otherwise.
    """
    parts = [(H11Protocol, name) for name in ("_check_protocol", "_create_stream", "_send_h11_event", "stream_send")]
    parts += [(TCPServer, name) for name in ("_read_data", "protocol_send")]
    if not all(hasattr(kind, name) for kind, name in parts) or not _has_idle_task() or not _chunks_are_joined():
        versions = [f"{name} {metadata.version(name)}" for name in ("h11", "hypercorn")]
        raise ConfigError(f"the server cannot work with {' and '.join(versions)}: pip install {' '.join(_KNOWN)}")


def _has_idle_task() -> bool:
    """Whether a connection has what connections.Idle takes the place of."""
    try:
        return isinstance(TCPServer(*[None] * 7).idle_task, AsyncioSingleTask)
    except (AttributeError, TypeError):
        return False


def _chunks_are_joined() -> bool:
    """Whether a body in chunks is read as it must be, by our reader."""
    heard, pieces = Heard(h11.SERVER), []
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    try:
        for data in (head + b"1\r\na\r\n1;x\r\nb\r\n2\r\nc", b"d\r", b"\n2\r\nef\r\n0\r\na: b\r\n\r\n"):
            heard.receive_data(data)
            while (event := heard.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    pieces.append(bytes(event.data))
                if isinstance(event, h11.EndOfMessage):
                    return pieces == [b"ab", b"c", b"d", b"ef"]
    except Exception:  # whatever strange code does
        return False
    return False


def _path(target: bytes) -> bytes:
    """The path and query of a target that is a whole URL; any other target as it is."""
    if target.startswith(b"/") or b"://" not in target[:8]:
        return target
    try:
        found = urlsplit(target)
    except ValueError:
        return target
    return (found.path or b"/") + (b"?" + found.query if found.query else b"")
