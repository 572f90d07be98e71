"""Names of schemas inside a schema: no two may be one, or the library takes the last one for the first.

    {"$id": "http://h/r", "properties": {"z": {"$id": "./r", "type": "integer"}}}      both are http://h/r

Names are resolved by hand, as urllib knows few schemes by name and keeps the dots of absolute ones. Where it is not
certain that two are different, they are taken for one.

Before: places.py.  After: schema.py.

Source: JSON Schema draft 2020-12, section 8.2.1 ($id); RFC 3986 sections 5.2 and 6.2 (when two names are one) and
appendix B (the parts of a name).
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from attrs import frozen

from ..errors import shown
from .numbers import Schema, Wrong
from .places import Place, at, inside, pointer

_PARTS = re.compile(r"(?:([A-Za-z][\w+.-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)


@frozen
class _Name:
    """A name that needs no other one to say where it is. Two that are equal are one."""

    scheme: str
    host: str
    path: str
    query: str = ""
    fragment: str = ""

    def resolved(self, text: str) -> _Name:
        """What a text means as a name inside a schema with this one."""
        scheme, host, path, query, fragment = _PARTS.fullmatch(text.rstrip("#")).groups()  # type: ignore[union-attr]
        if scheme is None and host is None:
            if not path:
                path, query = self.path, self.query if query is None else query
            elif not path.startswith("/"):
                path = self.path[: self.path.rfind("/") + 1] + path
        if scheme is None and host is None:
            host = self.host
        return _Name(
            (scheme or self.scheme).lower(),
            re.sub(":(80|443)?$", "", host or "").lower(),
            _without_dots(path),
            query or "",
            fragment or "",
        )

    def compared(self) -> tuple[str, ...]:
        """Equal for names that are one."""
        return (self.scheme, *map(unquote, (self.host, self.path.lstrip("/"), self.query, self.fragment)))


_UNNAMED = _Name("json-schema", "", "/")  # what the library calls a schema without a name


def check_names(root: Schema) -> None:
    """Refuse a schema with the name of another one, wherever it stands. Raises: Wrong."""
    for word in ("$id", "id") if "draft-04" in str(root.get("$schema")) else ("$id",):
        for old in (False, True):
            _check(root, word, old)


def _check(root: Schema, word: str, old: bool) -> None:
    """old: as before draft 2019-09, when a $ref hid the name beside it, and one that began with "#" was none."""
    seen: dict[tuple[str, ...], Place] = {}
    waiting: list[tuple[Place, Any, _Name]] = [((), root, _UNNAMED)]
    while waiting:
        place, value, base = waiting.pop()
        if isinstance(value, list):
            waiting += [((place, index), each, base) for index, each in enumerate(value)]
        if not isinstance(value, dict):
            continue
        named = isinstance(value.get(word), str) and not (old and ("$ref" in value or value[word].startswith("#")))
        if named:
            base = base.resolved(value[word])
        if named or not place:
            other = seen.setdefault(base.compared(), place)
            if other is not place:
                what = pointer(other) if other else "the whole schema"
                raise Wrong(at(place, f"{word} {shown(value[word])} is the name of {what}, too; leave it out"))
        held = inside(place, value, definitions=True, everything=True)
        waiting += [(there, each, base) for there, each in held]


def _without_dots(path: str) -> str:
    kept: list[str] = []
    steps = re.sub("%2[eE]", ".", path).split("/")
    for step in steps:
        if step == ".." and len(kept) > path.startswith("/"):
            kept.pop()
        elif step not in (".", ".."):
            kept.append(step)
    if steps[-1] in (".", ".."):
        kept.append("")
    return "/".join(kept)
