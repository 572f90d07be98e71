"""The words in which a format is written down: states, marks that lead from one to the next, and what happens then.

Text flows into a state's sink until a mark stands there. Where a value has a grammar of its own (JSON, Python), a
reader takes the characters. A table is data: machine.py runs it, family.py puts it together.

Before: calls.py.  After: machine.py, family.py, the ..._families.py.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import field, frozen

from .calls import CallWriter

NAME = re.compile(r"\s*[\w.\-:/]*\s*")  # of a function; what else follows the mark of a call is no call
ANY = re.compile(r"(?s).*")


class Sink(enum.Enum):
    """Where the text of a state goes."""

    TEXT = "text"
    THOUGHT = "thought"
    HEAD = "head"  # collected, for the mark that ends it: a name, a key, a header
    VALUE = "value"  # of a parameter


class Act(enum.Enum):
    """What a mark does on the way to the next state; `head` is what HEAD has collected."""

    BEGIN = "begin"  # a call begins; the head is its name
    BEGIN_END = "begin-end"  # and has no arguments
    KEY = "key"  # a parameter begins; the head is its name
    VALUE = "value"  # its value ends
    END = "end"  # the call ends


@frozen
class Go:
    """A transition.

    Args:
        state: the next state.
        act: what happens on the way.
        stay: the mark is not taken away: the next state reads it.
        head: how the head is read; group "name" is the name or key, and group "id" the call's id.
        routes: (pattern, transition) pairs: the first pattern found in the head decides, instead of `state`.
    """

    state: str = ""
    act: Act | None = None
    stay: bool = False
    head: re.Pattern[str] = re.compile(r"(?s)\s*(?P<name>.*?)\s*")
    routes: tuple[tuple[re.Pattern[str], Go], ...] = ()


@frozen
class Until:
    """Text flows into the sink until a mark comes.

    Args:
        allowed: HEAD only: what it may look like; matched against every beginning of it.
        silent: nothing of this state is text, even if the answer ends in it (headers).
    """

    sink: Sink
    marks: Mapping[str, Go]
    allowed: re.Pattern[str] = NAME
    silent: bool = False


@frozen
class Expect:
    """Blanks, then one of the marks.

    Args:
        otherwise: the state that reads anything else; None: then it is no call.
        silent: a call is complete and only the format goes on: these marks are never text.
    """

    marks: Mapping[str, Go]
    otherwise: str | None = None
    silent: bool = False


class Reader(Protocol):
    """Takes characters until a value is complete."""

    def step(self, char: str) -> bool:
        """Take one; True: complete. Raises: Broken."""
        ...

    def run(self, text: str, at: int) -> int:
        """Take what follows at `at` and needs no look at each character; how many characters that were."""
        ...


@frozen
class Read:
    """A reader made by `form` takes over; then the next state."""

    form: Callable[[CallWriter], Reader]
    then: str
    silent = False


State = Until | Expect | Read
FRESH, TEXT, THOUGHT = "fresh", "text", "thought"  # the states in which nothing is a call
PLAIN = {FRESH, TEXT, THOUGHT, "opened"}


@frozen
class Table:
    """States by name, FRESH, TEXT and THOUGHT among them. start: where answers begin."""

    states: Mapping[str, State]
    start: str = FRESH
    _finders: dict[str, Finder] = field(factory=dict, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name, state in self.states.items():
            if not isinstance(state, Read):
                self._finders[name] = Finder(state.marks)
        for name, state in self.states.items():
            following = [state.then] if isinstance(state, Read) else [go.state for go in state.marks.values()]
            if missing := set(filter(None, following)) - self.states.keys():
                raise ValueError(f"state {name!r} leads to {missing}, which do not exist")

    def finder(self, name: str) -> Finder:
        """The marks of a state, ready for searching."""
        return self._finders[name]


class Finder:
    """Looks for marks in text of which the end is not there yet."""

    def __init__(self, marks: Mapping[str, Go]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if marks else None
        self._marks = marks
        self._beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max(map(len, marks), default=1)

    def search(self, text: str) -> tuple[int, str]:
        """Where the first mark stands and which it is; without one ("") how much of the text cannot be one."""
        found = self._pattern.search(text) if self._pattern else None
        if found:
            return found.start(), found.group()
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return len(text) - size, ""
        return len(text), ""

    def begins(self, text: str, *, final: bool) -> str | None:
        """The longest mark that `text` begins with, "" for none, None while it could still become one."""
        if not final and text in self._beginnings:
            return None
        return max((mark for mark in self._marks if text.startswith(mark)), key=len, default="")
