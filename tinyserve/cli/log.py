"""Log lines: text for people, one JSON object a line for machines.

Before: config.py (LogOptions).  After: every logger named `tinyserve...`.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import orjson

from ..config import LogOptions


class _Text(logging.Formatter):
    """INFO 11-29 20:15:02 [engine] message"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("tinyserve.")
        text = f"{record.levelname} {stamp} [{name}] {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


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
    handler = _BesideBars(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tinyserve").setLevel(options.log_level.upper())
