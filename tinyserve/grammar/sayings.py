"""What the grammar library says of a grammar, put into words for whoever wrote it: what is wrong, and what to do.

Before: references.py.  After: schema.py, matcher.py.
"""

from __future__ import annotations

import re
from typing import Any

from .references import ENDLESS

MAX_ALTERNATIVES = 12_000  # that the library follows: 3000 optional properties, or 1000 branches of anyOf
LENGTH = 300  # characters of what it says that are read
_EXCERPT = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"^at [0-9()]+: failed to compile JSON schema: ")  # in a grammar that nobody sent
_REGEX = "regex parse error: "  # then the regex, with marks below it, and what is wrong
SHOWN = 100  # characters of it
NOTHING = "nothing satisfies it"


def too_many(alternatives: int | str) -> str:
    """What to do about so many of them."""
    return (
        f"{alternatives} alternatives may come at one place of it, and at most {MAX_ALTERNATIVES} can be followed; "
        "write them as one choice, enum or regular expression"
    )


_SAYINGS = (
    (r".*NoExtensionBias$", ENDLESS),
    (r".*[Cc]urrent row has ([0-9]+) items.*", too_many(r"\1")),
    (r'.*Unimplemented keys: \["([^"]+)".*', r"the keyword '\1' is not enforced by this server; leave it out"),
    (
        r".*min/maxProperties only supported.*",
        "minProperties and maxProperties are counted only where all of 'properties' are required; put those that every "
        "answer needs into 'required'",
    ),
    (
        r".*oneOf constraints are not supported.*",
        "oneOf is held only where no value can satisfy two of its schemas: by their types, their constants, or a "
        "property that all require and whose constants differ; use anyOf",
    ),
    (
        r".*patternProperty regexes /(.+)/ and /(.+)/ are not disjoint.*",
        r"patternProperties: a name may match both \1 and \2, which is not followed; make them exclude each other",
    ),
    (r".*Unknown format: (.+)", r"the format '\1' is not enforced by this server; leave it out"),
    (r".*Schema intersection stack level.*", "references or choices that lead to others go too deep in it; nest fewer"),
    (r".*Value for 'multipleOf' has too many digits: (\S+).*", r"multipleOf \1 has too many digits; use a smaller one"),
    (r".*Failed to generate regex for .* range.*", "no number lies between its minimum and its maximum"),
    (
        r".*lookarounds not supported yet; \S+ in regex /(.+)/.*",
        r"the regex \1 looks at what is beside it (\\b and the like), which cannot be followed; leave that out",
    ),
    (
        r".*Resource '(?:json-schema:///)?(.+)' is not present.*",
        r"'\1' is another document, and none is fetched: put what a $ref needs into '$defs', and leave that out of "
        "$schema",
    ),
    (r".*Anchor '(.+)' does not exist.*", r"$ref '#\1' leads nowhere: no schema has that $anchor"),
    (r".*Pointer '(.+)' does not exist.*", r"$ref '#\1' leads nowhere: the schema has nothing there"),
    (
        r".*Unsatisfiable schema: Regex is empty.*",
        f"{NOTHING}: no text has its pattern, format and length at once; leave one out",
    ),
    (
        r".*Unable to determine if regex is empty.*",
        "its patterns, formats and lengths are too much to be followed at once; leave some out, or write one pattern",
    ),
    (r".*Unsatisfiable schema: incompatible types.*", f"{NOTHING}: its types and values exclude each other"),
    (r".*Unsatisfiable schema: anyOf is empty.*", f"{NOTHING}: each of its choices contradicts itself or the rest"),
    (
        r".*schema too large|.*too many expressions constructed|.*grammar too large.*",
        "there is too much in it to be followed; ask for less of it at once",
    ),
    (
        r".*Unsatisfiable schema: schema is false.*",
        f"{NOTHING}: what it needs is the schema false",
    ),
    (r".*Unsatisfiable schema: (.+)", NOTHING + r": \1"),
)


def explained(error: Any) -> str:
    """The beginning of what the library says; it prints the grammar made for it, and its whole state."""
    text = " ".join(_EXCERPT.split(str(error).split("<state>")[0])[0].split())
    _, mark, rest = text.partition(_REGEX)
    if mark:
        regex, _, reason = rest.rpartition(" error: ")
        regex = regex.rstrip(" ^").lstrip()
        told = regex if len(regex) <= SHOWN else f"{regex[:SHOWN]}..."
        return f"the regex {told} cannot be read: {reason[:LENGTH]}"
    text = _PLACE.sub("", text[:LENGTH])
    for saying, meaning in _SAYINGS:
        if found := re.fullmatch(saying, text):
            return found.expand(meaning)
    return text
