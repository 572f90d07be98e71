"""C06: tool_choice and finish_reason agree, whole and streamed."""

import json

import jsonschema
import pytest

from tests.scripted import ScriptModel, byte_tokenizer
from tests.text.parsers.formats import FORMATS

from .harness import CHAT, HI, serving
from .test_c05_streamed_arguments import CALL, calls_of

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
F = {"type": "function", "function": {"name": "f", "parameters": CITY}}
ASK = {**HI, "max_tokens": 200, "temperature": 0}
NAMED = {"type": "function", "function": {"name": "f"}}


def serve(text, tok, **options):
    script = ScriptModel(byte_tokenizer().encode(text).ids)
    return serving(script, tok, **{"tool_call_parser": "hermes", **options})


@pytest.mark.anyio
async def test_none(tok):
    """1: without tools; 2: markup arrives to the letter, tools are not in the prompt."""
    async with serve(CALL, tok) as server:
        bare = await server.ask(CHAT, ASK)
        for body in (
            {"tool_choice": "none"},
            {"tool_choice": "none", "tools": [F]},
            {"tool_choice": "auto", "tools": []},
        ):
            whole, _ = await server.both(CHAT, {**ASK, **body})
            assert whole.text == CALL and whole.reason == "stop"
            assert "tool_calls" not in whole.choices[0]["message"]
            assert whole.usage["prompt_tokens"] == bare.usage["prompt_tokens"]  # 8 as well


@pytest.mark.anyio
async def test_required_forces_a_call(tok):
    """3: the model wants to say hello, and calls f with a city; 4: cut, never tool_calls without a call."""
    async with serve("hello", tok) as server:
        forced = {**ASK, "tools": [F], "tool_choice": "required"}
        whole, stream = await server.both(CHAT, forced)
        calls, content, _ = calls_of(stream)
        assert calls and content == "" and whole.reason == "tool_calls"
        for call in calls.values():
            assert call["name"] == ["f"] and json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
        assert whole.choices[0]["message"]["content"] is None
        cut, stream = await server.both(CHAT, {**ASK, "tools": [F], "tool_choice": "required", "max_tokens": 3})
        assert cut.reason == "length" and not cut.choices[0]["message"].get("tool_calls")
        one = {**ASK, "tools": [F], "tool_choice": "required", "parallel_tool_calls": False}
        whole, _ = await server.both(CHAT, one)
        assert len(whole.choices[0]["message"]["tool_calls"]) == 1


@pytest.mark.anyio
async def test_a_named_tool(tok):
    """5: the answer is the arguments; reason stop in both modes."""
    async with serve("hello", tok, tool_call_parser="none") as server:
        whole, stream = await server.both(CHAT, {**ASK, "tools": [F], "tool_choice": NAMED})
        calls, content, _ = calls_of(stream)
        assert list(calls) == [0] and calls[0]["name"] == ["f"] and content == ""
        assert json.loads(calls[0]["arguments"])["city"] in ("Rome", "Oslo")
        (call,) = whole.choices[0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == calls[0]["arguments"]
        assert whole.reason == "stop" and whole.choices[0]["message"]["content"] is None


@pytest.mark.anyio
async def test_refusals(tok):
    """6, 7, 9, and tools that are none."""
    wrong = [
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "zzz"}}},
        {"tools": [], "tool_choice": "required"},
        {"tool_choice": "required"},
        {"tools": [F], "tool_choice": "any"},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [F, F]},
        {"tools": [F], "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "g", "parameters": {"type": "strnig"}}}],
         "tool_choice": "required"},
    ]  # fmt: skip
    async with serve("hello", tok) as server:
        for body in wrong:
            error = await server.refused(CHAT, {**ASK, **body})
            assert error["param"].startswith(("tool", "messages")), (body, error)
    async with serve("hello", tok, tool_call_parser="none") as server:
        error = await server.refused(CHAT, {**ASK, "tools": [F]})
        assert "--tool-call-parser" in error["message"]
    async with serve("hello", tok, enable_auto_tool_choice=False) as server:
        error = await server.refused(CHAT, {**ASK, "tools": [F]})
        assert "enable-auto-tool-choice" in error["message"]


@pytest.mark.anyio
@pytest.mark.parametrize("parser", ["none", "qwen3_coder", "mistral", "openai"])
async def test_required_in_other_formats(tok, parser):
    """A model whose format is not known, or is no JSON, writes plain objects; the client sees no difference."""
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
    text = thought + "hello" if parser == "openai" else "hello"
    async with serve(text, tok, tool_call_parser=parser, reasoning_parser="none") as server:
        asked = {**ASK, "tools": [F], "tool_choice": "required"}
        if parser == "openai":
            named, _ = await server.both(CHAT, {**asked, "tool_choice": NAMED})
            assert named.reason == "stop" and len(named.choices[0]["message"]["tool_calls"]) == 1
            assert named.choices[0]["message"]["reasoning"] == "hm"
        whole, stream = await server.both(CHAT, asked)
        calls, content, _ = calls_of(stream)
        assert [call["name"] for call in calls.values()] == [["f"]] and content == ""
        assert json.loads(calls[0]["arguments"])["city"] in ("Rome", "Oslo")
        assert whole.reason == "tool_calls" and whole.choices[0]["message"]["content"] is None


@pytest.mark.anyio
async def test_strict_holds_when_the_model_decides(tok):
    """The model wants to pass a number; with strict it cannot, and text before the call stays free."""
    text = 'Look: <tool_call>\n{"name": "f", "arguments": {"city": 5}}\n</tool_call>'
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    async with serve(text, tok) as server:
        loose, _ = await server.both(CHAT, {**ASK, "tools": [F]})
        held, _ = await server.both(CHAT, {**ASK, "tools": [strict]})
    (call,) = loose.choices[0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": 5}
    (call,) = held.choices[0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    assert held.choices[0]["message"]["content"] == "Look: "


@pytest.mark.anyio
async def test_a_forced_tool_may_have_any_parameters(tok):
    """Without properties in its schema, what stands in a call of marks is the model's choice."""
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    anything = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with serve(text, tok, tool_call_parser="qwen3_coder") as server:
        forced, _ = await server.both(CHAT, {**ASK, "tools": [anything], "tool_choice": "required"})
    (call,) = forced.choices[0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


@pytest.mark.anyio
async def test_strict_holds_where_a_call_has_no_mark(tok):
    """Llama 3 writes a bare object: one at the beginning is held to the schema, any other text is free."""
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    async with serve('{"name": "f", "parameters": {"city": 5}}', tok, tool_call_parser="llama3_json") as server:
        held, _ = await server.both(CHAT, {**ASK, "tools": [strict]})
    (call,) = held.choices[0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    async with serve('\n A set: {"name": 5}', tok, tool_call_parser="llama3_json") as server:
        free, _ = await server.both(CHAT, {**ASK, "tools": [strict]})
    assert free.text == '\n A set: {"name": 5}' and free.reason == "stop"


CITIES = [
    ("pythonic", '[f(city="Paris")]', ""),
    ("llama4_pythonic", 'Look: <|python_start|>[f(city="Paris")]<|python_end|>', "Look: "),
    ("olmo3", 'Look: <function_calls>\nf(city="Paris")\n</function_calls>', "Look: "),
    ("gemma3", 'Look: ```tool_code\n[f(city="Paris")]\n```', "Look: "),
    ("functiongemma", "Look: <start_function_call>call:f{city:<escape>Paris<escape>}<end_function_call>", "Look: "),
    ("gemma4", 'Look: <|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|>', "Look: "),
    ("xlam", '[{"name": "f", "arguments": {"city": 5}}]', ""),
    ("openai", '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look: <|end|>'
     '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": 5}', "Look: "),
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(("parser", "text", "before"), CITIES)
async def test_strict_holds_in_python_lists_and_channels(tok, parser, text, before, monkeypatch):
    """The model wants a wrong city, in all formats that have no mark around JSON."""
    monkeypatch.setattr("tests.cases.harness.CONTEXT", 1024)
    asked = {**ASK, "max_tokens": 600, "parallel_tool_calls": False}
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    async with serve(text, tok, tool_call_parser=parser, reasoning_parser="none") as server:
        loose, _ = await server.both(CHAT, {**asked, "tools": [F]})
        held, _ = await server.both(CHAT, {**asked, "tools": [strict]})
    cities = [
        json.loads(reply.choices[0]["message"]["tool_calls"][0]["function"]["arguments"])["city"]
        for reply in (loose, held)
    ]
    assert cities[0] in ("Paris", 5) and cities[1] in ("Rome", "Oslo")
    assert (loose.text or "") == before and (held.text or "").startswith(before)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", 'Look: {"name": "f", "parameters": {"city": 5}}'),
        ("pythonic", 'Look: [f(city="Paris")]'),
        ("granite", 'Look: <tool_call>[{"name": "f", "arguments": {"city": 5}}]</tool_call>'),
        ("qwen3_coder", "Look: <function=f>\n<parameter=city>\nParis\n</parameter>\n</function>"),
    ],
)
async def test_what_no_grammar_held_is_no_strict_call(tok, parser, text):
    """Calls in a way that a grammar cannot see coming are read for tools that are not strict, and else are text."""
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    async with serve(text, tok, tool_call_parser=parser, reasoning_parser="none") as server:
        loose, _ = await server.both(CHAT, {**ASK, "tools": [F]})
        held, _ = await server.both(CHAT, {**ASK, "tools": [strict]})
    assert loose.choices[0]["message"]["tool_calls"]
    assert held.text == text and held.reason == "stop"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ({"enum": []}, "enum without values"),
        ({"type": "string", "minLength": "x"}, "no text of"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "no text of 5 to 2"),
        ({"type": "string", "pattern": 5}, "no JSON schema"),
        ("string", "no JSON schema"),
        (None, "requires 'a'"),
    ],
)
async def test_parameters_that_nothing_satisfies_are_named(tok, parameter, said):
    """Calls of marks: a 400 says which part of the schema is wrong, not how a grammar made of it fails."""
    schema = {"type": "object", "properties": {"a": parameter} if parameter else {"b": {}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    async with serve("hello", tok, tool_call_parser="qwen3_coder") as server:
        error = await server.refused(CHAT, {**ASK, "tools": [tool], "tool_choice": "required"})
    assert said in error["message"] and error["param"].startswith("tools"), error


TRIP = {
    "type": "object",
    "required": ["city", "days", "when", "tags"],
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
        "when": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
}
RIGHT = {"city": "Oslo", "days": 3, "when": "2026-11-30", "tags": ["b"], "note": "two\nlines, <b>"}


@pytest.mark.anyio
@pytest.mark.parametrize("parser", ["qwen3_coder", "seed_oss", "minimax_m2", "step3", "glm45"])
async def test_strict_holds_where_parameters_are_text(tok, parser, monkeypatch):
    """What the schema allows is written as the model wants, what it forbids cannot be; forced calls look the same."""
    monkeypatch.setattr("tests.cases.harness.CONTEXT", 1024)
    trip = {"name": "trip", "parameters": TRIP, "strict": True}
    asked = {**ASK, "max_tokens": 700, "tools": [{"type": "function", "function": trip}, F]}
    form = next(form for form in FORMATS if form.name == parser)
    for arguments in (RIGHT, {**RIGHT, "days": 9, "city": "Paris", "when": "soon", "tags": "none"}):
        async with serve("So: " + form.calls([("trip", arguments)]), tok, tool_call_parser=parser) as server:
            held, _ = await server.both(CHAT, asked)
            forced, _ = await server.both(CHAT, {**asked, "tool_choice": "required", "parallel_tool_calls": False})
            for schema in ({**TRIP, "required": 5}, {"anyOf": [TRIP, CITY]}):
                wrong = {"type": "function", "function": {**trip, "parameters": schema}}
                await server.refused(CHAT, {**asked, "tools": [wrong]})
        message = held.choices[0]["message"]
        call, found = message["tool_calls"][0], json.loads(message["tool_calls"][0]["function"]["arguments"])
        assert call["function"]["name"] == "trip" and message["content"].startswith("So: ")
        assert (found, message["content"]) == (RIGHT, "So: ") if arguments is RIGHT else found != arguments
        jsonschema.Draft202012Validator(TRIP).validate(found)
        (call,) = forced.choices[0]["message"]["tool_calls"]
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), {"trip": TRIP, "f": CITY}[call["function"]["name"]]
        )


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NO_TOOLS = [
    *(({"name": name}, "function.name may hold no") for name in ("a<|eot|>b", "a b", "a\n", 'a"b', "f(x)", "[f]")),
    *(({"parameters": parameters}, "parameters must be the schema of an object")
      for parameters in ({"type": "string"}, {"enum": [1]}, {"anyOf": [{"type": "null"}]}, {"type": ["array", "null"]},
                         {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}})),
    ({"parameters": LOOP, "strict": True}, "leads back to itself"),
    ({"parameters": {**CITY, "properties": {"city": {"const": 2**64}}}, "strict": True}, "const holds"),
]  # fmt: skip


@pytest.mark.anyio
async def test_tools_that_no_call_could_be_of_are_refused_at_once(tok):
    """A mark in a name ended the answer within a call; a schema of texts was answered with text and no call."""
    async with serve("hello", tok) as server:
        for function, told in NO_TOOLS:
            tool = {"type": "function", "function": {**F["function"], **function}}
            for choice in ("required", "auto"):
                if choice == "required" or "strict" not in function:
                    error = await server.refused(CHAT, {**ASK, "tools": [tool], "tool_choice": choice})
                    assert told in error["message"], error
        for name in ("weather.now", "ns/f:2", "погода", "f-1_x"):
            body = {**ASK, "tools": [{"type": "function", "function": {**F["function"], "name": name}}]}
            whole = await server.ask(CHAT, {**body, "tool_choice": "required", "parallel_tool_calls": False})
            assert whole.choices[0]["message"]["tool_calls"][0]["function"]["name"] == name


@pytest.mark.anyio
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
async def test_an_argument_may_hold_the_mark_of_a_special_token(tok, parser):
    """As JSON and as a bare parameter: the text of the mark, and not the token, which would end the answer."""
    schema = {"type": "object", "properties": {"mark": {"const": "a<|eot|>b"}}, "required": ["mark"]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    async with serve("hello", tok, tool_call_parser=parser) as server:
        body = {**ASK, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        whole = await server.ask(CHAT, body)
        (call,) = whole.choices[0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"mark": "a<|eot|>b"} and whole.reason == "tool_calls"
        text = {"type": "string", "minLength": 10**12}
        bounded = {**tool, "function": {**tool["function"], "parameters": {**schema, "properties": {"mark": text}}}}
        error = await server.refused(CHAT, {**body, "tools": [bounded]})
        assert "minLength" in error["message"] and "no answer is so long" in error["message"]
