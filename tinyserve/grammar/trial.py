"""Grammars of strangers, tried in a process of their own that may be killed.

The library counts its steps, but one step can be as large as it likes: the intersection of thirty patterns, or a
number that must be a multiple of 1234567, holds a thread for minutes and takes gigabytes, and no thread can be stopped.
So each grammar is first compiled in a process with few seconds of its core, little memory and a quarter of the stack,
and followed for some tokens. Where it goes too far the process dies, and its sender gets a 400.

    parent <--"!"-- child, once        parent --length, JSON--> twin: make, compile, follow --length, JSON--> parent
                    '--fork--> twin, until it dies: child --length, JSON--> parent, and another twin

The child has imported all and waits; a twin of it does the work. So the next grammar finds another twin 5 ms after one
has died, where a start takes 0.2 s of a core, 0.4 with a large vocabulary: those who come behind many that go too far
would wait for one each time.

What was asked for is made a grammar there as well: that takes a second for a schema of 250 KB that is meant to, in
which the threads of the server would stand in line for the interpreter.

A system without limits of a process (Windows) bounds a trial by the parent's patience alone: a grammar may take as much
memory there as it gets within that time. Nor has it twins: the child does the work, and is started again.

The child's vocabulary is the 256 bytes and the special tokens: what a grammar costs hardly depends on the words.

Before: asked.py (the text of a grammar).  After: compile.py, which compiles for itself what has passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from attrs import frozen
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..errors import Overloaded
from ..structured import Constraint
from .asked import Asked
from .child import start_child
from .deep import with_stack
from .numbers import Wrong
from .sayings import MAX_ALTERNATIVES

MEMORY_BYTES = 256 * 2**20  # that one grammar may take
START_SECONDS = 30.0  # for a new child, on a busy machine
RETRY_SECONDS = 5  # until a grammar that could not be tried, or waited for others, may be there
PATIENCE = 5.0  # so many times the seconds that a grammar may compute, on a busy machine
FOLLOWED = 24  # tokens
# Stacks of threads. The library goes into a grammar with them, and what has passed in a child must not be too deep for
# the parent. It is followed in threads of any kind, so less is enough for that.
CHILD_STACK, PARENT_STACK, FOLLOW_STACK = 2**23, 2**25, 2**20
# Steps of work, about 50,000 of them a millisecond, and sizes; beyond them the library gives up on a grammar.
BOUNDS = {
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 500_000,
    "max_grammar_size": 500_000,
    "max_items_in_row": MAX_ALTERNATIVES,
}
_LENGTH = struct.Struct("<Q")
_READY = b"!"
_FORKS = hasattr(os, "fork")
GROWN = 2  # status of a twin that holds too much memory
# That who answers may hold for the next grammar, whose size is told too small where it finds room: twins cost little.
KEPT_BYTES = 4 * 2**20 if _FORKS else MEMORY_BYTES // 4
_log = logging.getLogger(__name__)
_CODE = "from tinyserve.grammar.trial import child; child()"


class TooMuch(Exception):
    """A grammar took more time or memory than it may."""


class NoChild(Overloaded):
    """The process could not be started: there is no memory, or no descriptor, left; no grammar is to blame."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"Grammars cannot be tried now: {reason}.", retry_after=RETRY_SECONDS)


@frozen
class Verdict:
    """What came of a grammar.

    Args: error: what is wrong, or "".   bytes: of memory that it takes.   text: of it, for the library.
    """

    error: str
    bytes: int
    text: str


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A grammar's text, compiled within the library's own bounds; it holds what is wrong itself."""
    return LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**BOUNDS))


class Trial:
    """Tries one grammar after the other, in a child that is started when it is needed. Used from one thread at a time.

    Args: size: tokens of the vocabulary.   special: special tokens by their text.   end_ids: tokens that end an answer,
            at least one.
    """

    def __init__(self, size: int, special: Mapping[str, int], end_ids: tuple[int, ...]) -> None:
        self._words = json.dumps([size, dict(special), list(end_ids)])
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False  # the child has said that it reads
        self._lock = threading.Lock()  # of the child's beginning and end
        self._closed = False

    def start(self) -> None:
        """Start the child now, if there is none."""
        with self._lock:
            if self._child is None and not self._closed:
                self._ready = False
                self._child = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            return start_child(_CODE, self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except (OSError, MemoryError) as error:
            raise self._failed(error or "no memory is left") from None

    def make_ready(self) -> subprocess.Popen[bytes]:
        """Have a child that reads. Returns: it. Raises: NoChild."""
        if self._child is not None and self._child.poll() is not None:
            self._end()  # somebody killed it while it had nothing to do: no grammar's fault
        self.start()
        if (child := self._child) is None:
            raise self._failed("")
        self._await(child)
        return child

    def run(self, wanted: Constraint, seconds: float) -> Verdict:
        """What comes of a grammar. seconds: of one core, at most. Raises: TooMuch; NoChild."""
        child, done = self.make_ready(), False
        try:
            data = json.dumps([seconds, *wanted.key]).encode()
            child.stdin.write(_LENGTH.pack(len(data)) + data)
            child.stdin.flush()
            end = time.monotonic() + START_SECONDS + seconds * PATIENCE
            (length,) = _LENGTH.unpack(_read(child, _LENGTH.size, end))
            answer = json.loads(_read(child, length, end))
            if len(answer) > 1:
                error, size, text, done = answer
                return Verdict(error, size, text)
            (status,), done = answer, True  # of a twin that is dead; there is another one
        except (OSError, EOFError, ValueError):
            if (status := self._end()) > 0 and _FORKS:  # the child could not make another twin
                raise NoChild("no other process could be started") from None
        finally:
            if not done:  # dead, stuck, or grown
                self._end()
        if status == -signal.SIGSEGV:
            raise TooMuch("what it asks for is nested too deeply, or references lead too deep; nest less")
        raise TooMuch(f"it takes more than {seconds:g} seconds or {MEMORY_BYTES >> 20} MB to compile")

    def _await(self, child: subprocess.Popen[bytes]) -> None:
        """Wait until a new child reads. Raises: NoChild."""
        if self._ready:
            return
        try:
            _read(child, len(_READY), time.monotonic() + START_SECONDS)
        except (OSError, EOFError, ValueError):
            self._end()
            raise self._failed(f"{sys.executable} -c ... did not start") from None
        self._ready = True

    def _failed(self, reason: object) -> NoChild:
        if not self._closed:
            _log.error("the process that tries grammars did not start: %s", reason)
        return NoChild("they are closed" if self._closed else reason)

    def close(self) -> None:
        """End the child, whatever it does."""
        with self._lock:
            self._closed = True
        self._end()

    def _end(self) -> int:
        """End the child, if there is one. Returns: the status with which it ended."""
        with self._lock:
            child, self._child = self._child, None
        return _ended(child)


def _ended(child: subprocess.Popen[bytes] | None) -> int:
    """End a child, if it is one, and its twin. Returns: the status with which it ended."""
    if child is None:
        return 0
    if child.poll() is None:  # else its twin sees the pipe end, and its number may be another's
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL) if _FORKS else child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):  # what could not be written any more
            pipe.close()
    return child.returncode


def _read(child: subprocess.Popen[bytes], count: int, end: float) -> bytes:
    """So many bytes of what a child says. Raises: EOFError: it ends before, or has not said them when `end` comes."""
    poll, data = select.poll(), b""
    poll.register(child.stdout, select.POLLIN)
    while len(data) < count:
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise EOFError  # and whoever asked ends it
        if not (piece := child.stdout.read1(count - len(data))):
            raise EOFError
        data += piece
    return data


# ---- the child


class _Bytes:
    """A vocabulary of bytes and special tokens, of the right size."""

    bos_token_id = None

    def __init__(self, size: int, special: Mapping[str, int], end_ids: list[int]) -> None:
        self.tokens = [b""] * max(size, 256 + len(special))
        for text, index in special.items():
            self.tokens[index] = text.encode()
        taken = set(special.values()) | set(end_ids)
        free = [index for index in range(len(self.tokens)) if index not in taken]
        for byte, index in enumerate(free[:256]):
            self.tokens[index] = bytes([byte])
        self.special_token_ids = sorted(special.values())
        self.eos_token_id = end_ids[0]
        self._at = free

    def __call__(self, text: Any) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._at[byte] for byte in data]


def child() -> None:
    """The other end: twins of this process answer until the pipe ends, one after the other."""
    size, special, end_ids = json.loads(sys.argv[2])
    tokens = LLTokenizer(TokenizerWrapper(_Bytes(size, special, end_ids)), eos_token=end_ids)
    _follow(compiled(tokens, "start: /[a-z]+/"))  # what the library makes once
    usual = _memory()
    _bound(_memory(0) + MEMORY_BYTES)
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    busy = mmap.mmap(-1, 1)  # shared with the twins: whether one has begun with something
    if not _FORKS:
        _answer(tokens, special, usual, busy)
        return
    while status := _twin(lambda: _answer(tokens, special, usual, busy)):
        if busy[0]:  # else nobody waits: it held too much memory, or somebody killed it
            busy[0] = 0
            _say([status])


def _twin(work: Callable[[], int]) -> int:
    """Have a twin of this process do something and end. Returns: its status, as of subprocess."""
    if (number := os.fork()) > 0:
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    status = 1
    try:
        status = work()
    finally:
        os._exit(status)


def _answer(tokens: LLTokenizer, special: Mapping[str, int], usual: int, busy: mmap.mmap) -> int:
    """Try what is asked for until the pipe ends, or too much memory is held: 0, or GROWN."""
    source = sys.stdin.buffer
    while head := source.read(_LENGTH.size):
        busy[0] = 1
        seconds, *key = json.loads(source.read(*_LENGTH.unpack(head)))
        _alarm(seconds)
        verdict = _tried(tokens, special, key)
        _alarm(0)
        small = _memory() - usual < KEPT_BYTES
        busy[0] = 0
        _say([*verdict, small or _FORKS])
        if not small:
            return GROWN
    return 0


def _say(answer: Sequence[Any]) -> None:
    data = json.dumps(answer).encode()
    sys.stdout.buffer.write(_LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def _tried(tokens: LLTokenizer, special: Mapping[str, int], key: Sequence[Any]) -> tuple[str, int, str]:
    """What is wrong with a grammar, the memory that it takes, and its text. Args: key: of a Constraint."""
    try:
        asked = Asked(Constraint.from_key(key), special)
    except Wrong as error:
        return str(error), 0, ""
    before = _memory()
    matcher = with_stack(CHILD_STACK, lambda: compiled(tokens, asked.text))
    with_stack(FOLLOW_STACK, lambda: _follow(matcher))
    grown, error = max(0, _memory() - before), matcher.get_error()
    return with_stack(CHILD_STACK, lambda: asked.explained(error)) if error else "", grown, asked.text


def _alarm(seconds: float) -> None:
    """End this process when it has computed for so long; 0: not any more."""
    with contextlib.suppress(AttributeError):  # Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its default action ends the process


def _bound(size: int) -> None:
    """Take no more than `size` bytes of addresses, and leave no core file.

    A limit that the system or its administrator set lower stays; a system that bounds no addresses (macOS) refuses.
    """
    resource = _limits_of_processes()
    if resource is None:
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size = size if most == resource.RLIM_INFINITY else min(size, most)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (size, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limits_of_processes() -> ModuleType | None:
    """The module `resource`; None on a system that has none."""
    try:
        return importlib.import_module("resource")
    except ImportError:
        return None


def _follow(matcher: LLMatcher) -> None:
    """Go along with a grammar for some tokens that it allows."""
    draw = random.Random(0)
    for _ in range(FOLLOWED):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.get_error() or matcher.is_stopped():
            break
        may = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not len(may) or not matcher.consume_token(int(draw.choice(may))):
            break


def _memory(field: int = 1) -> int:
    """Bytes that this process holds, or, where a system does not tell, the most that it ever held.

    Args: field: 0 for those of its address space.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    resource = _limits_of_processes()
    if resource is None:
        return 0
    try:
        with open("/proc/self/statm") as file:
            sizes = [int(number) for number in file.read().split()]
            own = sizes[field] - sizes[2] * field  # pages of files are there for all, and for a twin when it reads them
            return own * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
