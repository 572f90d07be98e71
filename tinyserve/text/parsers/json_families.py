"""Families whose calls are JSON objects that hold the name and the arguments.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Before: family.py, json_calls.py.  After: registry.py.
"""

from __future__ import annotations

from .family import Calls, Family, Thinking, Written
from .json_calls import JsonForm
from .table import FRESH, Expect, Go, Read

THINK = Thinking(begin=("<think>",), end=("</think>",))


def tagged(begin: tuple[str, ...], end: tuple[str, ...], form: JsonForm | None = None) -> Calls:
    """Each call, or a list of them, between two marks; the second one may be missing."""
    return Calls(
        marks=dict.fromkeys(begin, Go("call")),
        states={
            "call": Read(form or JsonForm(), "close"),
            "close": Expect(dict.fromkeys(end, Go(FRESH)), otherwise=FRESH, silent=True),
        },
    )


def bare(marks: tuple[str, ...] = (), end: tuple[str, ...] = (), opening: tuple[str, ...] = ("{",)) -> Calls:
    """Calls that may stand in the text without a mark, several of them behind one another or after `;`."""
    entries = dict.fromkeys(marks, Go("marked"))
    begin = dict.fromkeys(opening, Go("call", stay=True))
    return Calls(
        marks={**entries, **begin},
        states={
            "marked": Expect(begin),
            "call": Read(JsonForm(bare=True, others=("type", "id", "name", "parameters", "arguments")), "close"),
            "close": Expect({";": Go("marked"), **dict.fromkeys(end, Go(FRESH))}, otherwise=FRESH, silent=True),
        },
    )


ARGUMENTS, PARAMETERS = '{"name": JSON, "arguments": ', '{"name": JSON, "parameters": '
TAGGED = Written(before="<tool_call>\n" + ARGUMENTS, after="}\n</tool_call>", between="\n", trigger="<tool_call>")


def listed(begin: str, end: str, before: str = ARGUMENTS) -> Written:
    """All calls in one list."""
    return Written(before=before, after="}", begin=begin + "[", end="]" + end, between=", ", trigger=begin)


FAMILIES = (
    Family(
        name="hermes",
        tools=("hermes", "qwen", "qwen3", "longcat"),
        reasoning=("qwen3",),
        thinking=THINK,
        written=TAGGED,
        calls=tagged(("<tool_call>", "<longcat_tool_call>"), ("</tool_call>", "</longcat_tool_call>")),
        certain=(("<tool_call>", "</tool_call>", '"name"', '"arguments"'), ("<tool_call>", "</tool_call>", "tojson")),
        but_not=("<function=", "<arg_key>", "<response>", "<|tool_call|>"),
    ),
    Family(
        name="llama3_json",
        tools=("llama3_json", "llama3"),
        written=Written(before=PARAMETERS, after="}", between="; ", first=True),
        calls=bare(("<|python_tag|>",)),
        special=True,
        certain=(("<|start_header_id|>", '"parameters"', "ipython"), ("<|python_tag|>", '"parameters"')),
    ),
    Family(
        name="llama4_json",
        tools=("llama4_json",),
        written=Written(before=PARAMETERS, after="}", between="; ", first=True),
        calls=bare(("<|python_start|>",), ("<|python_end|>",)),
        special=True,
    ),
    Family(
        name="granite",
        tools=("granite", "granite-20b-fc"),
        reasoning=("granite",),
        thinking=Thinking(
            begin=("Here is my thought process:", "Here's my thought process:"),
            end=("Here is my response:", "Here's my response:"),
        ),
        written=listed("<|tool_call|>", ""),
        calls=tagged(("<|tool_call|>", "<tool_call>", "<function_call>"), ("</tool_call>", "<|/tool_call|>")),
        special=True,
        certain=(("<|start_of_role|>", "<|tool_call|>"), ("<|start_of_role|>", "Here is my thought process")),
    ),
    Family(
        name="phi4_mini",
        tools=("phi4_mini_json", "phi4_mini"),
        written=listed("functools", ""),
        calls=tagged(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
        special=True,
        certain=(("<|tool|>", "<|/tool|>"),),
    ),
    Family(
        name="internlm",
        tools=("internlm", "internlm2"),
        thinking=THINK,
        written=Written(
            before="<|action_start|><|plugin|>\n" + PARAMETERS, after="}<|action_end|>", trigger="<|action_start|>"
        ),
        calls=Calls(
            marks={"<|action_start|>": Go("plugin")},
            states={
                "plugin": Expect({"<|plugin|>": Go("call")}),
                "call": Read(JsonForm(), "close"),
                "close": Expect({"<|action_end|>": Go(FRESH)}, otherwise=FRESH, silent=True),
            },
        ),
        special=True,
        certain=(("<|action_start|>", "<|plugin|>"), ("<|plugin|>", "<|im_start|>")),
    ),
    Family(
        name="jamba",
        tools=("jamba",),
        thinking=THINK,
        written=listed("<tool_calls>", "</tool_calls>"),
        calls=tagged(("<tool_calls>",), ("</tool_calls>",)),
        certain=(("<tool_calls>", "<|bom|>"),),
    ),
    Family(
        name="hunyuan_a13b",
        tools=("hunyuan_a13b",),
        reasoning=("hunyuan_a13b",),
        thinking=Thinking(begin=("<think>",), end=("</think>",), drops=("<answer>", "</answer>")),
        written=listed("<tool_calls>", "</tool_calls>"),
        calls=tagged(("<tool_calls>",), ("</tool_calls>",)),
        certain=(("<tool_calls>", "<answer>"),),
    ),
    Family(
        name="ernie45",
        tools=("ernie45",),
        reasoning=("ernie45",),
        thinking=Thinking(begin=("<think>",), end=("</think>",), drops=("<response>", "</response>")),
        written=TAGGED,
        calls=tagged(("<tool_call>",), ("</tool_call>",)),
        certain=(("<tool_call>", "<response>"),),
    ),
    Family(
        name="xlam",
        tools=("xlam",),
        thinking=THINK,
        written=Written(before=ARGUMENTS, after="}", begin="[", end="]", between=", ", first=True),
        calls=Calls(
            marks={"<tool_call>": Go("call"), "[TOOL_CALLS]": Go("call"), "```json": Go("fenced")},
            first={"[": Go("bare", stay=True)},
            states={
                "call": Read(JsonForm(), "close"),
                "fenced": Expect({"[": Go("bare", stay=True)}),
                "bare": Read(JsonForm(bare=True), "close"),
                "close": Expect({"</tool_call>": Go(FRESH), "```": Go(FRESH)}, otherwise=FRESH, silent=True),
            },
        ),
    ),
    Family(
        name="cohere",
        tools=("cohere_command3", "cohere_command4", "cohere", "command_a"),
        reasoning=("cohere_command3", "cohere_command4", "cohere", "command_a"),
        thinking=Thinking(
            begin=("<|START_THINKING|>",),
            end=("<|END_THINKING|>",),
            drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        written=listed("<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "0", "tool_name": JSON, "parameters": '),
        calls=tagged(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            JsonForm(names=("tool_name", "name"), arguments=("parameters", "arguments")),
        ),
        special=True,
        certain=(("<|START_ACTION|>", "<|END_ACTION|>"),),
    ),
)
