"""A family of models: how it thinks and how it calls tools, as data; and the table that this makes.

A family's thinking can be combined with another one's calls (--reasoning-parser, --tool-call-parser), and each can be
switched off for a request: then its marks are text like any other.

Before: table.py.  After: the ..._families.py, registry.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

from attrs import evolve, field, frozen

from .table import FRESH, TEXT, THOUGHT, Expect, Go, Sink, State, Table, Until


@frozen(kw_only=True)
class Thinking:
    """Marks around a thought.

    Args:
        always: an answer begins with a thought, mark or not (DeepSeek R1).
        drops: further marks around the answer, which are not shown.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    always: bool = False
    drops: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class Calls:
    """Marks that may begin a call, and the states behind them.

    Args:
        marks: anywhere in the text.   first: only where an answer, or a text behind a call, begins.
        states: by name; they end in FRESH.
        ends_thought: a call inside a thought ends it.
    """

    marks: Mapping[str, Go] = field(factory=dict)
    first: Mapping[str, Go] = field(factory=dict)
    states: Mapping[str, State]
    ends_thought: bool = False


@frozen(kw_only=True)
class Written:
    """How calls are written, for grammars that make a model call. NAME stands for the name; JSON for it in quotes.

    Args:
        before, after: around the arguments of each call.   begin, end: around all calls.   between: calls.
        parameter: around each parameter, where those are written one by one as text; NAME is its name then.
        trigger: the text that begins a call, where the model may also say something else; "" if none does.
        first: without such a text: calls stand at the beginning of an answer, which is otherwise no JSON object.
        thought: what stands before and behind a thought, for formats in which a call ends the turn: there a grammar
            spans both, and there is one call at most.
        answer, preamble: there, what stands before an answer, and around a text before a call.
        joined: between parameters; those are written as JSON then, and texts among them, too.
        quote: around texts of that form, instead.   loose: a pattern for parameters that need not be held to a schema.
    """

    before: str
    after: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    parameter: tuple[str, str] | None = None
    trigger: str = ""
    first: bool = False
    thought: tuple[str, str] | None = None
    answer: str = ""
    preamble: tuple[str, str] | None = None
    joined: str = ""
    quote: str = ""
    loose: str = ""

    @property
    def mark(self) -> str:
        """What begins a call that a grammar holds: the trigger, or the first character of an answer."""
        return self.trigger or (self.begin or "{")[:1]

    def call(self, name: str) -> str:
        """What stands before the arguments of a call of this tool."""
        return self.before.replace("JSON", json.dumps(name, ensure_ascii=False)).replace("NAME", name)


@frozen(kw_only=True, eq=False)
class Family:
    """One kind of model.

    Args:
        name: of the family.
        tools, reasoning: names under which its calls and its thinking can be asked for; vLLM's.
        written: how its calls are written; None: such answers are a plain list instead (registry.LISTED).
        special: its marks are special tokens, which have to be shown to the parser.
        certain: texts that, all found in a chat template, tell this family for sure.   but_not: none of these.
        whole: a ready table for formats in which calls, thoughts and answers are not nested (harmony).
        whole_without: the same where no tools may be called.
    """

    name: str
    tools: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    thinking: Thinking | None = None
    calls: Calls | None = None
    written: Written | None = None
    special: bool = False
    certain: tuple[tuple[str, ...], ...] = ()
    but_not: tuple[str, ...] = ()
    whole: Table | None = None
    whole_without: Table | None = None


@lru_cache(256)
def held(family: Family) -> Calls | None:
    """The calls of a family as far as a grammar can hold them: with its usual mark, and without one only at first."""
    calls, written = family.calls, family.written
    if calls is None or written is None or not (written.trigger or written.first):
        return calls
    entries = {mark: go for mark, go in {**calls.first, **calls.marks}.items() if mark == written.mark}
    where = {"marks": entries, "first": {}} if written.trigger else {"marks": {}, "first": entries}
    return evolve(calls, **where)


@lru_cache(256)
def make_table(thinking: Thinking | None, calls: Calls | None, hidden: tuple[str, ...] = ()) -> Table:
    """The table of a model that thinks and calls like this; hidden: special tokens that are not shown."""
    drops = dict.fromkeys((*hidden, *(thinking.drops if thinking else ())), Go(TEXT))
    entries = dict(calls.marks) if calls else {}
    for mark in entries:
        drops.pop(mark, None)
    begins = dict.fromkeys(thinking.begin if thinking else (), Go(THOUGHT))
    ends = dict.fromkeys(thinking.end if thinking else (), Go(FRESH))
    first = {**dict.fromkeys(drops, Go(FRESH)), **entries, **(calls.first if calls else {}), **begins}
    inside = entries if calls and calls.ends_thought else {}
    states: dict[str, State] = {
        FRESH: Expect(first, otherwise=TEXT),
        TEXT: Until(Sink.TEXT, {**drops, **entries}),
        THOUGHT: Until(Sink.THOUGHT, {**inside, **ends}),
        "opened": Expect(dict.fromkeys(begins, Go(THOUGHT)), otherwise=THOUGHT),
        **(calls.states if calls else {}),
    }
    return Table(states, "opened" if thinking and thinking.always else FRESH)
