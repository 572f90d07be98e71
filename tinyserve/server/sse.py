"""One generation on the wire: a JSON answer or server-sent events, and an end when the client goes away.

The HTTP status is sent with the first output, not before, so that whatever can go wrong until then is an HTTP error.
After it, an error is an event of its own, and the stream still ends as its protocol says. While the answer is being
made, `receive` is watched: when the client is gone, the generator is closed, and that aborts the request in the engine,
running or waiting. A stream that is silent for long (a queue, a long prompt) gets a comment now and then, so that no
proxy takes it for dead, and with the first one the status; but none before its grammar is compiled, which may yet be
refused: that is at most 20 s, and proxies wait for a minute.

Before: face.py, errors.py.  After: the protocol files, which write the events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import anyio
import orjson
from attrs import evolve

from ..request import Output, Usage
from .errors import Failure, answer_to, describe, is_own

_AT_ONCE = 32  # answers that begin, or end, in one turn of the loop
_LOOK_SECONDS = 1.0  # until a stream that may say nothing yet looks again whether it may
_NAMED = 20  # alternatives of a position, at most, as far as the size of an answer goes
OFF_LOOP = 2048  # tokens and log-probabilities in an answer; writing more takes over 2 ms and is done in a thread
DONE = b"data: [DONE]\n\n"
PROGRESS_INTERVAL = 0.1  # seconds
COMMENT = b": still working\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect the events
]


class Writer(Protocol):
    """A protocol's way to write one request's answers."""

    def events(self, output: Output) -> bytes:
        """The events that an output becomes; b"" for none."""
        ...

    def last_events(self) -> bytes:
        """Events after all answers ended: whatever ends a stream."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """The events that end a started stream after an error."""
        ...

    def add(self, output: Output) -> None:
        """Keep an output for `body`."""
        ...

    def body(self) -> bytes:
        """The whole JSON answer."""
        ...


class Generation:
    """An ASGI response that drives one or several generators of outputs.

    Args:
        sources: one generator per prompt; the outputs of source i get index i * n + their own.
        n: answers per prompt.
        keep_alive: seconds of silence after which a stream gets a comment; 0: never.
        progress: asked now and then until the first output; gives an event, or b"" when there is no news.
        known: whether it is known that there will be an answer: before, nothing is sent.
    """

    def __init__(
        self,
        sources: Sequence[AsyncIterator[Output]],
        n: int,
        writer: Writer,
        *,
        stream: bool,
        keep_alive: float = 0.0,
        progress: Callable[[], bytes] | None = None,
        known: Callable[[], bool] = lambda: True,
    ) -> None:
        self._sources = sources
        self._n = n
        self._writer = writer
        self._stream = stream
        self._keep_alive = keep_alive
        self._progress = progress
        self._known = known
        self._answering = False
        self._unfinished = n * len(sources)
        self._last = b""  # events of the last output of all, which leave with the stream's end
        self._started = False
        self._sent = time.monotonic()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        departure = Departure(receive)
        silence = Silence(self, send, self._keep_alive) if self._stream and self._keep_alive else None
        telling = None
        if self._stream and self._progress is not None:
            telling = asyncio.create_task(self._tell_progress(send))
        try:
            await self._answer(send)
        except BaseException as error:
            if not departure.caused(error):
                if is_own(error):
                    raise
                await self._fail(error, scope, receive, send)
        finally:
            departure.end()
            if silence is not None:
                silence.end()
            if telling is not None:
                telling.cancel()

    async def _answer(self, send: Any) -> None:
        outputs = self._sources[0] if len(self._sources) == 1 else _merged(self._sources, self._n)
        size = 0
        async with aclosing(outputs):
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                self._answering = True
                size += (weight := _weight(output))
                if not self._stream:
                    self._writer.add(output)
                    continue
                work = partial(self._writer.events, output)
                events = work() if weight <= OFF_LOOP else await asyncio.to_thread(work)
                self._unfinished -= output.finished
                if not self._unfinished:
                    self._last += events
                elif events:
                    await self._send(send, events)
        if self._stream:
            await self._send(send, self._last + self._writer.last_events(), more=False)
        else:
            work = self._writer.body
            body = work() if size <= OFF_LOOP else await asyncio.to_thread(work)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _send(self, send: Any, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sent = time.monotonic()

    async def comment(self, send: Any) -> float:
        """Break a silence that has lasted too long. Returns: seconds until it may be so again."""
        left = self._sent + self._keep_alive - time.monotonic()
        if left <= 0 and not self._started and not self._known():
            return min(_LOOK_SECONDS, self._keep_alive)
        if left <= 0 and not self._sending.locked():  # a reader that does not read needs no comment
            await self._send(send, COMMENT)
        return left if left > 0 else self._keep_alive

    async def _tell_progress(self, send: Any) -> None:
        while not self._answering:
            if news := self._progress():
                await self._send(send, news)
            await asyncio.sleep(PROGRESS_INTERVAL)

    async def _fail(self, error: BaseException, scope: Any, receive: Any, send: Any) -> None:
        failure = describe(error)
        if self._started:
            await self._send(send, self._last + self._writer.failed(failure), more=False)
        else:
            await answer_to(scope, failure)(scope, receive, send)


class Progress:
    """Tells how far a request's prompts are. head: the beginning of a chunk, up to its choices.

    Args: ask: gives (done, found in the cache, all) of a prompt, or None.   names: the engine's requests.
    """

    def __init__(self, head: bytes, ask: Callable[[str], tuple[int, int, int] | None], names: Sequence[str]) -> None:
        self._head = head
        self._ask = ask
        self._names = names
        self._start = time.monotonic()
        self._last: tuple[int, ...] = ()

    def __call__(self) -> bytes:
        """A chunk without choices, or b"" when nothing is known or nothing has changed."""
        found = [state for state in map(self._ask, self._names) if state is not None]
        state = tuple(map(sum, zip(*found, strict=True)))
        if not state or state == self._last:
            return b""
        self._last = state
        milliseconds = round(1000 * (time.monotonic() - self._start))
        told = {"total": state[2], "cache": state[1], "processed": state[0], "time_ms": milliseconds}
        return self._head + b'],"prompt_progress":' + orjson.dumps(told) + b"}\n\n"


def alive(engine: Any, seconds: float, *names: str) -> dict[str, Any]:
    """For a `Generation`: how its stream is kept alive. names: of the engine's requests, one for each prompt."""
    return {"keep_alive": seconds, "known": lambda: any(engine.progress(name) is not None for name in names)}


def _weight(output: Output) -> int:
    """How much there is to write, in tokens and log-probabilities."""
    named = len(output.logprobs or ()) + len(output.prompt_logprobs or ())
    return 1 + len(output.token_ids) + _NAMED * named


class Departure:
    """Cancels the task that makes it as soon as the client has left; until `end`. Attributes: left: whether it has."""

    def __init__(self, receive: Any) -> None:
        self.left = False
        self._task = asyncio.current_task()
        self._watching = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._task.cancel()

    def caused(self, error: BaseException) -> bool:
        """Whether `error` is nothing but that cancellation, which is over then. Looks no more for the client."""
        self.end()
        return self.left and isinstance(error, asyncio.CancelledError) and not self._task.uncancel()

    def end(self) -> None:
        """Look no more for the client."""
        self._watching.cancel()


class Silence:
    """Has a generation say something when it was silent for long; until `end`. A timer costs less than a task."""

    def __init__(self, generation: Generation, send: Any, seconds: float) -> None:
        self._work = partial(generation.comment, send)
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._look())

    async def _look(self) -> None:
        self._timer = self._loop.call_later(await self._work(), self._begin)

    def end(self) -> None:
        """Say nothing more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def _merged(sources: Sequence[AsyncIterator[Output]], n: int) -> AsyncIterator[Output]:
    """The outputs of all sources as they come. When one fails, or the reader stops, all are closed."""
    news: asyncio.Queue[Any] = asyncio.Queue(len(sources))

    async def pump(number: int, source: AsyncIterator[Output]) -> None:
        try:
            async with aclosing(source):
                async for output in source:
                    await news.put(_at(output, number * n + output.index))
            await news.put(None)
        except BaseException as error:
            if is_own(error):
                raise
            await news.put(error)

    tasks: list[asyncio.Task[None]] = []
    at_once = max(_AT_ONCE // n, 1)
    try:
        for number, source in enumerate(sources):
            tasks.append(asyncio.create_task(pump(number, source)))
            if number % at_once == at_once - 1:
                await asyncio.sleep(0)  # others have a turn: queueing a thousand prompts takes 0.2 s
        open_sources = len(tasks)
        while open_sources:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield item
    finally:
        with anyio.CancelScope(shield=True):
            for number, task in enumerate(tasks):
                task.cancel()
                if number % at_once == at_once - 1:
                    await asyncio.sleep(0)  # an answer takes 0.1 ms to end
            await asyncio.gather(*tasks, return_exceptions=True)


def _at(output: Output, index: int) -> Output:
    return output if output.index == index else evolve(output, index=index)


class Tally:
    """Adds up the usage of a request: each prompt counted once, whatever n.

    Args: prompts: prompt tokens of each prompt.   details: whether cached tokens are reported.
    """

    def __init__(self, prompts: Sequence[int], *, details: bool) -> None:
        self._prompts = prompts
        self._details = details
        self._completion: dict[int, int] = {}
        self._thoughts: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def count(self, output: Output, n: int) -> None:
        """Note the newest counts of an answer."""
        self._completion[output.index] = output.usage.completion_tokens
        prompt = output.index // n
        self._cached[prompt] = max(self._cached.get(prompt, 0), output.usage.cached_tokens)

    def thought(self, index: int, tokens: int) -> None:
        """Note how many tokens of an answer were a thought; only for models whose thoughts are known."""
        self._thoughts[index] = tokens

    def total(self) -> dict[str, Any]:
        """Usage of the whole request."""
        usage = self._usage(sum(self._prompts), sum(self._completion.values()), sum(self._cached.values()))
        if self._thoughts:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(self._thoughts.values())}
        return usage

    def so_far(self, usage: Usage) -> bytes:
        """The usage of one answer, as a JSON member to append to a chunk."""
        found = self._usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return b',"usage":' + orjson.dumps(found)

    def _usage(self, prompt: int, completion: int, cached: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion
        }  # fmt: skip
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


class ChoiceWriter:
    """What writers of OpenAI's chunks share: answers are numbered choices, and a stream ends with usage and [DONE].

    Args:
        identity: how the one object begins, and a chunk, if `chunk` is not given.
        prompts: prompt tokens of each prompt.   n: answers to each.
        include_usage: whether a stream ends with it.   details: whether cached tokens are reported.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        chunk: dict[str, Any] | None = None,
        *,
        prompts: Sequence[int],
        n: int,
        include_usage: bool,
        details: bool,
    ) -> None:
        self._identity = identity
        self._n = n
        self._include_usage = include_usage
        self._tally = Tally(prompts, details=details)
        self.head = b"data: " + orjson.dumps(chunk or identity)[:-1] + b',"choices":['
        self._choices: dict[int, list[Output]] = {}

    def last_events(self) -> bytes:
        """The usage chunk, if asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":' + orjson.dumps(self._tally.total()) + b"}\n\n" + DONE

    def failed(self, failure: Failure) -> bytes:
        """The error as an event, and [DONE]."""
        return b"data: " + failure.body() + b"\n\n" + DONE

    def add(self, output: Output) -> None:
        """Keep an output for `body`."""
        self._tally.count(output, self._n)
        self._choices.setdefault(output.index, []).append(output)
