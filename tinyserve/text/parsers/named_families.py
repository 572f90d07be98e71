"""Families that write a call's name as text and its arguments as a JSON object.

    [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}

Before: family.py, json_calls.py.  After: registry.py.
"""

from __future__ import annotations

import re

from .family import Calls, Family, Thinking, Written
from .json_calls import JsonArguments, JsonForm
from .json_families import THINK
from .table import FRESH, NAME, Act, Expect, Go, Read, Sink, Until

_KIMI = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*")
_DEEPSEEK_THINK = Thinking(begin=("<think>",), end=("</think>",))
_DEEPSEEK = {
    "section": Expect({"<｜tool▁call▁begin｜>": Go("head")}),
    "json": Read(JsonArguments, "close"),
    "next": Expect(
        {"<｜tool▁call▁begin｜>": Go("head"), "<｜tool▁calls▁end｜>": Go(FRESH)}, otherwise=FRESH, silent=True
    ),
}
_AROUND = {"begin": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>", "trigger": "<｜tool▁calls▁begin｜>"}
_SECTION = "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>", "<|tool_call_section_end|>"

FAMILIES = (
    Family(
        name="mistral",
        tools=("mistral",),
        reasoning=("mistral",),
        thinking=Thinking(begin=("[THINK]",), end=("[/THINK]",)),
        written=Written(before="[TOOL_CALLS]NAME[ARGS]", trigger="[TOOL_CALLS]"),
        calls=Calls(
            marks={"[TOOL_CALLS]": Go("calls")},
            states={
                "calls": Expect({"[": Go("list", stay=True), "{": Go("list", stay=True)}, otherwise="name"),
                "list": Read(JsonForm(), "close"),
                "name": Until(
                    Sink.HEAD,
                    {
                        "[CALL_ID]": Go("id", Act.BEGIN),
                        "[ARGS]": Go("json", Act.BEGIN),
                        "{": Go("json", Act.BEGIN, stay=True),
                    },
                ),
                "id": Until(Sink.HEAD, {"[ARGS]": Go("json")}),
                "json": Read(JsonArguments, "close"),
                "close": Expect({"[TOOL_CALLS]": Go("calls")}, otherwise=FRESH, silent=True),
            },
        ),
        special=True,
        certain=(("[TOOL_CALLS]",), ("[AVAILABLE_TOOLS]",)),
    ),
    Family(
        name="deepseek_v3",
        tools=("deepseek_v3",),
        reasoning=("deepseek_v3",),
        thinking=_DEEPSEEK_THINK,
        written=Written(
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
            between="\n",
            **_AROUND,
        ),
        calls=Calls(
            marks={"<｜tool▁calls▁begin｜>": Go("section")},
            states={
                **_DEEPSEEK,
                "head": Until(Sink.HEAD, {"<｜tool▁sep｜>": Go("name")}),
                "name": Until(Sink.HEAD, {"```json": Go("args", Act.BEGIN)}),
                "args": Expect({"{": Go("json", stay=True)}),
                "close": Expect({"```": Go("close"), "<｜tool▁call▁end｜>": Go("next")}, otherwise=FRESH, silent=True),
            },
        ),
        special=True,
        certain=(("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    Family(
        name="deepseek_v31",
        tools=("deepseek_v31",),
        thinking=_DEEPSEEK_THINK,
        written=Written(before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", after="<｜tool▁call▁end｜>", **_AROUND),
        calls=Calls(
            marks={"<｜tool▁calls▁begin｜>": Go("section")},
            states={
                **_DEEPSEEK,
                "head": Until(Sink.HEAD, {"<｜tool▁sep｜>": Go("args", Act.BEGIN)}),
                "args": Expect({"{": Go("json", stay=True)}),
                "close": Expect({"<｜tool▁call▁end｜>": Go("next")}, otherwise=FRESH, silent=True),
            },
        ),
        special=True,
        certain=(("<｜tool▁calls▁begin｜>",),),
        but_not=("```json",),
    ),
    Family(
        name="kimi_k2",
        tools=("kimi_k2",),
        reasoning=("kimi_k2",),
        thinking=Thinking(begin=("<think>", "◁think▷"), end=("</think>", "◁/think▷")),
        written=Written(
            before="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
            begin=_SECTION[0],
            end=_SECTION_END[0],
            trigger=_SECTION[0],
        ),
        calls=Calls(
            marks=dict.fromkeys(_SECTION, Go("section")),
            ends_thought=True,
            states={
                "section": Expect({"<|tool_call_begin|>": Go("name")}),
                "name": Until(Sink.HEAD, {"<|tool_call_argument_begin|>": Go("args", Act.BEGIN, head=_KIMI)}, NAME),
                "args": Expect({"{": Go("json", stay=True), "<|tool_call_end|>": Go("next", Act.END)}),
                "json": Read(JsonArguments, "close"),
                "close": Expect({"<|tool_call_end|>": Go("next")}, otherwise=FRESH, silent=True),
                "next": Expect(
                    {"<|tool_call_begin|>": Go("name"), **dict.fromkeys(_SECTION_END, Go(FRESH))},
                    otherwise=FRESH,
                    silent=True,
                ),
            },
        ),
        special=True,
        certain=(("<|tool_calls_section_begin|>",),),
    ),
    Family(
        name="functionary",
        tools=("functionary",),
        thinking=THINK,
        written=Written(before="<function=NAME>", after="</function>", trigger="<function="),
        calls=Calls(
            marks={"<function=": Go("name")},
            states={
                "name": Until(Sink.HEAD, {">": Go("args", Act.BEGIN)}),
                "args": Expect({"{": Go("json", stay=True), "</function>": Go(FRESH, Act.END)}),
                "json": Read(JsonArguments, "close"),
                "close": Expect({"</function>": Go(FRESH)}, otherwise=FRESH, silent=True),
            },
        ),
        certain=(("<function=", "</function>"),),
        but_not=("<parameter=",),
    ),
)
