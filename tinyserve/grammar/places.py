"""The schemas inside a schema, where each stands, and what its references lead to.

    {"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$defs": {"b": {}}}
        ->  #   #/properties/a   #/properties/a/items   #/$defs/b

What stands under a word that JSON Schema does not know is a remark and no schema, unless a reference leads there; a
definition that no reference leads to says nothing of any value, and is passed over like a remark.

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
DEFINITIONS = ("$defs", "definitions")
WITH_SCHEMAS = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
HOLDING = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
SHOWN = 200  # characters of a pointer
NO_SCHEMAS = frozenset(("enum", "const", *ANNOTATIONS))
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
        self._everything, self._named = everything, False
        self._collect()
        if not everything and not (self.plain and all(self._is_known(part) for _, part in self.parts)):
            self._seen.clear()  # a reference may mean any definition, and any place that its pointer leads to
            self.parts.clear()
            self._named = True
            self._collect()

    def of(self, reference: Any) -> Any:
        """What a reference leads to. None: nothing that is found here, such as another document, or an anchor."""
        way = _way(reference)
        if way is None:
            return None
        if way not in self._found:
            self._found[way] = _follow(self.root, way)
        return self._found[way]

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

    def _collect(self) -> None:
        waiting, bases, ways = deque([((), self.root)]), [((), self.root)], dict.fromkeys([""])
        while waiting:
            for place, part in self._inside(*waiting.popleft()):
                self.parts.append((place, part))
                if self._named and _has_name(part) and part is not self.root:
                    bases.append((place, part))
                    waiting += [(_along(place, way), _follow(part, way)) for way in ways]
                way = _way(part.get("$ref"), self._named)
                if way is not None and way not in ways:
                    ways[way] = None
                    waiting += [(_along(start, way), _follow(base, way)) for start, base in bases]
        # A schema with a name of its own is a place that its references start from.
        self.plain = not any(_has_name(part) for _, part in self.parts if part is not self.root)

    def _inside(self, place: Place, value: Any) -> Iterator[tuple[Place, Schema]]:
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
            inner = inside(place, value, definitions=self._everything or self._named, everything=self._everything)
            stack += [(there, held, depth + 1) for there, held in reversed(inner)]

    def _is_known(self, part: Schema) -> bool:
        reference = part.get("$ref")
        return not isinstance(reference, str) or _way(reference) is not None


def inside(place: Place, part: Schema, *, definitions: bool, everything: bool) -> list[tuple[Place, Any]]:
    """What stands under the words of a schema: schemas and lists of them, each with its place.

    Args: definitions: those as well.   everything: also what stands under words that JSON Schema does not know.
    """
    found: list[tuple[Place, Any]] = []
    maps = (*WITH_SCHEMAS, "dependencies") if everything else WITH_SCHEMAS
    for name, held in part.items():
        if name in DEFINITIONS and not definitions:
            continue
        if name in maps and isinstance(held, dict):  # its names are no words: a property may be called "const"
            found += [(((place, name), key), each) for key, each in held.items()]
        elif name in HOLDING or (everything and name not in NO_SCHEMAS):
            found.append(((place, name), held))
    return found


def _has_name(part: Schema) -> bool:
    return any(isinstance(part.get(word), str) for word in ("$id", "id"))


def is_reference(part: Any) -> bool:
    """Whether a schema is a reference and says nothing else of what is valid."""
    if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
        return False
    return all(name == "$ref" or name in ANNOTATIONS for name in part)


def _way(reference: Any, named: bool = False) -> str | None:
    """The pointer of a reference, without its "#"; None: it has none. named: also behind the name of a document."""
    if not isinstance(reference, str):
        return None
    name, mark, way = reference.partition("#")
    return way if mark and (named or not name) and (not way or way[0] == "/") else None


def _steps(way: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(way).split("/")[1:]]


def _along(place: Place, way: str) -> Place:
    for step in _steps(way):
        place = (place, step)
    return place


def _follow(found: Any, way: str) -> Any:
    """What stands there, seen from a schema; None: nothing."""
    for step in _steps(way):
        if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", step):
            found = found[int(step)] if int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found
