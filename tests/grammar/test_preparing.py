"""How a schema is made ready for the library: bounded, elsewhere, and what is wrong is told with its place."""

import contextlib
import json
import random
import string
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
from llguidance import LLMatcher

from tests.scripted import EOS, VOCAB
from tinyserve.errors import RequestError
from tinyserve.grammar import asked, compile, schema
from tinyserve.grammar.compile import Grammars
from tinyserve.grammar.keywords import check_words
from tinyserve.grammar.names import check_names
from tinyserve.grammar.numbers import Wrong
from tinyserve.grammar.places import Document, pointer
from tinyserve.grammar.regexes import check_repeats
from tinyserve.grammar.trial import with_stack
from tinyserve.runner.workers import Workers
from tinyserve.structured import StructuredOutputsParams

from .harness import GRAMMARS, TOKENIZER, takes

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def fault(value, **form) -> str:
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compiled(StructuredOutputsParams(**(form or {"json": value})).constraint()).result(60)
    return str(caught.value)


def test_no_schema_is_prepared_in_the_server(monkeypatch):
    """249 KB of numbers took 1.2 s in the thread that all new grammars wait for; now that is a child's, and killed."""

    def forbidden(*_):
        raise AssertionError("prepared here")

    for module, name in ((schema, "prepared"), (asked, "prepared"), (asked, "Asked")):
        monkeypatch.setattr(module, name, forbidden)
    assert takes("7", json={"$ref": "#/$defs/a", "$defs": {"a": {"enum": [7, 8]}}})


def test_a_schema_that_takes_long_to_prepare_goes_aside(monkeypatch):
    """1200 numbers with bounds, 0.2 s: the next grammar does not wait until they are done."""
    monkeypatch.setattr(compile, "QUICK_SECONDS", 0.05)
    numbers = {f"k{n}": {"type": "number", "minimum": -n - 0.5, "maximum": 1e9 + n / 7} for n in range(1200)}
    slow = Workers("own-slow")
    own = Grammars(TOKENIZER, VOCAB, {EOS}, quick=Workers("own-quick"), slow=slow)
    try:
        own.warm()
        gate = threading.Event()
        slow.submit(gate.wait, 60)  # what is slow does not begin before the other one has ended
        heavy = {"type": "object", "properties": numbers, "required": list(numbers)}
        first = own.compiled(StructuredOutputsParams(json=heavy).constraint())
        own.compiled(StructuredOutputsParams(choice=["behind it"]).constraint()).result(60)
        assert not first.done()
        gate.set()
        first.exception(60)
    finally:
        own.close()


def chain(count, link):
    return {
        "$ref": "#/$defs/0",
        "$defs": {str(n): link(f"#/$defs/{n + 1}") for n in range(count)} | {str(count): {"const": 1}},
    }


def test_chains_of_references_are_one_step():
    """5000 said "is nested too deeply"; titles beside them are no matter."""
    assert takes("1", json=chain(5000, lambda to: {"$ref": to, "title": "x"}))
    assert not takes("2", json=chain(70, lambda to: {"$ref": to}))
    assert takes("1", json=chain(90, lambda to: {"allOf": [{"$ref": to}]}))
    assert "more than 100 schemas" in fault(chain(101, lambda to: {"allOf": [{"$ref": to}]}))  # was 200, of 101
    assert "nested too deeply, or references lead too deep" in fault(
        chain(3000, lambda to: {"type": "object", "properties": {"a": {"$ref": to}}})
    )
    assert "leads back to itself" in fault(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    )


TOLD = [
    ({"$ref": "#/$defs/no"}, "$ref '#/$defs/no' leads nowhere"),
    ({"anyOf": []}, "anyOf is an empty list"),
    ({"type": "object", "required": "a"}, "'required' must be a list of names"),
    ({"type": "object", "required": [1]}, "'required' must be a list of names"),
    ({"type": "object", "properties": []}, "properties must be an object"),
    ({"type": "array", "items": 3}, "'items' must be a schema"),
    ({"enum": "a"}, "enum must be a list of values"),
    ({"type": []}, "it must be one of string, number"),
    ({"type": "string", "pattern": 3}, "pattern must be a text"),
    ({"type": "string", "pattern": r"\bfoo"}, r"the regex \bfoo looks at what is beside it"),
    ({"type": "string", "pattern": "("}, "the regex ( cannot be read"),
    ({"type": "object", "patternProperties": {"^a": {}, "^ab": {}}}, "a name may match both ^a and ^ab"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "no text has its pattern, format and length at once"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "its types and values exclude each other"),
    ({"type": "array", "contains": {}}, "the keyword 'contains' is not enforced"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is held only where"),
    ({"$ref": "http://e/x"}, "'http://e/x' is another document, and none is fetched"),
    ({"type": "integer", "minimum": 10**30}, "minimum 1000000000000000000000000000000"),
]
WORDS_OF_THE_LIBRARY = ("Pointer", "Expected", "Unsatisfiable", "Unimplemented", "regexes", "Resource", "not supported")


@pytest.mark.parametrize(("wrong", "told"), TOLD)
def test_what_is_wrong_is_told_with_its_place(wrong, told):
    """It was "Pointer '/$defs/no' does not exist", of a schema with a hundred references; and no tool was named."""
    inside = {"type": "object", "properties": {"a/b": {"type": "array", "items": wrong, "minItems": 1}},
              "required": ["a/b"]}  # fmt: skip
    inner = {
        "type": "json_schema",
        "name": "tool weather",
        "json_schema": {"type": "object", "properties": {"x": wrong}, "required": ["x"]},
    }
    other = {"type": "json_schema", "name": "other", "json_schema": {"enum": [1]}}
    tags = fault(None, structural_tag={"format": {"type": "sequence", "elements": [other, inner]}})
    assert told in fault(wrong)
    assert fault(inside).startswith("structured_outputs: at #/properties/a~1b/items: ") and told in fault(inside)
    assert tags.startswith("structured_outputs: tool weather: at #/properties/x: ") and told in tags
    assert not any(word in text for word in WORDS_OF_THE_LIBRARY for text in (tags, fault(inside), fault(wrong)))


def test_remarks_pass_and_misspelt_words_do_not_whatever_stands_before_them():
    """A remark "x-required" was "did you mean 'required'?"; behind 100 remarks "MinLength" was a remark, too."""
    draw = random.Random(0)
    remarks = {"".join(draw.choices(string.ascii_lowercase, k=11)): 0 for _ in range(3000)}
    check_words({**remarks, "x-required": 1, "x-minlength": 2, "x-format": "y", "X-enum": 1, "order": 1})
    wrong = {"MinLength": "minLength", "requierd": "required", "additionalPropertys": "additionalProperties",
             "maxLenght": "maxLength", "uniqueitem": "uniqueItems", "patern": "pattern"}  # fmt: skip
    for word, meant in wrong.items():
        with pytest.raises(Wrong, match=f"'{word}'; did you mean '{meant}'"):
            check_words({**remarks, word: 1})


def test_what_stands_under_a_remark_is_a_schema_only_if_a_reference_leads_there():
    """{"x-ui": {"minLength": -1}} was refused."""
    schema = {"x-ui": {"minLength": -1}, "parts": {"a": {"minimum": "x"}}, "type": "string"}
    assert takes('"a"', json=schema)
    assert [pointer(place) for place, _ in Document(schema).parts] == ["#"]
    referring = {**schema, "allOf": [{"$ref": "#/parts/a"}]}
    assert fault(referring).endswith("at #/parts/a: minimum must be a number, is 'x'")


def test_remarks_stay_remarks_where_schemas_have_names():
    """One nested $id, and {"example": {"type": "cat"}} was "type is 'cat'"; what a pointer leads to is held still."""
    cat = {"type": "cat", "required": True}
    inner = {"$id": "http://x/a", "type": "string", "example": cat, "x-ui": cat, "parts": {"p": {"minimum": "x"}}}
    schema = {"$ref": "http://x/a", "$defs": {"A": inner}}
    assert takes('"a"', json=schema)
    assert takes(
        '"a"', json={**schema, "examples": [cat], "x-order": cat, "$defs": {"B": {"$ref": "http://x/a"}, "A": inner}}
    )
    for reference in ("http://x/a#/parts/p", "#/parts/p"):
        there = {**inner, "allOf": [{"$ref": reference}]}
        told = "at #/$defs/A/parts/p: minimum must be a number"
        assert told in fault({**schema, "$defs": {"A": there}}), reference
    kept = {"$ref": "http://x/a", "$defs": {"A": {**inner, "uniqueItems": True, "type": "array"}}}
    assert "uniqueItems" in fault(kept)


@pytest.mark.parametrize("name", ["", "#", "/", ".", "json-schema:///", "JSON-SCHEMA:///", "json-schema:/x/.."])
def test_no_schema_has_the_name_of_another(name):
    """One inside with the name of the whole took its place without a word: the answer to this was a bare integer."""
    inner = {"type": "integer", "$id": name}
    root = {"type": "object", "properties": {"z": inner}, "required": ["z"], "additionalProperties": False}
    assert "at #/properties/z: $id" in fault(root) and "the whole schema, too" in fault(root)


def test_names_are_compared_as_the_library_resolves_them():
    """Also in a definition that nothing uses; what only looks alike passes, as do remarks and pydantic's own names."""
    for name in ("http://h/r", "http://h/r#", "r", "./r", "HTTP://H/r", "../r", "%72"):
        for where in ("definitions", "$defs"):
            schema = {"type": "object", "$id": "http://h/r", where: {"A": {"type": "integer", "$id": name}}}
            assert f"at #/{where}/A: $id" in fault(schema), name
    twice = {"anyOf": [{"$id": "http://h/a", "type": "integer"}, {"$id": "a", "type": "string"}]}
    assert "is the name of #/anyOf/" in fault({**twice, "$id": "http://h/r"})
    for name in ("#z", "z", "#/properties/z", "http://h/r/", "http://i/r"):
        inner = {"type": "integer", "$id": name, "examples": [{"$id": "http://h/r"}]}
        root = {"$id": "http://h/r", "type": "object", "properties": {"z": inner}, "required": ["z"]}
        assert takes('{"z": 5}', json=root), name
    assert takes('{"$id": "x"}', json={"type": "object", "properties": {"$id": {"const": "x"}, "id": {"$id": "y"}}})


@pytest.mark.parametrize("where", ["properties", "patternProperties", "$defs", "dependentSchemas", "dependencies"])
def test_a_property_may_be_called_as_a_word_is(where):
    """What is called "const" or "title" there was taken for a remark, and its $id was not looked at."""
    for called in ("const", "enum", "default", "examples", "title", "description", "$comment"):
        schema = {"type": "object", where: {called: {"type": "integer", "$id": ""}}}
        assert f"at #/{where}/{called}: $id" in fault(schema), called
    named = {"type": "object", "properties": {"const": {"$id": "http://h/a", "const": 5}}, "required": ["const"]}
    assert takes('{"const": 5}', json=named)


@pytest.mark.parametrize(
    ("whole", "inner"),
    [
        *(("http://h/r", f"http://h/{way}") for way in ("x/../r", "./r", "x/y/../../r", "../r", "x/%2e%2E/r")),
        *(("http://h/r", "http:" + way) for way in ("//H:80/r", "//h:/r", "//h/r#")),
        *(("custom://h/r", name) for name in ("r", "custom://h/x/../r", "Custom://H/r", "/r", "//h/r", "")),
        *(("urn:a:r", name) for name in ("URN:a:r", "urn:a:r#", "")),
        *(("a/b", name) for name in ("b", "../a/b", "/a/b", "json-schema:///a/b", "./x/../b")),
        *(("http://h", name) for name in ("http://h/", "/", "x/..")),
    ],
)
def test_names_are_resolved_whatever_their_scheme(whole, inner):
    """urllib left "r" inside of custom://h/r as it is, and the dots of absolute names."""
    schema = {"type": "object", "$id": whole, "properties": {"z": {"type": "integer", "$id": inner}}}
    assert "at #/properties/z: $id" in fault(schema)
    other = {"z": {"type": "integer", "$id": inner + "x"}}
    if inner and inner[-1] not in "#./":
        assert takes('{"z": 5}', json={**schema, "properties": other, "required": ["z"]})


def test_names_beside_references_count_by_the_draft():
    """Before draft 2019-09 a $ref hides the $id beside it, and "#a" is none: names inside begin further out."""
    inner = {"$id": "http://x/", "$ref": "#/definitions/B", "definitions": {"B": {"type": "integer", "$id": "r"}}}
    schema = {"$id": "http://h/r", "type": "object", "properties": {"a": inner}, "definitions": {"B": {}}}
    assert "at #/properties/a/definitions/B: $id" in fault({"$schema": DRAFT_7, **schema})
    assert "at #/properties/z: $id" in fault({"$id": "#a", "properties": {"z": {"$id": ""}}, "$schema": DRAFT_7})
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://h/r", "type": "object"}
    assert "at #/properties/z: id" in fault({**old, "properties": {"z": {"id": "r", "type": "integer"}}})


def test_no_name_is_let_through_with_which_the_library_replaces_the_form():
    """2,000 drawn names, of the whole and inside: where a bare integer may be written for the object, it is refused."""
    draw, replaced = random.Random(5), 0
    pieces = [
        "http://h",
        "HTTP://H",
        "custom://h",
        "json-schema:",
        "//",
        "urn:",
        "a:",
        *"///rrrx#?é% ",
        "..",
        ".",
        "%72",
    ]
    for _ in range(2000):
        whole, inner = ("".join(draw.choices(pieces, k=draw.choice([0, 1, 2, 3, 5]))) for _ in range(2))
        form = {"type": "object", "$id": whole, "properties": {"title": {"type": "integer", "$id": inner}}}
        form |= draw.choice([{}, {"$schema": DRAFT_7}])
        match = LLMatcher(GRAMMARS.library(), LLMatcher.grammar_from_json_schema(json.dumps(form)), log_level=0)
        if not match.is_error() and match.validate_tokens(TOKENIZER.encode("8")):
            replaced += 1
            with pytest.raises(Wrong, match="is the name of the whole schema, too"):
                check_names(form)
    assert replaced > 50


def test_definitions_that_nothing_uses_say_nothing():
    """A dangling $ref in one of them refused a whole document of an API; where it is used, it is told."""
    unused = {"A": {"$ref": "#/definitions/none"}, "B": {"enum": []}, "C": {"type": "cat"}, "D": {"$ref": "#/$defs/A"}}
    for form in ({"type": "integer"}, {"enum": [1]}, {"$ref": "#/$defs/E"}):
        assert takes("1", json={**form, "$defs": {**unused, "E": {"type": "integer"}}})
    for name, told in (("A", "leads nowhere"), ("B", "an empty list"), ("C", "type is 'cat'"), ("D", "leads nowhere")):
        assert told in fault({"items": {"$ref": f"#/$defs/{name}"}, "type": "array", "$defs": unused})


def test_long_regexes_are_told_by_their_beginning_with_what_is_wrong():
    """The library's words were told, cut off before the reason."""
    brackets = "(" * 300 + ")" * 300
    for form in ({"regex": brackets}, {"json": {"type": "string", "pattern": brackets}}):
        told = fault(None, **form)
        assert "the regex ((((" in told and told.endswith("(250)") and len(told) < 250
    patterns = [{"pattern": f"^(a|b|1)*[ab]{{{number % 7 + 3}}}c$"} for number in range(30)]
    assert "too much to be followed at once" in fault({"type": "string", "allOf": patterns})
    assert "json-schema:///" not in fault({"$ref": "#/$defs/no", "$defs": {"no": False}})


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "((ab){300}c{2,400}){900}", "x(?:[a-z]{10,90}){5000}"])
def test_repeats_of_repeats_are_counted_before_they_are_written_out(pattern):
    """They took 3 s each, of the one thread for slow grammars."""
    for form in (
        {"regex": pattern},
        {"json": {"type": "string", "pattern": pattern}},
        {"grammar": f"start: /{pattern}/"},
    ):
        assert "repeats what repeats itself" in fault(None, **form)
    check_repeats("(a{1000}b){3}[({]{5}\\(c{9}")


def test_rules_of_many_alternatives_are_counted_before_they_are_read():
    """20,000 took 3 s. What is one word, or in quotes, is none."""
    many = " | ".join(f'"v{n}"' for n in range(13_000))
    for text in (f"root ::= {many}", f"start: one\none: {many}"):
        assert "13000 alternatives" in fault(None, grammar=text)
    assert takes("v7", grammar=f"start: WORD\nWORD: {many}")
    assert takes("|" * 13_000, grammar='start: "' + "|" * 13_000 + '"')


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "wolf"] = "dog"


class Fish(pydantic.BaseModel):
    kind: Literal["fish"]


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog | Fish, pydantic.Field(discriminator="kind")]


def test_unions_of_pydantic_are_told_apart_by_their_discriminator():
    """One whose kind has a default was "oneOf is held only where"; the answer always has the kind, so it validates."""
    schema = Owner.model_json_schema()
    good = ['{"kind": "cat", "lives": 9}', '{"kind": "wolf"}', '{"kind": "fish"}']
    for pet in good:
        assert takes(f'{{"pet": {pet}}}', json=schema)
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(f'{{"pet": {pet}}}'))
        Owner.model_validate_json(f'{{"pet": {pet}}}')
    for pet in ('{"lives": 9}', "{}", '{"kind": "cat"}', '{"kind": "cow"}'):
        assert not takes(f'{{"pet": {pet}}}', json=schema)
    strict = json.loads(json.dumps(schema))
    for part in strict["$defs"].values():
        part.update(required=list(part["properties"]), additionalProperties=False)
    assert takes('{"pet": {"kind": "dog"}}', json=strict)


def test_a_discriminator_that_tells_nothing_apart_is_none():
    """Two of one kind, or a kind that is any text."""
    for kinds in (({"const": "a"}, {"enum": ["b", "a"]}), ({"const": "a"}, {"type": "string"})):
        parts = [{"type": "object", "properties": {"kind": kind}} for kind in kinds]
        assert "oneOf is held only where" in fault({"oneOf": parts, "discriminator": {"propertyName": "kind"}})


def test_threads_with_a_stack_of_their_own_leave_that_of_others_alone(monkeypatch):
    """Two at once: the second took the first one's size for the usual one, and all later threads had it."""
    usual, real, inside = threading.stack_size(), threading.stack_size, threading.Barrier(2)

    def slowly(*size):
        if size == (2**20,):
            with contextlib.suppress(threading.BrokenBarrierError):
                inside.wait(0.2)
        return real(*size)

    monkeypatch.setattr(threading, "stack_size", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda n: with_stack(2**20, lambda: n), range(2))) == [0, 1]
    assert real() == usual
    with pytest.raises(ZeroDivisionError):
        with_stack(2**20, lambda: 1 / 0)
