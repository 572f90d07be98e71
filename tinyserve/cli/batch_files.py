"""The two ends of `run-batch`: a line is read when there is room for it, and an answer is written whole or not at all.

    Source   lines of a file, a pipe or a terminal; waiting for one holds up nothing else and can be given up
    Sink     answers to a file, a pipe or a terminal; when a disk is full, the half of a line is taken back

Whether both are the same file is asked of the system, not of their names: links, /dev/stdin and a shell's `<` hide it.
A file that the shell has opened (`-o /dev/stdout >> FILE`) is the shell's to empty; one of ours is emptied once there
is something to answer with.

Before: engine/thread.py.  After: batch.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import stat
import sys
from collections.abc import AsyncIterator
from typing import Any

from attrs import frozen

from ..engine.thread import in_own_thread
from ..errors import ConfigError, EngineError

STANDARD = {"-i": 0, "-o": 1}  # descriptors that `-` stands for
PIECE = 1 << 20  # bytes that are read at once


@frozen
class Line:
    """A line that is not blank. number: from 1 on.   size: its bytes.   data: they, or none if they are too many."""

    number: int
    size: int
    data: bytes


class Source:
    """Lines of an open file. Args: most: bytes of a line; of a longer one only the size is told."""

    def __init__(self, name: str, descriptor: int, most: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._most = most
        self._waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)

    async def lines(self) -> AsyncIterator[Line]:
        """Yield them as they come. Raises: EngineError: the file cannot be read on."""
        held, seen, dropped, number, ended = bytearray(), 0, 0, 1, False
        while not ended or held or dropped:
            end = held.find(b"\n", seen)
            if end < 0 and not ended:
                seen = len(held)
                if seen > self._most:
                    dropped, seen = dropped + seen, 0
                    held.clear()
                piece = await self._piece()
                ended = not piece
                held += piece
                continue
            end = len(held) if end < 0 else end
            data, size = bytes(held[:end]), dropped + end
            del held[: end + 1]
            if size > self._most:
                yield Line(number, size, b"")
            elif data.strip():
                yield Line(number, size, data)
            seen, dropped, number = 0, 0, number + 1

    async def _piece(self) -> bytes:
        while True:
            try:
                if self._waits:
                    await self._readable()
                    return os.read(self._descriptor, PIECE)
                return await asyncio.to_thread(os.read, self._descriptor, PIECE)
            except PermissionError:  # nothing to wait for: a device that is always ready
                if not self._waits:
                    raise EngineError(f"-i {self._name}: it cannot be read on.") from None
                self._waits = False
            except BlockingIOError:
                continue
            except OSError as error:
                raise EngineError(f"-i {self._name}: {error.strerror}.") from None

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self._descriptor, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(self._descriptor)

    def close(self) -> None:
        """Close what was opened here."""
        _close(self._descriptor)


class Sink:
    """Where answers go. Args: own: nobody else has it open, so that what it held may go."""

    def __init__(self, name: str, descriptor: int, own: bool) -> None:
        self._name = name
        self._descriptor = descriptor
        self._own = own
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._turn = asyncio.Lock()

    def clear(self) -> None:
        """Let go of answers of another day."""
        if self._own and self._regular:
            os.ftruncate(self._descriptor, 0)

    async def write(self, line: bytes) -> None:
        """Write a line. Raises: EngineError: it cannot be; BrokenPipeError: nobody reads standard output any more."""
        async with self._turn:
            try:
                if self._regular:
                    self._write(line)
                else:
                    # Which may wait for another program, for ever: a run that ends otherwise does not wait for it.
                    await in_own_thread("answers", self._write, line, daemon=True)
            except BrokenPipeError:
                if self._descriptor == STANDARD["-o"]:
                    raise
                raise EngineError(f"-o {self._name}: nobody reads it any more.") from None
            except OSError as error:
                raise EngineError(f"-o {self._name}: {error.strerror}; the answers before are whole.") from None

    def _write(self, line: bytes) -> None:
        before, done = os.fstat(self._descriptor).st_size, 0
        try:
            while done < len(line):
                try:
                    done += os.write(self._descriptor, line[done:] if done else line)
                except BlockingIOError:  # whoever gave it to us did not want to wait for it; we do
                    select.select((), (self._descriptor,), ())
        except OSError:
            if self._regular and os.fstat(self._descriptor).st_size == before + done:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        """Close what was opened here. Raises: EngineError: the system has lost answers (a quota, a network's disk)."""
        try:
            _close(self._descriptor)
        except OSError as error:
            raise EngineError(f"-o {self._name}: {error.strerror}; answers may be missing.") from None


def open_both(source: str, sink: str, most: int) -> tuple[Source, Sink]:
    """Open what is asked and where answers go. Raises: ConfigError: one cannot be opened, or both are one file."""
    if _same(_stat(source, "-i"), _stat(sink, "-o")):  # before a pipe is opened, which waits for its other end
        raise ConfigError(_SAME)
    first = _opened(source, "-i", os.O_RDONLY)
    others = [_identity(found) for found in _open_files()]
    second = _opened(sink, "-o", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if _same(os.fstat(first), found := os.fstat(second)):
        raise ConfigError(_SAME)
    own = second != STANDARD["-o"] and _identity(found) not in others
    return Source(source, first, most), Sink(sink, second, own)


_SAME = "--input-file and --output-file are the same file; answers would take the place of what is asked."


def _opened(name: str, option: str, flags: int) -> int:
    """A descriptor. Raises: ConfigError."""
    if name == "-":
        stream = sys.stdin if option == "-i" else sys.stdout
        if stream is None:
            raise ConfigError(f"{option} -: the standard one is closed.")
        return STANDARD[option]
    if "://" in name:
        raise ConfigError(f"{option} {name}: files of this machine only; fetch or send it with curl.")
    try:
        descriptor = os.open(name, flags | os.O_CLOEXEC, 0o666)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(None, "Is a directory")
    except OSError as error:
        raise ConfigError(f"{option} {name}: {error.strerror or error}.") from None
    return descriptor


def _close(descriptor: int) -> None:
    if descriptor not in STANDARD.values():
        os.close(descriptor)


def _stat(name: str, option: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.fstat(STANDARD[option]) if name == "-" else os.stat(name)
    return None


def _open_files() -> list[os.stat_result]:
    """All that this process has open, and so whatever the shell has given it."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError, ValueError):
                found.append(os.fstat(int(name)))
    return found


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _same(one: Any, other: Any) -> bool:
    """Whether two files are one that keeps, or passes on, what is written: not a terminal, nor /dev/null."""
    if one is None or other is None or _identity(one) != _identity(other):
        return False
    return stat.S_ISREG(one.st_mode) or stat.S_ISFIFO(one.st_mode)
