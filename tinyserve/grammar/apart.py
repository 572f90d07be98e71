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

from .keywords import target

MOST = 64  # schemas of a oneOf that are compared with each other


def read_as_any_of(part: dict[str, Any], root: Any) -> None:
    """Make oneOf an anyOf if no value can satisfy two of its schemas."""
    choice = part.get("oneOf")
    if not isinstance(choice, list) or len(choice) > MOST or "anyOf" in part:
        return
    each = [_resolved(one, root) for one in choice]
    if all(_are_apart(one, other) for one, other in itertools.combinations(each, 2)):
        part["anyOf"] = part.pop("oneOf")


def _resolved(part: Any, root: Any) -> Mapping[str, Any]:
    """A schema, or the one that it is a reference to and nothing else."""
    if isinstance(part, dict) and part.keys() == {"$ref"}:
        part = target(part["$ref"], root)
    return part if isinstance(part, dict) else {}


def _are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if _differ(one, other):
        return True
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    names = [set(part["required"]) if _is_names(part.get("required")) else set() for part in (one, other)]
    inside = [part["properties"] if isinstance(part.get("properties"), dict) else {} for part in (one, other)]
    return any(_differ(*(properties.get(name) for properties in inside)) for name in names[0] & names[1])


def _differ(one: Any, other: Any) -> bool:
    """Whether two schemas name all their values, and none is in both."""
    first, second = _values(one), _values(other)
    return first is not None and second is not None and not first & second


def _values(part: Any) -> set[str] | None:
    """The values that a schema names, as texts that are equal where JSON Schema holds the values equal."""
    if not isinstance(part, dict) or ("const" not in part and not isinstance(part.get("enum"), list)):
        return None
    values = [part["const"]] if "const" in part else part["enum"]
    if any(isinstance(value, (list, dict)) for value in values):
        return None
    whole = (int(value) if isinstance(value, float) and value.is_integer() else value for value in values)
    return {json.dumps(value) for value in whole}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
