"""Tools of a request: what the model may call, what it must call, and the grammar that makes it.

    none      tools are not called; markup that looks like a call is text
    auto      the model decides, in its family's own format (text/parsers)
    required  the answer is a JSON list of {name, parameters}: one call at least
    named     the answer is the arguments of one tool

Before: fields.py, structured.py.  After: reading.py, and the protocol files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ..errors import RequestError, shown
from ..structured import StructuredOutputsParams

MAX_TOOLS = 512
MAX_NAME = 256
Schema = Mapping[str, Any]


@frozen(kw_only=True, eq=False)
class ToolPlan:
    """What a request says about tools.

    Args:
        tools: in the form that chat templates read; empty when there are none, or when they are hidden.
        schemas: name -> schema of the parameters, of all that may be called.
        mode: none, auto, required or named.   name: of the named one.
        parallel: whether an answer may hold several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    schemas: Mapping[str, Schema] = {}
    mode: str = "none"
    name: str = ""
    parallel: bool = True

    def grammar(self) -> StructuredOutputsParams | None:
        """What the answer must be so that it is a call; None if it may be anything."""
        if self.mode == "named":
            schema: Any = self.schemas[self.name]
        elif self.mode == "required":
            schema = self._list()
        else:
            return None
        style = {"disable_any_whitespace": True, "disable_additional_properties": True}
        return StructuredOutputsParams(json=schema, source="tools", **style)

    def _list(self) -> dict[str, Any]:
        many = {} if self.parallel else {"maxItems": 1}
        items = []
        for number, (name, schema) in enumerate(self.schemas.items()):
            place = f"#/items/anyOf/{number}/properties/parameters"
            properties = {"name": {"const": name}, "parameters": _moved(schema, place)}
            items.append(
                {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
            )
        return {"type": "array", "minItems": 1, **many, "items": {"anyOf": items}}


def plan_tools(tools: Sequence[Any] | None, choice: Any, *, parallel: bool = True, hide: bool = True) -> ToolPlan:
    """What `tools` and `tool_choice` of a request mean.

    Args:
        tools: each {type: function, function: {name, description, parameters}}.
        choice: none, auto, required or {type: function, function: {name}}; None: auto if there are tools.
        hide: with none, leave the tools out of the prompt.
    Raises: RequestError: naming the tool at fault, or a choice that cannot be met.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed.", param="tools")
    checked = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    schemas: dict[str, Schema] = {}
    for index, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in schemas:
            raise _wrong(f"tools[{index}].function.name", f"{shown(name)} is the name of another tool already")
        schemas[name] = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    mode, name = _choice(choice, bool(checked))
    if mode in ("required", "named") and not checked:
        raise RequestError(f"tool_choice is {shown(choice)}, but there are no tools.", param="tool_choice")
    if mode == "named" and name not in schemas:
        raise RequestError(f"tool_choice: there is no tool {shown(name)}.", param="tool_choice")
    shown_tools = () if mode == "none" and hide else tuple(checked)
    return ToolPlan(tools=shown_tools, schemas=schemas, mode=mode, name=name, parallel=parallel)


def _choice(choice: Any, tools: bool) -> tuple[str, str]:
    if choice is None:
        return ("auto" if tools else "none"), ""
    if choice == "auto" and not tools:
        return "none", ""
    if choice in ("none", "auto", "required"):
        return choice, ""
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if isinstance(name, str) and name:
            return "named", name
    expected = "none, auto, required, or an object that names a function"
    raise RequestError(f"tool_choice must be {expected}, got {shown(choice)}.", param="tool_choice")


def _tool(tool: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(place, f"must be an object, got {shown(tool)}")
    kind = tool.get("type", "function")
    if kind != "function":
        raise _wrong(f"{place}.type", f"must be 'function', got {shown(kind)}; no other tools run here")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{place}.function", f"must be an object with a name, got {shown(function)}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise _wrong(f"{place}.function.name", f"must be a text of 1 to {MAX_NAME} characters, got {shown(name)}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong(f"{place}.function.parameters", f"must be a JSON schema, got {shown(parameters)}")
    return {**tool, "type": kind, "function": {k: v for k, v in function.items() if v is not None}}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` of another one: its references to itself follow."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: part if name in ("const", "enum") else _moved(part, place) for name, part in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}.", param=place)
