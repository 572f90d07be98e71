"""A response while it grows: the `response` object of the moment, and the events that tell of each change.

    response.created, response.in_progress
      output_item.added [content_part.added] ... delta ... done [content_part.done] output_item.done      per block
    response.completed | response.incomplete | response.failed

Every event has a sequence number, counted from 0; there is no [DONE].

Before: blocks.py (what an answer consists of).  After: responses.py, responses_store.py (keeps what was written).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from attrs import field, frozen

from ..request import FinishReason, Output, Usage
from .blocks import CALL, TEXT, THOUGHT, Block, Blocks, Reader, Step, plain
from .errors import Failure
from .logprobs import chat_logprobs

_PREFIX = {TEXT: "msg_", THOUGHT: "rs_", CALL: "fc_"}
_CODES = {503: "rate_limit_exceeded"}  # by which a client tells whether to ask again, and when
_STATUS = {FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}


@frozen(kw_only=True)
class Shape:
    """How one response is written.

    Args:
        logprobs: alternatives per token that the text lists, None for no logprobs.
        reader: takes the answer's text apart.   thought_tokens: tells how many of its tokens were a thought.
        ended: called once, when the response is complete.
    """

    tokenizer: Any
    prompt_tokens: int
    logprobs: int | None = None
    reader: Reader = plain
    thought_tokens: Callable[[], int] = int
    ended: Callable[[], None] = field(default=lambda: None)


class ResponseWriter:
    """Writes one response. head: the members of the object that do not change."""

    def __init__(self, head: Mapping[str, Any], shape: Shape) -> None:
        self._head = head
        self._shape = shape
        self._blocks = Blocks()
        self._items: list[dict[str, Any]] = []  # of closed blocks
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been sent yet
        self._sent_logprobs: list[dict[str, Any]] = []  # of the open block
        self._usage: Usage | None = None
        self._so_far: Usage | None = None
        self._error: dict[str, Any] | None = None
        self._number = 0
        self.status = "queued"

    # ---- the object

    def snapshot(self) -> dict[str, Any]:
        """The `response` object as it is now."""
        cut = self.status == "incomplete"
        return {
            **self._head,
            "status": self.status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*self._items, *(self._item(b, "in_progress") for b in self._blocks.all[len(self._items) :])],
            "usage": self._counts(),
        }

    def messages(self) -> list[dict[str, Any]]:
        """The answer as chat messages, for the next turn of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for block in self._blocks.all:
            if block.kind == THOUGHT:
                message["reasoning"] = message.get("reasoning", "") + block.text
            elif block.kind == TEXT:
                message["content"] += block.text
            else:
                function = {"name": block.name, "arguments": block.text}
                call = {"id": "call_" + block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return [message]

    def _counts(self) -> dict[str, Any] | None:
        if self._usage is None:
            return None
        usage = self._usage
        return {
            "input_tokens": self._shape.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._shape.thought_tokens()},
            "total_tokens": self._shape.prompt_tokens + usage.completion_tokens,
        }

    # ---- what happens to it

    def events(self, output: Output) -> bytes:
        """The events that an output becomes."""
        written = [] if self.status != "queued" else self.begin()
        self.status = "in_progress"
        self._so_far = output.usage
        if self._shape.logprobs is not None:
            self._logprobs += self._named(output)
        for step in self._blocks.add(self._shape.reader(output)):
            written += self._step(step)
        if output.finished:
            self._usage = self._so_far
            self.status = _STATUS.get(output.finish_reason, "completed")
            for step in self._blocks.end():
                written += self._step(step)
        return b"".join(written)

    def begin(self) -> list[bytes]:
        """The first events."""
        self.status = "in_progress"
        return [self._told("response.created"), self._told("response.in_progress")]

    def last_events(self) -> bytes:
        """The whole object, as the last event."""
        self._shape.ended()
        kind = "response.completed" if self.status == "completed" else "response.incomplete"
        return self._told(kind)

    def failed(self, failure: Failure) -> bytes:
        """The response has failed."""
        self.status = "failed"
        code = _CODES.get(failure.status, "server_error" if failure.status >= 500 else "invalid_prompt")
        self._error = {"code": code, "message": failure.message}
        self._shape.ended()
        return self._told("response.failed")

    def cancelled(self) -> bytes:
        """Somebody has ended it: the last events, as those of an answer that was aborted."""
        written = [] if self.status != "queued" else self.begin()
        self.status, self._usage = "cancelled", self._so_far
        for step in self._blocks.end():
            written += self._step(step)
        return b"".join([*written, self.last_events()])

    def add(self, output: Output) -> None:
        """Take an output in, for `body`."""
        self.events(output)

    def body(self) -> bytes:
        """The whole object."""
        self._shape.ended()
        return orjson.dumps(self.snapshot())

    # ---- blocks become items

    def _step(self, step: Step) -> list[bytes]:
        if step.what == "open":
            return self._opened(step.block)
        if step.what == "more":
            return [self._grown(step.block, step.text)]
        return self._closed(step.block)

    def _opened(self, block: Block) -> list[bytes]:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == CALL:
            return [added]
        return [added, self._event("response.content_part.added", **self._place(block), part=self._part(block, []))]

    def _grown(self, block: Block, text: str) -> bytes:
        if block.kind == CALL:
            found = {"item_id": _PREFIX[CALL] + block.id, "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **found, delta=text)
        if block.kind == THOUGHT:
            self._logprobs = []
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        new, self._logprobs = self._logprobs, []
        self._sent_logprobs += new
        return self._event("response.output_text.delta", **self._place(block), delta=text, logprobs=new)

    def _closed(self, block: Block) -> list[bytes]:
        unfinished = self.status not in ("completed", "in_progress")
        logprobs = [*self._sent_logprobs, *self._logprobs]
        self._sent_logprobs, self._logprobs = [], []
        item = self._item(block, "incomplete" if unfinished else "completed", logprobs)
        self._items.append(item)
        place, text, written = self._place(block), block.text, []
        if block.kind == CALL:
            found = {"item_id": item["id"], "output_index": block.index, "name": block.name}
            written.append(self._event("response.function_call_arguments.done", **found, arguments=text))
        else:
            if block.kind == THOUGHT:
                written.append(self._event("response.reasoning_text.done", **place, text=text))
            else:
                written.append(self._event("response.output_text.done", **place, text=text, logprobs=logprobs))
            part = self._part(block, logprobs, text)
            written.append(self._event("response.content_part.done", **place, part=part))
        written.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return written

    def _item(self, block: Block, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        item: dict[str, Any] = {"id": _PREFIX[block.kind] + block.id, "status": status}
        if block.kind == CALL:
            name = {"type": "function_call", "call_id": "call_" + block.id, "name": block.name}
            return {**item, **name, "arguments": block.text}
        begun = bool(block.pieces) or status != "in_progress"
        content = [self._part(block, logprobs, block.text)] if begun else []
        if block.kind == THOUGHT:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, logprobs: Sequence[Any], text: str = "") -> dict[str, Any]:
        if block.kind == THOUGHT:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": _PREFIX[block.kind] + block.id, "output_index": block.index, "content_index": 0}

    def _named(self, output: Output) -> list[dict[str, Any]]:
        found = chat_logprobs([output], self._shape.tokenizer, top=self._shape.logprobs, ids_as_text=False)
        return found["content"]

    def _told(self, kind: str) -> bytes:
        return self._event(kind, response=self.snapshot())

    def _event(self, kind: str, **members: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **members})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def stamp() -> int:
    """Seconds since 1970, as answers carry them."""
    return int(time.time())
