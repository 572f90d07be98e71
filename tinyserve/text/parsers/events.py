"""What a parser tells about an answer, and how these events add up to a message.

    TEXT "Let me look." | CALL_BEGIN 0 "weather" | CALL_ARGS 0 '{"city": ' | CALL_ARGS 0 '"Oslo"}' | CALL_END 0

Events only ever add, with one exception: a call that had begun can turn out to be no call (CALL_BROKEN). It carries the
text that was meant; checked.py keeps such beginnings from whoever cannot take them back. A thought that the prompt had
opened and nothing closed may have been the answer (THOUGHT_ONLY): it is both then.

Before: request.py (the text of an answer).  After: machine.py (makes events), checked.py, server/ (sends them).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import define, evolve, field, frozen


class Kind(enum.Enum):
    """What an event adds."""

    TEXT = "text"
    THOUGHT = "thought"
    CALL_BEGIN = "call-begin"  # name, and id if the model gave one
    CALL_ARGS = "call-args"  # the next piece of the JSON text of the arguments
    CALL_END = "call-end"  # the arguments are complete
    CALL_BROKEN = "call-broken"  # what had begun is no call; text: everything that was taken for it
    THOUGHT_ONLY = "thought-only"  # text: all thoughts so far, behind which no answer came; it is the answer, too


@frozen
class Event:
    """One step of reading an answer. index: which call of the answer, from 0; -1 where it is about none."""

    kind: Kind
    text: str = ""
    index: int = -1
    name: str = ""
    id: str | None = None


_JOINED = {Kind.TEXT, Kind.THOUGHT, Kind.CALL_ARGS}


def join(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one kind joined, and empty ones left out."""
    joined: list[Event] = []
    for event in events:
        if event.kind in _JOINED and not event.text:
            continue
        last = joined[-1] if joined else None
        if last is not None and event.kind in _JOINED and (last.kind, last.index) == (event.kind, event.index):
            joined[-1] = evolve(last, text=last.text + event.text)
        else:
            joined.append(event)
    return joined


@define
class ParsedCall:
    """One call. arguments: JSON text, a beginning of it when `complete` is False."""

    name: str
    arguments: str = ""
    id: str | None = None
    complete: bool = False


@define
class Parsed:
    """A message: what all events so far add up to. calls: by index, in order."""

    text: str = ""
    thought: str = ""
    calls: dict[int, ParsedCall] = field(factory=dict)

    def add(self, events: Iterable[Event]) -> Parsed:
        """Take in more events; returns itself."""
        for event in events:
            match event.kind:
                case Kind.TEXT | Kind.THOUGHT_ONLY:
                    self.text += event.text
                case Kind.THOUGHT:
                    self.thought += event.text
                case Kind.CALL_BEGIN:
                    self.calls[event.index] = ParsedCall(event.name, id=event.id)
                case Kind.CALL_ARGS:
                    self.calls[event.index].arguments += event.text
                case Kind.CALL_END:
                    self.calls[event.index].complete = True
                case Kind.CALL_BROKEN:
                    self.calls.pop(event.index, None)
                    self.text += event.text
        return self
