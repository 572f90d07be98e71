"""Calls written as JSON, read character by character: braces and tags inside strings are just text.

`JsonScan` knows where in a JSON value it stands and refuses the first character that cannot be right. `JsonArguments`
passes one object on as arguments. `JsonCalls` finds the name and the arguments of an object, or of each object of a
list, in whatever order they come.

Before: calls.py.  After: machine.py, and the tables that use these readers.
"""

from __future__ import annotations

import json
import re

from attrs import frozen

from .calls import Broken, CallWriter, sound, strict_json

_SPACE = " \t\n\r"
_WORD = frozenset("-+.0123456789abcdefghijklmnopqrstuvwxyzE")
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
MAX_DEPTH = 128


class JsonScan:
    """Walks through one JSON object or list.

    Attributes:
        depth: open objects and lists.
        found: what the last character completed or began: "key", "string", "open", "close" or "".
        text: the decoded key or string, when `found` is one of these.
        word: the literal that the newest value is, as far as it is read; "" if it is none.
        done: the value is complete.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._mode = "value"
        self._run: list[str] = []  # of the string that is being read
        self._is_key = False
        self.found = ""
        self.text = ""
        self.word = ""
        self.done = False

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def in_word(self) -> bool:
        """Whether a literal may go on."""
        return self._mode == "word"

    def run(self, text: str, at: int) -> str:
        """Take the plain characters of a string that follow at `at` all at once; "" if there are none."""
        if self._mode != "string":
            return ""
        found = _PLAIN.match(text, at).group()
        if found:
            self._run.append(found)
            self.found = ""
        return found

    def step(self, char: str) -> str:
        """Take one character; returns how it is written: control characters inside strings are escaped.

        Raises: Broken: no JSON value goes on like this.
        """
        self.found = ""
        if self._mode == "string":
            return self._string(char)
        if self._mode == "escape":
            if char not in '"\\/bfnrtu':
                raise Broken
            self._run.append(char)
            self._mode = "hex0" if char == "u" else "string"
            return char
        if self._mode.startswith("hex"):
            if char not in "0123456789abcdefABCDEF":
                raise Broken
            self._run.append(char)
            self._mode = "string" if self._mode == "hex3" else f"hex{int(self._mode[3]) + 1}"
            return char
        if self._mode == "word":
            if char in _WORD:
                self.word += char
                return char
            if not _LITERAL.fullmatch(self.word):
                raise Broken
            self._mode = "after"
        if char not in _SPACE:
            self._structure(char)
        return char

    def _string(self, char: str) -> str:
        if char == '"':
            self.text = sound(json.loads('"' + "".join(self._run) + '"'))
            self.found = "key" if self._is_key else "string"
            self._mode = "colon" if self._is_key else "after"
            return char
        if char == "\\":
            self._mode = "escape"
        elif char < " ":
            char = json.dumps(char)[1:-1]
        self._run.append(char)
        return char

    def _structure(self, char: str) -> None:
        mode = self._mode
        if mode in ("value", "first"):
            self._value(char)
        elif mode in ("key", "first key") and char == '"':
            self._mode, self._is_key, self._run = "string", True, []
        elif mode == "first key" and char == "}":
            self._close(char)
        elif mode == "colon" and char == ":":
            self._mode, self.word = "value", ""
        elif mode == "after" and char == ",":
            self._mode = "key" if self._open[-1] == "{" else "value"
        elif mode == "after" and char in "]}":
            self._close(char)
        else:
            raise Broken

    def _value(self, char: str) -> None:
        if char in "{[" and self.depth < MAX_DEPTH:
            self._open.append(char)
            self._mode = "first key" if char == "{" else "first"
            self.found = "open"
        elif char == "]" and self._mode == "first":
            self._close(char)
        elif not self._open:
            raise Broken
        elif char == '"':
            self._mode, self._is_key, self._run = "string", False, []
        elif char in _WORD:
            self._mode, self.word = "word", char
        else:
            raise Broken

    def _close(self, char: str) -> None:
        if self._open.pop() + char not in ("{}", "[]"):
            raise Broken
        self.found, self._mode = "close", "after"
        self.done = not self._open


class JsonArguments:
    """The arguments of a call that has begun: one JSON object, passed on as it is written."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._scan = JsonScan()

    def run(self, text: str, at: int) -> int:
        """Take plain characters of a string at once; how many."""
        found = self._scan.run(text, at)
        if found:
            self._writer.args(found)
        return len(found)

    def step(self, char: str) -> bool:
        """Take one character; True: the object is complete. Raises: Broken."""
        scan = self._scan
        if not scan.depth and char != "{":
            if char in _SPACE:
                return False
            raise Broken
        self._writer.args(scan.step(char))
        if scan.done:
            self._writer.end()
        return scan.done


@frozen(kw_only=True)
class JsonForm:
    """How a family writes calls as JSON.

    Args:
        names, arguments: the keys that hold them.
        others: further keys that may stand beside them.
        bare: the call stands in the text without any mark, so it has to be told from other JSON: every key must be one
            of these, and the name that of a tool.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    others: tuple[str, ...] = ("type", "id")
    bare: bool = False

    def __call__(self, writer: CallWriter) -> JsonCalls:
        return JsonCalls(writer, self)


class JsonCalls:
    """One call as a JSON object, or a list of them."""

    def __init__(self, writer: CallWriter, form: JsonForm) -> None:
        self._writer = writer
        self._form = form
        self._scan = JsonScan()
        self._base = 0  # depth inside a call's object
        self._calls = 0
        self._forget()

    def _forget(self) -> None:
        self._name: str | None = None
        self._arguments: list[str] | None = None  # pieces that wait for the name
        self._reading = ""  # what the value now is: "name", "arguments"; "object": arguments under way

    def run(self, text: str, at: int) -> int:
        """Take plain characters of a string at once; how many."""
        found = self._scan.run(text, at)
        if found and self._reading == "object":
            self._pass(found)
        return len(found)

    def step(self, char: str) -> bool:
        """Take one character; True: the object or list is complete. Raises: Broken."""
        scan = self._scan
        depth = scan.depth
        if not depth:
            if char in _SPACE:
                return False
            self._base = {"{": 1, "[": 2}.get(char, 0)
            if not self._base:
                raise Broken
        elif depth < self._base and char not in _SPACE + ",{]":
            raise Broken  # a list of something else
        written = scan.step(char)
        if self._reading == "object":
            self._pass(written)
            if scan.depth == self._base:
                self._reading = ""
        elif self._reading == "arguments":
            self._begin_arguments(char, written)
        elif self._reading == "name":
            self._take_name(char)
        elif scan.found == "key" and scan.depth == self._base:
            self._take_key(scan.text)
        elif scan.found == "close" and scan.depth == self._base - 1 and self._base > scan.depth and char == "}":
            self._complete()
        if scan.done and not self._calls:
            raise Broken
        return scan.done

    def _take_key(self, key: str) -> None:
        form = self._form
        if key in form.names and self._name is None:
            self._reading = "name"
        elif key in form.arguments and self._arguments is None:
            self._reading, self._arguments = "arguments", []
        elif form.bare and key not in form.others:
            raise Broken

    def _take_name(self, char: str) -> None:
        if self._scan.found == "string":
            name = self._scan.text
            if not name or (self._form.bare and not self._writer.known(name)):
                raise Broken
            self._name, self._reading = name, ""
            if self._arguments is not None:
                self._begin()
        elif self._scan.found or self._scan.word:
            raise Broken

    def _begin(self) -> None:
        self._writer.begin(self._name)
        for piece in self._arguments or ():
            self._writer.args(piece)

    def _pass(self, text: str) -> None:
        if self._writer.open:
            self._writer.args(text)
        else:
            self._arguments.append(text)

    def _begin_arguments(self, char: str, written: str) -> None:
        """Before the value, or in a value that is no object: null, or the object as text."""
        scan = self._scan
        if scan.found == "open":
            if char != "{":
                raise Broken
            self._reading = "object"
            if self._name is not None:
                self._begin()
            self._pass(written)
        elif scan.found == "string":
            self._take_text(scan.text)
        elif scan.word and not scan.in_word:
            if scan.word != "null":
                raise Broken
            self._reading = ""
            if scan.found == "close":
                self._complete()

    def _take_text(self, text: str) -> None:
        """Arguments that were written as a string that holds JSON."""
        try:
            value = strict_json(text)
        except (ValueError, RecursionError):
            raise Broken from None
        if not isinstance(value, dict):
            raise Broken
        self._reading = ""
        self._arguments = [text]
        if self._name is not None:
            self._begin()

    def _complete(self) -> None:
        if self._name is None or (self._form.bare and self._arguments is None):
            raise Broken
        if not self._writer.open:
            self._begin()
        self._writer.end()
        self._calls += 1
        self._forget()
