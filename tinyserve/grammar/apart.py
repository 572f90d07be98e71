"""Which oneOf may be read as anyOf: one of whose schemas no value satisfies two.

The grammar library sees this by types and by constants that are texts, not by numbers, nor by a property that tells
objects apart, as unions of pydantic have it.

Before: keywords.py.  After: schema.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from .keywords import Targets, schemas

MOST = 64  # schemas of a oneOf that are compared with each other
MAX_VALUES = 100_000  # that are read and compared in a whole schema; what is left then is not found apart


class Choices:
    """Reads oneOf as anyOf in one schema, where no value can satisfy two of its schemas."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._targets = Targets(root)
        self._values: dict[int, frozenset[str] | None] = {}
        self._left = MAX_VALUES
        inside = [part for part in schemas(root) if part is not root]
        # A schema with a name of its own is a place that references start from; and a pointer may lead through oneOf.
        self._plain = not any("$id" in part or "id" in part for part in inside) and not any(
            "/oneOf/" in part["$ref"] for part in (root, *inside) if isinstance(part.get("$ref"), str)
        )

    def settle(self, part: dict[str, Any]) -> None:
        """Make oneOf of this part an anyOf, if that says the same."""
        choice = part.get("oneOf")
        if not self._plain or not isinstance(choice, list) or len(choice) > MOST or "anyOf" in part:
            return
        each = [self._resolved(one) for one in choice]
        if all(self._are_apart(one, other) for one, other in itertools.combinations(each, 2)):
            part["anyOf"] = part.pop("oneOf")

    def _resolved(self, part: Any) -> Mapping[str, Any]:
        """A schema, or the one that it is a reference to and nothing else."""
        if isinstance(part, dict) and part.keys() == {"$ref"}:
            part = self._targets.of(part["$ref"])
        return part if isinstance(part, dict) else {}

    def _are_apart(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        if self._differ(one, other):
            return True
        if one.get("type") != "object" or other.get("type") != "object":
            return False
        names = [set(part["required"]) if _is_names(part.get("required")) else set() for part in (one, other)]
        inside = [part["properties"] if isinstance(part.get("properties"), dict) else {} for part in (one, other)]
        return any(self._differ(*(properties.get(name) for properties in inside)) for name in names[0] & names[1])

    def _differ(self, one: Any, other: Any) -> bool:
        """Whether two schemas name all their values, and none is in both."""
        first, second = self._named(one), self._named(other)
        if first is None or second is None:
            return False
        self._left -= 1 + min(len(first), len(second))
        return self._left >= 0 and not first & second

    def _named(self, part: Any) -> frozenset[str] | None:
        if id(part) not in self._values:
            self._values[id(part)] = values = _values(part) if self._left > 0 else None
            self._left -= len(values or ())
        return self._values[id(part)]


def _values(part: Any) -> frozenset[str] | None:
    """The values that a schema names, as texts that are equal where JSON Schema holds the values equal."""
    if not isinstance(part, dict) or ("const" not in part and not isinstance(part.get("enum"), list)):
        return None
    values = [part["const"]] if "const" in part else part["enum"]
    if any(isinstance(value, (list, dict)) for value in values):
        return None
    whole = (int(value) if isinstance(value, float) and value.is_integer() else value for value in values)
    return frozenset(json.dumps(value) for value in whole)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
