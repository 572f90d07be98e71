"""What POST /v1/responses may hold, and its input items as the chat messages that a template reads.

    "Hi" | [message, function_call, function_call_output, reasoning ...]  ->  [{"role", "content", ...} ...]

A conversation goes on by `previous_response_id` (the server kept its messages) or by sending all items again.

Before: schema.py, bodies.py.  After: responses.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ..errors import RequestError, shown
from ..text.messages import call_arguments
from .bodies import EFFORTS, INT64, MODEL, PENALTIES, STRUCTURED, TOOLS
from .fields import Fields
from .schema import (
    Body,
    Param,
    choice,
    documented,
    either,
    flag,
    harmless,
    inside,
    integer,
    labels,
    listed,
    mapping,
    refusal,
    sampled,
    text,
    tokens,
)

LOGPROBS = "message.output_text.logprobs"
INCLUDE = (LOGPROBS, "reasoning.encrypted_content")
Message = dict[str, Any]
_TEXTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text"}
_PREFIX = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
_ITEMS = {"type": "array", "items": {"type": "object"}, "minItems": 1}

BODY = Body("ResponseRequest", [
    MODEL,
    Param("input", documented({"anyOf": [{"type": "string"}, _ITEMS]}, "a text or a list of items", str, list),
          "A text, or items of type message, function_call, function_call_output and reasoning.", required=True),
    Param("instructions", text(), "A system message in front; not kept for a later previous_response_id."),
    Param("previous_response_id", text(), "Go on after this stored response."),
    Param("max_output_tokens", integer(), "Most tokens of the answer; default, and at most: the rest of the context."),
    *PENALTIES,
    Param("stop", either(text(), listed(text()), expected="a string or a list of strings"),
          "Texts that end the answer."),
    Param("stop_token_ids", tokens(), "Ids that end the answer."),
    sampled("min_tokens", "No end before so many tokens."),
    Param("include_stop_str_in_output", flag(), "Show the stop string as well.", False),
    Param("ignore_eos", flag(), "Go on after the model's end token.", False),
    Param("skip_special_tokens", flag(), "Leave special tokens out of the text.", True),
    Param("logit_bias", mapping(), "Token id -> -100..100, added to its logit."),
    Param("top_logprobs", integer(), "Alternatives for each token, with include.", 0),
    Param("include", listed(choice(*INCLUDE), f"a list of {LOGPROBS}"),
          f"{LOGPROBS} adds log-probabilities to the text."),
    Param("text", inside(
        Param("format", inside(
            Param("type", choice("text", "json_object", "json_schema"), required=True),
            Param("name", text()), Param("description", text()), Param("schema", mapping("a JSON schema")),
            Param("strict", flag(), "Schemas are always kept to."),
        )),
        *harmless(choice("low", "medium", "high"), "verbosity"),
    ), "The form that the answer must have."),
    Param("reasoning", inside(Param("effort", choice(*EFFORTS), "Handed to the chat template."),
                              *harmless(choice("auto", "concise", "detailed"), "summary",
                                        "generate_summary")), "How much to think first."),
    *TOOLS,
    Param("stream", flag(), "Send the answer as events.", False),
    Param("background", flag(), "Answer at once, compute on; look at it with GET.", False),
    Param("store", flag(), "Keep the answer for GET and previous_response_id, as long as there is room.", True),
    Param("metadata", labels(), "Kept and given back."),
    Param("truncation", choice("auto", "disabled"), "auto: leave out the middle's oldest messages when the context is "
          "too short.", "disabled"),
    Param("chat_template_kwargs", mapping(), "Variables for the chat template."),
    Param("cache_salt", text(), "Cached prefixes are shared only among requests with an equal one."),
    Param("priority", integer(*INT64), "Lower runs earlier, with --scheduling-policy priority.", 0),
    Param("request_id", text(), "For the server's log; the header X-Request-Id wins."),
    STRUCTURED,
    sampled("thinking_token_budget", "Most tokens of the thought before an answer; -1: no limit. Not beside a form "
            "that holds the thought as well."),
    *refusal("prompt", why="stored prompts are not kept here; send instructions and input."),
    *refusal("conversation", why="conversations are not kept here; use previous_response_id."),
    *refusal("max_tool_calls", why="no tool runs on the server, so there is nothing to count."),
    *refusal("kv_transfer_params", "vllm_xargs", off=[{}]),
    *refusal("previous_input_messages", "enable_response_messages", off=[False, []]),
    *harmless(text(), "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *harmless(inside(*harmless(flag(), "include_obfuscation")), "stream_options"),
])  # fmt: skip


def read_input(fields: Fields, before: list[Message]) -> list[Message]:
    """The conversation: instructions, what was said before, and the new items. Raises: RequestError."""
    messages = [{"role": "system", "content": fields.text("instructions")}] if fields.given("instructions") else []
    given = fields.raw("input")
    if isinstance(given, str):
        return [*messages, *before, {"role": "user", "content": given}]
    if not given:
        fields.refuse("input", "at least one item is needed.")
    items: list[Message] = []
    for index, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise RequestError(f"input[{index}] must be an object, got {shown(item)}.", param=f"input[{index}]")
        _add(items, item, f"input[{index}]")
    if not items and not before:
        fields.refuse("input", "nothing is said in it: a message is needed.")
    return [*messages, *before, *items]


def listed_input(given: str | list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items that were read (`read_input`), as a list of them shows them: each with an id that no other has."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items, seen = list(before), {item["id"] for item in before}
    for item in given:
        kind, name = item.get("type") or "message", item.get("id")
        if not isinstance(name, str) or not name or name in seen:
            name = _PREFIX[kind] + uuid.uuid4().hex
        seen.add(name)
        content = item.get("content")
        if kind == "message" and not isinstance(content, list):
            part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
            item = {**item, "content": [{**part, "text": content or ""}]}
        items.append({**item, "id": name, "type": kind, "status": item.get("status") or "completed"})
    return items


def _add(messages: list[Message], item: Mapping[str, Any], place: str) -> None:
    """Append an item; calls and thoughts join the assistant's message that they belong to."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise _wrong(f"{place}.role", "user, assistant, system or developer", role)
        content = _text(item.get("content"), f"{place}.content")
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == "assistant" and not last.get("content"):
            last["content"] = content  # the thought or the call that came before it is part of the same message
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call_arguments(
            item.get("arguments"), f"{place}.arguments"
        )  # or the template would refuse them at its own place
        call = {"name": _named(item, "name", place), "arguments": item.get("arguments")}
        name = _named(item, "call_id" if item.get("call_id") or not item.get("id") else "id", place)
        _assistant(messages).setdefault("tool_calls", []).append({"id": name, "type": "function", "function": call})
    elif kind == "function_call_output":
        if item.get("output") is None:
            raise _wrong(f"{place}.output", "a text or a list of parts", None)
        content = _text(item["output"], f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": _named(item, "call_id", place), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thought = _text(parts, f"{place}.content")
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning": thought})
    else:
        known = "message, function_call, function_call_output or reasoning"
        raise _wrong(f"{place}.type", known, kind)


def _named(item: Mapping[str, Any], key: str, place: str) -> str:
    name = item.get(key)
    if not isinstance(name, str) or not name:
        raise _wrong(f"{place}.{key}", "a text", name)
    return name


def _assistant(messages: list[Message]) -> Message:
    """The last message if it is the assistant's, else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise _wrong(place, "a text or a list of parts", content)
    texts = []
    for index, part in enumerate(content):
        kind = str(part.get("type")) if isinstance(part, Mapping) else None
        found = part.get("refusal" if kind == "refusal" else "text") if kind in {*_TEXTS, "refusal"} else None
        if not isinstance(found, str):
            raise _wrong(f"{place}[{index}]", "a part with a text (input_text, output_text or refusal)", part)
        texts.append(found)
    return "\n".join(texts)


def _wrong(place: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"{place} must be {expected}, got {shown(value)}.", param=place)
