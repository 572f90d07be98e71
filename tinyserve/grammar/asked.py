"""What was asked for, as text for the grammar library: schemas, regexes, choices, grammars, structural tags.

This is done in the process that tries grammars (trial.py): a schema of 250 KB may take a second, and its sender alone
waits for that. Where the library finds something wrong, it is found out in which part, and where in a schema.

Before: schema.py, tags.py, sayings.py.  After: trial.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from ..structured import Constraint
from .keywords import NOT_ENFORCED, refuse
from .numbers import Schema, Wrong
from .places import Document, at
from .regexes import check_repeats
from .sayings import MAX_ALTERNATIVES, NOTHING, explained, too_many
from .schema import prepared
from .tags import Part, Tags, quoted

SEARCHED, SEARCH_SECONDS = 500, 0.1  # parts of a schema that are compiled to find the one that is wrong
_IN_GRAMMARS = (*NOT_ENFORCED, "lenient")  # which would let the library pass over more of them
# Of Lark: texts, sets of letters, patterns and comments hold what would be marks elsewhere.
_PIECES = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|//[^\n]*|\#[^\n]*|/(?P<regex>(?:[^/\\\n]|\\.)+)/'
    r"|^[!?]*(?P<rule>[\w-]+)(?=[^\n:\"]*:)|[()|]",
    re.MULTILINE,
)
_INSIDE = re.compile(r"%json\s*(?=\{)")


class Asked:
    """The library's text for a constraint.

    Args: special: special tokens by their text.
    Attributes: text: of the grammar.
    Raises: Wrong: it is malformed, or asks for what is not enforced.
    """

    def __init__(self, constraint: Constraint, special: Mapping[str, int]) -> None:
        self._parts: list[Part] = []
        try:
            self.text: str = _KINDS[constraint.kind](constraint, special, self._parts)
        except (ValueError, TypeError) as error:
            raise Wrong(str(error)) from error
        except RecursionError:
            raise Wrong("is nested too deeply") from None
        except MemoryError:
            raise
        except Exception as error:  # the converter of grammars raises bare ones
            raise Wrong(explained(error)) from error

    def explained(self, error: str) -> str:
        """What the library says of the grammar, with the part and the place where it is wrong, if they are found."""
        said, end = explained(error), time.process_time() + SEARCH_SECONDS
        for part in self._parts:
            if len(self._parts) == 1 or _fault(part.grammar) == said:
                return part.named(_placed(part.schema, said, end) if part.schema is not None else said)
            if time.process_time() > end:
                break
        return said


def _fault(grammar: str) -> str:
    """What the library says of a grammar alone."""
    return explained(LLMatcher.validate_grammar(grammar))


def _placed(schema: Schema, said: str, end: float) -> str:
    """What is said of a schema, with the place of the smallest part of which it is true.

    Of an object whose required property nothing satisfies, the property is meant.
    """
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parts = Document(schema).parts[1:]
    for place, part in reversed(parts[-SEARCHED:]):
        if time.process_time() > end:
            break
        fault = _fault(LLMatcher.grammar_from_json_schema(json.dumps({**shared, **part})))
        if fault == said or (fault.startswith(NOTHING) and said.startswith(NOTHING)):
            return at(place, fault)
    return said


# ---- the kinds


def _json(constraint: Constraint, _: Any, parts: list[Part]) -> str:
    value = {"type": "object"} if constraint.kind == "json_object" else constraint.value
    schema, style = prepared(value, constraint)
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), style)
    parts.append(Part("", text, schema))
    return text


def _regex(constraint: Constraint, *_: Any) -> str:
    check_repeats(constraint.value)
    return LLMatcher.grammar_from_regex(constraint.value)


def _choice(constraint: Constraint, *_: Any) -> str:
    one_word = " | ".join(quoted(choice) for choice in constraint.value)  # any number
    return f"start: CHOICE\nCHOICE: {one_word}"


def _grammar(constraint: Constraint, *_: Any) -> str:
    for found in _INSIDE.finditer(constraint.value):
        try:
            schema, _ = json.JSONDecoder().raw_decode(constraint.value, found.end())
        except ValueError:
            continue  # in a text or a comment, or the library refuses it
        refuse(schema, _IN_GRAMMARS)
    text: str = any_to_lark(constraint.value)
    _check_rules(text)
    return text


def _check_rules(text: str) -> None:
    """Refuse rules of too many alternatives, and regular expressions that repeat too much. Raises: Wrong."""
    rule, counts, most = "", [1], 1
    for piece in _PIECES.finditer(text):
        mark = piece[0]
        if piece["regex"]:
            check_repeats(piece["regex"])
        elif piece["rule"]:
            rule, counts = piece["rule"], [1]
        elif mark == "(":
            counts.append(1)
        elif mark == ")" and len(counts) > 1:
            counts.pop()
        elif mark == "|" and not rule.isupper():  # those of one word are any number
            counts[-1] += 1
            most = max(most, counts[-1])
    if most > MAX_ALTERNATIVES:
        raise Wrong(too_many(most))


def _tags(constraint: Constraint, special: Mapping[str, int], parts: list[Part]) -> str:
    return Tags(constraint, special, parts).text


_KINDS: dict[str, Callable[[Constraint, Mapping[str, int], list[Part]], str]] = {
    "json": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tags,
}
