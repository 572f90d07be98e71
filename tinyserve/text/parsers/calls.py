"""Writes calls: whatever form a model gives its arguments in, what goes out is the JSON text of one object.

Some formats hold JSON already; others hold a name and a text per parameter, and only the tool's schema says whether
`42` is a number or a text. Texts are passed on as they come; what has to be read as a whole waits for its end.

Before: events.py.  After: machine.py and the readers (json_calls.py, literals.py), which all write through this.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .events import Event, Kind

_WORDS = {"True": True, "False": False, "None": None}
_SURROGATES = re.compile("[\ud800-\udfff]")


class Broken(Exception):
    """What was taken for a call is none."""


class CallWriter:
    """Turns what readers find into events.

    Args:
        emit: takes the events.
        tools: name -> JSON schema of its parameters; None when nothing is known of the tools.

    Attributes:
        open: whether a call has begun and not ended.
        index: of the last call, -1 before the first.   ended: calls that are complete.
    """

    def __init__(self, emit: Callable[[Event], None], tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._emit = emit
        self._tools = tools
        self.open = False
        self.index = -1
        self.ended = 0
        self._schema: Mapping[str, Any] = {}
        self._keys = 0  # parameters written so far
        self._written = False  # whether any argument text went out
        self._value: list[str] | None = None  # pieces of a value that is read as a whole; None: a text, passed on
        self._types: frozenset[str] = frozenset()
        self._fresh = False  # the value has no character yet

    def known(self, name: str) -> bool:
        """Whether there is a tool of this name, as far as is known."""
        return self._tools is None or name in self._tools

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call starts. Raises: Broken: it has no name."""
        if not name or self.open:
            raise Broken
        self.open, self.index = True, self.index + 1
        self._schema = (self._tools or {}).get(name) or {}
        self._keys, self._written = 0, False
        self._emit(Event(Kind.CALL_BEGIN, index=self.index, name=name, id=call_id))

    def args(self, text: str) -> None:
        """The next piece of the arguments' JSON text."""
        self._written = True
        self._emit(Event(Kind.CALL_ARGS, text, self.index))

    def end(self) -> None:
        """The call is complete; without any argument they are `{}`."""
        if self._keys:
            self.args("}")
        elif not self._written:
            self.args("{}")
        self.open = False
        self.ended += 1
        self._emit(Event(Kind.CALL_END, index=self.index))

    def drop(self, raw: str) -> None:
        """The open call is none; `raw` is what was taken for it."""
        self.open, self._value = False, None
        self._emit(Event(Kind.CALL_BROKEN, raw, self.index))

    # ---- parameters one by one

    def parameter(self, key: str, value: Any) -> None:
        """One argument whose value is known."""
        text = json_text(value)
        self._begin_key(key)
        self.args(text)

    def key(self, key: str) -> None:
        """The value of this parameter follows, as text."""
        self._begin_key(key)
        self._types = _types(self._schema, key)
        self._fresh = True
        self._value = None if self._types == {"string"} else []
        if self._value is None:
            self.args('"')

    def value(self, text: str) -> None:
        """The next piece of the value's text. A line break before it belongs to the format."""
        if self._fresh and text:
            text, self._fresh = text.removeprefix("\n"), False
        if self._value is None:
            self.args(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def end_value(self) -> None:
        """The value is complete."""
        if self._value is None:
            self.args('"')
        else:
            self.args(json_text(typed("".join(self._value), self._types)))
            self._value = None

    def _begin_key(self, key: str) -> None:
        self.args(("{" if not self._keys else ", ") + json_text(key) + ": ")
        self._keys += 1


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a tool's parameter may have; empty when its schema does not say."""
    properties = schema.get("properties")
    part = properties.get(key) if isinstance(properties, Mapping) else None
    return types_of(part) if isinstance(part, Mapping) else frozenset()


def types_of(part: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    named = part.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if isinstance(part.get("enum"), list) and all(isinstance(value, str) for value in part["enum"]):
        return frozenset({"string"})
    choices = part.get("anyOf") or part.get("oneOf") or ()
    found = [types_of(choice) for choice in choices if isinstance(choice, Mapping)]
    return frozenset().union(*found) if found and all(found) else frozenset()


def typed(text: str, types: frozenset[str]) -> Any:
    """The value that a parameter's text stands for: of one of the types if it can be, else the text itself."""
    try:
        value = strict_json(text.strip())
    except (ValueError, RecursionError):
        value = _python(text.strip())
        if value is Broken:
            return text
    return value if not types or _type_names(value) & types else text


def _python(text: str) -> Any:
    """A Python word, list or dict, which models write where JSON is meant; Broken if it is none."""
    if text in _WORDS:
        return _WORDS[text]
    if not text.startswith(("[", "{")):
        return Broken
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Broken


def _type_names(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]})


def strict_json(text: str) -> Any:
    """The value of a JSON text. Raises: ValueError: it is none, or holds a number beyond all floats."""
    value = json.loads(text, parse_constant=_no_constant)
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    return value


def json_text(value: Any) -> str:
    """The JSON text of a value. Raises: Broken: it has none."""
    try:
        return sound(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        raise Broken from None


def sound(text: str) -> str:
    """The same text as UTF-8 can hold it: escapes like \\ud83c may name halves of a character; those become U+FFFD."""
    if not _SURROGATES.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
