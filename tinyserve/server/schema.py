"""What a request body may hold: every field declared once, with its type, its range and a sentence about it.

    Param("echo", flag(), "...")  ->  a 400 that names the field when it holds something else
                                  ->  its entry in /openapi.json and on /docs

A field is honoured, or refused by name, or (its sentence says so) accepted because it changes no answer; a field that
nobody declared is ignored, because official clients send new ones before servers know them. Ranges of sampling fields
are declared in request.py, where they are checked, and only copied into the document from there.

Before: errors.py, checks.py.  After: bodies.py (the declarations), fields.py (reads checked bodies), openapi.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, fields_dict, frozen

from ..checks import MAX_TOKEN_LIST
from ..errors import RequestError, shown
from ..request import SamplingParams

NOT_YET = "tinyserve does not support this field yet."


@frozen
class Kind:
    """A type of JSON value.

    Args:
        schema: the same as JSON Schema.   expected: the same in words, for a refusal.
        fits: whether a value is one; the elements of lists are looked at besides.
        element: what a list holds.   most: how many of them.   inner: the fields of an object.
    """

    schema: Mapping[str, Any]
    expected: str
    fits: Callable[[Any], bool]
    element: Kind | None = None
    most: int = MAX_TOKEN_LIST
    inner: Body | None = None

    def check(self, value: Any, path: str) -> None:
        """Raises: RequestError: `value`, found at `path`, is something else."""
        if not self.fits(value):
            raise RequestError(f"{path} must be {self.expected}, got {shown(value)}.", param=path)
        if self.element is not None and isinstance(value, list):
            if len(value) > self.most:
                raise RequestError(f"{path} has {len(value)} entries; at most {self.most} are allowed.", param=path)
            fits = self.element.fits
            for item in value:
                if not fits(item):
                    raise RequestError(f"{path} must be {self.expected}, got {shown(value)}.", param=path)
        if self.inner is not None and isinstance(value, dict):
            self.inner.check(value, path + ".")


def text() -> Kind:
    """A string."""
    return Kind({"type": "string"}, "a string", lambda v: isinstance(v, str))


def flag() -> Kind:
    """true or false."""
    return Kind({"type": "boolean"}, "true or false", lambda v: isinstance(v, bool))


def integer(low: int | None = None, high: int | None = None) -> Kind:
    """A whole number in [low, high]."""
    schema = {"type": "integer"} | _limits(low, high)
    within = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
    return Kind(
        schema,
        "an integer" + within,
        lambda v: type(v) is int and (low is None or v >= low) and (high is None or v <= high),
    )


def number() -> Kind:
    """A finite number; JSON has no others."""
    return Kind({"type": "number"}, "a number", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool))


def choice(*names: str) -> Kind:
    """One of some words."""
    return Kind({"type": "string", "enum": list(names)}, "one of " + ", ".join(names), lambda v: v in names)


def listed(element: Kind, expected: str = "", *, most: int = MAX_TOKEN_LIST) -> Kind:
    """A list whose elements are all of one kind."""
    schema = {"type": "array", "items": element.schema, "maxItems": most}
    return Kind(schema, expected or f"a list, each of it {element.expected}", _is_list, element, most)


def tokens() -> Kind:
    """A list of token ids."""
    return listed(Kind({"type": "integer", "minimum": 0}, "", lambda v: type(v) is int), "a list of token ids")


def mapping(expected: str = "an object") -> Kind:
    """An object with any names."""
    return Kind({"type": "object"}, expected, lambda v: isinstance(v, dict))


def objects(expected: str = "a list of objects", *, most: int = MAX_TOKEN_LIST) -> Kind:
    """A list of objects with any names; what is in them is checked by whoever reads them."""
    return listed(mapping(), expected, most=most)


def inside(*params: Param) -> Kind:
    """An object with declared fields."""
    body = Body("", params)
    return Kind(body.schema(), "an object", lambda v: isinstance(v, dict), inner=body)


def either(*kinds: Kind, expected: str = "") -> Kind:
    """Any of several kinds, which differ in their JSON type."""

    def fits(value: Any) -> bool:
        return any(kind.fits(value) for kind in kinds)

    whole = Kind({"anyOf": [kind.schema for kind in kinds]}, expected or " or ".join(k.expected for k in kinds), fits)
    lists = [kind for kind in kinds if kind.element is not None]
    objects = [kind for kind in kinds if kind.inner is not None]
    return evolve(
        whole,
        element=lists[0].element if lists else None,
        most=lists[0].most if lists else MAX_TOKEN_LIST,
        inner=objects[0].inner if objects else None,
    )


def documented(schema: Mapping[str, Any], expected: str, *types: type) -> Kind:
    """A value of these Python types; all else is checked where it is read, and only described here."""
    named = object in types or bool in types
    return Kind(schema, expected, lambda v: isinstance(v, types) and (named or not isinstance(v, bool)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _limits(low: float | None, high: float | None) -> dict[str, float]:
    limits = {"minimum": low, "maximum": high}
    return {name: value for name, value in limits.items() if value is not None}


@frozen
class Param:
    """One field.

    Args:
        help: what it does, as a sentence for people.
        default: what holds when it is missing or null, as far as that is one value.
        required: whether it must be there.
        refused: why any value but those in `off` is a 400; None for a field that is honoured.
    """

    name: str
    kind: Kind
    help: str = ""
    default: Any = None
    required: bool = False
    refused: str | None = None
    off: Sequence[Any] = field(default=(), converter=tuple)

    def check(self, value: Any, path: str) -> None:
        """Raises: RequestError: the value is of another kind, or asks for what there is not."""
        if self.refused is not None:
            if not any(_same(value, off) for off in self.off):
                raise RequestError(f"{path}: {self.refused}", param=path)
            return
        self.kind.check(value, path)

    def schema(self) -> dict[str, Any]:
        """As JSON Schema; null is always allowed and means the default."""
        help = self.help
        if self.refused is not None:
            only = f" Accepted with the value {' or '.join(map(str, self.off))}." if self.off else ""
            help = f"{help} Refused: {self.refused}{only}".strip()
            return {"description": help, "enum": [None, *self.off]}
        schema = dict(self.kind.schema) if self.required else _nullable(self.kind.schema)
        if help:
            schema["description"] = help
        if self.default is not None:
            schema["default"] = self.default
        return schema


def _same(value: Any, off: Any) -> bool:
    return value == off and isinstance(value, bool) == isinstance(off, bool)


def _nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema:
        return {**schema, "type": [schema["type"], "null"], "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else dict(schema)


def refusal(*names: str, off: Sequence[Any] = (), why: str = NOT_YET, help: str = "") -> list[Param]:
    """Fields that would change the answer and cannot be honoured. off: values of them that ask for nothing."""
    return [Param(name, documented({}, "", object), help, refused=why, off=off) for name in names]


def harmless(kind: Kind, *names: str, help: str = "Accepted; it changes no answer.") -> list[Param]:
    """Fields that say nothing about the answer. kind: what may be in them all the same."""
    return [Param(name, kind, help) for name in names]


def labels() -> Kind:
    """An object whose values are strings."""
    schema = {"type": "object", "additionalProperties": {"type": "string"}}

    def fits(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())

    return Kind(schema, "an object of strings", fits)


def sampled(name: str, help: str) -> Param:
    """A field of SamplingParams, with the type and range that its validator there declares."""
    attribute = fields_dict(SamplingParams)[name]
    schema = dict(getattr(attribute.validator, "schema", {"type": "boolean"}))
    kind = {"number": number(), "boolean": flag(), "integer": integer()}[schema["type"]]
    default = attribute.default if attribute.default != () else None
    return Param(name, evolve(kind, schema=schema), help, default)


class Body:
    """All fields of one route's body. name: what the document calls it."""

    def __init__(self, name: str, params: Sequence[Param]) -> None:
        self.name = name
        self.params = {param.name: param for param in params}
        self._needed = frozenset(param.name for param in params if param.required)

    def check(self, values: Mapping[str, Any], path: str = "") -> None:
        """Hold the values to the declarations. Raises: RequestError: naming the first field at fault."""
        needed = self._needed
        for name in [name for name in self.params if name in values or name in needed]:
            param, value = self.params[name], values.get(name)
            if value is not None:
                param.check(value, path + name)
            elif param.required:
                raise RequestError(f"{path}{name} is needed.", param=path + name)

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: param.schema() for name, param in self.params.items()},
        }
        if needed := [name for name, param in self.params.items() if param.required]:
            schema["required"] = needed
        return schema


@frozen(kw_only=True)
class Facts:
    """What the document says of a route beside its handler's docstring.

    Args:
        tag: heading that it stands under.   title: a short name of the operation.
        body: of a POST.   answer: JSON Schema of the 200; None: an empty body.   media: its media type.
        stream: the events, in words, if it also answers with such.   query, path: parameters that are no body.
        refusals: statuses that it may answer with, beside those of the transport.
    """

    tag: str
    title: str
    body: Body | None = None
    answer: Mapping[str, Any] | None = None
    media: str = "application/json"
    stream: str = ""
    query: Sequence[Param] = ()
    path: Sequence[Param] = ()
    refusals: Sequence[int] = ()


def facts(tag: str, title: str, **more: Any) -> Callable[[Any], Any]:
    """Decorator of a handler: what the document says of its route; see Facts."""

    def attach(handler: Any) -> Any:
        handler.facts = Facts(tag=tag, title=title, **more)
        return handler

    return attach
