"""A conversation becomes a prompt: template, then tokenizer; both off the loop, unless there is little to do.

The template writes the special tokens itself, so the text gets no second BOS from the tokenizer.

Before: text/template.py, intake.py (the threads, the limits).  After: engine.py (encode_chat), llm.py (chat).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import frozen

from ..errors import Overloaded, RequestError
from ..telemetry import NoMetrics
from ..text.fence import Fence
from ..text.template import ChatTemplate
from .intake import INLINE_CHARACTERS, Intake
from .meter import Meter
from .parts import Parts

INLINE_MESSAGES, INLINE_SECONDS = 8, 0.002  # of a conversation that is not worth a hop to a thread and back


@frozen(kw_only=True)
class ChatOptions:
    """How messages become text.

    Args:
        tools, documents: handed to the template.
        add_generation_prompt: end with the beginning of an answer; None: unless the last message is continued.
        continue_final_message: end inside the last message, which the model then continues.
        chat_template: another template than the model's.
        add_special_tokens: let the tokenizer add BOS as well; for templates that do not.
        chat_template_kwargs: more variables for the template.
        untrusted: the template came over the network: it is rendered behind a fence.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    add_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    untrusted: bool = False


class Chat:
    """Renders and tokenises conversations for one model."""

    def __init__(self, parts: Parts, intake: Intake, meter: Meter | None = None) -> None:
        self._template: ChatTemplate | None = parts.template
        self._intake = intake
        self._meter = meter or Meter(NoMetrics())
        self._special = special = parts.tokenizer.facts.special_tokens
        self._compile = lru_cache(8)(lambda text: ChatTemplate(text, special_tokens=special))
        self._fence = Fence()
        self._seconds = float("inf")  # that the last short conversation took

    def template(self, options: ChatOptions) -> ChatTemplate:
        """The template to use. Raises: RequestError: the model has none and the call brings none."""
        if options.chat_template is not None:
            return self._compile(options.chat_template)
        if self._template is None:
            raise RequestError(
                "This model has no chat template: give one (--chat-template, or chat_template=...), or send a prompt.",
                param="messages",
            )
        return self._template

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The conversation as text; takes a few milliseconds, so call it off the loop."""
        return self.template(options).render(messages, **_keywords(options))

    async def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, list[int]]:
        """Text and ids of a conversation; the options are those of ChatOptions.

        Raises: RequestError: the template refused the messages. ContextLengthExceeded: no room for an answer.
            Overloaded: too many wait for a template of their own to be rendered.
        """
        chosen = ChatOptions(**options)

        fenced = await self._fenced(messages, chosen) if chosen.untrusted and chosen.chat_template else None

        small = fenced is None and _is_small(messages, chosen)

        def work() -> tuple[str, list[int]]:
            begin = time.thread_time()
            text = self.render(messages, chosen) if fenced is None else fenced
            ids = self._intake.encode_prompt(text, add_special_tokens=chosen.add_special_tokens)
            if small:
                self._seconds = time.thread_time() - begin
            return text, ids

        quick = small and self._seconds < INLINE_SECONDS
        return work() if quick else await self._intake.off_loop(work)

    async def _fenced(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        job = {
            "template": options.chat_template,
            "special_tokens": dict(self._special),
            "messages": messages,
            "options": _keywords(options),
        }
        data = await self._intake.off_loop(lambda: json.dumps(job).encode())
        try:
            return await self._fence.render(data)
        except Overloaded:
            self._meter.no_template()
            raise

    async def close(self) -> None:
        """End the process that renders the templates of strangers, if there is one."""
        await self._fence.close()


def _is_small(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
    """Whether a conversation is short, and for the model's own template."""
    if options.tools or options.documents or options.chat_template is not None or len(messages) > INLINE_MESSAGES:
        return False
    size, variables = 0, options.chat_template_kwargs or {}
    for values in (*messages, variables):
        for value in values.values():
            if isinstance(value, str):
                size += len(value)
            elif value is not None and not isinstance(value, bool):
                return False
    return size <= INLINE_CHARACTERS


def _keywords(options: ChatOptions) -> dict[str, Any]:
    """What goes to ChatTemplate.render beside the messages."""
    return {
        "tools": options.tools,
        "documents": options.documents,
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
        "variables": options.chat_template_kwargs,
    }
