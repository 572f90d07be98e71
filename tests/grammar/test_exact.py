"""Schemas at the edges of what the grammar library holds: an answer validates, or the schema is refused by name."""

import json
import random
import re
import time

import jsonschema
import pytest

from tests.scripted import EOS
from tinyserve.errors import RequestError
from tinyserve.grammar.apart import Choices
from tinyserve.grammar.keywords import check_words
from tinyserve.grammar.places import Document
from tinyserve.grammar.references import settle_references
from tinyserve.structured import StructuredOutputsParams

from .harness import GRAMMARS, takes

BOOLEANS = {"type": "object", "additionalProperties": {"type": "boolean"}}
LISTED = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False}
LETTERS = {"type": "object", "patternProperties": {"^[ab]$": {"type": "null"}}, "additionalProperties": False}
NULLS = {"type": "array", "items": {"type": "null"}}
WHOLE = [(10**30, 10**31), (2**63, 2**64), (2**53 + 1, 2**53 + 3), (2**60, 2**60 + 512), (2**63 - 1, 2**63 - 1),
         (-(2**63), 2**63 - 1), (-(10**30), 0), (0, 10**30), (0, 2**64 - 1), (9 * 10**18, 10**25), (-(2**63), -(2**62)),
         (1.5, 2.5), (0.5, 0.9), (-(10**400), 10**400)]  # fmt: skip
NUMBERS = [(1e20, 1e21), (1e19, 2e19), (-1e19, 0), (0, 1e308), (2**53 + 1, 2**53 + 1), (1e15 + 0.5, 1e15 + 1),
           (0.1, 0.30000000000000004), (5e-324, 1e-323), (1e-40, 2e-40), (1e-10, 1e-9), (0, 1e-7), (2**60, 2**60),
           (-9884721.618163219, 9884721.618163219), (3, 3.5), (-3.5, -3), (-0.5, 0), (0, 1)]  # fmt: skip
SCHEMAS = [
    *({"type": "integer", "minimum": low, "maximum": high} for low, high in WHOLE),
    *({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in WHOLE),
    *({"type": ["null", "integer"], "exclusiveMinimum": low} for low, _ in WHOLE),
    *({"type": "number", "minimum": low, "maximum": high} for low, high in NUMBERS),
    *({"type": "number", "exclusiveMinimum": low, "maximum": high} for low, high in NUMBERS),
    *({"type": "number", "minimum": low, "exclusiveMaximum": high} for low, high in NUMBERS),
    {"exclusiveMinimum": 2**63 - 1, "maximum": 2**64, "type": "integer"}, {"minimum": 1e19}, {"maximum": -1e19},
    {"type": "integer", "multipleOf": 2**70}, {"type": "integer", "multipleOf": 3, "minimum": 10**30},
    {"type": "integer", "multipleOf": 2, "minimum": 2**55, "maximum": 2**55 + 8}, {"multipleOf": -1}, {"multipleOf": 0},
    {"enum": [2**64 + 1]}, {"enum": [float(2**64)]}, {"const": 2**63}, {"const": -(2**63)}, {"const": 2**53 + 1},
    {"const": 2**63 - 1}, {"const": 2**60}, {"enum": [{"a": [2**64 + 1]}]}, {"const": 10**30}, {"const": 0.1},
    {"enum": [4334962496355730.0, 1e18]}, {"const": 123456789.12345679}, {"enum": [5.24e-300]}, {"const": 5e-324},
    *({"const": random.Random(seed).uniform(-1e9, 1e9)} for seed in range(12)),
    *({"enum": [[random.Random(seed).random() * 1e-9]]} for seed in range(6)), {"multipleOf": 1e-23},
    {"type": "number", "minimum": 1e-29, "maximum": 1e-20}, {"type": "number", "minimum": 8.25e-24, "maximum": 1e-23},
    {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"exclusiveMinimum": 3, "exclusiveMaximum": 5}]},
    {"$defs": {"a": {"exclusiveMaximum": -3}}, "$ref": "#/$defs/a", "type": "number", "minimum": -3.25},
    {**BOOLEANS, "minProperties": 3, "maxProperties": 3}, {**BOOLEANS, "minProperties": 1, "maxProperties": 1},
    {**BOOLEANS, "required": ["a"], "minProperties": 2, "maxProperties": 2}, {**BOOLEANS, "maxProperties": 1},
    {**LISTED, "minProperties": 2}, {**LISTED, "maxProperties": 1}, {**LETTERS, "minProperties": 2},
    {"allOf": [BOOLEANS, {"minProperties": 2}]}, {"allOf": [LISTED, {"minProperties": 1}]},
    {"type": "string", "maxLength": 10**12, "pattern": "^ab?$"}, {"type": "string", "minLength": 10**12},
    {"type": "string", "minLength": 2.0, "maxLength": 3.0}, {"type": "string", "minLength": -1}, {"maxLength": True},
    {**NULLS, "minItems": 10**20}, {**NULLS, "minItems": 2.0, "maxItems": 3.0}, {**NULLS, "maxItems": 2**64},
]  # fmt: skip


def answers(compiled, count):
    """Random answers that end, each one of the end as soon as it may come, half of the time."""
    for seed in range(count):
        draw, match, text = random.Random(seed), compiled.deep_copy(), bytearray()
        for _ in range(120):
            mask = match.compute_bitmask()
            may = [token for token in range(EOS + 1) if mask[token // 8] >> token % 8 & 1]
            if may == [EOS] or (EOS in may and draw.random() < 0.5):
                yield text.decode()
                break
            token = draw.choice([token for token in may if token < 128] or [token for token in may if token != EOS])
            assert token < 256 and match.consume_token(token), (text, token)
            text.append(token)


def compiled(schema):
    return GRAMMARS.compiled(StructuredOutputsParams(json=schema).constraint()).result(20)


def test_what_cannot_be_held_exactly_is_refused_and_all_else_validates():
    """{"minimum": 10**30} gave 2**63 - 1, 0 < x < 0.5 only 0, and three properties were one three times."""
    refused = 0
    for schema in SCHEMAS:
        try:
            found = list(answers(compiled(schema), 6))
        except RequestError as error:
            refused += 1
            assert not any(word in str(error) for word in ("Some(", "regex", "Unimplemented", "Failed")), error
            assert any(word in str(error) for word in re.findall(r'"([a-zA-Z]{4,})":', json.dumps(schema))), error
            continue
        validator = jsonschema.Draft202012Validator(schema)
        assert not [(schema, text) for text in found if not validator.is_valid(json.loads(text))]
    print(f"{refused} of {len(SCHEMAS)} refused")
    assert 30 < refused < 0.6 * len(SCHEMAS)


WORDS = {
    "divisibleBy": (2, "use 'multipleOf'"), "extends": ({}, "use 'allOf'"), "disallow": ("string", "with 'type'"),
    "additionalItems": (False, "use 'prefixItems'"), "required": (True, "a list of names"),
    "minlength": (3, "did you mean 'minLength'"), "requred": (["a"], "did you mean 'required'"),
    "patternPropertie": ({}, "did you mean 'patternProperties'"), "Type": ("string", "did you mean 'type'"),
    "unevaluatedItems": (False, "not enforced"), "not": ({}, "not enforced"), "propertyNames": ({}, "not enforced"),
}  # fmt: skip
REMARKS = {"example": 1, "nullable": True, "x-minlength": 3, "discriminator": {"minlength": 3}, "propertyOrdering": [],
           "deprecated": True, "order": 1, "$anchor": "x", "contentEncoding": "base64", "externalDocs": {}}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_words_that_would_limit_and_do_not_are_refused_by_name(word):
    """Those of older drafts and misspelt ones passed, and the answers broke them."""
    value, told = WORDS[word]
    for schema in ({word: value}, {"type": "object", "properties": {"a": {"anyOf": [{word: value}]}}}):
        with pytest.raises(RequestError, match=f"'?{word}'?.*{told}"):
            compiled(schema)


def test_other_words_are_remarks_and_names_are_no_words():
    """JSON Schema takes unknown keywords as remarks; a property may be called like a misspelt keyword."""
    named = {"type": "object", "properties": {word: {"type": "null"} for word in WORDS}, "required": ["minlength"]}
    assert takes('{"minlength": null}', json={**named, **REMARKS, "additionalProperties": False})
    assert takes("4", json={"type": "integer", "minimum": 3, "exclusiveMinimum": True})
    assert not takes("3", json={"type": "integer", "minimum": 3, "exclusiveMinimum": True})
    assert takes("3", json={"type": "integer", "minimum": 3, "exclusiveMinimum": False})


@pytest.mark.parametrize("form, told", [
    ({"json": {"type": "string", "pattern": "a{3"}}, "the regex"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf is held only where .*; use anyOf"),
    ({"json": {"type": "integer", "multipleOf": 10**10}}, "multipleOf 10000000000 has too many digits"),
    ({"json": {"type": "object", "properties": {"a": {}}, "minProperties": 1}}, "into 'required'"),
    ({"grammar": "root ::= " + " | ".join(f'"v{n}"' for n in range(13_000))}, "13000 alternatives"),
    ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {"enum": []}}}}, ": enum is an empty list"),
    ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {"$ref": "#/$defs/a", "$defs": {
        "a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}}}}, "leads back to itself"),
])  # fmt: skip
def test_the_librarys_words_are_put_into_ours(form, told):
    with pytest.raises(RequestError, match=told):
        GRAMMARS.compiled(StructuredOutputsParams(**form).constraint()).result(20)


def test_large_choices_are_compared_in_little_time():
    """1900 times two enums of 10,000 numbers by reference; 64 enums of 600."""
    enums = {"A": {"enum": list(range(0, 20000, 2))}, "B": {"enum": list(range(1, 20000, 2))}}
    both = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    many = {"properties": {str(n): dict(both) for n in range(1900)}, "$defs": enums}
    began = time.process_time()
    for schema in (many, {"oneOf": [{"enum": list(range(n * 900, n * 900 + 600))} for n in range(64)]}):
        document = Document(schema)
        choices = Choices(document)
        for _, part in document.parts:
            choices.settle(part)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("schema", [
    {"$ref": "#/$defs/S", "$defs": {"S": {"$id": "http://e/s", "$defs": {"A": {"const": 1}, "B": {"const": 1}}, "oneOf":
     [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, "A": {"const": 1}, "B": {"const": 2}}},
    {"oneOf": [{"$ref": "#/$defs/a%62"}, {"$ref": "#/$defs/B"}],
     "$defs": {"ab": {"const": 1}, "a%62": {"const": 2}, "B": {"const": 1}}},
])  # fmt: skip
def test_one_of_behind_names_of_its_own_is_left_alone(schema):
    with pytest.raises(RequestError, match="oneOf is held only where"):
        GRAMMARS.compiled(StructuredOutputsParams(json=schema).constraint()).result(20)


@pytest.mark.parametrize("schema", [
    {"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", "type": "string"}}},
    {"type": "object", "properties": {"x": {"oneOf": [{"const": "a"}, {"const": "b"}]},
                                      "y": {"$ref": "#/properties/x/oneOf/0"}}, "required": ["x", "y"]},
])  # fmt: skip
def test_references_that_the_library_follows_itself(schema):
    GRAMMARS.compiled(StructuredOutputsParams(json=schema).constraint()).result(20)


KIND = {"type": "object", "properties": {"kind": {"const": 1}, "a": {"type": "null"}}, "required": ["kind"]}
OTHER = {"type": "object", "properties": {"kind": {"enum": [2.0, 3]}, "b": {"type": "null"}}, "required": ["kind"]}


@pytest.mark.parametrize(("choice", "held"), [
    ([{"const": 1}, {"const": 2}], True), ([{"enum": [1, 2]}, {"enum": [3]}, {"const": 1.5}], True),
    ([{"$ref": "#/$defs/k"}, {"$ref": "#/$defs/o"}], True), ([{"const": 1}, {"enum": [3, 1.0]}], False),
    ([{"$ref": "#/$defs/k"}, {**OTHER, "required": []}], False),
    ([{"$ref": "#/$defs/k"}, {k: v for k, v in OTHER.items() if k != "type"}], False),
])  # fmt: skip
def test_one_of_what_differs_in_constants_is_held(choice, held):
    """Numbers, and objects that a required property tells apart; what can be both is refused."""
    form = StructuredOutputsParams(json={"oneOf": choice, "$defs": {"k": KIND, "o": OTHER}}).constraint()
    if held:
        GRAMMARS.compiled(form).result(20)
    else:
        with pytest.raises(RequestError, match="oneOf is held only where"):
            GRAMMARS.compiled(form).result(20)


@pytest.mark.parametrize(("name", "held"), [("password", True), ("uuid4", True), ("uuid", True), ("iri", False)])
def test_formats(name, held):
    form = StructuredOutputsParams(json={"type": "string", "format": name}).constraint()
    if held:
        GRAMMARS.compiled(form).result(20)
    else:
        with pytest.raises(RequestError, match=f"the format '{name}' is not enforced"):
            GRAMMARS.compiled(form).result(20)


def test_many_references_to_what_is_long_to_follow_are_read_once():
    """2^15 ways through 16 definitions, asked for by 4000 properties; and 4000 words that nobody knows."""
    twice = {str(k): {"allOf": [{"$ref": f"#/d/{k + 1}"}] * 2} for k in range(15)} | {"15": {"type": "object"}}
    properties = {f"p{k}": {"$ref": "#/d/0", f"x-word-{k}-mininum": k} for k in range(4000)}
    began = time.process_time()
    document = Document({"d": twice, "type": "object", "properties": properties})
    for _, part in document.parts:
        check_words(part)
    settle_references(document)
    assert time.process_time() - began < 2


def test_a_reference_with_a_way_out_is_none_that_leads_back():
    """A choice of which one branch ends, met from either side."""
    ends = {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]}, "b": {"$ref": "#/$defs/a"}}
    tree = {"type": "array", "items": {"$ref": "#/$defs/t"}}
    assert takes('"x"', json={"$ref": "#/$defs/a", "$defs": ends})
    assert takes('"x"', json={"$ref": "#/$defs/b", "$defs": ends})
    assert takes("[[], []]", json={"$ref": "#/$defs/t", "$defs": {"t": tree}})
