"""Families that write each parameter between marks of its own, as plain text.

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Whether such a text is a number or a string is said by the tool's schema (calls.py).

Before: family.py.  After: registry.py.
"""

from __future__ import annotations

import re

from .family import Calls, Family, Thinking, Written
from .json_families import THINK
from .table import FRESH, Act, Expect, Go, Sink, State, Until

_KEY = re.compile(r'[^<>"\n]*')


def functions(
    open_function: str, open_parameter: str, head_end: str, tag: str = "", prefix: str = ""
) -> dict[str, State]:
    """States "name", "parameters", "key", "value" of calls `<function=name> <parameter=key> value </parameter> ...`.

    Args: head_end: ends a name.   tag, prefix: names of the closing tags: </{prefix}{function}>, </{prefix}parameter>.
    Behind the call comes the state "close".
    """
    end, end_value = f"</{prefix}{tag}>", f"</{prefix}parameter>"
    done = Go("parameters", Act.VALUE)
    return {
        "name": Until(Sink.HEAD, {head_end: Go("parameters", Act.BEGIN)}),
        "parameters": Expect({open_parameter: Go("key"), end: Go("close", Act.END)}),
        "key": Until(Sink.HEAD, {head_end: Go("value", Act.KEY)}, _KEY),
        "value": Until(Sink.VALUE, {end_value: done, "\n" + end_value: done}),
        "function": Expect({open_function: Go("name")}),
    }


def wrapped(begin: str, end: str, open_function: str, *, also: tuple[str, ...] = (), **parts: str) -> Calls:
    """Calls of `functions`, one or several between `begin` and `end`. also: marks that begin a call without `begin`."""
    return Calls(
        marks={begin: Go("function"), **dict.fromkeys(also, Go("name"))},
        states={
            **functions(open_function, **parts),
            "close": Expect({open_function: Go("name"), end: Go(FRESH)}, otherwise=FRESH, silent=True),
        },
    )


def qwen(begin: str, end: str) -> Written:
    """Calls as Qwen writes them, between these marks."""
    return Written(
        before=f"{begin}\n<function=NAME>\n",
        after=f"</function>\n{end}",
        between="\n",
        parameter=("<parameter=NAME>\n", "\n</parameter>\n"),
        trigger=begin,
    )


_QWEN = {"open_parameter": "<parameter=", "head_end": ">", "tag": "function"}
_INVOKE = {"open_parameter": '<parameter name="', "head_end": '">', "tag": "invoke"}
_STEP = {"open_parameter": '<steptml:parameter name="', "head_end": '">', "tag": "invoke", "prefix": "steptml:"}

FAMILIES = (
    Family(
        name="qwen3_coder",
        tools=("qwen3_coder", "qwen3_xml", "nemotron_v3"),
        thinking=THINK,
        written=qwen("<tool_call>", "</tool_call>"),
        calls=wrapped("<tool_call>", "</tool_call>", "<function=", also=("<function=",), **_QWEN),
        certain=(("<tool_call>", "<function=", "<parameter="),),
    ),
    Family(
        name="seed_oss",
        tools=("seed_oss",),
        reasoning=("seed_oss",),
        thinking=Thinking(begin=("<seed:think>",), end=("</seed:think>",)),
        written=qwen("<seed:tool_call>", "</seed:tool_call>"),
        calls=wrapped("<seed:tool_call>", "</seed:tool_call>", "<function=", **_QWEN),
        special=True,
        certain=(("<seed:tool_call>",), ("<seed:think>",)),
    ),
    Family(
        name="minimax_m2",
        tools=("minimax_m2",),
        reasoning=("minimax_m2", "minimax_m2_append_think"),
        thinking=THINK,
        written=Written(
            before='<invoke name="NAME">\n',
            after="</invoke>\n",
            begin="<minimax:tool_call>\n",
            end="</minimax:tool_call>",
            parameter=('<parameter name="NAME">', "</parameter>\n"),
            trigger="<minimax:tool_call>",
        ),
        calls=wrapped("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', **_INVOKE),
        special=True,
        certain=(("<minimax:tool_call>",),),
    ),
    Family(
        name="step3",
        tools=("step3", "step3p5"),
        reasoning=("step3", "step3p5"),
        thinking=THINK,
        written=Written(
            before='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
            after="</steptml:invoke><｜tool_call_end｜>",
            begin="<｜tool_calls_begin｜>",
            end="<｜tool_calls_end｜>",
            parameter=('<steptml:parameter name="NAME">', "</steptml:parameter>"),
            trigger="<｜tool_calls_begin｜>",
        ),
        calls=Calls(
            marks={"<｜tool_calls_begin｜>": Go("section")},
            states={
                **functions('<steptml:invoke name="', **_STEP),
                "section": Expect({"<｜tool_call_begin｜>": Go("kind")}),
                "kind": Until(Sink.HEAD, {"<｜tool_sep｜>": Go("function")}),
                "close": Expect({"<｜tool_call_end｜>": Go("next")}, otherwise=FRESH, silent=True),
                "next": Expect(
                    {"<｜tool_call_begin｜>": Go("kind"), "<｜tool_calls_end｜>": Go(FRESH)},
                    otherwise=FRESH,
                    silent=True,
                ),
            },
        ),
        special=True,
        certain=(("<｜tool_calls_begin｜>", "steptml:"),),
    ),
    Family(
        name="glm45",
        tools=("glm45", "glm47"),
        reasoning=("glm45", "glm47"),
        thinking=THINK,
        written=Written(
            before="<tool_call>NAME\n",
            after="</tool_call>",
            between="\n",
            parameter=("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"),
            trigger="<tool_call>",
        ),
        calls=Calls(
            marks={"<tool_call>": Go("name")},
            states={
                "name": Until(Sink.HEAD, {"<arg_key>": Go("key", Act.BEGIN), "</tool_call>": Go(FRESH, Act.BEGIN_END)}),
                "key": Until(Sink.HEAD, {"</arg_key>": Go("equals", Act.KEY)}, _KEY),
                "equals": Expect({"<arg_value>": Go("value")}),
                "value": Until(Sink.VALUE, {"</arg_value>": Go("parameters", Act.VALUE)}),
                "parameters": Expect({"<arg_key>": Go("key"), "</tool_call>": Go(FRESH, Act.END)}),
            },
        ),
        special=True,
        certain=(("<arg_key>", "<arg_value>"),),
    ),
)
