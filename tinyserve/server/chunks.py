"""Bodies that come in chunks, read as quickly as others: all chunks that are here are one piece of the body.

h11 makes an event of every chunk, and each event has 60 us of layers to go through: 500 kB in chunks of one byte held
the loop for half a minute, and 16 MB may come. Here a small chunk costs less than a microsecond, and a body that goes
on with chunks of a few bytes is refused.

The reader is no public part of h11, and no public part lets another one read the body on a connection that h11 goes on
with; so it is tried at the start whether this h11's fits (spoken.py).

Before: h11 (whose grammar of chunks this is).  After: spoken.py.

Source: RFC 9112 section 7.1.
"""

from __future__ import annotations

import re
from typing import Any

import h11

try:
    from h11._readers import ChunkedReader
except ImportError:  # spoken.check_libraries says so

    class ChunkedReader:
        """What h11 does not have."""


MANY = 2**16  # chunks that may have any size
LEAST = 16  # bytes of a chunk, on average, of a body with more of them
_HEAD = re.compile(rb"([0-9a-fA-F]{1,16})(?:;[^\n]*|[ \t]*)\r\n")  # blanks match in one way only, or many take for ever


class Chunks(ChunkedReader):
    """h11's reader of one chunked body, which does by itself whatever is not a whole chunk."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks = self._bytes = 0

    def __call__(self, buffer: Any) -> h11.Data | h11.EndOfMessage | None:
        """The next piece of the body, or its end; None: more has to come. Raises: h11.LocalProtocolError."""
        data = bytes(buffer)
        if self._bytes_to_discard and data.startswith(self._bytes_to_discard):
            data = data[len(self._bytes_to_discard) :]
            buffer.maybe_extract_at_most(len(self._bytes_to_discard))
            self._bytes_to_discard = b""
        if not (self._reading_trailer or self._bytes_to_discard or self._bytes_in_chunk):
            pieces, end = _whole(data)
            if pieces:
                buffer.maybe_extract_at_most(end)
                body = b"".join(pieces)
                self._count(len(pieces), len(body))
                return h11.Data(data=body)
        return super().__call__(buffer)

    def _count(self, chunks: int, size: int) -> None:
        self._chunks += chunks
        self._bytes += size
        if self._chunks > MANY and self._bytes < LEAST * self._chunks:
            raise h11.LocalProtocolError("too many small chunks", error_status_hint=413)


def _whole(data: bytes) -> tuple[list[bytes], int]:
    """What the chunks hold with which `data` begins, and where they end. The last chunk, an empty one, is none."""
    pieces, at = [], 0
    while (head := _HEAD.match(data, at)) and (size := int(head[1], 16)):
        end = head.end() + size
        if data[end : end + 2] != b"\r\n":
            break
        pieces.append(data[head.end() : end])
        at = end + 2
    return pieces, at
