"""Anthropic's messages: POST /v1/messages, and /v1/messages/count_tokens for what a request would cost.

    system, messages made of blocks -> chat messages -> template and tokenizer -> engine.generate -> MessageWriter

A conversation that ends with an assistant's message is an answer that was begun: the model goes on writing it.

Before: schema.py, sampling.py, anthropic_writer.py.  After: sse.py (sends it), app.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ..config import ServerOptions
from ..errors import RequestError, shown
from . import answers, spans
from .amount import check_messages
from .anthropic_writer import MessageWriter, Shape
from .bodies import EFFORTS, INT64, MODEL
from .face import Service
from .fields import Fields, read_body
from .formats import of_format
from .openai_chat import effort_variables, name_of
from .reading import Readings
from .requestlog import log_request
from .sampling import read_sampling, request_options
from .schema import (
    Body,
    Param,
    choice,
    documented,
    facts,
    flag,
    harmless,
    inside,
    integer,
    listed,
    mapping,
    objects,
    refusal,
    sampled,
    text,
)
from .sse import Generation, alive
from .tools import ToolPlan, plan_tools

Message = dict[str, Any]
_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_CONVERSATION = [
    MODEL,
    Param("messages", documented({"type": "array", "minItems": 1, "items": {"type": "object", "properties": {
        "role": {"type": "string", "enum": ["user", "assistant", "system"]}, "content": _BLOCKS,
    }, "required": ["role", "content"]}}, "a list of messages", list),
          "The conversation; content is a text or blocks of type text, tool_use, tool_result and thinking."),
    Param("system", documented(_BLOCKS, "a text or a list of text blocks", str, list), "The system prompt."),
    Param("tools", objects("a list of tools"), "Functions that the model may call: name, description, input_schema."),
    Param("tool_choice", inside(Param("type", choice("auto", "any", "tool", "none"), required=True),
                                Param("name", text()), Param("disable_parallel_tool_use", flag())),
          "Whether a tool is called."),
    Param("thinking", inside(Param("type", choice("enabled", "disabled", "adaptive"), required=True),
                             Param("budget_tokens", integer(1024)), *harmless(text(), "display")),
          "Handed to the chat template as enable_thinking; budget_tokens are the most tokens of a thought."),
    Param("output_config", inside(Param("effort", choice(*EFFORTS)), Param("format", inside(
        Param("type", choice("json_schema"), required=True), Param("schema", mapping("a JSON schema"), required=True),
    ))), "effort is handed to the chat template as reasoning_effort; format is the form of the answer."),
    Param("chat_template_kwargs", mapping(), "Variables for the chat template."),
    *refusal("mcp_servers", "context_management", "container", off=[[], {}]),
    *harmless(mapping(), "cache_control"),
]  # fmt: skip

BODY = Body("MessageRequest", [
    *_CONVERSATION,
    Param("max_tokens", integer(1, 2**31 - 1), "Most tokens of the answer; the context may end it.", required=True),
    Param("stop_sequences", listed(text(), "a list of strings"), "Texts that end the answer."),
    Param("stream", flag(), "Send the answer as events.", False),
    sampled("temperature", "0 takes the most likely token each time."),
    sampled("top_p", "Draw from the likeliest tokens that together have this probability."),
    sampled("top_k", "Draw from so many likeliest tokens; 0 and -1 mean all."),
    sampled("seed", "Makes the draw repeatable."),
    Param("cache_salt", text(), "Cached prefixes are shared only among requests with an equal one."),
    Param("priority", integer(*INT64), "Lower runs earlier, with --scheduling-policy priority.", 0),
    Param("request_id", text(), "For the server's log; the header X-Request-Id wins."),
    *refusal("kv_transfer_params", "vllm_xargs", off=[{}]),
    *harmless(inside(*harmless(text(), "user_id")), "metadata"),
    *harmless(text(), "service_tier", "inference_geo", "speed"),
])  # fmt: skip
COUNT = Body("CountTokensRequest", _CONVERSATION)


@facts(
    "Messages",
    "Answer a conversation, Anthropic's way",
    body=BODY,
    answer=answers.MESSAGE,
    stream=answers.MESSAGE_EVENTS,
)
async def messages(request: Request, service: Service) -> Generation:
    """The next message of a conversation; with a last message of the assistant, the rest of that.

    Raises: RequestError, Overloaded, EngineDead; all before the first byte.
    """
    engine = service.ready()
    options = service.config.server
    fields = await read_body(request, options, BODY)
    model = service.model_name(fields.text("model"))
    stream = fields.flag("stream")
    stops = fields.items("stop_sequences", str) or []
    plan = _plan(fields, options)
    decided = {"max_tokens": fields.integer("max_tokens"), "stop": stops, **_form(fields), **_budget(fields, engine)}
    sampling = read_sampling(fields, engine.default_sampling, stream=stream, **decided)
    more = request_options(fields, service)
    conversation, ids = await _encoded(fields, service, plan)
    readings = Readings.of(engine, plan, ids, sampling)
    sampling = await readings.prepared(sampling)
    name = "msg_" + uuid.uuid4().hex
    log_request(service.config.log, f"{name} {name_of(request, fields)}", sampling, len(ids), conversation)
    shape = Shape(
        name=name,
        model=model,
        prompt_tokens=len(ids),
        stops=stops,
        details=options.enable_prompt_tokens_details,
        reader=readings.new().parts,
    )
    outputs = engine.generate(ids, sampling, request_id=name, thinks=True, **more)
    outputs = service.spans.watch(outputs, request, spans.CHAT, name=name, model=model, sampling=sampling)
    return Generation(
        [outputs], 1, MessageWriter(shape), stream=stream, **alive(engine, options.sse_keep_alive_interval, name)
    )


@facts("Messages", "Count the tokens of a conversation", body=COUNT, answer=answers.COUNT)
async def count_tokens(request: Request, service: Service) -> Response:
    """The prompt tokens that /v1/messages would compute for the same conversation."""
    service.ready()
    fields = await read_body(request, service.config.server, COUNT)
    service.model_name(fields.text("model"))
    _, ids = await _encoded(fields, service, _plan(fields, service.config.server))
    return Response(orjson.dumps({"input_tokens": len(ids)}), media_type="application/json")


async def _encoded(fields: Fields, service: Service, plan: ToolPlan) -> tuple[list[Message], list[int]]:
    """The conversation as chat messages, and its ids."""
    conversation = read_conversation(fields)
    begun = conversation[-1]["role"] == "assistant"
    kwargs = {
        **service.config.server.default_chat_template_kwargs,
        **_thinking(fields),
        **(fields.mapping("chat_template_kwargs") or {}),
    }
    tools = {"tools": list(plan.tools)} if plan.tools else {}
    ids = await service.ready().encode_chat(
        conversation,
        add_generation_prompt=not begun,
        continue_final_message=begun,
        chat_template_kwargs=kwargs,
        **tools,
    )
    return conversation, ids


def _plan(fields: Fields, options: ServerOptions) -> ToolPlan:
    """What the request says about tools, in this API's words. Raises: RequestError."""
    tools = []
    for index, tool in enumerate(fields.items("tools", dict, "a list of tools") or ()):
        if tool.get("type") not in (None, "custom"):
            raise _wrong(f"tools[{index}].type", "custom; no other tools run here", tool.get("type"))
        function = {"name": tool.get("name"), "description": tool.get("description")}
        tools.append({"function": {**function, "parameters": tool.get("input_schema"), "strict": tool.get("strict")}})
    asked = fields.inner("tool_choice")
    if asked is None:
        return plan_tools(tools, None, options)
    kind = asked.text("type")
    if kind == "tool" and not asked.given("name"):
        asked.refuse("name", "is needed for the type tool.")
    choice: Any = {"any": "required", "tool": {"type": "function", "name": asked.text("name")}}.get(kind, kind)
    return plan_tools(tools, choice, options, parallel=not asked.flag("disable_parallel_tool_use"))


def _form(fields: Fields) -> dict[str, Any]:
    """The form of the answer that output_config asks for, as sampling parameters."""
    config = fields.inner("output_config")
    form = config.inner("format") if config is not None else None
    if form is None:
        return {}
    return {"structured_outputs": of_format(form, "output_config.format", flat=True)}


def _budget(fields: Fields, engine: Any) -> dict[str, Any]:
    """The thinking budget, as sampling parameters; a model that does not think keeps to any."""
    thinking = fields.inner("thinking")
    if thinking is None or thinking.text("type") != "enabled" or not engine.parsing.reads_thoughts:
        return {}
    return {"thinking_token_budget": thinking.integer("budget_tokens")}


def _thinking(fields: Fields) -> dict[str, Any]:
    """Template variables of `thinking` and `output_config`."""
    variables: dict[str, Any] = {}
    thinking, output = fields.inner("thinking"), fields.inner("output_config")
    if output is not None and output.given("effort"):
        variables |= effort_variables(output.text("effort"))
    if thinking is not None:
        wanted = thinking.text("type") != "disabled"
        budget, most = (
            thinking.integer("budget_tokens"),
            fields.raw("max_tokens") if fields.holds("max_tokens") else None,
        )
        if thinking.text("type") == "enabled" and budget is None:
            thinking.refuse("budget_tokens", "is needed for the type enabled.")
        if budget is not None and isinstance(most, int) and budget >= most:
            thinking.refuse("budget_tokens", f"must be less than max_tokens ({most}), got {budget}.")
        variables |= {"enable_thinking": wanted, "thinking": wanted}
    return variables


def read_conversation(fields: Fields) -> list[Message]:
    """System prompt and messages as a chat template reads them. Raises: RequestError; TooLarge."""
    given = fields.raw("messages")
    if not given:
        fields.refuse("messages", "at least one message is needed.")
    check_messages(given)
    found: list[Message] = []
    if fields.raw("system"):
        found.append({"role": "system", "content": _text(fields.raw("system"), "system")})
    for index, message in enumerate(given):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(place, "an object", message)
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise _wrong(f"{place}.role", "user, assistant or system", role)
        found += _said(role, message.get("content"), f"{place}.content")
    return found


def _said(role: str, content: Any, place: str) -> list[Message]:
    """One message of theirs, as one or several of ours: each result of a tool is a message of its own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _wrong(place, "a text or a list of blocks", content)
    message: Message = {"role": role, "content": ""}
    results, texts = [], []
    for index, block in enumerate(content):
        at = f"{place}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_text([block], place))
        elif kind == "tool_result" and role == "user":
            answer = _text(block.get("content") or "", f"{at}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": answer})
        elif kind == "tool_use" and role == "assistant":
            if not isinstance(block.get("input"), Mapping):
                raise _wrong(f"{at}.input", "an object", block.get("input"))
            function = {"name": block.get("name"), "arguments": block["input"]}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            message["reasoning"] = message.get("reasoning", "") + block["thinking"]
        elif not (kind == "redacted_thinking" and role == "assistant"):
            raise _wrong(f"{at}.type", f"text, tool_use, tool_result or thinking, where a {role} may say it", kind)
    message["content"] = "\n".join(texts)
    return [*results, message] if texts or not results else results


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, "a text or a list of text blocks", content)
    for index, block in enumerate(content):
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _wrong(f"{place}[{index}]", "a block of type text with a text", block)
    return "\n".join(block["text"] for block in content)


def _wrong(place: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"{place} must be {expected}, got {shown(value)}.", param=place)
