"""How each family writes calls and thoughts: the inverse of its parser, for tests."""

import json
from collections.abc import Callable

from attrs import field, frozen

THINK = "<think>\n{}\n</think>\n\n"
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "options": {"type": "object"},
            "tags": {"type": "array"},
            "exact": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@frozen(kw_only=True)
class Format:
    """calls: writes [(name, arguments)]; broken: looks like a call and is none; thought: format string or None."""

    name: str
    calls: Callable[[list], str]
    broken: str
    literal: str
    thought: str | None = None
    text: str = "{}"
    then: str = ""  # between a text and calls
    single: bool = field(default=False)


def one(name, arguments, names=("name", "arguments")):
    return json.dumps({names[0]: name, names[1]: arguments}, ensure_ascii=False)


def many(calls, names=("name", "arguments")):
    return "[" + ", ".join(one(name, arguments, names) for name, arguments in calls) + "]"


def dumped(arguments):
    return json.dumps(arguments, ensure_ascii=False)


def each(pattern, join=""):
    return lambda calls: join.join(pattern.format(name, dumped(arguments)) for name, arguments in calls)


def tagged(begin, end):
    return lambda calls: "\n".join(f"{begin}\n{one(*call)}\n{end}" for call in calls)


def plain(value):
    return value if isinstance(value, str) else dumped(value)


def xml(begin, function, parameter, end_parameter, end):
    def write(calls):
        return "\n".join(
            begin.format(name)
            + "".join(parameter.format(key) + plain(value) + end_parameter for key, value in arguments.items())
            + end
            for name, arguments in calls
        )

    return write


def python(calls, join=", "):
    return join.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )


def gemma(value, quote):
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(inner, quote) for inner in value) + "]"
    return json.dumps(value)


def glm(calls):
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def step(calls):
    inner = "".join(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        + "".join(
            f'<steptml:parameter name="{key}">{plain(value)}</steptml:parameter>' for key, value in arguments.items()
        )
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, arguments in calls
    )
    return f"<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>"


def deepseek(pattern, join="\n"):
    def write(calls):
        inner = join.join(pattern.format(name, dumped(arguments)) for name, arguments in calls)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"

    return write


def kimi(calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"
        for name, arguments in calls
    )


def cohere(calls):
    listed = [
        {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{dumped(listed)}<|END_ACTION|>"


def qwen(prefix=""):
    return xml(
        f"<{prefix}tool_call>\n<function={{}}>\n",
        None,
        "<parameter={}>\n",
        "\n</parameter>\n",
        f"</function>\n</{prefix}tool_call>",
    )


minimax = xml(
    '<minimax:tool_call>\n<invoke name="{}">\n',
    None,
    '<parameter name="{}">',
    "</parameter>\n",
    "</invoke>\n</minimax:tool_call>",
)

FORMATS = [
    Format(
        name="hermes",
        calls=tagged("<tool_call>", "</tool_call>"),
        broken='<tool_call>\n{"name": f}\n</tool_call>',
        literal="Write <tool_call> and </tool_call> around it.",
        thought=THINK,
    ),
    Format(
        name="llama3_json",
        calls=lambda calls: "; ".join(one(*call, names=("name", "parameters")) for call in calls),
        broken='{"name": "get_weather", "parameters": oslo}',
        literal='A call looks like {"name": ...}; a set like {1, 2}.',
    ),
    Format(
        name="llama4_json",
        calls=lambda calls: (
            "<|python_start|>" + ";".join(one(*call, names=("name", "parameters")) for call in calls) + "<|python_end|>"
        ),
        broken='<|python_start|>{"name": "get_weather", "parameters": oslo}',
        literal='A call looks like {"name": ...} or <|python_start|>.',
    ),
    Format(
        name="granite",
        calls=lambda calls: "<|tool_call|>" + many(calls),
        broken='<|tool_call|>[{"name": "get_weather", "arguments": 5}]',
        literal="The mark is <|tool_call|> and then a list.",
        thought="Here is my thought process:\n{}\nHere is my response:\n",
    ),
    Format(
        name="phi4_mini",
        calls=lambda calls: "functools" + many(calls),
        broken='functools[{"nam": "get_weather"}]',
        literal="import functools and use it.",
    ),
    Format(
        name="internlm",
        calls=lambda calls: "".join(
            f"<|action_start|><|plugin|>\n{one(*call, names=('name', 'parameters'))}<|action_end|>" for call in calls
        ),
        broken='<|action_start|><|plugin|>{"name": "get_weather"',
        literal="An <|action_start|> opens a plugin.",
        thought=THINK,
    ),
    Format(
        name="jamba",
        calls=lambda calls: f"<tool_calls>{many(calls)}</tool_calls>",
        broken="<tool_calls>[get_weather]</tool_calls>",
        literal="Put it in <tool_calls> tags.",
    ),
    Format(
        name="hunyuan_a13b",
        calls=lambda calls: f"<tool_calls>{many(calls)}</tool_calls>",
        broken="<tool_calls>[{}]</tool_calls>",
        literal="Put it in <tool_calls> tags.",
        thought="<think>\n{}\n</think>\n<answer>\n",
    ),
    Format(
        name="ernie45",
        calls=tagged("<tool_call>", "</tool_call>"),
        broken="<tool_call>\nget_weather\n</tool_call>",
        literal="Write <tool_call> around it.",
        thought="<think>\n{}\n</think>\n\n<response>\n",
    ),
    Format(
        name="xlam",
        calls=many,
        broken='[{"name": "get_weather", "arguments": {"city": }}]',
        literal="A list [1, 2] and {braces}.",
        single=True,
        then="```json\n",
    ),
    Format(
        name="cohere",
        calls=cohere,
        broken="<|START_ACTION|>get_weather<|END_ACTION|>",
        literal="The mark <|START_ACTION|> begins it.",
        thought="<|START_THINKING|>{}<|END_THINKING|>",
    ),
    Format(
        name="mistral",
        calls=lambda calls: "[TOOL_CALLS]" + many(calls),
        broken='[TOOL_CALLS][{"name": "get_weather", "arguments": }]',
        literal="The [TOOL_CALLS] mark is special.",
        thought="[THINK]{}[/THINK]",
    ),
    Format(
        name="mistral",
        calls=each("[TOOL_CALLS]{}[ARGS]{}"),
        broken="[TOOL_CALLS]get_weather[ARGS]{oslo}",
        literal="The [TOOL_CALLS] mark is special.",
        thought="[THINK]{}[/THINK]",
    ),
    Format(
        name="mistral",
        calls=each("[TOOL_CALLS]{}{}"),
        broken="[TOOL_CALLS]get_weather{oslo}",
        literal="See [/TOOL_CALLS].",
    ),
    Format(
        name="deepseek_v3",
        calls=deepseek("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"),
        broken="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\noslo\n```",
        literal="The <｜tool▁calls▁begin｜> mark.",
        thought=THINK,
    ),
    Format(
        name="deepseek_v31",
        calls=deepseek("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>", ""),
        broken="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>oslo",
        literal="The <｜tool▁calls▁begin｜> mark.",
        thought=THINK,
    ),
    Format(
        name="kimi_k2",
        calls=kimi,
        broken="<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>no",
        literal="The <|tool_calls_section_begin|> mark.",
        thought=THINK,
    ),
    Format(
        name="functionary",
        calls=each("<function={}>{}</function>"),
        broken="<function=get_weather>oslo</function>",
        literal="Use <function= name >.",
    ),
    Format(
        name="qwen3_coder",
        calls=qwen(),
        broken="<tool_call>\n<function=get_weather>\nOslo\n</function>\n</tool_call>",
        literal="Use <tool_call> with <function=a name>.",
        thought=THINK,
    ),
    Format(
        name="seed_oss",
        calls=qwen("seed:"),
        broken="<seed:tool_call>\n<function=get_weather>\nOslo\n</function>\n</seed:tool_call>",
        literal="Use <seed:tool_call> here.",
        thought="<seed:think>{}</seed:think>",
    ),
    Format(
        name="minimax_m2",
        calls=minimax,
        broken='<minimax:tool_call>\n<invoke name="get_weather">Oslo</invoke>\n</minimax:tool_call>',
        literal="Use <minimax:tool_call> here.",
        thought=THINK,
    ),
    Format(
        name="step3",
        calls=step,
        broken="<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>get_weather",
        literal="The <｜tool_calls_begin｜> mark.",
        thought=THINK,
    ),
    Format(
        name="glm45",
        calls=glm,
        broken="<tool_call>get_weather\n<arg_key>city</arg_key>\nOslo</tool_call>",
        literal="Use <tool_call> tags, or </tool_call>.",
        thought=THINK,
    ),
    Format(
        name="pythonic",
        calls=lambda calls: f"[{python(calls)}]",
        broken="[get_weather(oslo)]",
        literal="See [docs](http://x) and a[0].",
    ),
    Format(
        name="llama4_pythonic",
        calls=lambda calls: f"<|python_start|>[{python(calls)}]<|python_end|>",
        broken="<|python_start|>[get_weather(city=)]",
        literal="See [docs](http://x) and a[0].",
    ),
    Format(
        name="olmo3",
        calls=lambda calls: f"<function_calls>\n{python(calls, chr(10))}\n</function_calls>",
        broken="<function_calls>\nget_weather: Oslo\n</function_calls>",
        literal="The <function_calls> mark, used rarely.",
        thought=THINK,
    ),
    Format(
        name="gemma3",
        calls=lambda calls: f"```tool_code\n[{python(calls)}]\n```",
        broken="```tool_code\nx = 5\n```",
        literal="See [docs](http://x) and {1, 2}.",
    ),
    Format(
        name="functiongemma",
        calls=lambda calls: "".join(
            f"<start_function_call>call:{name}{gemma(arguments, '<escape>')}<end_function_call>"
            for name, arguments in calls
        ),
        broken="<start_function_call>call:get_weather(oslo)<end_function_call>",
        literal="The <start_function_call> mark.",
    ),
    Format(
        name="gemma4",
        calls=lambda calls: "".join(
            "<|tool_call>call:" + name + gemma(arguments, '<|"|>') + "<tool_call|>" for name, arguments in calls
        ),
        broken="<|tool_call>get_weather<tool_call|>",
        literal="The <|tool_call> mark.",
        thought="<|channel>thought\n{}<channel|>",
    ),
    Format(
        name="harmony",
        calls=harmony,
        broken="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>oslo",
        literal="Use to=functions.x in a header.",
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        text="<|channel|>final<|message|>{}",
        then="<|end|><|start|>assistant",
    ),
]  # fmt: skip
