"""Names of schemas inside a schema: no two may be one, or the library takes the last one for the first.

    {"$id": "http://h/r", "properties": {"z": {"$id": "./r", "type": "integer"}}}      both are http://h/r

Before: places.py.  After: schema.py.

Source: JSON Schema draft 2020-12, section 8.2.1 ($id); RFC 3986 sections 5.2 and 6.2 (when two names are one).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from ..errors import shown
from .numbers import Schema, Wrong
from .places import NO_SCHEMAS, Place, at, pointer

_LIBRARY, _OURS = "json-schema:///", "http://json-schema.invalid/"  # of a schema without a name, and to reckon with


def check_names(root: Schema) -> None:
    """Refuse a schema with the name of another one, wherever it stands. Raises: Wrong."""
    word = "id" if "draft-04" in str(root.get("$schema")) else "$id"
    seen: dict[str, Place] = {}
    waiting: list[tuple[Place, Any, str]] = [((), root, _OURS)]
    while waiting:
        place, value, base = waiting.pop()
        if isinstance(value, list):
            waiting += [((place, index), each, base) for index, each in enumerate(value)]
        if not isinstance(value, dict):
            continue
        if isinstance(value.get(word), str) or not place:
            base = _resolved(base, value.get(word) or "")
            other = seen.setdefault(_compared(base), place)
            if other is not place:
                what = pointer(other) if other else "the whole schema"
                raise Wrong(at(place, f"{word} {shown(value[word])} is the name of {what}, too; leave it out"))
        waiting += [((place, name), each, base) for name, each in value.items() if name not in NO_SCHEMAS]


def _resolved(base: str, name: Any) -> str:
    try:
        return urljoin(base, str(name).replace(_LIBRARY, _OURS))
    except ValueError:
        return str(name)  # none of the internet's; the library says what is wrong with it


def _compared(name: str) -> str:
    """Equal for names that are one."""
    try:
        parts = urlsplit(name)
    except ValueError:
        return name
    host = parts._replace(scheme=parts.scheme.lower(), netloc=parts.netloc.lower(), path=parts.path or "/")
    return unquote(host.geturl())
