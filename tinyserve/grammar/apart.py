"""Which oneOf may be read as anyOf: one of whose schemas no value satisfies two.

The grammar library sees this by types and by constants that are texts, not by numbers, nor by a property that tells
objects apart, as unions of pydantic have it.

    {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}

An object without `kind` would be a Cat and a Dog where neither requires it, as pydantic has it for a kind with a
default. The answer always has it then: what is narrower than the schema satisfies it still.

Before: places.py.  After: schema.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from .numbers import Schema
from .places import MAX_DEPTH, Document

MOST = 64  # schemas of a oneOf that are compared with each other
_NOTHING: Schema = {}
MAX_VALUES = 100_000  # schemas and values that are read and compared in a whole one; the rest is not found apart


class Choices:
    """Reads oneOf as anyOf in one schema, where no value can satisfy two of its schemas."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._values: dict[int, frozenset[str] | None] = {}
        self._left = MAX_VALUES
        # A pointer may lead through oneOf.
        self._plain = document.plain and not any(
            "/oneOf/" in part["$ref"] for _, part in document.parts if isinstance(part.get("$ref"), str)
        )

    def settle(self, part: Schema) -> None:
        """Make oneOf of this part an anyOf, if that says the same."""
        choice = part.get("oneOf")
        if not self._plain or not isinstance(choice, list) or "anyOf" in part:
            return
        if self._are_told_apart(part, choice) or self._are_all_apart(choice):
            part["anyOf"] = part.pop("oneOf")

    def _are_told_apart(self, part: Schema, choice: list[Any]) -> bool:
        """Whether objects differ in the property that a discriminator names; each requires it afterwards."""
        discriminator = part.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if not isinstance(name, str):
            return False
        objects: list[Schema] = []
        known: dict[int, frozenset[str] | None] = {}
        told = [self._told(each, name, objects, known) for each in choice]
        if any(values is None for values in told) or len(frozenset().union(*told)) < sum(map(len, told)):
            return False
        for each in objects:
            if name not in (required := each.setdefault("required", [])):
                required.append(name)
        return True

    def _told(
        self, part: Any, name: str, objects: list[Schema], known: dict[int, frozenset[str] | None], depth: int = 0
    ) -> frozenset[str] | None:
        """The values of a property in an object, or in those of a choice; the objects are added to the list.

        known: what each schema told, however often references lead to it; nothing as long as it is read, so a choice
            that is one of its own tells nothing.
        """
        part = self._resolved(part)
        if id(part) not in known:
            known[id(part)] = None
            known[id(part)] = self._read(part, name, objects, known, depth)
        values = known[id(part)]
        self._left -= 1 + len(values or ())
        return values if self._left >= 0 else None

    def _read(
        self, part: Schema, name: str, objects: list[Schema], known: dict[int, frozenset[str] | None], depth: int
    ) -> frozenset[str] | None:
        choices = [part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list)]
        if len(choices) == 1 and "properties" not in part and depth < MAX_DEPTH:
            found: set[str] = set()
            for each in choices[0]:
                values = self._told(each, name, objects, known, depth + 1)
                if values is None:
                    return None
                found |= values
            return frozenset(found)
        if choices or part.get("type") != "object":
            return None
        objects.append(part)
        return self._named(self._resolved(_properties(part).get(name)))

    def _are_all_apart(self, choice: list[Any]) -> bool:
        each = [self._resolved(one) for one in choice]
        return len(each) <= MOST and all(self._are_apart(*two) for two in itertools.combinations(each, 2))

    def _resolved(self, part: Any) -> Schema:
        part = self._document.resolved(part)
        return part if isinstance(part, dict) else _NOTHING

    def _are_apart(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        if self._differ(one, other):
            return True
        self._left -= 1 + len(one.get("required", ())) + len(other.get("required", ()))
        if self._left < 0 or one.get("type") != "object" or other.get("type") != "object":
            return False
        names = [set(part.get("required", ())) for part in (one, other)]
        inside = [_properties(part) for part in (one, other)]
        return any(self._differ(*(properties.get(name) for properties in inside)) for name in names[0] & names[1])

    def _differ(self, one: Any, other: Any) -> bool:
        """Whether two schemas name all their values, and none is in both."""
        first, second = self._named(self._resolved(one)), self._named(self._resolved(other))
        if first is None or second is None:
            return False
        self._left -= 1 + min(len(first), len(second))
        return self._left >= 0 and not first & second

    def _named(self, part: Schema) -> frozenset[str] | None:
        if id(part) not in self._values:
            self._values[id(part)] = values = _values(part) if self._left > 0 else None
            self._left -= len(values or ())
        return self._values[id(part)]


def _properties(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return part.get("properties", {})


def _values(part: Mapping[str, Any]) -> frozenset[str] | None:
    """The values that a schema names, as texts that are equal where JSON Schema holds the values equal."""
    if "const" not in part and "enum" not in part:
        return None
    values = [part["const"]] if "const" in part else part["enum"]
    if any(isinstance(value, (list, dict)) for value in values):
        return None
    whole = (int(value) if isinstance(value, float) and value.is_integer() else value for value in values)
    return frozenset(json.dumps(value) for value in whole)
