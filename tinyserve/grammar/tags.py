"""Structural tags: free text in which marks are followed by constrained parts, as one grammar.

Parts may have a `name`, which is told where one is wrong: a request may hold hundreds of tools. A `const_string` may be
`"plain": true`: then it is a text also where it looks like a special token, which it stands for otherwise. Both are
words of ours, not of the form that others read.

Before: schema.py.  After: asked.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from llguidance import LLMatcher

from ..errors import shown
from ..structured import Constraint
from .numbers import Schema, Wrong
from .places import MAX_DEPTH
from .regexes import check_repeats
from .schema import prepared

NAME = 300  # characters of a part's name that are told
FREE_TEXT = r"/(.|\n)*/"


@frozen(eq=False)
class Part:
    """A part of what was asked for that is wrong or right by itself.

    Args: name: its own, or "".   grammar: the library's text for it alone.   schema: if it is one.
    """

    name: str
    grammar: str
    schema: Schema | None = None

    def named(self, what: Any) -> str:
        """What is wrong, with the name of the part."""
        return f"{self.name}: {what}" if self.name else str(what)


class Tags:
    """Collects the rules of one grammar.

    Args: special: special tokens by their text.   parts: gets those that may be wrong by themselves.
    Attributes: text: of the grammar.
    Raises: Wrong: it is malformed, or asks for what is not held.
    """

    def __init__(self, constraint: Constraint, special: Mapping[str, int], parts: list[Part]) -> None:
        self._constraint = constraint
        self._special = special
        self._parts_of = parts
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []
        start = self._start(json.loads(constraint.value) if isinstance(constraint.value, str) else constraint.value)
        self.text = "\n".join(["%llguidance {}", f"start: {start}", f"FREE: {FREE_TEXT}", *self._rules])

    def _start(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            raise Wrong(f"a structural tag must be an object, got {shown(value)}")
        if "structures" in value:
            return self.triggered(value.get("triggers"), value["structures"])
        if "format" in value:
            return self.format(value["format"])
        raise Wrong("a structural tag needs 'structures' and 'triggers', or a 'format'")

    def rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def literal(self, text: Any) -> str:
        if not isinstance(text, str):
            raise Wrong(f"a structural tag needs a text, got {shown(text)}")
        parts, at = [], 0
        for mark in self._marks.finditer(text):
            parts += [quoted(text[at : mark.start()])] if mark.start() > at else []
            parts.append(f"<[{self._special[mark.group()]}]>")
            at = mark.end()
        return " ".join(parts + ([quoted(text[at:])] if at < len(text) else []))

    def schema(self, value: Any, name: str) -> str:
        try:
            found, style = prepared(value if value is not None else {}, self._constraint)
        except Wrong as error:
            raise Wrong(f"{name}: {error}" if name else error) from None
        self._parts_of.append(Part(name, LLMatcher.grammar_from_json_schema(json.dumps(found), style), found))
        return "%json " + json.dumps({**found, "x-guidance": style}, ensure_ascii=False)

    def regex(self, pattern: str, name: str) -> str:
        try:
            check_repeats(pattern)
        except Wrong as error:
            raise Wrong(f"{name}: {error}" if name else error) from None
        self._parts_of.append(Part(name, LLMatcher.grammar_from_regex(pattern)))
        return f"/{pattern.replace('/', chr(92) + '/')}/"

    def triggered(self, triggers: Any, tags: Any, *, at_least_one: bool = False, stop: bool = False) -> str:
        """Free text; where a trigger is written, one of the tags that begin with it follows."""
        if not isinstance(triggers, Sequence) or isinstance(triggers, str) or not triggers:
            raise Wrong("'triggers' must be a list of texts")
        if not isinstance(tags, Sequence) or isinstance(tags, str) or not tags:
            raise Wrong("a structural tag needs at least one tag")
        branches = []
        for tag in tags:
            begin, content, end = self._parts(tag)
            trigger = next(
                (each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None
            )
            if trigger is None:
                raise Wrong(f"no trigger is the beginning of {shown(begin)}")
            token = self._special.get(trigger)
            rest = [self.literal(begin[len(trigger) :])] if begin != trigger else []
            rest += [content, *([self.literal(end)] if end else [])]
            head = f"FREE <[{token}]>" if token is not None else self.rule(f"FREE {quoted(trigger)}", lazy=True)
            branches.append(self.rule(" ".join([head, *rest])))
        one = f"({' | '.join(branches)})"
        return one + ("+" if at_least_one else "*") + ("" if stop else " FREE")

    def _separated(self, value: Mapping[str, Any]) -> str:
        """Tags behind one another, with a text between them."""
        tags = [self.format({"type": "tag", **tag}) for tag in value.get("tags") or () if isinstance(tag, Mapping)]
        if not tags:
            raise Wrong("tags_with_separator needs tags")
        one = self.rule(" | ".join(tags))
        between = f"{self.literal(value['separator'])} " if value.get("separator") else ""
        many = one if value.get("stop_after_first") else f"{one} ({between}{one})*"
        return self.rule(many if value.get("at_least_one") else f"({many})?")

    def _parts(self, tag: Any) -> tuple[str, str, str]:
        if not isinstance(tag, Mapping) or not isinstance(tag.get("begin"), str):
            raise Wrong(f"a tag needs 'begin', got {shown(tag)}")
        content = self.format(tag["content"]) if "content" in tag else self.schema(tag.get("schema"), _name(tag))
        end = tag.get("end") or ""
        if not isinstance(end, str):
            raise Wrong(f"'end' of a tag must be a text, got {shown(end)}")
        return tag["begin"], content, end

    def format(self, value: Any, depth: int = 0) -> str:
        """One of the format objects, by its type."""
        if depth > MAX_DEPTH or not isinstance(value, Mapping):
            raise Wrong(f"a format must be an object with a type, got {shown(value)}")
        kind = value.get("type")
        if kind == "const_string":
            text = value.get("value")
            return quoted(text) if value.get("plain") and isinstance(text, str) else self.literal(text)
        if kind == "json_schema":
            return self.rule(self.schema(value.get("json_schema"), _name(value)))
        if kind == "any_text":
            return "FREE"
        if kind == "regex":
            return self.rule(self.regex(str(value.get("pattern")), _name(value)))
        if kind in ("sequence", "or"):
            parts = [self.format(part, depth + 1) for part in value.get("elements") or ()]
            if not parts:
                raise Wrong(f"a {kind} needs elements")
            return self.rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            begin, content, end = self._parts(value)
            if content == "FREE" and end and not self._marks.match(end):  # text up to the first such end
                return self.rule(f"{self.literal(begin)} {self.rule(f'FREE {quoted(end)}', lazy=True)}")
            return self.rule(
                " ".join(part for part in (self.literal(begin), content, end and self.literal(end)) if part)
            )
        if kind == "optional":
            return self.rule(f"({self.format(value.get('content'), depth + 1)})?")
        if kind == "tags_with_separator":
            return self._separated(value)
        if kind == "triggered_tags":
            return self.triggered(
                value.get("triggers"),
                value.get("tags"),
                at_least_one=bool(value.get("at_least_one")),
                stop=bool(value.get("stop_after_first")),
            )
        raise Wrong(f"the format {shown(kind)} is not supported in structural tags")


def _name(value: Mapping[str, Any]) -> str:
    """What a part is called, or the mark that begins it."""
    name = value.get("name")
    if isinstance(name, str):
        return name[:NAME]
    return f"the tag {shown(value['begin'])}" if "begin" in value else ""


def quoted(text: str) -> str:
    """A text as a Lark terminal."""
    return json.dumps(text, ensure_ascii=False)
