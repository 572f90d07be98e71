"""What each keyword of a schema must hold, so that the schema says what it seems to say.

Before: places.py.  After: schema.py.
"""

from __future__ import annotations

from typing import Any

from ..errors import shown
from .numbers import Schema, Wrong
from .places import HOLDING, WITH_SCHEMAS

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TEXTS = ("pattern", "format")


def check_shape(part: Schema) -> None:
    """Refuse one schema, without those inside it, whose keywords hold what they cannot. Raises: Wrong."""
    for name, value in part.items():
        if name == "type":
            _check_type(value)
        elif name == "enum":
            _check_list(name, value, "values", "an empty one allows nothing: leave it out, or name the values")
        elif name == "required":
            _check_required(value)
        elif name in _TEXTS and not isinstance(value, str):
            raise Wrong(f"{name} must be a text, is {shown(value)}")
        elif name in _LISTS:
            _check_schemas(name, value)
        elif name in WITH_SCHEMAS:
            _check_named(name, value)
        elif name in HOLDING and not (name == "items" and isinstance(value, list)):
            _check_schema(name, value)


def _check_type(value: Any) -> None:
    types = value if isinstance(value, list) and value else [value]
    wrong = next((each for each in types if not isinstance(each, str) or each not in TYPES), None)
    if wrong is not None or value is None:
        raise Wrong(f"type is {shown(value)}; it must be one of {', '.join(TYPES)}, or a list of some of them")


def _check_list(name: str, value: Any, of: str, empty: str) -> None:
    if not isinstance(value, list):
        raise Wrong(f"{name} must be a list of {of}, is {shown(value)}")
    if not value and empty:
        raise Wrong(f"{name} is an empty list; {empty}")


def _check_required(value: Any) -> None:
    if not isinstance(value, list):
        raise Wrong(f"'required' must be a list of names, in the schema of the object; it is {shown(value)}")
    if (wrong := next((each for each in value if not isinstance(each, str)), "")) != "":
        raise Wrong(f"'required' must be a list of names; it holds {shown(wrong)}")


def _check_schemas(name: str, value: Any) -> None:
    _check_list(name, value, "schemas", "an empty one allows nothing: leave it out" if name[3:] == "Of" else "")
    for index, each in enumerate(value):
        _check_schema(f"{name}/{index}", each)


def _check_named(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise Wrong(f"{name} must be an object, of names and their schemas; it is {shown(value)}")
    for key, each in value.items():
        _check_schema(f"{name}/{key}", each)


def _check_schema(name: str, value: Any) -> None:
    if not isinstance(value, (dict, bool)):
        raise Wrong(f"{shown(name)} must be a schema, which is an object, true or false; it is {shown(value)}")
