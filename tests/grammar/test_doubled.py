"""Schemas in which every step leads to the next one twice: 41 of them are 2**40 ways through them."""

import sys

import pytest

from tinyserve.grammar.asked import Asked
from tinyserve.server.tool_parameters import admits_objects
from tinyserve.server.tool_parameters import parameters as tool_parameters
from tinyserve.structured import StructuredOutputsParams
from tinyserve.text.parsers.family import Written

LEVELS, CALLS = 40, 200_000
KEYWORDS = (
    *("oneOf", "anyOf", "allOf", "prefixItems", "items", "if"),
    *("properties", "patternProperties", "dependentSchemas"),
)


class Endless(BaseException):
    """Work of more than CALLS calls; nobody who catches errors catches it."""


def counted(work):
    """What work returns, which calls few functions."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"
        if calls > CALLS:
            raise Endless(f"more than {CALLS} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(before)


def level(keyword, following):
    one, other = {"$ref": following}, {"$ref": following}
    if keyword in ("oneOf", "anyOf"):
        return {keyword: [one, other], "discriminator": {"propertyName": "k"}}
    if keyword == "allOf":
        return {"allOf": [one, other]}
    if keyword == "prefixItems":
        return {"type": "array", "prefixItems": [one, other]}
    if keyword == "items":
        return {"type": "array", "items": one, "prefixItems": [other]}
    if keyword == "if":
        return {"if": one, "then": other, "else": other}
    return {"type": "object", keyword: {"a": one, "b": other}, "required": ["a"]}


def doubled(keyword, last=None):
    last = last or {"type": "object", "properties": {"k": {"const": "z"}}, "required": ["k"]}
    steps = {f"U{at}": level(keyword, f"#/$defs/U{at + 1}") for at in range(LEVELS)}
    return {"$defs": {**steps, f"U{LEVELS}": last}, "$ref": "#/$defs/U0"}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_each_part_is_read_once_however_many_ways_lead_to_it(keyword):
    """2**40 steps in the child, until it was killed: nested unions with a discriminator, which were read anew for each
    reference. What the schema says is not the question here; the text for the library is."""
    for wanted in (doubled(keyword), doubled(keyword, {"$ref": "#/$defs/U0"}), doubled(keyword, {"type": "integer"})):
        constraint = StructuredOutputsParams(json=wanted).constraint()

        def work(constraint=constraint):
            try:
                return Asked(constraint, {}).text
            except ValueError as error:
                return error

        assert counted(work)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_tools_are_read_within_bounds(keyword):
    """In the server's own process: whether an object can satisfy a schema, and its parameters one by one."""
    written = Written(before="NAME", parameter=("<p=NAME>", "</p>"))
    schema = doubled(keyword)
    assert counted(lambda: admits_objects(schema)) in (True, False)
    outer = {"type": "object", "properties": {"a": {"$ref": "#/$defs/U0"}}, "$defs": schema["$defs"]}
    assert counted(lambda: tool_parameters(outer, written, "f", strict=True))
