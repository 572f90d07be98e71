"""Calls written as Python, or in Gemma's own notation.

    get(city="Oslo", days=[1, 2])            call:get{city:<escape>Oslo<escape>,days:[1,2]}

A Python call is read argument by argument: each is passed on when the comma behind it has come.

Before: calls.py.  After: machine.py, and the tables that use these readers.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from typing import Any

from attrs import frozen

from .calls import Broken, CallWriter, strict_json

_PLAIN = re.compile(r"[^'\"\\]*")
_DECODER = json.JSONDecoder()
_NAMES = {"true": True, "false": False, "null": None}
MAX_DEPTH = 64


@frozen(kw_only=True)
class PythonForm:
    """One call `name(key=value, ...)`. bare: it stands in the text without a mark, so its name has to be a tool's."""

    bare: bool = False

    def __call__(self, writer: CallWriter) -> PythonCall:
        return PythonCall(writer, bare=self.bare)


class PythonCall:
    """Reads one call up to its closing parenthesis."""

    def __init__(self, writer: CallWriter, *, bare: bool) -> None:
        self._writer = writer
        self._bare = bare
        self._name = ""
        self._part: list[str] = []  # of the argument that is being read
        self._depth = 0
        self._quote = ""  # of the string that is being read
        self._closing = ""  # quotes in a row that may end it
        self._escaped = False

    def run(self, text: str, at: int) -> int:
        """Take plain characters of a string at once; how many."""
        if not self._quote or self._escaped:
            return 0
        found = _PLAIN.match(text, at).group()
        if found:
            self._part.append(found)
            self._closing = ""
        return len(found)

    def step(self, char: str) -> bool:
        """Take one character; True: the call is complete. Raises: Broken."""
        if not self._writer.open:
            return self._take_name(char)
        if self._quote:
            self._in_string(char)
        elif self._depth == 0 and char in ",)":
            self._argument("".join(self._part))
            self._part = []
            if char == ")":
                self._writer.end()
            return char == ")"
        elif char in "([{":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise Broken
        elif char in ")]}":
            self._depth -= 1
        elif char in "'\"":
            self._quote, self._closing = char, ""
            if "".join(self._part[-2:]) == char * 2:  # the third in a row opens a long string
                self._quote = char * 3
        self._part.append(char)
        return False

    def _take_name(self, char: str) -> bool:
        if char == "(" and self._name and (not self._bare or self._writer.known(self._name)):
            self._writer.begin(self._name)
        elif char.isalnum() or char in "_." or (char == "-" and self._name):
            self._name += char
        elif self._name or not char.isspace():
            raise Broken
        return False

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped, self._closing = True, ""
        elif char == self._quote[0]:
            self._closing += char
            if self._closing == self._quote:
                self._quote = ""
        else:
            self._closing = ""

    def _argument(self, text: str) -> None:
        if not text.strip():
            return
        key, equals, value = text.partition("=")
        if equals and key.strip().isidentifier():
            with contextlib.suppress(ValueError, RecursionError):
                found = strict_json(value.strip())
                return self._writer.parameter(key.strip(), found)
        try:
            call = ast.parse(f"_({text.strip()}\n)", mode="eval").body
            (keyword,) = call.keywords
            if call.args or keyword.arg is None:
                raise Broken
            self._writer.parameter(keyword.arg, _plain(keyword.value))
        except (ValueError, TypeError, SyntaxError, AttributeError, MemoryError, RecursionError):
            raise Broken from None


def _plain(node: ast.expr) -> Any:
    """The JSON value of a Python literal; `true`, `false` and `null` count as well. Raises: Broken."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, str)):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) is int or (
            type(value) is float and math.isfinite(value)
        ):
            return -value
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_plain(part) for part in parts]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_key(_plain(key)): _plain(value) for key, value in zip(keys, values, strict=True)}
    raise Broken


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@frozen(kw_only=True)
class GemmaForm:
    """Arguments `key:value,...}` behind the opening brace. quote: stands before and behind a text."""

    quote: str

    def __call__(self, writer: CallWriter) -> GemmaArguments:
        return GemmaArguments(writer, self.quote)


class GemmaArguments:
    """Reads the arguments up to their closing brace, then writes them."""

    def __init__(self, writer: CallWriter, quote: str) -> None:
        self._writer = writer
        self._quote = quote
        self._text = "{"
        self._depth = 1
        self._inside = False  # a text
        self._since = 0  # characters since the last quote
        self._json = False  # a text as JSON has it
        self._escaped = False  # its next character stands behind a backslash
        self._before = "{"  # the last character outside of texts that is no blank

    def run(self, text: str, at: int) -> int:
        """Every character counts here."""
        return 0

    def step(self, char: str) -> bool:
        """Take one character; True: the arguments are complete. Raises: Broken."""
        self._text += char
        self._since += 1
        if self._json:
            self._json = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return False
        if char == '"' and not self._inside and self._before in "{[,:":
            self._json, self._before = True, char
            return False
        if not self._inside and not char.isspace():
            self._before = char
        if self._since >= len(self._quote) and self._text.endswith(self._quote):
            self._inside, self._since = not self._inside, 0
        elif not self._inside and char in "{[":
            self._depth += 1
        elif not self._inside and char in "}]":
            self._depth -= 1
        if self._depth > MAX_DEPTH:
            raise Broken
        if self._depth:
            return False
        values, end = _gemma(self._text, 0, self._quote)
        if not isinstance(values, dict) or end != len(self._text):
            raise Broken
        for key, value in values.items():
            self._writer.parameter(key, value)
        self._writer.end()
        return True


def _gemma(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. Raises: Broken."""
    if text.startswith(quote, at):
        start = at + len(quote)
        end = text.find(quote, start)
        if end < 0:
            raise Broken
        return text[start:end], end + len(quote)
    if (found := _json(text, at)) is not None:
        return found
    if text.startswith("{", at):
        return _gemma_object(text, at + 1, quote)
    if text.startswith("[", at):
        values: list[Any] = []
        at += 1
        while not text.startswith("]", at):
            value, at = _gemma(text, at, quote)
            values.append(value)
            at = _gemma_comma(text, at, "]")
        return values, at + 1
    end = at
    while end < len(text) and text[end] not in ",]}":
        end += 1
    word = text[at:end].strip()
    try:
        return strict_json(word), end
    except ValueError:
        if not word:
            raise Broken from None
        return word, end


def _json(text: str, at: int) -> tuple[Any, int] | None:
    """The value at `at` and its end, if JSON stands there: what a grammar makes of all but texts."""
    if not text.startswith(('"', "{", "["), at):
        return None
    try:
        value, end = _DECODER.raw_decode(text, at)
        strict_json(text[at:end])
    except (ValueError, RecursionError):
        return None
    return (value, end) if text[end : end + 1] in ("", ",", "]", "}") else None


def _gemma_object(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while not text.startswith("}", at):
        if text.startswith(quote, at):
            key, at = _gemma(text, at, quote)
            end = at
        else:
            end = text.find(":", at)
            key = text[at:end].strip()
        if end < 0 or not text.startswith(":", end) or not key:
            raise Broken
        values[key], at = _gemma(text, end + 1, quote)
        at = _gemma_comma(text, at, "}")
    return values, at + 1


def _gemma_comma(text: str, at: int, close: str) -> int:
    """Where the next value starts, or the closing bracket stands. Raises: Broken."""
    if text.startswith(",", at):
        return at + 1
    if text.startswith(close, at):
        return at
    raise Broken
