"""Whatever a model writes, what a stream adds up to is what the whole answer says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.parsers.formats import FORMATS, TOOLS
from tests.text.parsers.test_families import IDS, OSLO, outputs
from tinyserve.config import ServerOptions
from tinyserve.request import FinishReason, Output, SamplingParams, Usage
from tinyserve.server.blocks import Blocks
from tinyserve.server.reading import Readings, deltas
from tinyserve.server.tools import plan_tools
from tinyserve.text.parsers import registry

LISTED = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
USAGE = Usage(prompt_tokens=1)
# What breaks a call, or looks like the next part of one.
BITS = (
    *("NaN", "Infinity", "-", ",", ":", "{", "}", "[", "]", "(", ")", "=", '"', "'", "\\", "\\ud83c", "\n", "```", "é"),
    *("<tool_call>", "</tool_call>", "</parameter>", "</function>", "<|call|>", "<|end|>", "<think>", "</think>", "x "),
)


class Tokenizer:
    """As much of one as readings need where no tokens are counted."""

    def __init__(self, prompt=""):
        self.prompt = prompt

    def decode(self, ids, **options):
        return self.prompt

    def encode(self, text, **options):
        return list(text.encode())


class Engine:
    def __init__(self, form, prompt=""):
        family = next(family for family in registry.FAMILIES if family.name == form.name)
        thoughts = family if family.thinking or family.whole else None
        self.parsing, self.tokenizer = registry.Parsing(thoughts=thoughts, tools=family), Tokenizer(prompt)


def readings(family, *, prompt="", parallel=True, strict=(), form=None, **asked):
    tools = [
        {**tool, "function": {**tool["function"], "strict": tool["function"]["name"] in strict}} for tool in LISTED
    ]
    plan = plan_tools(tools, None, ServerOptions(), parallel=parallel)
    return Readings.of(Engine(family, prompt), plan, [1], SamplingParams(structured_outputs=form), **asked)


def said(text, reason=None):
    return Output(request_id="r", text=text, usage=USAGE, finish_reason=reason)


def pieces_of(pieces, reason):
    """Outputs with these pieces of text, and the end behind them."""
    return [*map(said, pieces), said("", reason)]


def added_up(reading, outputs_):
    """What a client of the chat route has at the end, which can only add."""
    content, reasoning, calls, reason = "", "", [], None
    for output in outputs_:
        for delta in deltas(reading.take(output)):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning", "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(calls) and not piece["function"]["arguments"]
                    calls.append([piece["function"]["name"], ""])
                else:
                    assert piece["index"] == len(calls) - 1 and piece["function"]["arguments"]
                    calls[-1][1] += piece["function"]["arguments"]
        if output.finished:
            reason = reading.finish_reason(output)
    return content, reasoning, calls, reason


def whole(reading, text, reason):
    output = said(text, reason)
    reading.take(output)
    message = reading.message()
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.calls]
    return message.content or "", message.reasoning or "", calls, reading.finish_reason(output)


def blocks_of(reading, outputs_):
    """What a client of the other two routes has: blocks, each with its kind, name and text."""
    blocks, found = Blocks(), []
    for output in outputs_:
        for step in blocks.add(reading.parts(output)):
            if step.what == "open":
                found.append([step.block.kind, step.block.name, ""])
            elif step.what == "more":
                found[-1][2] += step.text
    return found


def texts(form):
    """Outputs of a family, one after the other, whole or spoiled."""
    table = {name: output for name, (output, *_) in outputs(form).items()}
    broken = form.calls([("get_weather", {"city": "HERE", "days": 5})]).replace("HERE", 'a"b')
    table |= {"spoiled call": broken, "NaN": form.calls([("get_weather", {"days": 5})]).replace("5", "NaN")}
    several = st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3)
    return st.tuples(several, st.sampled_from(["", "\n", " x "])).map(
        lambda drawn: drawn[1].join(map(table.get, drawn[0]))
    )


@st.composite
def spoiled(draw, form):
    """A text with stretches missing, bits put in, or its end cut off."""
    text = draw(texts(form))
    for _ in range(draw(st.integers(0, 2))):
        at, size = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
        text = text[:at] + draw(st.sampled_from(("", *BITS))) + text[at + size :]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_a_stream_adds_up_to_the_whole_answer(form, data):
    """Any text in any pieces, ended or cut, thoughts shown or not, one call or several: equal; arguments parse."""
    text = data.draw(spoiled(form))
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options = {"thoughts": data.draw(st.booleans()), "parallel": data.draw(st.booleans())}
    if form.thought and data.draw(st.booleans()):
        options["prompt"] = "hi " + form.thought.split("{}")[0].strip()
    asked = readings(form, **options)

    found = whole(asked.new(), text, reason)

    assert added_up(asked.new(), pieces_of(pieces, reason)) == found
    assert added_up(asked.new(), pieces_of(list(text), reason)) == found
    assert blocks_of(asked.new(), pieces_of(pieces, reason)) == blocks_of(asked.new(), [said(text, reason)])
    _, _, calls, _ = found
    assert options["parallel"] or len(calls) < 2
    for _, arguments in calls if reason is FinishReason.STOP else calls[:-1]:
        assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize("form", FORMATS, ids=IDS)
def test_a_call_that_breaks_is_text_and_the_next_one_is_the_first(form):
    """The stream had shown a call with the arguments {"city": before the text; the next one had the index 1."""
    table = outputs(form)
    text = form.calls([("get_weather", {"days": 5})]).replace("5", "NaN[") + "\n\n" + form.calls([OSLO])
    asked = readings(form, parallel=False)

    content, _, calls, reason = added_up(asked.new(), pieces_of(list(text), FinishReason.STOP))

    assert (content, _, calls, reason) == whole(asked.new(), text, FinishReason.STOP)
    assert table and len(calls) <= 1 and reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("asked", "early"),
    [({"strict": ("get_weather",)}, True), ({}, False), ({"strict": ("now",)}, True)],
)
def test_what_is_certain_is_shown_while_it_is_written(asked, early):
    """Where a grammar holds each call: any strict tool does so, as calls are JSON here."""
    assert (count(readings(FORMATS[0], **asked).new(), FORMATS[0].calls([OSLO])) > 10) == early


def test_a_form_takes_the_place_of_the_grammar_of_tools():
    """Calls are as uncertain then as without strict tools; and so are those of tools that are not strict, in XML."""
    held = readings(FORMATS[0], strict=("get_weather",), form={"regex": ".*"}).new()
    assert count(held, FORMATS[0].calls([OSLO])) == 2
    coder = next(form for form in FORMATS if form.name == "qwen3_coder")
    for strict, early in (("now", False), ("get_weather", True)):
        assert (count(readings(coder, strict=(strict,)).new(), coder.calls([OSLO])) > 4) == early


def test_a_call_that_its_grammar_allows_and_nobody_reads():
    """129 brackets: the stream has shown the call, so the whole answer has it too, with the text that it is."""
    text = FORMATS[0].calls([("get_weather", {"days": 5})]).replace("5", "[" * 129 + "]" * 129)
    asked = readings(FORMATS[0], strict=("get_weather",))
    found = whole(asked.new(), text, FinishReason.STOP)
    assert found == added_up(asked.new(), pieces_of(list(text), FinishReason.STOP))
    assert found[0] == text and found[3] == "stop" and len(found[2]) == 1


def count(reading, text):
    """How many deltas a call makes that comes letter by letter; 2 when it is told at its end."""
    return sum(len(deltas(reading.take(output))) for output in pieces_of(list(text), FinishReason.STOP))


def test_long_arguments_come_in_pieces():
    form, city = FORMATS[0], "Oslo " * 2000
    reading = readings(form).new()
    found = [each for output in pieces_of([form.calls([("get_weather", {"city": city})])], FinishReason.STOP)
             for each in deltas(reading.take(output))]  # fmt: skip
    sizes = [len(each["tool_calls"][0]["function"]["arguments"]) for each in found]
    assert sizes[0] == 0 and len(sizes) > 4 and max(sizes) <= 2048


def test_a_thought_that_nothing_ends_is_the_answer_too():
    """A model that did not think at all though its prompt opened a thought: nobody may miss what it said."""
    form = FORMATS[0]
    for thoughts in (True, False):
        asked = readings(form, prompt="hi <think>\n", thoughts=thoughts)
        found = whole(asked.new(), "Hm. Yes.", FinishReason.STOP)
        assert found == ("Hm. Yes.", "Hm. Yes." if thoughts else "", [], "stop")
        assert added_up(asked.new(), pieces_of(["Hm.", " Yes."], FinishReason.STOP)) == found
