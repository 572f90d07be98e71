"""Chat messages to prompt text, as the model's authors meant it.

A chat template is a small program that comes with the model. This file gives it what it expects (messages in the form
it reads, tools, special tokens, only those extra variables it knows) and reports its complaints as the sender's
mistake. User content is data: it is printed, never run.

Before: messages.py, jinja.py, tokenizer.py (where the template comes from).  After: engine/intake.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes

from ..errors import RequestError
from .jinja import Program
from .messages import Message, normalise

# Given by this file, or by the request's own fields: chat_template_kwargs may not touch them.
RESERVED = {
    *("chat_template", "tokenize", "messages", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "tokenizer_kwargs", "return_dict", "return_tensors"),
}
END_OF_PREFIX = "\ue000tinyserve:continue\ue001"  # private-use letters: no text that anybody means


class ChatTemplate:
    """A model's chat template, or its named ones.

    Args:
        text: Jinja text, or name -> text ("default", and "tool_use" for requests with tools).
        special_tokens: "bos_token" ... -> text, visible to the template.
        content_format: "string" (parts are joined), "openai" (lists stay lists), or "auto": as the template reads it.
    Raises: RequestError: it is not valid Jinja. At start-up this means: chat is off, completions still work.
    """

    def __init__(
        self,
        text: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        content_format: str = "auto",
    ) -> None:
        texts = {"default": text} if isinstance(text, str) else dict(text)
        if not texts:
            raise RequestError("There is no chat template.", param="chat_template")
        self._variants = {name: _Variant(each, content_format) for name, each in texts.items()}
        self._special_tokens = dict(special_tokens or {})

    @property
    def content_format(self) -> str:
        """ "string" or "openai": what the default variant reads."""
        variant = next(iter(self._variants.values()), None)
        return self._variants.get("default", variant).content_format

    @property
    def variables(self) -> frozenset[str]:
        """Names that any variant takes from outside, such as "enable_thinking"."""
        return frozenset().union(*(variant.program.variables for variant in self._variants.values()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text; encode it with add_special_tokens=False: BOS is the template's business.

        Args:
            messages, tools, documents: as parsed from JSON.
            add_generation_prompt: end with the opening of an assistant message; None: unless a message is continued.
            continue_final_message: leave the last message open, so that the model goes on writing it.
            now: what strftime_now tells; None: the time of this call.
            variables, kwargs: chat_template_kwargs (as a mapping when a stranger chose the names); names that the
                template does not use are ignored.
        Raises: RequestError: reserved names, messages that cannot be right, whatever the template refuses.
        """
        kwargs = {**(variables or {}), **kwargs}
        if reserved := sorted(RESERVED & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs must not contain {reserved[0]!r}.", param=f"chat_template_kwargs.{reserved[0]}"
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: set one of them to false.",
                param="continue_final_message",
            )
        variant = self._choose(bool(tools))
        settled = variant.normalise(messages)
        if continue_final_message:
            _mark_end(settled)
        known = {name: value for name, value in kwargs.items() if name in variant.program.variables}
        text = variant.program.render(
            {
                **self._special_tokens,
                "messages": settled,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": not continue_final_message and add_generation_prompt is not False,
                **known,
            },
            now,
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, with_tools: bool) -> _Variant:
        names = ["tool_use", "default"] if with_tools else ["default"]
        for name in names:
            if name in self._variants:
                return self._variants[name]
        if len(self._variants) == 1:
            return next(iter(self._variants.values()))
        raise RequestError(
            f"The model has several chat templates ({', '.join(sorted(self._variants))}) and none is named 'default'; "
            "choose one with --chat-template.",
            param="chat_template",
        )


class _Variant:
    """One template text and how it reads messages."""

    def __init__(self, text: str, content_format: str) -> None:
        self.program = Program(text)
        reading = _Reading(self.program.tree)
        self.content_format = reading.format if content_format == "auto" else content_format
        self._wraps = self.content_format == "openai" and not reading.accepts_text
        self._developer = "developer" in text

    def normalise(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        keep = self.content_format == "openai"
        return normalise(messages, keep_parts=keep, wrap_text=self._wraps, developer=self._developer)


class _Reading:
    """Whether a template walks over the parts of a message's content, told from its syntax tree.

    It does if some loop runs over `<anything>.content`: directly, through filters, through a variable set from it, or
    through a macro that is called with it.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._names: set[str] = set()
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        found = -1
        while found < len(self._names):  # a name may become known through one that stands behind it
            found = len(self._names)
            self._follow(tree, macros)
        loops = any(self._is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self.format = "openai" if loops else "string"
        self.accepts_text = any(
            test.name == "string" and self._is_content(test.node) for test in tree.find_all(nodes.Test)
        )

    def _follow(self, tree: nodes.Template, macros: Mapping[str, nodes.Macro]) -> None:
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self._is_content(assign.node):
                self._names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is None:
                continue
            given = [*zip(macro.args, call.args, strict=False)]
            by_name = {arg.name: arg for arg in macro.args}
            given += [(by_name[pair.key], pair.value) for pair in call.kwargs if pair.key in by_name]
            self._names.update(name.name for name, value in given if self._is_content(value))

    def _is_content(self, node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._names
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Const):
                return node.arg.value == "content"
            return isinstance(node.arg, nodes.Slice) and self._is_content(node.node)
        if isinstance(node, nodes.Filter):
            return self._is_content(node.node)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "content"
        return False


def _mark_end(messages: list[Message]) -> None:
    """Put the mark behind the last message's text; where it comes out is where the prompt has to end."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + END_OF_PREFIX
    elif content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + END_OF_PREFIX}
    else:
        messages[-1]["content"] = [{"type": "text", "text": END_OF_PREFIX}]


def _cut_at_mark(text: str) -> str:
    start = text.rfind(END_OF_PREFIX)
    if start < 0:
        raise RequestError(
            "continue_final_message is set, but the chat template does not print the last message's text.",
            param="continue_final_message",
        )
    return text[:start].replace(END_OF_PREFIX, "")
