"""References inside a schema: each must lead somewhere, and none back to itself before anything is written.

References that only lead to the next one are made one step. The library follows such chains with its stack.

Before: places.py.  After: schema.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..errors import shown
from .numbers import Schema, Wrong
from .places import Document, at

MAX_STEPS = 100  # schemas that choices and references lead through, one to the next, before anything is written
ENDLESS = "no text satisfies it: a rule or $ref leads back to itself, or it contradicts itself."


def settle_references(document: Document) -> None:
    """Shorten chains of references, and refuse those that lead nowhere or to themselves. Raises: Wrong."""
    for place, part in document.parts:
        if "$ref" not in part:
            continue
        try:
            _settle(document, part)
        except Wrong as error:
            raise Wrong(at(place, error)) from None
    search = _Search(document)
    for place, part in document.parts:
        if "$ref" in part and search.leads_back(part):
            raise Wrong(at(place, ENDLESS))


def _settle(document: Document, part: Schema) -> None:
    reference = part["$ref"]
    if not isinstance(reference, str):
        raise Wrong(f"$ref must be a text such as '#/$defs/name', is {shown(reference)}")
    if not document.plain or not (reference + "/").startswith("#/"):
        return  # the library follows it, by names that the schemas have
    end = document.end(reference)
    if end is None:
        raise Wrong(ENDLESS)
    target = document.of(end)
    if target is None and (end + "/").startswith("#/"):
        raise Wrong(
            f"$ref {shown(end)} leads nowhere: the schema has nothing there; correct it, or put the schema there"
        )
    if target is not None and not isinstance(target, (dict, bool)):
        raise Wrong(f"$ref {shown(end)} leads to {shown(target)}, which is no schema")
    part["$ref"] = end


def _groups(document: Document, part: Schema) -> Iterator[list[Any]]:
    """What a value of a schema has to satisfy as well, before anything is written: one schema of each list."""
    if "$ref" in part:
        yield [document.of(part["$ref"])]
    if isinstance(part.get("allOf"), list):
        yield from ([each] for each in part["allOf"])
    yield from (part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list) and part[name])


def _without_end(document: Document) -> set[int]:
    """The ids of schemas of which a value would have to be one of itself first, so that there is none.

    Found from the other side, which looks at each step once: a schema has an end when one of each of its groups has.
    """
    parts = {id(part): part for _, part in document.parts}
    left: dict[int, int] = {}  # groups of a schema of which none is known to have an end
    users: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # of a schema: (another, its group)
    ends: list[int] = []
    for key, part in parts.items():
        open_groups = [
            group
            for group in _groups(document, part)
            if all(isinstance(each, dict) and id(each) in parts for each in group)
        ]
        left[key] = len(open_groups)
        for number, group in enumerate(open_groups):
            for each in group:
                users[id(each)].append((key, number))
        if not open_groups:
            ends.append(key)
    settled: set[tuple[int, int]] = set()
    while ends:
        for user in users[ends.pop()]:
            if user not in settled:
                settled.add(user)
                left[user[0]] -= 1
                if not left[user[0]]:
                    ends.append(user[0])
    return {key for key, count in left.items() if count}


class _Search:
    """Goes the ways that lead from schema to schema before anything is written, each schema once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._endless = _without_end(document)
        self._passed: set[int] = set()

    def leads_back(self, part: Any, depth: int = 0) -> bool:
        """Whether a value of this schema needs one of itself first. Raises: Wrong: a long way."""
        if isinstance(part, dict) and id(part) in self._endless:
            return True
        if not isinstance(part, dict) or id(part) in self._passed:
            return False
        if depth > 2 * MAX_STEPS:  # a choice, and the reference in it
            raise Wrong(
                f"references and choices lead through more than {MAX_STEPS} schemas, one to the next; put what they "
                "lead to in their place"
            )
        self._passed.add(id(part))
        for group in _groups(self._document, part):
            any(not self.leads_back(each, depth + 1) for each in group)  # a way out is enough
        return False
