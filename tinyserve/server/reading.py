"""Answers taken apart while they are written: text, thoughts and calls, the same whole and streamed.

    Output -> Machine, Checked (text/parsers) -> events -> deltas of the chat route, or parts of a message's blocks

One `Reading` belongs to one answer. It also knows how an answer ended: with calls or without, and how many of its
tokens were a thought.

Before: tools.py, text/parsers.  After: the protocol files.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, frozen

from ..errors import RequestError
from ..grammar.thought import Gate
from ..request import FinishReason, Output, SamplingParams
from ..text.parsers.checked import Checked
from ..text.parsers.events import Event, Kind, Parsed
from ..text.parsers.registry import Parsing
from . import blocks
from .tools import ToolPlan

_PROMPT_END = 16  # tokens, in which the mark of an open thought stands


@frozen(kw_only=True, eq=False)
class Readings:
    """Makes the readings of one request's answers.

    Args:
        parsing: how the model writes.   plan: what it may call.
        tokenizer: of the engine.   prompt: the end of the prompt.
        thoughts: whether thoughts are told; else they are left out of the answer.
        special: whether the client asked to see special tokens.
        form: whether the client asked for a form, which takes the place of the grammar of tools.
    """

    parsing: Parsing
    plan: ToolPlan
    tokenizer: Any
    prompt: str
    thoughts: bool = True
    special: bool = False
    form: bool = False

    @classmethod
    def of(
        cls, engine: Any, plan: ToolPlan, prompt_ids: Sequence[int], sampling: SamplingParams, **asked: bool
    ) -> Readings:
        """For a prompt. sampling: as the client asks for it.   asked: thoughts, special.

        Raises: RequestError: the model has tools to choose from, but how it calls them is unknown.
        """
        parsing = engine.parsing
        if plan.mode == "auto" and parsing.tools is None:
            raise RequestError(
                "tools: how this model writes tool calls is not known; start the server with --tool-call-parser, or "
                "use tool_choice 'required' or 'none'.",
                param="tools",
            )
        prompt = engine.tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)
        parsing = evolve(parsing, special=()) if asked.get("special") else parsing
        form = sampling.structured_outputs is not None
        return cls(parsing=parsing, plan=plan, tokenizer=engine.tokenizer, prompt=prompt, form=form, **asked)

    @property
    def plain(self) -> bool:
        """Whether answers are nothing but text."""
        return not self.parsing.reads_thoughts and self.plan.mode == "none"

    @property
    def hides_thoughts(self) -> bool:
        """Whether the model's answers may hold thoughts that are not shown."""
        return self.parsing.reads_thoughts and not self.thoughts

    async def prepared(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters under which the parser sees its marks and the grammar of the tools holds.

        Raises: RequestError: a form is asked for beside a tool that must be called.
        """
        plan, written = self.plan, self.parsing.written
        grammar = await asyncio.to_thread(plan.grammar, written) if plan.large else plan.grammar(written)
        if grammar is not None:
            if sampling.structured_outputs is not None and plan.mode != "auto":
                raise RequestError(
                    "tool_choice forces a call, so the answer cannot have another form.", param="tool_choice"
                )
            sampling = evolve(sampling, structured_outputs=sampling.structured_outputs or grammar)
        if sampling.skip_special_tokens and self.parsing.shows_special(calls=plan.mode != "none"):
            sampling = evolve(sampling, skip_special_tokens=False)
        return sampling

    @property
    def named(self) -> str:
        """The tool whose arguments are all of the answer's text, or ""."""
        return self.plan.name if self.parsing.written.thought is None else ""

    def certain(self, name: str) -> bool:
        """Whether a call of this tool that has begun can turn out to be nothing else."""
        parsing = self.parsing
        calls = parsing.tools.calls if parsing.tools else None
        # A call that ends a thought begins where no grammar holds.
        held = not (self.form or (calls and calls.ends_thought and parsing.reads_thoughts))
        return held and self.plan.holds_call(name, parsing.written)

    def new(self) -> Reading:
        """The reading of one answer."""
        plan, parsing = self.plan, self.parsing
        if plan.forced and not self.named:
            machine = parsing.forced(tools=plan.schemas, prompt=self.prompt)
        else:
            strict = plan.holds(parsing.written)
            machine = parsing.machine(calls=plan.mode == "auto", tools=plan.schemas, prompt=self.prompt, strict=strict)
        thought = parsing.thought(self.prompt, None)
        gate = Gate(thought, lambda text: self.tokenizer.encode(text, add_special_tokens=False)) if thought else None
        return Reading(machine, self, gate)


@frozen
class Message:
    """What a whole answer holds. calls: in the chat route's form."""

    content: str | None
    reasoning: str | None
    calls: list[dict[str, Any]]


class Reading:
    """One answer, read as it comes.

    Attributes:
        parsed: all of it so far.   reasoning_tokens: how many of its tokens were a thought.
    """

    def __init__(self, machine: Any, asked: Readings, gate: Gate | None) -> None:
        self._machine = machine
        self._checked = Checked(asked.certain)
        self._asked = asked
        self._gate = gate
        self._named = asked.named
        self._ids: set[str] = set()
        self.parsed = Parsed()
        self.reasoning_tokens = 0

    def take(self, output: Output) -> list[Event]:
        """The events that an output makes."""
        self._count(output.token_ids)
        events = self._machine.feed(output.text)
        if output.finished:
            own = output.finish_reason is FinishReason.STOP and not isinstance(output.stop_reason, str)
            events += self._machine.finish(cut=not own)
            if self._named:
                events.append(Event(Kind.CALL_END, index=0))
        events = self._checked.take(events, last=output.finished)
        if self._named:
            events = list(self._as_named(events))
        if not self._asked.plan.parallel:
            events = [event for event in events if event.index <= 0]
        if not self._asked.thoughts:
            events = [event for event in events if event.kind is not Kind.THOUGHT]
        events = [self._with_id(event) if event.kind is Kind.CALL_BEGIN else event for event in events]
        self.parsed.add(events)
        return events

    def _with_id(self, event: Event) -> Event:
        """A call's beginning with an id that no other call of the answer has: the model's own, if it gives one."""
        own = event.id if event.id and event.id not in self._ids else f"chatcmpl-tool-{uuid.uuid4().hex}"
        self._ids.add(own)
        return evolve(event, id=own)

    def message(self) -> Message:
        """The whole answer."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(self.parsed.calls.items())
        ]
        nothing = None if calls or self.parsed.thought else ""
        return Message(self.parsed.text or nothing, self.parsed.thought or None, calls)

    def finish_reason(self, output: Output) -> str:
        """Why the answer ended, for the client: tool_calls if it ended by itself with at least one call."""
        reason = output.finish_reason
        calls = any(call.complete for call in self.parsed.calls.values())
        return (
            "tool_calls" if reason is FinishReason.STOP and calls and self._asked.plan.mode != "named" else reason.value
        )

    def parts(self, output: Output) -> Iterable[blocks.Part]:
        """The same as parts of blocks, for the protocols that write those."""
        for event in self.take(output):
            match event.kind:
                case Kind.TEXT | Kind.THOUGHT_ONLY:
                    yield blocks.Part(blocks.TEXT, event.text)
                case Kind.THOUGHT:
                    yield blocks.Part(blocks.THOUGHT, event.text)
                case Kind.CALL_BEGIN:
                    yield blocks.Part(blocks.CALL, name=event.name)
                case Kind.CALL_ARGS:
                    yield blocks.Part(blocks.CALL, event.text)

    def _as_named(self, events: Iterable[Event]) -> Iterable[Event]:
        """The answer's text is the arguments of the tool that was named."""
        begun = bool(self.parsed.calls)
        for event in events:
            if event.kind is Kind.TEXT:
                if not begun:
                    yield Event(Kind.CALL_BEGIN, index=0, name=self._named)
                begun = True
                yield Event(Kind.CALL_ARGS, event.text, 0)
            elif event.kind is not Kind.CALL_END or begun:
                yield event

    def _count(self, ids: Sequence[int]) -> None:
        if self._gate is None:
            return
        for token in ids:
            self._gate.takes(self._asked.tokenizer.token_bytes(token))
        self.reasoning_tokens = self._gate.tokens


# ---- the chat route's words for events


def deltas(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Chat deltas for events: each holds a text, a thought, the beginning of a call, or a piece of its arguments."""
    return [delta for event in events if (delta := _delta(event)) is not None]


def _delta(event: Event) -> dict[str, Any] | None:
    match event.kind:
        case Kind.TEXT | Kind.THOUGHT_ONLY:
            return {"content": event.text}
        case Kind.THOUGHT:
            return {"reasoning": event.text, "reasoning_content": event.text}
        case Kind.CALL_BEGIN:
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Kind.CALL_ARGS:
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
