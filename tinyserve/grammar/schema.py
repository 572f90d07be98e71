"""A JSON schema as text for the grammar library, which holds all of it or is not given it.

Nothing is ignored: what the library does not enforce is refused by its name and place. Blanks between JSON tokens are
bounded, since models that have lost their way write line breaks for ever.

Before: structured.py, shapes.py, keywords.py, references.py, apart.py, numbers.py.  After: asked.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import shown
from ..structured import Constraint
from .apart import Choices
from .keywords import check_words
from .names import check_names
from .numbers import Schema, Wrong, settle
from .places import Document, at
from .references import settle_references
from .regexes import check_repeats
from .shapes import check_shape

MAX_OPTIONAL = 2000  # properties of one object; each may follow each, and 3000 cost 0.1 s at a token
BLANKS = r"(\x20|\r?\n[\x20\t]{0,16})?"  # one space, or one line break and its indentation


def prepared(value: Any, constraint: Constraint) -> tuple[Schema, dict[str, Any]]:
    """A schema of which the library holds all that it says, and how its JSON is written.

    Args: value: the schema, which is changed, or its text.
    Raises: Wrong: it is malformed, or asks for what is not held.
    """
    schema = json.loads(value) if isinstance(value, str) else value
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise Wrong(f"a JSON schema must be an object, got {shown(schema)}")
    schema.pop("x-guidance", None)
    check_names(schema)
    document = Document(schema)
    for work in (check_shape, check_words):
        _each(document, work)
    settle_references(document)
    _each(document, Choices(document).settle)
    _each(document, lambda part: _settle(part, closed=constraint.closed))
    if constraint.compact:
        return schema, {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    return schema, {"whitespace_pattern": constraint.blanks or BLANKS}


def _each(document: Document, work: Callable[[Schema], None]) -> None:
    """Do something with each part, and tell where it went wrong."""
    for place, part in document.parts:
        try:
            work(part)
        except Wrong as error:
            raise Wrong(at(place, error)) from None


def _settle(part: Schema, *, closed: bool) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]  # which says nothing
    _settle_format(part)
    for pattern in (part.get("pattern", ""), *part.get("patternProperties", ())):
        check_repeats(pattern)
    if closed and "properties" in part:
        part.setdefault("additionalProperties", False)
    _check_optional(part)
    settle(part)


def _settle_format(part: Schema) -> None:
    """Leave out formats that say nothing about a text, and call those of pydantic by their name in JSON Schema."""
    named = part.get("format")
    if named in ("password", "binary"):
        del part["format"]
    elif isinstance(named, str) and re.fullmatch("uuid[1-8]", named):
        part["format"] = "uuid"


def _check_optional(part: Schema) -> None:
    names = part.get("properties", {})
    if len(names) <= MAX_OPTIONAL:
        return
    if (count := len(names.keys() - set(part.get("required", ())))) > MAX_OPTIONAL:
        raise Wrong(
            f"an object has {count} optional properties; at most {MAX_OPTIONAL} can be followed. Put those that every "
            "answer needs into 'required' (any number), or describe the others with 'additionalProperties'"
        )
