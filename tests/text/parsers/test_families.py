"""Every family's parser, on the same table of outputs: what it reads does not depend on how the text was cut."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.text.parsers import registry
from tinyserve.text.parsers.events import Kind, Parsed
from tinyserve.text.parsers.machine import Machine

from .formats import FORMATS, TOOLS

OSLO = ("get_weather", {"city": "Oslo"})
HARD = {
    "escapes": {"city": 'Zü "rich"\\ tab\tline\nend 京都🌶'},
    "nested": {"options": {"deep": [{"a": [1, 2, {"b": None}]}, True]}, "days": -3, "exact": False},
    "braces": {"city": "mkdir {a,b} ]}) </tool> <x> [y"},
    "tags": {"city": "about <tool_call> and </function>; [TOOL_CALLS] too"},
}
IDS = [f"{form.name}-{number}" for number, form in enumerate(FORMATS)]


def machine(form, *, calls=True, thoughts=True, prompt=""):
    family = next(family for family in registry.FAMILIES if family.name == form.name)
    parsing = registry.Parsing(thoughts=family if family.thinking or family.whole else None, tools=family)
    return parsing.machine(calls=calls, tools=TOOLS, prompt=prompt, thoughts=thoughts)


def read(form, pieces, *, cut=False, **options) -> Parsed:
    reader: Machine = machine(form, **options)
    parsed = Parsed()
    for piece in pieces:
        parsed.add(reader.feed(piece))
    return parsed.add(reader.finish(cut=cut))


def found(parsed):
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls.values()]


def outputs(form):
    """name -> (output, calls, text or None when only the calls are told, thought)."""
    text, sep = form.text.format, form.then
    two = [OSLO, ("get_weather", {"city": "Rome", "days": 2})]
    table = {
        "no call": (text("Just words."), [], "Just words.", ""),
        "one call": (form.calls([OSLO]), [OSLO], "", ""),
        "two calls": (form.calls(two), two, "", ""),
        "text before": (text("Let me look. ") + sep + form.calls([OSLO]), [OSLO], "Let me look. ", ""),
        "no arguments": (form.calls([("now", {})]), [("now", {})], "", ""),
        "three, one empty": (form.calls([("now", {}), *two]), [("now", {}), *two], "", ""),
        "broken": (form.broken, [], form.broken, ""),
        "literal": (text(form.literal), [], form.literal, ""),
        "unicode text": (text("京都 🌶 é\n\n{x} <y> [z]"), [], "京都 🌶 é\n\n{x} <y> [z]", ""),
    }
    for name, arguments in HARD.items():
        table[name] = form.calls([("get_weather", arguments)]), [("get_weather", arguments)], "", ""
    if form.name != "harmony":
        table["text after"] = form.calls([OSLO]) + "\nThere.", [OSLO], None, ""
    if form.thought:
        thought = form.thought.format("First I think,\n\nthen I act.")
        table["thought, text"] = thought + text("So."), [], "So.", "First I think,\n\nthen I act."
        table["thought, call"] = thought + form.calls(two), two, "", "First I think,\n\nthen I act."
    return table


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_each_output_is_read_as_meant(form):
    """At least 12 outputs; arguments parse to what was written; text and thought are kept to the letter."""
    table = outputs(form)
    assert len(table) >= 12
    for name, (output, calls, text, thought) in table.items():
        parsed = read(form, [output])
        assert found(parsed) == calls, name
        assert parsed.thought == thought, name
        if text is not None:
            assert parsed.text == text, name
        assert all(call.complete for call in parsed.calls.values()), name


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_pieces_do_not_matter(form):
    """Character by character, and for three outputs every cut in two, gives what one piece gives."""
    for name, (output, *_) in outputs(form).items():
        whole = read(form, [output])
        assert read(form, output) == whole, name
        if name in ("two calls", "tags", "broken"):
            for at in range(1, len(output)):
                assert read(form, [output[:at], output[at:]]) == whole, (name, output[:at])


@settings(max_examples=25)
@given(st.data())
@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_any_pieces_do_not_matter(form, data):
    """Any cut into any number of pieces, of several outputs joined and spoiled, gives what one piece gives."""
    table = outputs(form)
    chosen = data.draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3))
    output = data.draw(st.sampled_from(["", "\n", " x "])).join(table[name][0] for name in chosen)
    if data.draw(st.booleans()):  # spoiled: a stretch is missing
        start = data.draw(st.integers(0, len(output)))
        output = output[:start] + output[start + data.draw(st.integers(1, 9)) :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=12)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    cut = data.draw(st.booleans())

    whole = read(form, [output], cut=cut)

    assert read(form, pieces, cut=cut) == whole
    for call in whole.calls.values():
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_an_answer_cut_anywhere_shows_a_beginning(form):
    """Cut at every character: what is told is a beginning of what the whole tells, and a call never appears in text."""
    output = form.calls([OSLO, ("get_weather", {"city": "a}b", "days": 5})])
    whole = read(form, [output])
    for at in range(len(output)):
        parsed = read(form, [output[:at]], cut=True)
        for index, call in parsed.calls.items():
            assert call.name == whole.calls[index].name
            assert whole.calls[index].arguments.startswith(call.arguments)
        if len(parsed.calls) == 2:
            assert not parsed.text, output[:at]


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_without_tools_marks_are_text(form):
    """tool_choice none: the markup arrives to the letter."""
    if form.name == "harmony":
        return
    output = "Hm. " + form.calls([OSLO])
    assert read(form, [output], calls=False).text == output


@pytest.mark.parametrize("form", [form for form in FORMATS if form.thought and form.name != "harmony"])
def test_thoughts_that_the_prompt_opens_or_closes(form):
    """opened by prompt or model x closed or not x cut or stop: thinking is never in the wrong field."""
    begin, end = (part.strip() for part in form.thought.split("{}"))
    opened = {"prompt": f"user: hi\n{begin}\n"}
    for pieces in (["Hm.", " Yes."], list("Hm. Yes.")):
        unclosed = read(form, pieces, cut=True, **opened)
        assert (unclosed.text, unclosed.thought) == ("", "Hm. Yes.")
        stopped = read(form, pieces, **opened)
        assert (stopped.text, stopped.thought) == ("Hm. Yes.", "Hm. Yes.")  # it did not think at all; told as it came
        own = read(form, [begin, "\n", *pieces], cut=True)
        assert (own.text, own.thought) == ("", "Hm. Yes.")
    closed = read(form, [f"Hm.\n{end}\n\nYes."], **opened)
    assert (closed.text.strip(), closed.thought) == ("Yes.", "Hm.")
    again = read(form, [f"{begin}\nHm.\n{end}\n\nYes."], **opened)
    assert (again.text.strip(), again.thought) == ("Yes.", "Hm.")


def test_deepseek_r1_begins_with_a_thought():
    form = next(form for form in FORMATS if form.name == "hermes")
    parsing = registry.choose(None, tool_parser="hermes", reasoning_parser="deepseek_r1")
    reader = parsing.machine(calls=True, tools=TOOLS, prompt="hi")
    parsed = Parsed().add(reader.feed("Hm.</think>" + form.calls([OSLO]))).add(reader.finish())
    assert (parsed.thought, found(parsed)) == ("Hm.", [OSLO])
    closed = parsing.machine(calls=True, tools=TOOLS, prompt="hi<think>\n\n</think>\n\n")
    assert Parsed().add(closed.feed("Yes.")).add(closed.finish()).text == "Yes."


def test_a_call_broken_after_it_began_says_so_with_its_whole_text():
    """What a stream has shown of the call is taken back by one event; the text is complete."""
    output = 'Hm. <tool_call>\n{"name": "now", "arguments": {"a": "say "hi""}}\n</tool_call>'
    reader = machine(FORMATS[0])
    events = [event for char in output for event in reader.feed(char)] + reader.finish()
    assert [event.kind for event in events if event.kind is not Kind.TEXT][-1] is Kind.CALL_BROKEN
    parsed = Parsed().add(events)
    assert (parsed.text, parsed.calls) == (output, {})


def test_arguments_in_any_order_null_or_as_text():
    """C05 c: arguments before the name; and what models write where an object is meant."""
    for written, arguments in (
        ('{"arguments": {"city": "Oslo"}, "name": "get_weather"}', {"city": "Oslo"}),
        ('{"name": "get_weather", "arguments": null}', {}),
        ('{"name": "get_weather"}', {}),
        ('{"arguments": null, "id": 5, "name": "get_weather"}', {}),
        ('{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', {"city": "Oslo"}),
        ('{"name": "get_weather", "arguments": {"city": "a\nb"}}', {"city": "a\nb"}),
    ):
        for pieces in ([written], written):
            parsed = read(FORMATS[0], ["<tool_call>", *pieces, "</tool_call>"])
            assert found(parsed) == [("get_weather", arguments)], written
            assert parsed.text == ""


HOSTILE = {
    "half a character": r'"\ud83c"', "two halves": r'"\ud83d\ude00"', "half as a key": r'{"\ud83c": 1}',
    "NUL": '"a\x00b"',
    "infinity": "1e999", "minus infinity": "-1e999", "infinity inside": "[1e999]", "NaN": "NaN", "NaN inside": "[NaN]",
    "digits": "1" * 5000, "depth": "[" * 1000, "text of JSON": r'"{\"a\": NaN, \"b\": \"\ud83c\"}"',
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_hostile_values_leave_valid_json(form):
    """Halves of characters, which UTF-8 cannot hold, and numbers, which JSON has not: the answer can always be sent."""
    for (name, value), key in itertools.product(HOSTILE.items(), ("city", "tags")):
        output = form.calls([("get_weather", {key: "VALUE"})])
        written = next(
            (q for q in ('"VALUE"', "'VALUE'", "<escape>VALUE<escape>", '<|"|>VALUE<|"|>') if q in output), "VALUE"
        )
        output = output.replace(written, value)
        whole = read(form, [output])
        assert read(form, output) == whole, name
        for text in (whole.text, *(call.name + call.arguments for call in whole.calls.values())):
            text.encode()
        for call in whole.calls.values():
            if name != "digits":  # which JSON allows, and Python's reader does not
                json.loads(call.arguments, parse_constant=pytest.fail)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_a_name_without_end_is_text(form):
    """Where a name could stand, 3000 letters come: text to the last one, with no look back at each of them."""
    output = form.calls([OSLO])
    output = output[: output.index("get_weather")] + "n" * 3000
    whole = read(form, [output])
    assert read(form, output) == whole
    assert not whole.calls and (form.name == "harmony" or whole.text == output)


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
def test_gemma_may_write_json_inside(name):
    """As a grammar makes it: texts and keys in JSON's quotes, with braces, quotes and escapes in them."""
    form = next(form for form in FORMATS if form.name == name)
    options = {"a": 'x } "y", \\ {', "b": ["]", "é\n", {"c": ""}]}
    quote = {"functiongemma": "<escape>", "gemma4": '<|"|>'}[name]
    output = form.calls([("get_weather", {"city": "Oslo", "options": "HERE", "days": 2})])
    output = output.replace(f"{quote}HERE{quote}", json.dumps(options))
    for pieces in ([output], output):
        assert found(read(form, pieces)) == [("get_weather", {"city": "Oslo", "options": options, "days": 2})]
    inches = output.replace(json.dumps(options), 'size 5" wide')
    assert found(read(form, [inches]))[0][1]["options"] == 'size 5" wide'


def test_many_quotes_in_json_inside_take_no_longer_than_letters():
    """20,000 escaped quotes took 12 s of the loop: each one looked at all of the text before it."""
    form = next(form for form in FORMATS if form.name == "gemma4")
    output = form.calls([("get_weather", {"city": "HERE"})])
    output = output.replace('<|"|>HERE<|"|>', json.dumps('"' * 20_000))
    begin = time.process_time()
    assert found(read(form, [output])) == [("get_weather", {"city": '"' * 20_000})]
    assert time.process_time() - begin < 2


def test_families_are_told_from_templates():
    """Marks that only one family has; a plain template tells none."""
    tell = registry.detect
    assert tell("{{ m.content }}") is None
    assert tell("<tool_call>\n<function=a>\n<parameter=b>").name == "qwen3_coder"
    assert tell('<tool_call></tool_call> {"name": <n>, "arguments": <a>}').name == "hermes"
    assert tell("<｜tool▁calls▁begin｜> ```json").name == "deepseek_v3"
    assert tell("<｜tool▁calls▁begin｜>").name == "deepseek_v31"
    assert tell("<|start|>assistant<|channel|>final<|message|>").name == "harmony"
    assert registry.choose("<think></think>").thinking is not None
    assert registry.choose("plain").thinking is None
