"""The schemas inside a schema, where each stands, and what its references lead to.

    {"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$defs": {"b": {}}}
        ->  #   #/properties/a   #/properties/a/items   #/$defs/b

What stands under a word that JSON Schema does not know is a remark and no schema, unless a reference leads there.

Before: numbers.py (what is wrong).  After: shapes.py, keywords.py, references.py, apart.py, schema.py.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from .numbers import Schema, Wrong

MAX_DEPTH = 64
ANNOTATIONS = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
WITH_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
HOLDING = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
SHOWN = 200  # characters of a pointer
_NO_SCHEMAS = frozenset(("enum", "const", *ANNOTATIONS))
# The steps from the root, the last one first: (all but the last, the last). Most are never written out.
Place = tuple[Any, ...]


def pointer(place: Place) -> str:
    """A place as a JSON pointer, its beginning and end if it is long."""
    steps = []
    while place:
        place, step = place
        steps.append("/" + str(step).replace("~", "~0").replace("/", "~1"))
    text = "#" + "".join(reversed(steps))
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 2 :]}"


def at(place: Place, what: Any) -> str:
    """What is wrong, with its place; that of the whole schema needs no name."""
    return f"at {pointer(place)}: {what}" if place else str(what)


class Document:
    """One schema, as a whole.

    Args: everything: take what stands under words that JSON Schema does not know for schemas, too.
    Attributes:
        root: the schema.   parts: it and those inside it, each once, with its place; the outer ones first.
        plain: every reference leads to where it says, counted from the root.
    Raises: Wrong: it is nested too deeply.
    """

    def __init__(self, root: Schema, *, everything: bool = False) -> None:
        self.root = root
        self._found: dict[str, Any] = {}
        self._ends: dict[str, str | None] = {}
        self._seen: set[int] = set()
        self.parts: list[tuple[Place, Schema]] = []
        self._collect((), root, everything)
        inside = [part for _, part in self.parts if part is not root]
        # A schema with a name of its own is a place that its references start from.
        self.plain = not any(isinstance(part.get(word), str) for part in inside for word in ("$id", "id"))
        if not everything and not (self.plain and all(self._is_known(part) for _, part in self.parts)):
            self._seen.clear()  # a reference may lead anywhere
            self.parts.clear()
            self._collect((), root, True)

    def of(self, reference: Any) -> Any:
        """What a reference leads to. None: nothing that is found here, such as another document, or an anchor."""
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            return None
        if reference not in self._found:
            self._found[reference] = self._follow(reference)
        return self._found[reference]

    def end(self, reference: str) -> str | None:
        """The last one of references that only lead from one to the next. None: they go round in a circle."""
        passed: dict[str, None] = {}
        while reference not in self._ends and reference not in passed:
            passed[reference] = None
            target = self.of(reference)
            if not is_reference(target):
                self._ends[reference] = reference
            else:
                reference = target["$ref"]
        end = self._ends.get(reference)
        self._ends.update(dict.fromkeys(passed, end))
        return end

    def resolved(self, part: Any) -> Any:
        """A schema, or the one that it is a reference to and nothing else."""
        end = self.end(part["$ref"]) if is_reference(part) else None
        return part if end is None else self.of(end)

    def _collect(self, place: Place, value: Any, everything: bool) -> None:
        waiting, asked = deque([(place, value)]), set()
        while waiting:
            for found, part in self._inside(*waiting.popleft(), everything):
                self.parts.append((found, part))
                reference = part.get("$ref")
                if isinstance(reference, str) and reference not in asked and self.of(reference) is not None:
                    asked.add(reference)
                    waiting.append((_place(reference), self.of(reference)))

    def _inside(self, place: Place, value: Any, everything: bool) -> Iterator[tuple[Place, Schema]]:
        stack = [(place, value, 0)]
        while stack:
            place, value, depth = stack.pop()
            if isinstance(value, list):
                stack += [((place, index), each, depth) for index, each in enumerate(value)][::-1]
            if not isinstance(value, dict) or id(value) in self._seen:
                continue
            if depth > MAX_DEPTH:
                raise Wrong(at(place, f"is nested more than {MAX_DEPTH} levels deep"))
            self._seen.add(id(value))
            yield place, value
            inner = []
            for name, held in value.items():
                if name in WITH_SCHEMAS and isinstance(held, dict):
                    inner += [(((place, name), key), each, depth + 1) for key, each in held.items()]
                elif name in HOLDING or (everything and name not in _NO_SCHEMAS):
                    inner.append(((place, name), held, depth + 1))
            stack += reversed(inner)

    def _is_known(self, part: Schema) -> bool:
        reference = part.get("$ref")
        return not isinstance(reference, str) or (reference + "/").startswith("#/")

    def _follow(self, reference: str) -> Any:
        found = self.root
        for step in _steps(reference):
            if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", step):
                found = found[int(step)] if int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found


def is_reference(part: Any) -> bool:
    """Whether a schema is a reference and says nothing else of what is valid."""
    if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
        return False
    return all(name == "$ref" or name in ANNOTATIONS for name in part)


def _steps(reference: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(reference[1:]).split("/")[1:]]


def _place(reference: str) -> Place:
    place: Place = ()
    for step in _steps(reference):
        place = (place, step)
    return place
