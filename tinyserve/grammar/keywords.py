"""Words of JSON Schema that say what is valid and are not held here: each is refused by its name, with what to use.

A word that no draft has is a remark, as JSON Schema says, and is passed over, unless it looks like one that was meant:
"minlength" would be a limit that nobody holds.

Before: numbers.py.  After: schema.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import shown
from .numbers import Wrong

MAX_DEPTH = 64
MAX_VISITS = 50_000  # of the search for references that lead back to themselves, in a whole schema
MAX_GUESSES = 100  # unknown words of a schema that are compared with those that were meant
# Keywords that change which values are valid, and that the library passes over without a word.
NOT_ENFORCED = ("$dynamicRef", "$recursiveRef", "dependencies", "minContains", "maxContains", "unevaluatedItems")
OLDER = {
    "divisibleBy": "use 'multipleOf'",
    "extends": "use 'allOf'",
    "disallow": "say what is allowed with 'type' or 'enum'",
}
_ANNOTATIONS = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
_WITH_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_HOLDING = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_MEANT = (
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    *("maxLength", "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains"),
    *("maxProperties", "minProperties", "required", "dependentRequired", "format", "properties", "patternProperties"),
    *("dependentSchemas", *_HOLDING),
)
_AS_WRITTEN = {word.lower(): word for word in _MEANT}
_KNOWN = frozenset((*_MEANT, *_ANNOTATIONS, *_WITH_SCHEMAS, *NOT_ENFORCED, *OLDER, "$ref", "id", "example", "nullable"))
SHORTEST, LIKENESS = 6, 0.85  # of a word that is compared with those that were meant
ENDLESS = "no text satisfies it: a rule or $ref leads back to itself, or it contradicts itself."


def schemas(value: Any, depth: int = 0, *, known: bool = False) -> Iterator[dict[str, Any]]:
    """A schema and all that are inside it. known: only where a keyword says that a schema stands."""
    if depth > MAX_DEPTH:
        raise Wrong(f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for part in value:
            yield from schemas(part, depth + 1, known=known)
    elif isinstance(value, dict):
        yield value
        for name, part in value.items():
            if name in ("enum", "const", *_ANNOTATIONS):
                continue
            if name in _WITH_SCHEMAS and isinstance(part, dict):
                for inner in part.values():
                    yield from schemas(inner, depth + 1, known=known)
            elif not known or name in _HOLDING:
                yield from schemas(part, depth + 1, known=known)


def refuse(schema: Any, names: Sequence[str]) -> None:
    """Refuse these keywords wherever they stand. Raises: Wrong."""
    for part in schemas(schema):
        for name in names:
            if name in part:
                raise Wrong(f"the keyword {name!r} is not enforced by this server; leave it out")


def check_words(schema: Mapping[str, Any]) -> None:
    """Refuse keywords of older drafts, misspelt ones, and references that lead to themselves. Raises: Wrong."""
    refuse(schema, NOT_ENFORCED)
    unknown: set[str] = set()
    for part in schemas(schema, known=True):
        for name in part:
            if name in OLDER:
                raise Wrong(f"the keyword {name!r} is of an older draft and not enforced; {OLDER[name]}")
            if name not in _KNOWN and name not in unknown and len(unknown) < MAX_GUESSES:
                unknown.add(name)
                if meant := _meant(name):
                    raise Wrong(f"there is no keyword {shown(name)}; did you mean {meant!r}?")
        if "additionalItems" in part and (not isinstance(part.get("items"), list) or "prefixItems" in part):
            raise Wrong(
                "the keyword 'additionalItems' has a meaning only beside a list of 'items'; use 'prefixItems', and "
                "'items' for those behind them"
            )
        if isinstance(part.get("required"), bool):
            raise Wrong("'required' must be a list of names, in the schema of the object")
    search = _Search(schema)
    if any("$ref" in part and search.leads_back(part) for part in schemas(schema)):
        raise Wrong(ENDLESS)


def _meant(name: str) -> str | None:
    """The keyword that a word is a misspelling of."""
    if name.lower() in _AS_WRITTEN:
        return _AS_WRITTEN[name.lower()]
    return (
        next(iter(difflib.get_close_matches(name, _MEANT, 1, LIKENESS)), None) if SHORTEST <= len(name) < 40 else None
    )


class _Search:
    """Looks for schemas of which a value would have to be one of itself first, so that there is none.

    A schema that was once found to have an end has one wherever it stands, so each is looked at once; only what leads
    back is looked at again, and the first such one ends the search. After MAX_VISITS the rest is left to the library.
    """

    def __init__(self, root: Any) -> None:
        self._targets = Targets(root)
        self._ends: set[int] = set()
        self._visits = 0

    def leads_back(self, part: Any, path: frozenset[int] = frozenset()) -> bool:
        """Whether a value of this schema, inside those of the path, needs one of itself."""
        if not isinstance(part, dict) or id(part) in self._ends or self._visits > MAX_VISITS:
            return False
        self._visits += 1
        if id(part) in path:
            return True
        path = path | {id(part)}
        if "$ref" in part and self.leads_back(self._targets.of(part["$ref"]), path):
            return True
        if isinstance(part.get("allOf"), list) and any(self.leads_back(each, path) for each in part["allOf"]):
            return True
        choices = [part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list) and part[name]]
        if any(all(self.leads_back(each, path) for each in choice) for choice in choices):
            return True
        self._ends.add(id(part))
        return False


class Targets:
    """What references within a schema lead to; each is followed once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: dict[str, Any] = {}

    def of(self, reference: Any) -> Any:
        """None: nothing that is found here: another document, an anchor, or a pointer in the writing of URLs."""
        if not isinstance(reference, str) or "%" in reference or not (reference + "/").startswith("#/"):
            return None
        if reference not in self._found:
            self._found[reference] = self._follow(reference)
        return self._found[reference]

    def _follow(self, reference: str) -> Any:
        found = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", step):
                found = found[int(step)] if int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found
