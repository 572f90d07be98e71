"""What was asked for, as text for the grammar library: schemas, regexes, choices, grammars, structural tags.

Nothing is ignored: what the library does not enforce is refused by its name (keywords.py, numbers.py). Blanks between
JSON tokens are bounded, since models that have lost their way write line breaks for ever.

Before: structured.py, keywords.py, apart.py.  After: compile.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from ..errors import RequestError, shown
from ..structured import Constraint
from .apart import Choices
from .keywords import ENDLESS, MAX_DEPTH, NOT_ENFORCED, check_words, refuse, schemas
from .numbers import Wrong, settle

MAX_CHARACTERS = 256 * 1024  # of a schema, regex or grammar
MAX_OPTIONAL = 2000  # properties of one object; each may follow each, and 3000 cost 0.1 s at a token
BLANKS = r"(\x20|\r?\n[\x20\t]{0,16})?"  # one space, or one line break and its indentation
FREE_TEXT = r"/(.|\n)*/"
_IN_GRAMMARS = (*NOT_ENFORCED, "lenient")  # which would let the library pass over more of them
_INSIDE = re.compile(r"%json\s*(?=\{)")


def grammar_text(constraint: Constraint, special: Mapping[str, int]) -> str:
    """The library's text for a constraint.

    Args: special: special tokens by their text.
    Raises: RequestError: it is malformed, too large, or asks for what is not enforced.
    """
    try:
        if len(str(constraint.value)) > MAX_CHARACTERS:
            raise Wrong(f"is longer than {MAX_CHARACTERS} characters")
        return _KINDS[constraint.kind](constraint, special)
    except (ValueError, TypeError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"{constraint.param}: {what}", param=constraint.param) from error
    except Exception as error:  # the converter of grammars raises bare ones
        raise RequestError(f"{constraint.param}: {first_line(error)}", param=constraint.param) from error


_EXCERPT = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"^at [0-9()]+: failed to compile JSON schema: ")  # in a grammar that nobody sent


# What the library says, and what that means to whoever wrote the schema.
_SAYINGS = (
    (r".*NoExtensionBias$", ENDLESS),
    (
        r".*[Cc]urrent row has ([0-9]+) items.*",
        r"\1 alternatives may come at one place of it, and at most 12000 can be followed; write them as one choice, "
        "enum or regular expression",
    ),
    (r'.*Unimplemented keys: \["([^"]+)".*', r"the keyword '\1' is not enforced by this server; leave it out"),
    (
        r".*min/maxProperties only supported.*",
        "minProperties and maxProperties are counted only where all of 'properties' are required; put those that every "
        "answer needs into 'required'",
    ),
    (
        r".*oneOf constraints are not supported.*",
        "oneOf is held only where no value can satisfy two of its schemas, by their types or constants; use anyOf",
    ),
    (r".*Unknown format: (.+)", r"the format '\1' is not enforced by this server; leave it out"),
    (r".*Schema intersection stack level.*", "references or choices that lead to others go too deep in it; nest fewer"),
    (r".*Value for 'multipleOf' has too many digits: (\S+).*", r"multipleOf \1 has too many digits; use a smaller one"),
    (r".*Failed to generate regex for .* range.*", "no number lies between its minimum and its maximum"),
    (r".*regex parse error: (.+?)[ ^]* error: (.+)", r"the regex \1 cannot be read: \2"),
)


def first_line(error: Any) -> str:
    """The beginning of what the library says; it prints the grammar made for it, and its whole state."""
    text = " ".join(_EXCERPT.split(str(error).split("<state>")[0])[0].split())[:300]
    text = _PLACE.sub("", text)
    for saying, meaning in _SAYINGS:
        if found := re.fullmatch(saying, text):
            return found.expand(meaning)
    return text


def _json(constraint: Constraint, _: Any) -> str:
    return LLMatcher.grammar_from_json_schema(*_prepared(constraint.value, constraint))


def _prepared(value: Any, constraint: Constraint) -> tuple[str, dict[str, Any]]:
    """A schema as text, and how its JSON is written."""
    schema = json.loads(value) if isinstance(value, str) else value
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise Wrong(f"a JSON schema must be an object, got {shown(schema)}")
    schema = json.loads(json.dumps(schema))  # a copy of our own, and certainly JSON
    schema.pop("x-guidance", None)
    check_words(schema)
    choices = Choices(schema)
    for part in schemas(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]  # which says nothing
        _settle_format(part)
        choices.settle(part)
        if constraint.closed and "properties" in part:
            part.setdefault("additionalProperties", False)
        _check_optional(part)
        settle(part)
    if constraint.compact:
        style = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    else:
        style = {"whitespace_pattern": constraint.blanks or BLANKS}
    return json.dumps(schema, ensure_ascii=False), style


def _settle_format(part: dict[str, Any]) -> None:
    """Leave out formats that say nothing about a text, and call those of pydantic by their name in JSON Schema."""
    named = part.get("format")
    if named in ("password", "binary"):
        del part["format"]
    elif isinstance(named, str) and re.fullmatch("uuid[1-8]", named):
        part["format"] = "uuid"


def _check_optional(schema: dict[str, Any]) -> None:
    names, required = schema.get("properties"), schema.get("required")
    if not isinstance(names, dict) or len(names) <= MAX_OPTIONAL:
        return
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if (count := len(names.keys() - needed)) > MAX_OPTIONAL:
        raise Wrong(
            f"an object has {count} optional properties; at most {MAX_OPTIONAL} can be followed. Put those that every "
            "answer needs into 'required' (any number), or describe the others with 'additionalProperties'"
        )


def _any_object(constraint: Constraint, _: Any) -> str:
    return LLMatcher.grammar_from_json_schema(*_prepared({"type": "object"}, constraint))


def _regex(constraint: Constraint, _: Any) -> str:
    return LLMatcher.grammar_from_regex(constraint.value)


def _choice(constraint: Constraint, _: Any) -> str:
    return "start: CHOICE\nCHOICE: " + " | ".join(
        _quoted(choice) for choice in constraint.value
    )  # one word: any number


def _grammar(constraint: Constraint, _: Any) -> str:
    for found in _INSIDE.finditer(constraint.value):
        try:
            schema, _ = json.JSONDecoder().raw_decode(constraint.value, found.end())
        except ValueError:
            continue  # in a text or a comment, or the library refuses it
        refuse(schema, _IN_GRAMMARS)
    return any_to_lark(constraint.value)


# ---- structural tags: free text in which marks are followed by constrained parts


def _structural(constraint: Constraint, special: Mapping[str, int]) -> str:
    value = json.loads(constraint.value) if isinstance(constraint.value, str) else constraint.value
    if not isinstance(value, Mapping):
        raise Wrong(f"a structural tag must be an object, got {shown(value)}")
    lark = _Lark(constraint, special)
    if "structures" in value:
        start = lark.triggered(value.get("triggers"), value["structures"])
    elif "format" in value:
        start = lark.format(value["format"])
    else:
        raise Wrong("a structural tag needs 'structures' and 'triggers', or a 'format'")
    return lark.text(start)


class _Lark:
    """Collects the rules of one grammar."""

    def __init__(self, constraint: Constraint, special: Mapping[str, int]) -> None:
        self._constraint = constraint
        self._special = special
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", f"FREE: {FREE_TEXT}", *self._rules])

    def rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def literal(self, text: Any) -> str:
        if not isinstance(text, str):
            raise Wrong(f"a structural tag needs a text, got {shown(text)}")
        parts, at = [], 0
        for mark in self._marks.finditer(text):
            parts += [_quoted(text[at : mark.start()])] if mark.start() > at else []
            parts.append(f"<[{self._special[mark.group()]}]>")
            at = mark.end()
        return " ".join(parts + ([_quoted(text[at:])] if at < len(text) else []))

    def schema(self, value: Any) -> str:
        text, style = _prepared(value if value is not None else {}, self._constraint)
        return "%json " + json.dumps({**json.loads(text), "x-guidance": style}, ensure_ascii=False)

    def triggered(self, triggers: Any, tags: Any, *, at_least_one: bool = False, stop: bool = False) -> str:
        """Free text; where a trigger is written, one of the tags that begin with it follows."""
        if not isinstance(triggers, Sequence) or isinstance(triggers, str) or not triggers:
            raise Wrong("'triggers' must be a list of texts")
        if not isinstance(tags, Sequence) or isinstance(tags, str) or not tags:
            raise Wrong("a structural tag needs at least one tag")
        branches = []
        for tag in tags:
            begin, content, end = self._parts(tag)
            trigger = next(
                (each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), None
            )
            if trigger is None:
                raise Wrong(f"no trigger is the beginning of {shown(begin)}")
            token = self._special.get(trigger)
            rest = [self.literal(begin[len(trigger) :])] if begin != trigger else []
            rest += [content, *([self.literal(end)] if end else [])]
            head = f"FREE <[{token}]>" if token is not None else self.rule(f"FREE {_quoted(trigger)}", lazy=True)
            branches.append(self.rule(" ".join([head, *rest])))
        one = f"({' | '.join(branches)})"
        return one + ("+" if at_least_one else "*") + ("" if stop else " FREE")

    def _separated(self, value: Mapping[str, Any]) -> str:
        """Tags behind one another, with a text between them."""
        tags = [self.format({"type": "tag", **tag}) for tag in value.get("tags") or () if isinstance(tag, Mapping)]
        if not tags:
            raise Wrong("tags_with_separator needs tags")
        one = self.rule(" | ".join(tags))
        between = f"{self.literal(value['separator'])} " if value.get("separator") else ""
        many = one if value.get("stop_after_first") else f"{one} ({between}{one})*"
        return self.rule(many if value.get("at_least_one") else f"({many})?")

    def _parts(self, tag: Any) -> tuple[str, str, str]:
        if not isinstance(tag, Mapping) or not isinstance(tag.get("begin"), str):
            raise Wrong(f"a tag needs 'begin', got {shown(tag)}")
        content = self.format(tag["content"]) if "content" in tag else self.schema(tag.get("schema"))
        end = tag.get("end") or ""
        if not isinstance(end, str):
            raise Wrong(f"'end' of a tag must be a text, got {shown(end)}")
        return tag["begin"], content, end

    def format(self, value: Any, depth: int = 0) -> str:
        """One of the format objects, by its type."""
        if depth > MAX_DEPTH or not isinstance(value, Mapping):
            raise Wrong(f"a format must be an object with a type, got {shown(value)}")
        kind = value.get("type")
        if kind == "const_string":
            text = value.get("value")
            return _quoted(text) if value.get("plain") and isinstance(text, str) else self.literal(text)
        if kind == "json_schema":
            return self.rule(self.schema(value.get("json_schema")))
        if kind == "any_text":
            return "FREE"
        if kind == "regex":
            return self.rule(f"/{str(value.get('pattern')).replace('/', chr(92) + '/')}/")
        if kind in ("sequence", "or"):
            parts = [self.format(part, depth + 1) for part in value.get("elements") or ()]
            if not parts:
                raise Wrong(f"a {kind} needs elements")
            return self.rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            begin, content, end = self._parts(value)
            if content == "FREE" and end and not self._marks.match(end):  # text up to the first such end
                return self.rule(f"{self.literal(begin)} {self.rule(f'FREE {_quoted(end)}', lazy=True)}")
            return self.rule(
                " ".join(part for part in (self.literal(begin), content, end and self.literal(end)) if part)
            )
        if kind == "optional":
            return self.rule(f"({self.format(value.get('content'), depth + 1)})?")
        if kind == "tags_with_separator":
            return self._separated(value)
        if kind == "triggered_tags":
            return self.triggered(
                value.get("triggers"),
                value.get("tags"),
                at_least_one=bool(value.get("at_least_one")),
                stop=bool(value.get("stop_after_first")),
            )
        raise Wrong(f"the format {shown(kind)} is not supported in structural tags")


def _quoted(text: str) -> str:
    """A text as a Lark terminal."""
    return json.dumps(text, ensure_ascii=False)


_KINDS: dict[str, Callable[[Constraint, Any], str]] = {
    "json": _json,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural,
}
