"""Chat messages as clients send them, made into what templates expect.

Clients send null where a text belongs, lists of parts where a string belongs, and arguments as JSON text where
templates want a mapping. All of that is settled here once, so that the word "None" never gets into a prompt. What
cannot be settled is the sender's mistake and is named by its place, `messages[i]`.

Before: server/ (parsed JSON).  After: template.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError, shown

TEXT_PARTS = {"text", "input_text", "output_text"}
Message = dict[str, Any]


def normalise(
    messages: Sequence[Mapping[str, Any]], *, keep_parts: bool = False, wrap_text: bool = False, developer: bool = False
) -> list[Message]:
    """Messages that any template can print.

    Args:
        messages: as parsed from JSON.
        keep_parts: the template walks over lists of parts by itself; else the texts are joined by newlines.
        wrap_text: with keep_parts, a plain string becomes a list of one text part.
        developer: the template knows the role "developer"; else it becomes "system".
    Returns: new dicts: content is "" instead of null, empty tool_calls are gone, arguments are mappings.
    Raises: RequestError: naming messages[i].
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list.", param="messages")
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    settled = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(place, "must be an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _wrong(f"{place}.role", "must be a text such as 'user'")
        new: Message = {key: value for key, value in message.items() if value is not None}
        new["role"] = "system" if role == "developer" and not developer else role
        new["content"] = _content(message.get("content"), role, place, keep_parts=keep_parts, wrap_text=wrap_text)
        calls = _tool_calls(new.pop("tool_calls", None), place)
        if calls:
            new["tool_calls"] = calls
        if role == "assistant":
            new.update(_thought(new, place))
        settled.append(new)
    return settled


def _thought(message: Message, place: str) -> Message:
    """An earlier thought under each name that templates have for it; clients send one of two."""
    for name in ("reasoning", "reasoning_content"):
        thought = message.get(name)
        if thought is not None and not isinstance(thought, str):
            raise _wrong(f"{place}.{name}", "must be a text")
        if thought:
            return {"reasoning": thought, "reasoning_content": thought, "thinking": thought}
    return {}


def _wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}.", param=place)


def _content(content: Any, role: str, place: str, *, keep_parts: bool, wrap_text: bool) -> str | list[Message]:
    place = f"{place}.content"
    if content is None:
        if role not in ("assistant", "tool", "function"):
            raise _wrong(place, f"must be a text or a list of parts for the role {shown(role)}, not null")
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wrap_text else content
    if not isinstance(content, Sequence):
        raise _wrong(place, "must be a text or a list of parts")
    parts = [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]
    return parts if keep_parts else "\n".join(part["text"] for part in parts)


def _part(part: Any, place: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise _wrong(place, "must be an object with a type")
    kind = part.get("type", "text")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise _wrong(f"{place}.type", f"is {shown(kind)}; this model reads text only")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{place}.text", "must be a text")
    return {"type": "text", "text": part["text"]}


def _tool_calls(calls: Any, place: str) -> list[Message]:
    if calls is None:
        return []
    place = f"{place}.tool_calls"
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise _wrong(place, "must be a list")
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> Message:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise _wrong(place, "must be an object with a function")
    function = dict(call["function"])
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"{place}.function.name", "must be a text")
    function["arguments"] = call_arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "function": function}


def call_arguments(arguments: Any, place: str) -> dict[str, Any]:
    """The arguments of a call, which clients send as JSON text. Raises: RequestError: it is no JSON object."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _wrong(place, f"is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise _wrong(place, "must be a JSON object")
    return dict(arguments)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
