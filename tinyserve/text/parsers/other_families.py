"""Families with notations of their own: Python calls, Gemma's, and OpenAI's harmony, where headers say what follows.

    [weather(city="Oslo")]
    <start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

Before: family.py, literals.py, json_calls.py.  After: registry.py.
"""

from __future__ import annotations

import re
from typing import Any

from .family import Calls, Family, Thinking, Written
from .json_calls import JsonArguments, JsonForm
from .json_families import THINK
from .literals import GemmaForm, PythonForm
from .table import ANY, FRESH, TEXT, THOUGHT, Act, Expect, Go, Read, Sink, State, Table, Until


def python_list(form: PythonForm, end: tuple[str, ...] = ()) -> dict[str, State]:
    """States "list", "item", "more": calls in brackets. Behind them may stand one of the `end` marks."""
    return {
        "list": Expect({"[": Go("item")}),
        "item": Read(form, "more"),
        "more": Expect({",": Go("item"), "]": Go("ended")}, otherwise=FRESH, silent=True),
        "ended": Expect(dict.fromkeys(end, Go(FRESH)), otherwise=FRESH, silent=True),
    }


# Parameters as JSON, which Python reads too. What may stand between parentheses otherwise has no others but in texts.
_LOOSE = r"""([^"'()]|"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*')*"""


def _python(**around: Any) -> Written:
    """Calls as Python writes them."""
    return Written(before="NAME(", after=")", parameter=("NAME=", ""), joined=", ", loose=_LOOSE, **around)


def _gemma(begin: str, end: str, quote: str) -> Calls:
    return Calls(
        marks={begin: Go("open")},
        states={
            "open": Expect({"call:": Go("name")}),
            "name": Until(Sink.HEAD, {"{": Go("arguments", Act.BEGIN)}),
            "arguments": Read(GemmaForm(quote=quote), "close"),
            "close": Expect({end: Go(FRESH)}, otherwise=FRESH, silent=True),
        },
    )


def _gemma_written(begin: str, end: str, quote: str) -> Written:
    return Written(
        before=begin + "call:NAME{", after="}" + end, parameter=("NAME:", ""), joined=",", quote=quote, trigger=begin
    )


_TO = re.compile(r"to=functions\.(?P<name>[\w.\-]+)")
_OTHER = re.compile(r"analysis"), re.compile(r"")


def _harmony(*, calls: bool) -> Table:
    """Messages one after the other, each behind a header that names its channel and, for calls, its recipient."""
    header, ended = Go("header", stay=True), Go("next")
    routes = ((_TO, Go("arguments", Act.BEGIN)),) if calls else ()
    routes += (_OTHER[0], Go(THOUGHT)), (_OTHER[1], Go(TEXT))
    ends = {"<|end|>": ended, "<|return|>": ended, "<|call|>": ended}
    begins = {"<|channel|>": header, "<|start|>": header, "to=": header, "<|message|>": header}
    states: dict[str, State] = {
        FRESH: Expect(begins, otherwise=TEXT),
        "header": Until(Sink.HEAD, {"<|message|>": Go(TEXT, routes=routes)}, ANY, silent=True),
        THOUGHT: Until(Sink.THOUGHT, {**ends, "<|start|>": header}),
        TEXT: Until(Sink.TEXT, {**ends, "<|start|>": header}),
        "next": Expect({**begins, **ends}, otherwise=TEXT, silent=True),
        "arguments": Expect({"{": Go("json", stay=True), "<|call|>": Go("next", Act.END)}),
        "json": Read(JsonArguments, "next"),
    }
    return Table(states)


FAMILIES = (
    Family(
        name="pythonic",
        tools=("pythonic",),
        written=_python(begin="[", end="]", between=", ", first=True),
        calls=Calls(marks={"[": Go("item")}, states=python_list(PythonForm(bare=True))),
    ),
    Family(
        name="llama4_pythonic",
        tools=("llama4_pythonic",),
        written=_python(begin="<|python_start|>[", end="]<|python_end|>", between=", ", trigger="<|python_start|>"),
        calls=Calls(
            marks={"<|python_start|>": Go("list"), "[": Go("item")},
            states=python_list(PythonForm(bare=True), ("<|python_end|>",)),
        ),
        special=True,
        certain=(("<|python_start|>", "<|header_start|>"),),
    ),
    Family(
        name="olmo3",
        tools=("olmo3",),
        reasoning=("olmo3",),
        thinking=THINK,
        written=_python(
            begin="<function_calls>\n", end="\n</function_calls>", between="\n", trigger="<function_calls>"
        ),
        calls=Calls(
            marks={"<function_calls>": Go("item")},
            states={
                "item": Read(PythonForm(), "more"),
                "more": Expect({"</function_calls>": Go(FRESH)}, otherwise="item", silent=True),
            },
        ),
        special=True,
        certain=(("<function_calls>", "<functions>"),),
    ),
    Family(
        name="gemma3",
        tools=("gemma3",),
        written=_python(begin="```tool_code\n[", end="]\n```", between=", ", trigger="```tool_code"),
        calls=Calls(
            marks={"```tool_code": Go("code"), "[": Go("item"), "{": Go("json", stay=True)},
            states={
                **python_list(PythonForm(bare=True), ("```",)),
                "code": Expect({"[": Go("item"), "print(": Go("printed")}, otherwise="plain"),
                "plain": Read(PythonForm(bare=True), "line"),
                "line": Expect({"```": Go(FRESH)}, otherwise=FRESH, silent=True),
                "printed": Read(PythonForm(bare=True), "bracket"),
                "bracket": Expect({")": Go("line")}, otherwise=FRESH, silent=True),
                "json": Read(JsonForm(bare=True), "ended"),
            },
        ),
    ),
    Family(
        name="functiongemma",
        tools=("functiongemma",),
        written=_gemma_written("<start_function_call>", "<end_function_call>", "<escape>"),
        calls=_gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        special=True,
        certain=(("<start_function_call>",),),
    ),
    Family(
        name="gemma4",
        tools=("gemma4",),
        reasoning=("gemma4",),
        thinking=Thinking(begin=("<|channel>thought",), end=("<channel|>",)),
        written=_gemma_written("<|tool_call>", "<tool_call|>", '<|"|>'),
        calls=_gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        special=True,
        certain=(("<|tool_call>", "<tool_call|>"),),
    ),
    Family(
        name="harmony",
        tools=("openai", "harmony", "gpt_oss"),
        reasoning=("openai_gptoss", "gptoss", "harmony"),
        special=True,
        certain=(("<|channel|>", "<|message|>"),),
        whole=_harmony(calls=True),
        whole_without=_harmony(calls=False),
        written=Written(
            before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            answer="<|channel|>final<|message|>",
            preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        ),
    ),
    Family(
        name="deepseek_r1",
        reasoning=("deepseek_r1",),
        thinking=Thinking(begin=("<think>",), end=("</think>",), always=True),
    ),
)
