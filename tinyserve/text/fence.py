"""Templates of strangers, rendered in a process of their own that may be killed.

Jinja's sandbox keeps a template away from the machine, but not from its time and memory: one filter can pad a text to
a gigabyte, and no thread can be stopped. So a template that came with a request is rendered in a child with little
memory, few seconds and an empty environment. When it goes too far the child dies, its sender gets a 400, and the next
such request starts another. The event loop only waits for a pipe.

    parent --length, JSON job--> child --"!" as it begins--> ChatTemplate(...).render(...) --length, JSON--> parent

A child that fails before it has begun a job fails through no fault of the template: another one is started, and where
none can be (no memory, no descriptors), the sender gets a 503, as he does where too many wait.

Before: template.py.  After: engine/chat.py, for requests with `chat_template` (--trust-request-chat-template).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import Overloaded, RequestError

logger = logging.getLogger(__name__)

SECONDS = 5  # for one rendering
START_SECONDS = 30.0  # for a new child, on a busy machine
MEMORY_BYTES = 512 * 2**20  # of address space
MAX_WAITING = 16  # requests; the next one is told to come again
RETRY_SECONDS = 5
_FAILED = (OSError, asyncio.IncompleteReadError, RuntimeError, MemoryError)  # TimeoutError is an OSError; no thread
_LENGTH = struct.Struct("<Q")
_CODE = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tinyserve.text.fence import child; child()"


class Fence:
    """Renders one template at a time, in a child process that is started when it is needed."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def render(self, job: bytes) -> str:
        """The text that a job gives. job: JSON with `template`, `special_tokens`, `messages` and `options`.

        Raises: RequestError: what the template did wrong, or that it went too far.
            Overloaded: too many wait, or there is no child for it.
        """
        if self._waiting >= MAX_WAITING:
            raise Overloaded(
                "Too many requests bring chat templates of their own just now. Retry later.", retry_after=RETRY_SECONDS
            )
        self._waiting += 1
        try:
            async with self._turn:
                found = await self._answer(job)
        finally:
            self._waiting -= 1
        if "error" in found:
            raise RequestError(found["error"], param=found["param"])
        return found["text"]

    async def _answer(self, job: bytes) -> Mapping[str, Any]:
        while True:
            fresh = self._child is None
            try:
                if fresh:
                    self._child = await _start()
                data = await self._asked(self._child, job)
            except _FAILED as error:
                if fresh:
                    logger.warning("the process that renders chat templates of requests failed: %r", error)
                    raise Overloaded(
                        "chat_template: the process that renders it cannot be started now. Retry later.",
                        retry_after=RETRY_SECONDS,
                    ) from None
            else:
                return await asyncio.to_thread(json.loads, data)

    async def _asked(self, child: asyncio.subprocess.Process, job: bytes) -> bytes:
        """Raises: RequestError: the job went too far.   _FAILED: the child failed before it had begun."""
        begun = done = False
        try:
            async with asyncio.timeout(SECONDS + 1):
                child.stdin.write(_LENGTH.pack(len(job)) + job)
                await child.stdin.drain()
                await child.stdout.readexactly(1)
                begun = True
                (length,) = _LENGTH.unpack(await child.stdout.readexactly(_LENGTH.size))
                data = await child.stdout.readexactly(length)
            done = True
        except _FAILED:
            if not begun:
                raise
            raise RequestError(
                f"The chat template was stopped: it took more than {SECONDS} seconds or {MEMORY_BYTES >> 20} MB.",
                param="chat_template",
            ) from None
        finally:
            if not done:  # also when the request was cancelled: half an answer may be in the pipe
                self._kill()
        return data

    async def close(self) -> None:
        """End the child, whatever it does, and wait until it is gone."""
        child = self._kill()
        if child is not None:
            await child.wait()

    def _kill(self) -> asyncio.subprocess.Process | None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        return child


async def _start() -> asyncio.subprocess.Process:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CODE, json.dumps(sys.path)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        limit=2**20,
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            await started.stdout.readexactly(1)
    except BaseException:  # also when the request was cancelled
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        raise
    return started


def child() -> None:
    """The other end: answers jobs until the pipe ends, or until one of them goes too far."""
    from .jinja import WentTooFar
    from .template import ChatTemplate

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(b"!")
    sink.flush()
    while head := source.read(_LENGTH.size):
        data = source.read(*_LENGTH.unpack(head))
        sink.write(b"!")
        sink.flush()
        signal.alarm(SECONDS)  # its default action ends the process, also inside of a long operation
        try:
            job = json.loads(data)
            template = ChatTemplate(job["template"], special_tokens=job["special_tokens"])
            found = {"text": template.render(job["messages"], **job["options"])}
        except RequestError as error:
            param = "chat_template" if isinstance(error, WentTooFar) else error.param  # not the model's: the sender's
            found = {"error": str(error), "param": param}
        except MemoryError:
            return
        data = json.dumps(found).encode()
        signal.alarm(0)
        sink.write(_LENGTH.pack(len(data)) + data)
        sink.flush()
