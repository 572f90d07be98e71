"""Which table reads a model's answers: asked for by name or import path, or told from the chat template.

A template shows how its model's history is written, so it nearly always shows the marks. Where they are certain the
family is chosen and logged; where they are not, answers stay plain text, and a request with tools is refused with the
name of the option that helps.

Before: family.py, the ..._families.py.  After: engine/parts.py (chooses once), server/ (makes a machine per answer).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ...errors import ConfigError
from ...options import nearest
from ...structured import Thought
from . import json_families, named_families, other_families, xml_families
from .family import Calls, Family, Thinking, Written, held, make_table
from .json_calls import JsonForm
from .machine import Machine
from .table import FRESH, Expect, Go, Read, Table

FAMILIES: tuple[Family, ...] = (
    *xml_families.FAMILIES,
    *named_families.FAMILIES,
    *other_families.FAMILIES,
    *json_families.FAMILIES,
)
OFF = "none"
# Calls for models whose own way is not known, or cannot be a grammar: JSON objects, one a line.
LISTED = Calls(
    first={"{": Go("object", stay=True)},
    states={
        "object": Read(JsonForm(arguments=("parameters",)), "listed"),
        "listed": Expect({"{": Go("object", stay=True)}, otherwise=FRESH, silent=True),
    },
)
LISTED_WRITTEN = Written(before='{"name": JSON, "parameters": ', after="}", between="\n")


@frozen(kw_only=True)
class Parsing:
    """How the answers of one model are read.

    Args:
        thoughts, tools: the families whose thinking and calls are read; None: such marks are text.
        special: all special tokens of the tokenizer; those that are no marks are not shown.
    """

    thoughts: Family | None = None
    tools: Family | None = None
    special: tuple[str, ...] = ()

    @property
    def thinking(self) -> Thinking | None:
        """The marks of thoughts; None if there are none, or if they are part of a whole format."""
        return self.thoughts.thinking if self.thoughts else None

    @property
    def reads_thoughts(self) -> bool:
        return self.thoughts is not None

    def shows_special(self, *, calls: bool) -> bool:
        """Whether the parser has to see special tokens as text."""
        return any(family.special for family in (self.thoughts, self.tools if calls else None) if family)

    def opened(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought, so that the answer goes on with it."""
        begins = self.thinking.begin if self.thinking else ()
        return prompt.rstrip().endswith(begins) if begins else False

    def thought(self, prompt: str, budget: int | None) -> Thought | None:
        """How the thought before an answer to this prompt is told from it; None if there is none."""
        if self.thoughts is None:
            return None
        if self.thoughts.whole is not None:
            final = "<|channel|>final<|message|>"
            force = "<|end|><|start|>assistant" + final
            return Thought(ends=(final,), opened=True, budget=budget, force=force)
        marks = self.thinking
        if marks is None or self._closed(prompt):
            return None
        opened = marks.always or self.opened(prompt)
        first, *others = marks.begin
        return Thought(begin=first, also=tuple(others), ends=marks.end, opened=opened, budget=budget)

    def machine(
        self,
        *,
        calls: bool,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        prompt: str = "",
        thoughts: bool = True,
        strict: bool = False,
    ) -> Machine:
        """A parser for one answer.

        Args:
            calls: whether the answer may call tools; else their marks are text.
            tools: name -> schema of the parameters.
            prompt: the end of the rendered prompt; empty when it is not known.
            thoughts: whether thinking is read; else its marks are text.
            strict: only what a grammar holds is a call.
        """
        opened = thoughts and self.opened(prompt)
        start = "fresh" if not opened and self._closed(prompt) else None
        table = self.table(calls=calls, thoughts=thoughts, strict=strict)
        return Machine(table, tools=tools, opened=opened, start=start)

    @property
    def written(self) -> Written:
        """How an answer writes calls when a grammar makes it do so: the model's own way, if that is known."""
        family = self._whole or self.tools
        return (family.written if family else None) or LISTED_WRITTEN

    def forced(self, *, tools: Mapping[str, Mapping[str, Any]], prompt: str = "") -> Machine:
        """A parser for an answer that a grammar makes a call, behind the model's own thought."""
        whole = self._whole
        if whole is not None:
            return Machine(whole.whole, tools=tools)
        if self.written is not LISTED_WRITTEN:
            return self.machine(calls=True, tools=tools, prompt=prompt)
        opened = self.opened(prompt)
        start = "fresh" if not opened and self._closed(prompt) else None
        return Machine(make_table(self.thinking, LISTED), tools=tools, opened=opened, start=start)

    @property
    def _whole(self) -> Family | None:
        return next((family for family in (self.tools, self.thoughts) if family and family.whole), None)

    def table(self, *, calls: bool, thoughts: bool = True, strict: bool = False) -> Table:
        """The table for answers of this model."""
        whole = self._whole
        if whole is not None:
            return whole.whole if calls and whole is self.tools else whole.whole_without
        hidden = self.special if self.shows_special(calls=calls) else ()
        read = (held(self.tools) if strict else self.tools.calls) if calls and self.tools else None
        return make_table(self.thinking if thoughts else None, read, hidden)

    def _closed(self, prompt: str) -> bool:
        """Whether the prompt already holds the end of a thought: the template was told not to think."""
        ends = self.thinking.end if self.thinking else ()
        return bool(ends) and prompt.rstrip().endswith(ends)


def choose(
    template: str | None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    special: tuple[str, ...] = (),
) -> Parsing:
    """The parsing of a model.

    Args:
        template: its chat template, from which the families are told unless they are named.
        tool_parser, reasoning_parser: a family by name, "none", or `package.module:NAME` / `file.py:NAME` of a Family.
        special: texts of the tokenizer's special tokens.
    Raises: ConfigError: an unknown name, or an import that fails.
    """
    told = detect(template or "")
    tools = _named(tool_parser, "--tool-call-parser", lambda family: family.tools) if tool_parser else told
    thoughts = (
        _named(reasoning_parser, "--reasoning-parser", lambda family: family.reasoning) if reasoning_parser else told
    )
    if not reasoning_parser and (thoughts is None or not (thoughts.thinking or thoughts.whole)):
        thoughts = _thoughts_of(template or "")
    if tools is not None and not (tools.calls or tools.whole):
        tools = None
    return Parsing(thoughts=thoughts, tools=tools, special=special)


def detect(template: str) -> Family | None:
    """The family that a chat template certainly belongs to."""
    for family in FAMILIES:
        if any(mark in template for mark in family.but_not):
            continue
        if any(all(mark in template for mark in marks) for marks in family.certain):
            if family.thinking is not None and not any(mark in template for mark in family.thinking.end):
                return evolve(family, thinking=None)
            return family
    return None


def _thoughts_of(template: str) -> Family | None:
    """A template without known calls may still show thoughts between the usual tags."""
    return _named("qwen3", "", lambda family: family.reasoning) if "</think>" in template else None


def _named(name: str, option: str, names: Callable[[Family], tuple[str, ...]]) -> Family | None:
    if name == OFF:
        return None
    for family in FAMILIES:
        if name in names(family):
            return family
    if ":" in name:
        return _imported(name, option)
    known = _known(names)
    hint = f" Did you mean {close}?" if (close := nearest(name, known)) else ""
    raise ConfigError(
        f"{option} {name}: no such parser.{hint} Known are {', '.join(known)}; or give module:NAME of a Family."
    )


def _known(names: Callable[[Family], tuple[str, ...]]) -> list[str]:
    return sorted({each for family in FAMILIES for each in names(family)})


def known_parsers() -> dict[str, list[str]]:
    """The names that each of the two options takes."""
    return {
        "tool_call_parser": _known(lambda family: family.tools),
        "reasoning_parser": _known(lambda family: family.reasoning),
    }


def _imported(path: str, option: str) -> Family:
    place, _, attribute = path.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        family = getattr(module, attribute)
    except Exception as error:
        raise ConfigError(f"{option} {path}: it cannot be imported: {error!r}") from error
    if not isinstance(family, Family):
        raise ConfigError(f"{option} {path}: it must be a tinyserve.text.parsers.family.Family, got {family!r}.")
    return family
