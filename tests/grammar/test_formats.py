"""A forced call is written as the family writes calls: the grammar takes exactly that."""

import time

import pytest

from tests.text.parsers.formats import FORMATS, TOOLS
from tinyserve.config import ServerOptions
from tinyserve.errors import RequestError
from tinyserve.server.tools import plan_tools
from tinyserve.text.parsers import registry

from .harness import GRAMMARS, ids

LISTED = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in TOOLS.items()
]


def written(form):
    family = next(family for family in registry.FAMILIES if family.name == form.name)
    return registry.Parsing(tools=family).written if family.written else None


def takes(grammar, text):
    match = GRAMMARS.compiled(grammar.constraint()).result(20).deep_copy()
    tokens = ids(text)
    return match.try_consume_tokens(tokens) == len(tokens) and match.is_accepting()


LEFT_OUT = {"llama4_json", "harmony"}  # as llama3_json; its calls end with an end token
FORMS = {form.name: form for form in FORMATS if written(form) and form.name not in LEFT_OUT}
FORMS["mistral"] = next(form for form in FORMATS if form.name == "mistral" and "[ARGS]" in form.broken)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_required_and_strict(name):
    """One call and two are taken, a text or a wrong argument is not; with auto and strict, text is taken as well."""
    form = FORMS[name]
    quote = '"' if written(form).joined else "'"

    def calls(listed):
        return form.calls(listed).replace("'", quote)  # Python has two; a grammar has JSON's

    good = [("get_weather", {"city": "Oslo", "days": 2})]
    two = [*good, ("now", {})]
    wrong = [
        (
            "get_weather",
            {"city": "Oslo", "days": "soon"} if written(form).parameter and not written(form).joined else {"city": 5},
        )
    ]
    numbered = name in ("kimi_k2", "cohere")  # every call has the number 0; the server gives ids of its own
    if numbered:
        two = good
    both = calls(two).replace("</minimax:tool_call>\n<minimax:tool_call>\n", "")  # one section has all calls
    required = plan_tools(LISTED, "required", ServerOptions()).grammar(written(form))
    assert takes(required, calls(good)) and takes(required, both)
    assert not takes(required, calls(wrong)) and not takes(required, "Hello.")
    one = plan_tools(LISTED, "required", ServerOptions(), parallel=False).grammar(written(form))
    assert takes(one, calls(good)) and (numbered or not takes(one, both))
    strict = plan_tools(LISTED, "auto", ServerOptions()).grammar(written(form))
    assert takes(strict, calls(good)) and takes(strict, "Hello.")
    assert not takes(strict, calls(wrong))
    if written(form).trigger:
        assert takes(strict, "Hello. " + calls(good)) and not takes(strict, "Hello. " + calls(wrong))


@pytest.mark.parametrize("name", ["pythonic", "olmo3"])
def test_optional_parameters_have_commas_between_them(name):
    """Any of them may be left out, also the first; in the schema's order, which is the order of writing."""
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in "abcd"}, "required": ["c"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = plan_tools([tool], "required", ServerOptions()).grammar(written(FORMS[name]))

    def may(**arguments):
        return takes(grammar, FORMS[name].calls([("f", arguments)]))

    assert may(c=1) and may(a=1, c=2) and may(b=1, c=2, d=3) and may(a=1, b=2, c=3, d=4)
    assert not may(a=1) and not may(c=1, a=2) and not may(c="1")


WIDE = {f"p{number}": {"type": "string"} for number in range(30_000)}
NUMBERS = {f"p{number}": {"type": "integer"} for number in range(4000)}
PARTS = {name: {"anyOf": [{"$ref": "#/$defs/a"}, part]} for name, part in [*NUMBERS.items()][:200]}
FEW = {name: PARTS[name] if name in ("p0", "p1") else NUMBERS[name] for name in PARTS}
WAYS = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 9}}}


@pytest.mark.parametrize(("name", "schema", "told"), [
    ("hermes", WAYS, None),
    ("qwen3_coder", {"properties": PARTS, "$defs": {"a": {"const": "x" * 100_000}}}, "definitions in f"),
    ("qwen3_coder", {"properties": FEW, "$defs": {"a": {"const": "x" * 100_000}}}, None),
    ("qwen3_coder", {"properties": WIDE}, "more than 262144 characters"),
    ("olmo3", {"properties": NUMBERS}, "more than 24 optional parameters"),
])  # fmt: skip
def test_what_a_tool_makes_of_a_small_body_is_bounded(name, schema, told):
    """10**8 ways through nine references, 400 MB of definitions, 8 million places: each took the loop seconds."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    began = time.process_time()
    plan = plan_tools([tool], "required", ServerOptions())
    if told is None:
        plan.grammar(written(FORMS[name])).constraint()
    else:
        with pytest.raises(RequestError, match=told):
            plan.grammar(written(FORMS[name])).constraint()
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "qwen3_coder", "mistral"])
def test_what_is_wrong_in_a_tool_is_told_with_its_name(name):
    """Of hundreds of tools none was named."""
    for wrong, told in (({"$ref": "#/$defs/no"}, "leads nowhere"), ({"type": "array", "contains": {}}, "'contains'"),
                        ({"type": "string", "pattern": r"\bx"}, r"\bx")):  # fmt: skip
        parts = ({"x": {"type": "string"}}, {"x": {"anyOf": [wrong, {"type": "null"}]}})
        parts = [{"type": "object", "properties": part, "required": ["x"]} for part in parts]
        tools = [{"type": "function", "function": {"name": f"tool_{n}", "parameters": p}} for n, p in enumerate(parts)]
        for choice in ("required", {"type": "function", "function": {"name": "tool_1"}}):
            grammar = plan_tools(tools, choice, ServerOptions()).grammar(written(FORMS[name]))
            with pytest.raises(RequestError, match=r"tools: .*tool_1.* at #.*/anyOf/0: ") as caught:
                GRAMMARS.compiled(grammar.constraint()).result(60)
            assert told in str(caught.value)
