"""References inside a schema: each must lead somewhere, and none back to itself before anything is written.

References that only lead to the next one are made one step. The library follows such chains with its stack.

Before: places.py.  After: schema.py.
"""

from __future__ import annotations

from typing import Any

from ..errors import shown
from .numbers import Schema, Wrong
from .places import Document, at

MAX_VISITS = 50_000  # of the search for references that lead back to themselves, in a whole schema
MAX_STEPS = 200  # schemas that references and choices lead through, one to the next, before anything is written
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


class _Search:
    """Looks for schemas of which a value would have to be one of itself first, so that there is none.

    A schema that was once found to have an end has one wherever it stands, so each is looked at once; only what leads
    back is looked at again, and the first such one ends the search. After MAX_VISITS the rest is left to the library.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._ends: set[int] = set()
        self._visits = 0

    def leads_back(self, part: Any, path: frozenset[int] = frozenset()) -> bool:
        """Whether a value of this schema, inside those of the path, needs one of itself. Raises: Wrong: a long way."""
        if not isinstance(part, dict) or id(part) in self._ends or self._visits > MAX_VISITS:
            return False
        self._visits += 1
        if id(part) in path:
            return True
        if len(path) > MAX_STEPS:
            raise Wrong(
                f"references and choices lead through more than {MAX_STEPS} schemas, one to the next; put what they "
                "lead to in their place"
            )
        path = path | {id(part)}
        if "$ref" in part and self.leads_back(self._document.of(part["$ref"]), path):
            return True
        if isinstance(part.get("allOf"), list) and any(self.leads_back(each, path) for each in part["allOf"]):
            return True
        choices = [part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list) and part[name]]
        if any(all(self.leads_back(each, path) for each in choice) for choice in choices):
            return True
        self._ends.add(id(part))
        return False
