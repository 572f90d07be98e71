"""An answer in Anthropic's shape: a message made of content blocks, whole or as events.

    message_start
      content_block_start, content_block_delta ..., content_block_stop      per block
    message_delta, message_stop

`message_delta` tells why the answer ended and how long it became; an error is an event of its own, and the last one.

Before: blocks.py.  After: anthropic.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson
from attrs import frozen

from ..errors import Overloaded
from ..request import FinishReason, Output, Usage
from .blocks import CALL, TEXT, Block, Blocks, Reader, Step, plain
from .errors import Failure


@frozen(kw_only=True)
class Shape:
    """How one message is written.

    Args:
        stops: the stop sequences of the request.   details: whether cached tokens are told apart.
        reader: takes the answer's text apart.
    """

    name: str
    model: str
    prompt_tokens: int
    stops: Sequence[str] = ()
    details: bool = False
    reader: Reader = plain


class MessageWriter:
    """Writes one message."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._blocks = Blocks()
        self._started = False
        self._last: Output | None = None

    def events(self, output: Output) -> bytes:
        """The events that an output becomes."""
        if output.finish_reason is FinishReason.ABORT:
            raise Overloaded("The answer was aborted by the server.")  # no stop_reason says so
        written = []
        if not self._started:
            self._started = True
            message = self._message([], output.usage, 0)
            written.append(_event("message_start", message=message))
        for step in self._blocks.add(self._shape.reader(output)):
            written.append(self._step(step))
        if output.finished:
            self._last = output
            written += [self._step(step) for step in self._blocks.end()]
        return b"".join(written)

    def last_events(self) -> bytes:
        """Why it ended, and the end."""
        reason, sequence = self._stop()
        usage = self._usage(self._last.usage, self._last.usage.completion_tokens)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failed(self, failure: Failure) -> bytes:
        """The error as the last event."""
        return b"event: error\ndata: " + failure.anthropic_body() + b"\n\n"

    def add(self, output: Output) -> None:
        """Take an output in, for `body`."""
        self.events(output)

    def body(self) -> bytes:
        """The whole `message` object."""
        content = [_content(block) for block in self._blocks.all]
        message = self._message(content, self._last.usage, self._last.usage.completion_tokens)
        reason, sequence = self._stop()
        return orjson.dumps({**message, "stop_reason": reason, "stop_sequence": sequence})

    def _message(self, content: list[Any], usage: Usage, tokens: int) -> dict[str, Any]:
        return {
            "id": self._shape.name,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage, tokens),
        }

    def _usage(self, usage: Usage, tokens: int) -> dict[str, Any]:
        """Tokens read from the cache do not count as input tokens in this API."""
        cached = usage.cached_tokens if self._shape.details else 0
        return {
            "input_tokens": self._shape.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
        }

    def _stop(self) -> tuple[str, str | None]:
        reason, stop = self._last.finish_reason, self._last.stop_reason
        if reason is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(stop, str) and stop in self._shape.stops:
            return "stop_sequence", stop
        calls = any(block.kind == CALL for block in self._blocks.all)
        return "tool_use" if calls else "end_turn", None

    def _step(self, step: Step) -> bytes:
        index = step.block.index
        if step.what == "open":
            return _event("content_block_start", index=index, content_block=_content(step.block))
        if step.what == "close":
            return _event("content_block_stop", index=index)
        kind = step.block.kind
        if kind == CALL:
            delta = {"type": "input_json_delta", "partial_json": step.text}
        elif kind == TEXT:
            delta = {"type": "text_delta", "text": step.text}
        else:
            delta = {"type": "thinking_delta", "thinking": step.text}
        return _event("content_block_delta", index=index, delta=delta)


def _content(block: Block) -> dict[str, Any]:
    """A block so far, as an element of `content`."""
    if block.kind == TEXT:
        return {"type": "text", "text": block.text}
    if block.kind == CALL:
        return {"type": "tool_use", "id": "toolu_" + block.id, "name": block.name, "input": _arguments(block.text)}
    return {"type": "thinking", "thinking": block.text, "signature": ""}


def _arguments(text: str) -> Any:
    """A call's arguments as they were written, as a stream has them: no type has room for every number."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}  # the token limit cut it off, or nobody could read it
    return orjson.Fragment(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **members}))
