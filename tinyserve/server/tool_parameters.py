"""A grammar for calls that write each parameter as text between marks: a schema, taken apart by property.

    {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
        -> <parameter=city> any text </parameter>   (<parameter=days> an integer </parameter>)?

A parameter that can only be a text is written bare, all others as JSON; text/parsers/calls.py reads them so. What JSON
schemas say of texts becomes a regular expression, or is refused by name.

Before: text/parsers/family.py (the marks), text/parsers/calls.py (who reads it back).  After: tools.py.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError, shown
from ..text.parsers.calls import types_of
from ..text.parsers.family import Written

_KEY = re.compile(r'[^<>"\n]+')
_FREE = {"type": "any_text"}
_NOTHING = {"type": "const_string", "value": ""}
MAX_FIRST = 24
MAX_LENGTH = 10**7  # of a text; no answer is longer
MAX_CHOICES = 8  # levels of choices that are looked into
MAX_LOOKED = 256  # schemas and keywords in them; nine references that each lead to nine more are 10**8
MAX_SHARED = 2**18  # characters of definitions, which are written out for each parameter
_ABOUT = ("title", "description", "$schema", "$id", "$comment", "additionalProperties")
_SHARED = ("$defs", "definitions")  # what a property may refer to
_ANYTHING = r"(.|\n)"
_YEAR_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9a-fA-F]"
_FORMATS = {
    "date": _YEAR_DAY,
    "time": _CLOCK,
    "date-time": f"{_YEAR_DAY}T{_CLOCK}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": r"(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])){3}",
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){1,4}",
}
_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
Schema = Mapping[str, Any]


def parameters(schema: Schema, written: Written, name: str, *, strict: bool) -> dict[str, Any]:
    """The form of a call's arguments: its properties in order; those that are not required may be left out.

    Args:
        written: its `parameter` has the marks.   name: of the tool, for messages.
        strict: a schema without properties of its own is refused; else anything may stand there.
    Raises: RequestError: the schema asks for what cannot be written so.
    """
    try:
        schema = _resolved(schema, schema)
        if "properties" not in schema:
            if strict and set(schema) - {"type", *_ABOUT}:
                raise _not_enforced(name, "a schema without properties")
            return {"type": "regex", "pattern": written.loose} if written.loose else _FREE
        shared = {key: schema[key] for key in _SHARED if key in schema}
        _check_size(shared, sum(map(_refers, (schema.get("properties") or {}).values())), name)
        required = _names(schema, name, strict)
        elements = []
        for key, part in (schema.get("properties") or {}).items():
            if not _KEY.fullmatch(key):
                raise RequestError(
                    f"tools: {name} has a parameter {shown(key)}, which cannot be written.", param="tools"
                )
            part = _resolved(part, schema)
            quote = written.quote if types_of(part) == {"string"} else ""
            bare = not written.joined or bool(quote)
            value = _value(part, shared, f"{name}.{key}") if bare else _json(part, shared, f"{name}.{key}")
            before, after = (mark.replace("NAME", key) for mark in written.parameter)
            elements.append((_between(before + quote, quote + after, value), key in required))
    except (AttributeError, TypeError, RecursionError) as error:
        raise RequestError(
            f"tools: the parameters of {name} are no JSON schema of an object.", param="tools"
        ) from error
    if not elements:
        return _NOTHING
    if written.joined:
        return _joined(elements, written.joined, name)
    return {"type": "sequence", "elements": [one if needed else _optional(one) for one, needed in elements]}


def _check_size(shared: Schema, count: int, name: str) -> None:
    """Refuse definitions that would be too long when each of the parameters that refer to them has them."""
    size = count * len(json.dumps(shared, ensure_ascii=False)) if shared else 0
    if size > MAX_SHARED:
        raise RequestError(
            f"tools: the definitions in {name} have {size} characters, written out for each of its {count} parameters "
            f"with references, as this model writes calls; at most {MAX_SHARED} are allowed.",
            param="tools",
        )


def _joined(elements: Sequence[tuple[Any, bool]], separator: str, name: str) -> dict[str, Any]:
    """Parameters with a separator between those that are there: any that may be the first, and the rest behind it."""
    last = next((index for index, (_, needed) in enumerate(elements) if needed), len(elements) - 1)  # that may be first
    if last >= MAX_FIRST:
        raise RequestError(
            f"tools: {name} has more than {MAX_FIRST} optional parameters before a required one; list those first.",
            param="tools",
        )
    between = {"type": "const_string", "value": separator}
    behind = [{"type": "sequence", "elements": [between, one]} for one, _ in elements]
    behind = [one if needed else _optional(one) for one, (_, needed) in zip(behind, elements, strict=True)]
    firsts = [{"type": "sequence", "elements": [elements[at][0], *behind[at + 1 :]]} for at in range(last + 1)]
    found = {"type": "or", "elements": firsts}
    return found if any(needed for _, needed in elements) else _optional(found)


def _optional(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "optional", "content": one}


def _json(part: Schema, shared: Schema, place: str) -> dict[str, Any]:
    """A parameter as JSON. The definitions go with it if it refers to one."""
    needed = shared if _refers(part) else {}
    return {"type": "json_schema", "name": place, "json_schema": {**needed, **part}}


def _refers(part: Any) -> bool:
    """Whether a schema may hold a reference."""
    return '"$ref"' in json.dumps(part)


def _between(before: str, after: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A value between its marks. A text of any kind ends at the mark itself, with or without a line break before it."""
    if value != _FREE:
        return {"type": "tag", "begin": before, "content": value, "end": after}
    mark = after.strip("\n")
    text = {"type": "tag", "begin": before, "content": value, "end": mark}
    rest = after[after.index(mark) + len(mark) :]
    return {"type": "sequence", "elements": [text, {"type": "const_string", "value": rest}]} if rest else text


def _resolved(part: Any, schema: Schema) -> Schema:
    """A property with the definition that it refers to in place of the reference, as far as one leads to it."""
    for _ in range(16):
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        names = reference.split("/") if isinstance(reference, str) else []
        if len(names) != 3 or names[0] != "#" or names[1] not in _SHARED:
            break
        part = {**schema.get(names[1], {}).get(names[2], {}), **{k: v for k, v in part.items() if k != "$ref"}}
    if isinstance(part, Mapping):
        return part
    if part is not True:
        raise TypeError("no schema")
    return {}


def admits_objects(schema: Schema) -> bool:
    """Whether an object can satisfy a schema, as far as its types, values and choices say, and that is soon seen."""
    left = MAX_LOOKED

    def admits(part: Any, depth: int) -> bool:
        nonlocal left
        left -= 1
        if not isinstance(part, Mapping) or depth > MAX_CHOICES or left < 0:
            return part is not False
        with contextlib.suppress(TypeError, AttributeError):  # which compiling it will tell
            part = _resolved(part, schema)
        left -= len(part)
        types = part.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            return False
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list) and not any(isinstance(value, Mapping) for value in values):
            return False
        for name, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            parts = part.get(name)
            if isinstance(parts, list) and not enough(admits(each, depth + 1) for each in parts):
                return False
        return True

    return admits(schema, 0)


def _names(schema: Schema, name: str, strict: bool) -> list[str]:
    """The required properties; a strict tool must say what they are."""
    required = schema.get("required") or []
    if not isinstance(required, list):
        raise TypeError("no list")
    unknown = next((key for key in required if key not in (schema.get("properties") or {})), None)
    if strict and unknown is not None:
        raise RequestError(
            f"tools: {name} requires {shown(unknown)}, which is not among its properties.", param="tools"
        )
    return required


def _value(part: Schema, shared: Schema, place: str) -> dict[str, Any]:
    types = types_of(part)
    if "const" in part or isinstance(part.get("enum"), list):
        bare = types == {"string"}
        values = [part["const"]] if "const" in part else part["enum"]
        if not values:
            raise RequestError(f"tools: {place} has an enum without values, so nothing can stand there.", param="tools")
        texts = [
            value if bare and isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values
        ]
        # A value that looks like a special token is a text all the same.
        return {"type": "or", "elements": [{"type": "const_string", "value": text, "plain": True} for text in texts]}
    limited = [key for key in _OF_TEXTS if key in part]
    if types == {"string"}:
        return _text(part, place) if limited else _FREE
    if types == {"string", "null"} and not limited and all(len(each) == 1 for each in part.get("anyOf", ())):
        return _FREE  # null is read as null, all else as a text
    return _json(part, shared, place)


def _text(part: Schema, place: str) -> dict[str, Any]:
    """A text with limits, as a regular expression."""
    limited = [key for key in ("pattern", "format") if key in part]
    if len(limited) + ("minLength" in part or "maxLength" in part) > 1:
        raise _not_enforced(place, "more than one of pattern, format and length")
    if "format" in part:
        if part["format"] not in _FORMATS:
            raise _not_enforced(place, f"the format {part['format']!r}")
        return {"type": "regex", "pattern": _FORMATS[part["format"]]}
    if "pattern" not in part:
        least, most = part.get("minLength", 0), part.get("maxLength", "")
        if not all(type(length) is int for length in (least, most or 0)) or least < 0 or (most != "" and most < least):
            raise RequestError(
                f"tools: {place} has no text of {shown(least)} to {shown(most)} characters.", param="tools"
            )
        if least > MAX_LENGTH:
            raise RequestError(f"tools: {place} has minLength {least}; no answer is so long.", param="tools")
        return {
            "type": "regex",
            "pattern": f"{_ANYTHING}{{{least},{most if most != '' and most <= MAX_LENGTH else ''}}}",
        }
    pattern = part["pattern"]
    if not isinstance(pattern, str):
        raise TypeError("no pattern")
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[start : len(pattern) - end]
    if (start or end) and "|" in re.sub(r"\([^()]*\)|\[[^]]*\]", "", inner):
        raise _not_enforced(place, "a pattern with an anchor in one of several alternatives")
    free = _ANYTHING + "*"
    return {"type": "regex", "name": place, "pattern": f"{'' if start else free}({inner}){'' if end else free}"}


def _not_enforced(place: str, what: str) -> RequestError:
    return RequestError(
        f"tools: {place} is written as plain text by this model, and {what} cannot be enforced there; leave it out.",
        param="tools",
    )
