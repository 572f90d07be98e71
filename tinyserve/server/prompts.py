"""Raw prompts of a request: a text, a list of texts, token ids, or a list of those; all read before anything runs.

Before: fields.py, sampling.py (truncation).  After: openai_completions.py, embeddings.py, tokens.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from ..checks import MAX_TEXT_TOKENS
from ..errors import COUNTED_CONTEXTS, ContextLengthExceeded, RequestError
from .face import EngineFace
from .fields import Fields
from .sampling import cut_prompt

MAX_PROMPTS = 1024
INLINE_CHARACTERS = 2048  # 1 ms of work; longer texts go to a thread


@frozen
class Prompt:
    """One prompt. text: as sent, or decoded when only ids were sent."""

    text: str
    ids: Sequence[int]


async def read(engine: EngineFace, fields: Fields, name: str) -> list[Prompt]:
    """All prompts of the field `name`, cut if asked; off the loop if there is much to read. Raises: RequestError."""

    def work() -> list[Prompt]:
        return [_encoded(engine, fields, name, prompt) for prompt in _listed(fields, name)]

    return work() if _is_small(fields.raw(name)) else await asyncio.to_thread(work)


def _listed(fields: Fields, name: str) -> list[str | list[int]]:
    """A prompt field in any of its four forms, as a list of texts or a list of id lists."""
    prompt = fields.raw(name)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong(name, "a text, a list of texts, a list of token ids, or a list of such lists; not empty")
    if _only_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        fields.refuse(name, f"holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed.")
    if all(isinstance(text, str) for text in prompt):
        return prompt
    if all(isinstance(ids, list) and ids and _only_ids(ids) for ids in prompt):
        return prompt
    raise fields.wrong(name, "only texts, or only lists of token ids, none of them empty")


def _only_ids(values: list[Any]) -> bool:
    """Whether all of them are integers; True is none."""
    return set(map(type, values)) <= {int}


def _is_small(prompt: Any) -> bool:
    if not isinstance(prompt, list):
        return not isinstance(prompt, str) or len(prompt) <= INLINE_CHARACTERS
    if len(prompt) <= INLINE_CHARACTERS and _only_ids(prompt):
        return True
    pieces = prompt[:INLINE_CHARACTERS]
    size = sum(len(piece) if isinstance(piece, (str, list)) else 1 for piece in pieces)
    return len(prompt) <= INLINE_CHARACTERS and size <= INLINE_CHARACTERS


def most_tokens(engine: EngineFace) -> int:
    """Tokens that a text may have where the context is no limit: it is cut, or only counted."""
    return max(MAX_TEXT_TOKENS, COUNTED_CONTEXTS * engine.max_model_len)


def check_length(fields: Fields, name: str, engine: EngineFace, count: int) -> None:
    """Refuse a text or list of more tokens than that. Raises: RequestError."""
    most = most_tokens(engine)
    if count > most:
        fields.refuse(name, f"holds more than {most} tokens, which are the most for one request; send it in parts.")


def _encoded(engine: EngineFace, fields: Fields, name: str, prompt: str | list[int]) -> Prompt:
    """Ids and text of one prompt, cut if asked."""
    cut = fields.given("truncate_prompt_tokens")
    longest = engine.max_model_len
    if isinstance(prompt, str):
        limit = most_tokens(engine) if cut else COUNTED_CONTEXTS * longest  # more are refused anyway
        ids = engine.tokenizer.encode(prompt, add_special_tokens=fields.flag("add_special_tokens", True), limit=limit)
        if cut:
            check_length(fields, name, engine, len(ids))
    else:
        ids = prompt
        if min(ids) < 0:
            fields.refuse(name, f"token ids must not be negative, got {min(ids)}.")
    ids = cut_prompt(fields, ids, longest)
    if not ids:
        raise RequestError(f"The {name} is empty: at least one token is needed.", param=name)
    if len(ids) >= longest:
        raise ContextLengthExceeded(
            len(ids), longest, at_least=isinstance(prompt, str) and len(ids) > COUNTED_CONTEXTS * longest, param=name
        )
    if isinstance(prompt, str) and not cut:
        return Prompt(prompt, ids)
    return Prompt(
        engine.tokenizer.decode(ids, skip_special_tokens=False) if fields.holds("echo") and fields.flag("echo") else "",
        ids,
    )
