"""Responses that are kept, and those that are made in the background.

    Store: id -> Kept (object, conversation, Run if it is made in the background)        bounded; the oldest go first

Everything is in memory and gone with the process. The bound counts responses and their text; what is still being made
is never dropped, so when all of it is, new background responses are refused as any overload is.

Before: responses_writer.py.  After: responses.py.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from attrs import define, field

from ..errors import Overloaded, RequestError
from ..request import Output
from .errors import describe
from .responses_writer import ResponseWriter
from .sse import COMMENT, STREAM_HEADERS

MAX_KEPT = 1024  # responses
MAX_BYTES = 64 * 1024**2  # of objects, conversations and events together


class NoSuchResponse(RequestError):
    """The id is not (or no longer) known."""

    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no response with the id {name[:80]!r} here.", param="response_id")


@define
class Kept:
    """One kept response.

    Args:
        conversation: all chat messages up to and including its answer.
        items: what it was made from, in the API's form.
    """

    writer: ResponseWriter
    conversation: list[dict[str, Any]]
    items: list[dict[str, Any]] = field(factory=list)
    run: Run | None = None
    size: int = 0

    @property
    def running(self) -> bool:
        return self.run is not None and not self.run.done

    def all_items(self) -> list[dict[str, Any]]:
        """What it was made from, and what it is."""
        return [*self.items, *self.writer.snapshot()["output"]]

    def weigh(self) -> int:
        """Bytes that it takes, about."""
        parts = (self.writer.snapshot(), self.conversation, self.items)
        self.size = sum(len(orjson.dumps(part)) for part in parts)
        self.size += self.run.size if self.run is not None else 0
        return self.size


@define
class Store:
    """The kept responses, oldest first."""

    kept: OrderedDict[str, Kept] = field(factory=OrderedDict)
    size: int = 0

    def get(self, name: str) -> Kept:
        """Raises: NoSuchResponse."""
        found = self.kept.get(name)
        if found is None:
            raise NoSuchResponse(name)
        return found

    def make_room(self) -> None:
        """For one more. Raises: Overloaded: everything here is still being made."""
        self._drop()
        if len(self.kept) >= MAX_KEPT and all(kept.running for kept in self.kept.values()):
            raise Overloaded(f"{len(self.kept)} responses are being made in the background already.")

    def put(self, name: str, kept: Kept) -> None:
        """Keep a response, or note that it has grown; older ones may have to go."""
        self.size -= kept.size
        self.size += kept.weigh()
        self.kept[name] = kept
        self._drop()

    def delete(self, name: str) -> None:
        """Raises: NoSuchResponse."""
        kept = self.get(name)
        self.size -= self.kept.pop(name).size
        if kept.run is not None:
            kept.run.cancel()

    def _drop(self) -> None:
        excess = len(self.kept) - MAX_KEPT
        for name in [name for name, kept in self.kept.items() if not kept.running]:
            if excess <= 0 and self.size <= MAX_BYTES:
                return
            self.size -= self.kept.pop(name).size
            excess -= 1


class Run:
    """Makes a response in a task of its own, whoever is connected.

    Args:
        keep_events: for readers that follow it, from its first event.
        ended: called at its end.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        outputs: AsyncGenerator[Output, None],
        ended: Callable[[], None],
        *,
        keep_events: bool,
    ) -> None:
        self.done = False
        self.size = 0
        self.events: list[bytes] | None = [] if keep_events else None
        self._writer = writer
        self._outputs = outputs
        self._ended = ended
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._make(), name="tinyserve-response")

    async def _make(self) -> None:
        try:
            async with aclosing(self._outputs):
                async for output in self._outputs:
                    if output.error is not None:
                        raise output.error
                    self._note(self._writer.events(output))
            self._note(self._writer.last_events())
        except asyncio.CancelledError:
            self._note(self._writer.cancelled())
        except Exception as error:
            self._note(self._writer.failed(describe(error)))
        finally:
            self.done = True
            self._ended()
            self._news.set()

    def _note(self, events: bytes) -> None:
        if self.events is not None and events:
            for event in events.split(b"\n\n")[:-1]:
                self.events.append(event + b"\n\n")
                self.size += len(event)
            self._news.set()

    def cancel(self) -> None:
        """End it, if it has not ended."""
        self._task.cancel()

    async def ended(self) -> None:
        """Return once it has ended."""
        await asyncio.wait([self._task])

    async def beyond(self, count: int) -> Sequence[bytes]:
        """The events after the first `count`, once there are any; none at its end."""
        while len(self.events) <= count and not self.done:
            self._news.clear()
            await self._news.wait()
        return self.events[count:]


class Follow:
    """An ASGI response: the events of a run from one on, until its end or until the reader leaves.

    Args: start: number of the first event.   keep_alive: seconds of silence that are broken by a comment; 0: never.
    """

    def __init__(self, run: Run, start: int, keep_alive: float = 0.0) -> None:
        self._run = run
        self._count = start
        self._keep_alive = keep_alive or None

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.create_task(_gone(receive))
        telling = asyncio.create_task(self._tell(send))
        await asyncio.wait({gone, telling}, return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, telling):
            task.cancel()
        await asyncio.gather(gone, telling, return_exceptions=True)

    async def _tell(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while (data := await self._next()) != b"":
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(self._keep_alive):
                new = await self._run.beyond(self._count)
        except TimeoutError:
            return COMMENT
        self._count += len(new)
        return b"".join(new)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
