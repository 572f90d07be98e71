"""One request to an OpenAI server: what is sent, when its pieces came, and whether it may be believed.

    sent |---- time to first token ----| piece |- inter-token latency -| piece | ...... | last piece
         |------------------------------- end-to-end latency ----------------------------|

Meanings are those of vLLM's `bench serve`. A piece is an event that brings something of the answer: text, a thought, a
call or token ids. The event with which a chat begins (a role and no text) is none, so a server that greets before it
computes gains nothing by it. How many tokens there were is what the server's usage says; a server that gives none is
credited with one a piece. An answer counts only if it was status 200, brought a piece and came to its end.

Before: client.py, prompts.py.  After: load.py (sends many), figures.py (adds them up).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import orjson
from attrs import define, field, frozen

from ..errors import ConfigError
from .client import Broken, Server
from .prompts import Prompt

SHOWN = 300  # characters of a server's error
LONGEST = 6 * 3600.0  # seconds that an answer may take; vLLM's benchmark waits as long
MOST_PIECES = 2**20  # of an answer, and
MOST_LINE = 2**24  # bytes of one: a server that sends more does not end it
MOST = 2**40  # tokens of a request; a server that says more is not to be believed
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@frozen(kw_only=True)
class Endpoint:
    """Where and how to ask.

    Args:
        path: of the route.   chat: whether it takes messages.
        fields: of every request's body: model, temperature, ignore_eos and what else was wanted.
    """

    path: str
    chat: bool
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, fields: Mapping[str, Any]) -> Endpoint:
        """name: chat, completions, or a path that ends like one of theirs. Raises: ConfigError."""
        path = PATHS.get(name, name)
        if not path.startswith("/") or not path.rstrip("/").endswith("completions"):
            raise ConfigError(f"--endpoint must be chat, completions or a path such as /v1/completions, got {name!r}.")
        return cls(path=path, chat=path.rstrip("/").endswith("chat/completions"), fields=fields)

    def body(self, prompt: Prompt) -> bytes:
        """The JSON to send. Raises: ConfigError: token ids for the chat, or messages for completions."""
        content, talks = prompt.content, isinstance(prompt.content, list) and isinstance(prompt.content[0], dict)
        if self.chat and not talks and not isinstance(content, str):
            raise ConfigError("the chat endpoint takes no token ids: use --random-text, or --endpoint completions.")
        if talks and not self.chat:
            raise ConfigError("there are conversations in the file: they need --endpoint chat.")
        if self.chat:
            asked = {"messages": content if talks else [{"role": "user", "content": content}]}
            asked["max_completion_tokens"] = prompt.output
        else:
            asked = {"prompt": content, "max_tokens": prompt.output}
        return orjson.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}, **self.fields})


@define
class Record:
    """What one request gave. Times are time.perf_counter() seconds.

    Attributes:
        sent: when it was.   pieces: when each came.   ended: when the last event did.
        prompt_tokens, output_tokens: as the server counted, None if it did not.
        whole: it came to its end.   error: why it does not count, or None.
    """

    sent: float = 0.0
    pieces: list[float] = field(factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    whole: bool = False
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.pieces) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 when there is none."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0


async def ask(server: Server, endpoint: Endpoint, body: bytes, record: Record) -> None:
    """Send one request and read its stream to the end; all of it, also what goes wrong, is noted in the record."""
    events = _Events(record)
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(LONGEST):
            head = await server.send(endpoint.path, body, events.feed)
    except TimeoutError:
        record.error = f"the answer did not end in {LONGEST:.0f} seconds"
        return
    except Broken as error:
        record.error = str(error)
        return
    if events.complete and not record.pieces and record.output_tokens:
        record.pieces.append(record.ended)  # tokens without a text, as random weights write: all came with the end
    if head.status != 200:
        record.error = f"{head.status}: {events.rest()}"
    elif record.error is None and not record.pieces:
        record.error = f"the answer was empty: {events.rest()}"
    elif record.error is None and not events.complete:
        record.error = "the stream ended before the answer did"
    record.whole = record.error is None


class _Events:
    """Reads server-sent events into a record; every line is looked at once."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._line = b""
        self._other: list[bytes] = []  # what is no event: the body of an error
        self.complete = False

    def feed(self, data: bytes) -> None:
        """Take what has come from the socket. Raises: Broken: it is more than any answer holds."""
        now = time.perf_counter()
        *lines, self._line = (self._line + data if self._line else data).split(b"\n")
        if len(self._line) > MOST_LINE or len(self._record.pieces) > MOST_PIECES:
            raise Broken("the answer does not end")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
            elif line.strip() and len(self._other) < SHOWN:
                self._other.append(line)

    def rest(self) -> str:
        """What came instead of events, shortened."""
        return b"\n".join([*self._other, self._line]).decode("utf-8", "replace").strip()[:SHOWN] or "no text"

    def _event(self, data: bytes, now: float) -> None:
        record = self._record
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            self._read(orjson.loads(data), now)
        except (ValueError, AttributeError, TypeError, LookupError, OverflowError):
            record.error = f"an event is not what OpenAI's API sends: {data[:SHOWN].decode('utf-8', 'replace')}"

    def _read(self, event: Mapping[str, Any], now: float) -> None:
        record = self._record
        record.ended = now
        if choices := event.get("choices"):
            choice = choices[0]
            if choice.get("text") or choice.get("token_ids") or _says(choice.get("delta")):
                record.pieces.append(now)
            self.complete |= choice.get("finish_reason") is not None
        elif event.get("error"):
            record.error = f"the stream ended by an error: {str(event['error'])[:SHOWN]}"
        if usage := event.get("usage"):
            record.prompt_tokens, record.output_tokens = (
                _count(usage["prompt_tokens"]),
                _count(usage["completion_tokens"]),
            )


def _count(value: Any) -> int:
    """A number of tokens that can be one. Raises: ValueError."""
    if not 0 <= int(value) <= MOST:
        raise ValueError(f"no count of tokens: {value}")
    return int(value)


def _says(delta: Mapping[str, Any] | None) -> bool:
    """Whether a part of a message holds anything of the answer."""
    return bool(delta) and any(value for name, value in delta.items() if name != "role")
