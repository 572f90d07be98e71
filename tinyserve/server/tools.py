"""Tools of a request: what the model may call, what it must call, and the grammar that makes it.

    none      tools are not called; markup that looks like a call is text
    auto      the model decides, in its family's own format (text/parsers)
    required  the answer is one call at least, in the same format
    named     the answer is the arguments of one tool

Before: structured.py, text/parsers, tool_parameters.py.  After: reading.py, and the protocol files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ..config import ServerOptions
from ..errors import RequestError, shown
from ..structured import MAX_CHARACTERS, StructuredOutputsParams, outgrows
from ..text.parsers.family import Written
from .tool_parameters import admits_objects, parameters

MAX_TOOLS = 512
AT_ONCE = 16_384  # characters of schemas: a grammar of more is made in a thread, while others are served
_STYLE = {"disable_any_whitespace": True, "disable_additional_properties": True}
MAX_NAME = 256
# A name stands bare between the marks of a call, in the formats of some models; so it must hold nothing that ends it.
_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff\"'`<>\[\](){}|\\]+")
_OTHER = r"\s*([^%s\s](.|\n)*)?"  # a text that does not begin with this character
_ANY = {"type": "any_text"}
Schema = Mapping[str, Any]


@frozen(kw_only=True, eq=False)
class ToolPlan:
    """What a request says about tools.

    Args:
        tools: in the form that chat templates read; empty when there are none, or when they are hidden.
        schemas: name -> schema of the parameters, of all that may be called.
        mode: none, auto, required or named.   name: of the named one.
        parallel: whether an answer may hold several calls.
        strict: names of those whose arguments must be what the schema says, also when the model decides.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    schemas: Mapping[str, Schema] = {}
    mode: str = "none"
    name: str = ""
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def forced(self) -> bool:
        """Whether a tool has to be called."""
        return self.mode in ("required", "named")

    def holds(self, written: Written) -> bool:
        """Whether calls that the model decides on are held to their schemas."""
        may = bool(written.trigger or written.first or written.answer)
        return self.mode == "auto" and bool(self.strict) and may

    def holds_call(self, name: str, written: Written) -> bool:
        """Whether a grammar makes each call of this tool one that can be read."""
        return self.forced or (self.holds(written) and (written.parameter is None or self._is_held(name, written)))

    @property
    def large(self) -> bool:
        """Whether a grammar of it takes more than a moment to make."""
        return outgrows(list(self.schemas.values()), AT_ONCE)

    def grammar(self, written: Written) -> StructuredOutputsParams | None:
        """What the answer must be so that its calls are what was asked for; None if it may be anything.

        Args: written: how the model writes calls.
        Raises: RequestError: the parameters ask for what cannot be held, or are too long.
        """
        if self.forced or self.holds(written):
            self._check_length(written)
        if self.mode == "named" and written.thought is None:
            form = {"type": "json_schema", "name": _named(self.name), "json_schema": self.schemas[self.name]}
            return StructuredOutputsParams(structural_tag={"format": form}, source="tools", **_STYLE)
        if self.forced:
            form = self._calls(written)
        elif self.holds(written):
            form = self._maybe_calls(written)
        else:
            return None
        whole = {"enable_in_reasoning": written.thought is not None}
        return StructuredOutputsParams(structural_tag={"format": form}, source="tools", **whole, **_STYLE)

    def _calls(self, written: Written) -> dict[str, Any]:
        """One call at least, in the model's own way."""
        names = [self.name] if self.mode == "named" else self.schemas
        tags = [self._tag(written, name) for name in names]
        if written.thought is not None:
            thought = {"type": "tag", **_text_between(*written.thought)}
            return {"type": "sequence", "elements": [{"type": "optional", "content": thought}, _or(tags)]}
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": written.between,
            "at_least_one": True,
            "stop_after_first": not self.parallel,
        }
        around = [written.begin, calls, written.end]
        elements = [
            {"type": "const_string", "value": part} if isinstance(part, str) else part for part in around if part
        ]
        return {"type": "sequence", "elements": elements}

    def _maybe_calls(self, written: Written) -> dict[str, Any]:
        """Free text; behind the mark of a call, the arguments are what the schema says."""
        if written.thought is not None and written.preamble is not None:
            before = [_text_between(*written.thought), _text_between(*written.preamble)]
            tags = [_text_between(written.answer, ""), *(self._tag(written, name) for name in self.schemas)]
            return {"type": "sequence", "elements": [{"type": "tags_with_separator", "tags": before}, _or(tags)]}
        if not written.trigger:
            other = {"type": "regex", "pattern": _OTHER % re.escape(written.mark)}
            return {"type": "or", "elements": [self._calls(written), other]}
        if written.begin:
            calls = {**self._calls(written), "elements": self._calls(written)["elements"][1:]}
            tags = [{"begin": written.begin, "content": calls, "end": ""}]
        else:
            tags = [self._tag(written, name) for name in self.schemas]
        return {"type": "triggered_tags", "triggers": [written.trigger], "tags": tags}

    def _check_length(self, written: Written) -> None:
        """Refuse what the grammar library is not given anyway, before anything is made of it."""
        names = [self.name] if self.mode == "named" else [name for name in self.schemas if self._is_held(name, written)]
        if outgrows([self.schemas[name] for name in names], MAX_CHARACTERS):
            what = f"the parameters that calls are held to have more than {MAX_CHARACTERS} characters"
            raise RequestError(f"tools: {what}.", param="tools")

    def _is_held(self, name: str, written: Written) -> bool:
        """Whether the arguments of a call must be what the tool's schema says."""
        return self.forced or name in self.strict or bool(written.quote)

    def _tag(self, written: Written, name: str) -> dict[str, Any]:
        held = self._is_held(name, written)
        if written.parameter is None:
            schema = self.schemas[name] if held else {"type": "object"}
            content = {"type": "json_schema", "name": _named(name), "json_schema": schema}
        else:
            content = (
                parameters(self.schemas[name], written, name, strict=name in self.strict)
                if held
                else ({"type": "regex", "pattern": written.loose} if written.loose else _ANY)
            )
        return {"begin": written.call(name), "content": content, "end": written.after}


def _named(name: str) -> str:
    """What is told of a tool whose parameters are wrong."""
    return f"the parameters of {shown(name)}"


def _text_between(begin: str, end: str) -> dict[str, Any]:
    return {"begin": begin, "content": _ANY, "end": end}


def _or(tags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "or", "elements": [{"type": "tag", **tag} for tag in tags]}


def plan_tools(tools: Sequence[Any] | None, choice: Any, options: ServerOptions, *, parallel: bool = True) -> ToolPlan:
    """What `tools` and `tool_choice` of a request mean.

    Args:
        tools: each {type: function, function: {name, description, parameters}}.
        choice: none, auto, required or {type: function, function: {name}}; None: auto if there are tools.
        options: whether the model may decide, and whether tools that must not be called are in the prompt.
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
    if mode == "auto" and not options.enable_auto_tool_choice:
        raise RequestError("tool_choice 'auto' is switched off (--no-enable-auto-tool-choice).", param="tool_choice")
    shown_tools = () if mode == "none" and options.exclude_tools_when_tool_choice_none else tuple(checked)
    strict = frozenset(tool["function"]["name"] for tool in checked if tool["function"].get("strict") is True)
    return ToolPlan(tools=shown_tools, schemas=schemas, mode=mode, name=name, parallel=parallel, strict=strict)


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
    if not _NAME.fullmatch(name):
        what = "may hold no blanks, quotes, brackets, bars, backslashes or control characters"
        raise _wrong(f"{place}.function.name", f"{what}, got {shown(name)}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong(f"{place}.function.parameters", f"must be a JSON schema, got {shown(parameters)}")
    if parameters is not None and not admits_objects(parameters):
        raise _wrong(f"{place}.function.parameters", f"must be the schema of an object, got {shown(parameters)}")
    return {**tool, "type": kind, "function": {k: v for k, v in function.items() if v is not None}}


def _wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}.", param=place)
