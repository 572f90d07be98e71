"""Words of JSON Schema that say what is valid and are not held here: each is refused by its name, with what to use.

A word that no draft has is a remark, as JSON Schema says, and is passed over, unless it looks like one that was meant:
"minlength" would be a limit that nobody holds. Words with a prefix ("x-order") are remarks for sure.

Before: places.py.  After: schema.py.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import shown
from .numbers import Schema, Wrong
from .places import ANNOTATIONS, HOLDING, WITH_SCHEMAS, Document, at

# Keywords that change which values are valid, and that the library passes over without a word.
NOT_ENFORCED = ("$dynamicRef", "$recursiveRef", "dependencies", "minContains", "maxContains", "unevaluatedItems")
OLDER = {
    "divisibleBy": "use 'multipleOf'",
    "extends": "use 'allOf'",
    "disallow": "say what is allowed with 'type' or 'enum'",
}
_MEANT = (
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    *("maxLength", "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains"),
    *("maxProperties", "minProperties", "required", "dependentRequired", "format", "properties", "patternProperties"),
    *("dependentSchemas", *HOLDING),
)
_AS_WRITTEN = {word.lower(): word for word in _MEANT}
_KNOWN = frozenset((*_MEANT, *ANNOTATIONS, *WITH_SCHEMAS, *NOT_ENFORCED, *OLDER, "$ref", "id", "example", "nullable"))
_PREFIXES = ("x-", "X-", "x_")
SHORTEST, LONGEST, LIKENESS = 6, 24, 0.85  # of a word that is compared with those that were meant
LONG = 12  # letters of a word of which two may be wrong


def refuse(schema: Any, names: Sequence[str]) -> None:
    """Refuse these keywords wherever they stand. Raises: Wrong."""
    for place, part in Document(schema, everything=True).parts:
        for name in names:
            if name in part:
                raise Wrong(at(place, f"the keyword {name!r} is not enforced by this server; leave it out"))


def check_words(part: Schema) -> None:
    """Refuse, in one schema, keywords that are not held, of older drafts, and misspelt ones. Raises: Wrong."""
    for name in NOT_ENFORCED:
        if name in part:
            raise Wrong(f"the keyword {name!r} is not enforced by this server; leave it out")
    for name in part:
        if name in OLDER:
            raise Wrong(f"the keyword {name!r} is of an older draft and not enforced; {OLDER[name]}")
        if name not in _KNOWN and (meant := _meant(name)):
            raise Wrong(f"there is no keyword {shown(name)}; did you mean {meant!r}?")
    if "additionalItems" in part and (not isinstance(part.get("items"), list) or "prefixItems" in part):
        raise Wrong(
            "the keyword 'additionalItems' has a meaning only beside a list of 'items'; use 'prefixItems', and "
            "'items' for those behind them"
        )


def _meant(name: str) -> str | None:
    """The keyword that a word is a misspelling of."""
    if name.startswith(_PREFIXES) or len(name) > LONGEST:
        return None
    if (low := name.lower()) in _AS_WRITTEN:
        return _AS_WRITTEN[low]
    if len(name) < SHORTEST:
        return None
    near = sorted({word for rest in _shortened(low) for word in _NEAR.get(rest, ())})
    return next(iter(difflib.get_close_matches(name, near, 1, LIKENESS)), None)


def _shortened(word: str) -> Iterator[str]:
    """A word, and what is left of it without any one letter, or any two if it is long.

    Two words that differ in a letter, or in the order of two, have one of these in common, so that of thousands of
    words only those few that look like a keyword have to be compared with one.
    """
    for count in range(2 + (len(word) >= LONG)):
        for kept in itertools.combinations(range(len(word)), len(word) - count):
            yield "".join(word[index] for index in kept)


def _neighbours() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for low, word in _AS_WRITTEN.items():
        for rest in _shortened(low):
            found.setdefault(rest, set()).add(word)
    return found


_NEAR = _neighbours()
