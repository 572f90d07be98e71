"""Calls that are shown once it is certain that they are calls: a stream cannot take back what it has shown.

    CALL_BEGIN "f" | CALL_ARGS '{"a":' | CALL_BROKEN '<tool_call>{...NaN'   ->  TEXT '<tool_call>{...NaN'
    CALL_BEGIN "f" | CALL_ARGS '{"a":' | CALL_ARGS '1}' | CALL_END          ->  CALL_BEGIN, CALL_ARGS '{"a":1}' ...

So what a stream adds up to is what the whole answer says, whatever a model writes. It costs time: arguments come when
they are complete. Where a grammar makes the model write a call that can be read, it is certain from its beginning and
passes as it comes; what a grammar allows and no parser takes (1000 brackets) is text behind it. A call that the
answer's end cuts off is shown as far as it came.

Before: machine.py (the events).  After: server/reading.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from attrs import evolve

from .events import Event, Kind

PIECE = 2048  # characters of arguments in an event


class Checked:
    """Holds back the calls of one answer. Args: certain: whether a call of this tool can be nothing else."""

    def __init__(self, certain: Callable[[str], bool]) -> None:
        self._certain = certain
        self._begin: Event | None = None  # of the call that is held back
        self._arguments: list[str] = []
        self._none = 0  # calls that turned out to be none: those behind them are counted without them

    def take(self, events: Iterable[Event], *, last: bool) -> list[Event]:
        """The events that may be shown now. last: the answer has ended."""
        shown = [each for event in events for each in self._next(event)]
        return [*shown, *self._release()] if last else shown

    def _next(self, event: Event) -> Iterator[Event]:
        if event.index >= 0:
            event = evolve(event, index=event.index - self._none)
        if event.kind is Kind.CALL_BEGIN and not self._certain(event.name):
            self._begin = event
        elif self._begin is None:
            yield Event(Kind.TEXT, event.text) if event.kind is Kind.CALL_BROKEN else event
        elif event.kind is Kind.CALL_ARGS:
            self._arguments.append(event.text)
        elif event.kind is Kind.CALL_BROKEN:
            self._begin, self._arguments = None, []
            self._none += 1
            yield Event(Kind.TEXT, event.text)
        else:
            yield from self._release()
            yield event

    def _release(self) -> Iterator[Event]:
        begin, self._begin = self._begin, None
        if begin is not None:
            text, self._arguments = "".join(self._arguments), []
            yield begin
            for at in range(0, len(text), PIECE):
                yield Event(Kind.CALL_ARGS, text[at : at + PIECE], begin.index)
