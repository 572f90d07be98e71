"""One machine for all formats in which models think, answer and call tools.

A table has states. In a state, text flows into a sink until a mark (a terminal) stands there; the mark leads to the
next state. Where a value has a grammar of its own (JSON, Python), a reader takes the characters until it is done.

    fresh -<think>-> thought -</think>-> fresh -"Hi"-> text -<tool_call>-> call =JSON=> close -</tool_call>-> fresh

What may still become a mark is kept back, nothing else. Every decision depends on the text so far and never on how it
was cut into pieces, so a stream and a whole answer give the same events. What was taken for a call and is none goes out
as text, from the first character of its mark on, and reading goes on behind it.

Before: table.py, calls.py, events.py.  After: checked.py, registry.py, server/reading.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .calls import Broken, CallWriter
from .events import Event, Kind, join
from .table import FRESH, PLAIN, TEXT, THOUGHT, Act, Expect, Go, Read, Reader, Sink, Table, Until

MAX_HEAD = 1024  # characters of a name, key or header; what is longer is none


class Machine:
    """Reads one answer.

    Args:
        table: of the model's family.
        tools: name -> JSON schema of its parameters, None when unknown.
        opened: the prompt ends with an open thought.   start: another state to begin in.
    """

    def __init__(
        self,
        table: Table,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        opened: bool = False,
        start: str | None = None,
    ) -> None:
        self._table = table
        self._events: list[Event] = []
        self._writer = CallWriter(self._events.append, tools)
        self._waiting = ""  # text that no state has taken yet
        self._raw: list[str] = []  # what was taken since the mark that may begin a call
        self._head = ""
        self._blank = ""  # blanks before a text that may not come
        self._newlines = ""  # at the end of the thought so far
        self._said = False  # text, a thought or a call stands before the blanks
        self._called = False
        self._thoughts: list[str] | None = [] if opened else None
        self._after_thought = self._thinking = False
        self._reader: Reader | None = None
        self._state = ""
        self._enter(start or ("opened" if opened and "opened" in table.states else table.start))

    @property
    def thinking(self) -> bool:
        """Whether what comes next belongs to a thought, as far as is known."""
        return self._state in (THOUGHT, "opened")

    def feed(self, text: str) -> list[Event]:
        """The events that more text of the answer makes."""
        self._waiting += text
        while self._waiting and self._advance(final=False):
            pass
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The last events. cut: the answer did not end by itself, so that its last call may be incomplete."""
        if self._state not in PLAIN and self._table.states[self._state].silent:
            self._waiting = ""
        while self._waiting and not self._writer.open and self._advance(final=True):
            pass
        state = self._table.states[self._state]
        if self._state in PLAIN:
            self._end_plain(cut)
        elif self._writer.open:
            if not cut:
                self._writer.drop("".join(self._raw) + self._waiting)
        elif not state.silent:
            self._end_raw()
        self._waiting = ""
        return self._take()

    def _take(self) -> list[Event]:
        events = join(self._events)
        self._events.clear()
        return events

    def _end_raw(self) -> None:
        """The answer ends where a call could have begun. Between two calls, punctuation alone is no text."""
        raw = "".join(self._raw) + self._waiting
        if not self._called or re.search(r"\w", raw):
            self._text(raw)

    def _end_plain(self, cut: bool) -> None:
        if self._waiting and self._state == THOUGHT:
            self._thought(self._waiting)
        elif self._waiting:
            self._text(self._waiting)
        if self._blank and not self._said:
            self._events.append(Event(Kind.TEXT, self._blank))
        if self.thinking and self._thoughts and not cut:
            self._events.append(Event(Kind.THOUGHT_ONLY, "".join(self._thoughts)))

    # ---- one step

    def _advance(self, *, final: bool) -> bool:
        """Take some of the waiting text; False when more of it is needed."""
        state = self._table.states[self._state]
        try:
            if isinstance(state, Read):
                return self._read(state)
            if isinstance(state, Expect):
                return self._expect(state, final)
            return self._until(state)
        except Broken:
            self._break()
            return True

    def _read(self, state: Read) -> bool:
        ended, reader, text, at = self._writer.ended, self._reader, self._waiting, 0
        while at < len(text):
            if skipped := reader.run(text, at):
                at += skipped
                continue
            try:
                done = reader.step(text[at])
            except Broken:
                self._consume(at)
                raise
            at += 1
            if self._writer.ended > ended:
                self._consume(at)
                self._settle()
                if done:
                    self._enter(state.then)
                return True
            if done:
                self._consume(at)
                self._enter(state.then)
                return True
        self._consume(len(self._waiting))
        return False

    def _expect(self, state: Expect, final: bool) -> bool:
        rest = self._waiting.lstrip()
        blanks = self._waiting[: len(self._waiting) - len(rest)]
        mark = self._table.finder(self._state).begins(rest, final=final) if rest else None
        if mark is None and not final:
            return False
        if mark:
            if self._state in PLAIN:
                self._blank += blanks
                self._waiting = rest
            else:
                self._consume(len(blanks))
            self._go(mark, state.marks[mark])
        elif self._state in PLAIN and rest:
            self._blank += blanks
            self._waiting = rest
            self._enter(state.otherwise)
        elif self._state in PLAIN:
            self._blank, self._waiting = self._blank + blanks, ""
        elif state.otherwise is None:
            self._consume(len(blanks))
            raise Broken
        else:
            self._enter(state.otherwise)
        return True

    def _until(self, state: Until) -> bool:
        at, mark = self._table.finder(self._state).search(self._waiting)
        text = self._waiting[:at]
        if state.sink is Sink.HEAD:
            fits = state.allowed.match(self._head + text, 0, MAX_HEAD).end() - len(self._head)
            if fits < len(text):
                self._consume(fits)
                raise Broken
            self._head += text
        if self._state in PLAIN:
            self._waiting = self._waiting[at:]
        else:
            self._consume(at)
        if state.sink is Sink.TEXT:
            self._text(text)
        elif state.sink is Sink.THOUGHT:
            self._thought(text)
        elif state.sink is Sink.VALUE:
            self._writer.value(text)
        if mark:
            self._go(mark, state.marks[mark])
        return bool(mark)

    def _go(self, mark: str, go: Go) -> None:
        """Follow a transition whose mark stands at the beginning of what waits."""
        if self._state in PLAIN and go.state not in PLAIN:
            self._raw = [self._blank]  # a call may begin: remember what to give back
        elif isinstance(state := self._table.states[self._state], Expect) and state.silent:
            self._raw = []
        if not go.stay:
            self._consume(len(mark))
        for pattern, route in go.routes:
            if found := pattern.search(self._head):
                self._act(route, found)
                return
        self._act(go, go.head.fullmatch(self._head))

    def _act(self, go: Go, found: re.Match[str] | None) -> None:
        groups = found.groupdict() if found else {}
        writer = self._writer
        if go.act in (Act.BEGIN, Act.BEGIN_END):
            writer.begin(groups.get("name") or "", groups.get("id"))
        elif go.act is Act.KEY:
            writer.key(groups.get("name") or "")
        elif go.act is Act.VALUE:
            writer.end_value()
        if go.act in (Act.END, Act.BEGIN_END):
            writer.end()
            self._settle()
        self._enter(go.state)

    def _enter(self, name: str) -> None:
        state = self._table.states[name]
        if name in PLAIN:
            self._raw = []
            if name == FRESH and self._state in (THOUGHT, "opened"):
                self._said = self._after_thought = True
                self._blank = self._newlines = ""
                self._thoughts = None
            elif name == THOUGHT:
                self._blank = ""
        elif isinstance(state, Read):
            self._reader = state.form(self._writer)
        self._state, self._head = name, ""

    def _settle(self) -> None:
        """A call is complete: what was taken for it is not text any more, nor are the blanks around it."""
        self._raw = []
        self._blank = ""
        self._said = self._called = True
        self._after_thought = False

    def _consume(self, count: int) -> None:
        if count:
            self._raw.append(self._waiting[:count])
            self._waiting = self._waiting[count:]

    def _break(self) -> None:
        """What was taken for a call is text; go on behind it."""
        raw, self._raw = "".join(self._raw), []
        self._blank = ""
        if self._writer.open:
            self._writer.drop(raw)
            self._said = True
        else:
            self._text(raw)
        self._enter(TEXT)

    # ---- what goes out

    def _text(self, text: str) -> None:
        text = self._blank + text
        if self._after_thought:  # line breaks between thought and answer belong to the format
            text = text.lstrip("\n")
        if text:
            self._blank, self._said, self._after_thought = "", True, False
            self._events.append(Event(Kind.TEXT, text))

    def _thought(self, text: str) -> None:
        """Line breaks around a thought belong to the format: they stand after the mark and before the next."""
        if self._thoughts is not None:
            self._thoughts.append(text)
        if not self._thinking:
            text = text.lstrip("\n")
        if not text:
            return
        self._thinking = True
        kept = text.rstrip("\n")
        if kept:
            self._events.append(Event(Kind.THOUGHT, self._newlines + kept))
            self._newlines = ""
        self._newlines += text[len(kept) :]
