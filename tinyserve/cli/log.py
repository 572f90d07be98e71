"""Log lines: text for people, one JSON object a line for machines.

Before: config.py (LogOptions).  After: every logger named `tinyserve...`.
"""

from __future__ import annotations

import codecs
import logging
import sys
import time
from typing import TextIO

import orjson

from ..config import LogOptions

# Looked up now, for it is in a file: the first line that needs it may say that no more files can be opened.
_as_code = codecs.lookup("unicode_escape").encode


class _Text(logging.Formatter):
    """INFO 11-29 20:15:02 [engine] message

    A record is one line, and a traceback's lines are indented: what a client sent can end up in both, and must not
    look like a record of its own, or move a terminal's cursor.
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("tinyserve.")
        lines = [f"{record.levelname} {stamp} [{name}] {printable(record.getMessage())}"]
        if record.exc_info:
            lines += [f"  {printable(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def printable(text: str) -> str:
    """The text in one line: characters that would not show themselves (line ends, escapes) are written as codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _as_code(c)[0].decode() for c in text)


class _Json(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "message": ...}"""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


class _BesideBars(logging.StreamHandler):
    """Writes lines above the progress bars that are being drawn, instead of into them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._terminal = stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm.std") if self._terminal else None
        if bars is None:
            super().emit(record)
            return
        with bars.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def set_up(options: LogOptions) -> None:
    """Send tinyserve's log to stderr in the chosen format; other libraries from WARNING up."""
    handler = logging.NullHandler() if sys.stderr is None else _BesideBars(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tinyserve").setLevel(options.log_level.upper())
