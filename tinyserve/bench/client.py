"""A small HTTP client that reads many streams at once: for measuring, so it takes less time than what it measures.

    Server (address, headers)  ->  Server.send(path, body, sink)  ->  Wire: head | chunks or bytes ... | end
                                                                       '-- sink(data) as it comes from the socket

A general client spends 30 to 100 us on each event of a stream, and would be what is measured at a thousand streams.
This one knows HTTP/1.1 as servers of models speak it: answers in chunks, of a given length, or until the connection
ends; connections are used again. There is no proxy, no redirect and no compression.

Before: errors.py.  After: requests.py (what is asked and what came back), serve.py.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from attrs import frozen

from ..errors import ConfigError, EngineError

MAX_HEAD = 64 * 1024  # bytes
Sink = Callable[[bytes], None]


class Broken(EngineError):
    """An answer did not come, or not to its end. The text says what happened."""


@frozen
class Head:
    """The beginning of an answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]


class Server:
    """One server and the connections to it that are free.

    Args: url: http or https, with or without a path before /v1.   headers: sent with every request.
    Raises: ConfigError: not such a URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port, known = parts.port, parts.scheme in ("http", "https") and parts.hostname
        except ValueError:  # no number, or too large a one
            known = False
        if not known:
            raise ConfigError(f"--base-url must be http://host:port or https://..., got {url!r}.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        self._headers = "\r\n".join(lines)
        self._free: list[Wire] = []

    async def send(self, path: str, body: bytes | None, sink: Sink) -> Head:
        """POST a JSON body (GET when None) and give what comes back to `sink`; returns when the answer is complete.

        Raises: Broken: no connection, or one that ended before the answer did.
        """
        method = "GET" if body is None else "POST"
        body = body or b""
        request = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        while True:
            wire, used = await self._wire()
            try:
                head = await wire.exchange(request, sink)
            except Broken:
                if used and wire.silent:
                    continue  # the server closed a connection that nobody used; a new one is not at fault
                raise
            finally:
                if wire.reusable:
                    self._free.append(wire)
                else:
                    wire.close()
            return head

    async def _wire(self) -> tuple[Wire, bool]:
        """A connection, and whether it has been used before."""
        while self._free:
            wire = self._free.pop()
            if wire.reusable:
                return wire, True
        loop = asyncio.get_running_loop()
        try:
            _, wire = await loop.create_connection(Wire, self._host, self._port, ssl=self._tls)
        except (OSError, UnicodeError) as error:  # the latter: no name of a host
            raise Broken(f"no connection to {self.url}: {error}") from None
        return wire, False

    def close(self) -> None:
        """Close the free connections."""
        while self._free:
            self._free.pop().close()


class Wire(asyncio.Protocol):
    """One connection: a request at a time, its answer parsed as it arrives."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Head] | None = None
        self._sink: Sink | None = None
        self._head: Head | None = None
        self._buffer = b""
        self._left = 0  # bytes of the body, or of the current chunk with its line end, that have not come
        self._take: Callable[[bytes], bytes] = self._read_head
        self.silent = True  # nothing of the answer has come

    @property
    def reusable(self) -> bool:
        """Whether another request may follow."""
        return self._done is None and not self._transport.is_closing()

    def close(self) -> None:
        """Cut the connection, also in the middle of an answer."""
        self._transport.abort()

    async def exchange(self, request: bytes, sink: Sink) -> Head:
        """Send a request; see Server.send."""
        self._done, self._sink, self.silent = asyncio.get_running_loop().create_future(), sink, True
        self._take = self._read_head
        self._transport.write(request)
        head = await self._done
        self._done = None
        if head.headers.get("connection", "").lower() == "close":
            self._transport.close()
        return head

    # ---- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.silent = False
        data = self._buffer + data if self._buffer else data
        try:
            while data and not (self._done is None or self._done.done()):
                rest = self._take(data)
                if len(rest) == len(data):
                    break  # more of it must come first
                data = rest
            else:
                data = b""
        except Broken as error:  # the sink has had enough
            self._fail(str(error))
            self.close()
        except (ValueError, IndexError):
            self._fail("the server does not speak HTTP/1.1")
        self._buffer = data

    def connection_lost(self, exc: Exception | None) -> None:
        if self._take == self._read_all and exc is None:
            self._end()
        self._fail(f"the connection ended in the middle of the answer{f' ({exc})' if exc else ''}")

    # ---- states: each takes what it can from the data and returns the rest

    def _read_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD:
                raise ValueError("no head")
            return data
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        head = Head(int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs})
        if head.status >= 200:  # 100 Continue is followed by another head
            self._head = head
            length = head.headers.get("content-length")
            if "chunked" in head.headers.get("transfer-encoding", ""):
                self._take, self._left = self._read_chunk, 0
            elif length is None and head.status != 204:
                self._take = self._read_all
            else:
                self._take, self._left = self._read_bytes, int(length or 0)
                if not self._left:
                    self._end()
        return data[end + 4 :]

    def _read_chunk(self, data: bytes) -> bytes:
        """A chunk's size line and as much of its bytes as there are; a chunk given on in parts stays in `_left`."""
        if self._left:
            body = data[: self._left - 2] if self._left > 2 else b""
            taken = min(len(data), self._left)
            self._left -= taken
            if body:
                self._sink(body)
            return data[taken:]
        end = data.find(b"\r\n")
        if end < 0:
            return data
        size = int(data[:end].partition(b";")[0], 16)
        if not size:
            self._take = self._read_trailer
            return data[end:]
        self._left = size + 2
        return data[end + 2 :]

    def _read_trailer(self, data: bytes) -> bytes:
        """Headers after the last chunk, which nobody uses, and the empty line that ends them."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return data
        self._end()
        return data[end + 4 :]

    def _read_bytes(self, data: bytes) -> bytes:
        part = data[: self._left]
        self._left -= len(part)
        self._sink(part)
        if not self._left:
            self._end()
        return data[len(part) :]

    def _read_all(self, data: bytes) -> bytes:
        self._sink(data)
        return b""

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._head)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Broken(message))
