"""What is asked: random prompts of chosen lengths, or those of a JSONL file.

    {"prompt": "Once upon"}                                    text, or a list of token ids
    {"prompt": "Once upon", "output_tokens": 64}               with its own length of the answer
    {"messages": [{"role": "user", "content": "Hello"}]}       a conversation, for the chat endpoint

The same seed gives the same prompts. A random text is made of common words, most of which are one token in most
vocabularies; how many tokens it really has is for the server to say.

Before: errors.py.  After: measure.py (gives them to an engine), requests.py (sends them to a server).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ..errors import ConfigError

Size = int | tuple[int, int]
RANDOM_IDS = 10_001  # random ids are below this: every vocabulary of today is larger, and few special tokens are there
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by but not what all
were we when your can said there use an each which she do how their if will up other about out many then them these so
some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part
"""
WORDS = _TEXT.split()


@frozen(kw_only=True)
class Prompt:
    """One request. content: token ids, text, or the messages of a chat. output: tokens of the answer."""

    content: Any
    output: int


def size(text: str) -> Size:
    """A number of tokens, or `low:high` for a uniform range. Raises: ValueError: neither."""
    low, colon, high = text.partition(":")
    found = (int(low), int(high)) if colon else (int(low), int(low))
    if not 1 <= found[0] <= found[1]:
        raise ValueError("sizes begin with 1")
    return found if colon else found[0]


def most(wanted: Size) -> int:
    """The upper end of a size."""
    return wanted[1] if isinstance(wanted, tuple) else wanted


def random_ids(
    count: int, prompt: Size, output: Size, *, seed: int = 0, ids: int = RANDOM_IDS
) -> tuple[list[list[int]], list[int]]:
    """Prompts of ids below `ids`, and how long each answer is to be.

    All prompts are drawn before all outputs, as in the nano-vllm benchmark: with its sizes (256 requests, 100 to 1024
    of both) and seed 0 these are its very requests, 133,966 output tokens.
    """
    draw = random.Random(seed)

    def drawn(wanted: Size) -> int:
        return draw.randint(*wanted) if isinstance(wanted, tuple) else wanted

    prompts = [[draw.randrange(ids) for _ in range(drawn(prompt))] for _ in range(count)]
    return prompts, [drawn(output) for _ in range(count)]


def random_prompts(count: int, prompt: Size, output: Size, *, seed: int, ids: int, text: bool) -> list[Prompt]:
    """The same as prompts; text: as words instead of ids."""
    found, outputs = random_ids(count, prompt, output, seed=seed, ids=ids)
    contents = [" ".join(WORDS[i % len(WORDS)] for i in one) for one in found] if text else found
    return [Prompt(content=content, output=length) for content, length in zip(contents, outputs, strict=True)]


def read_prompts(file: Path, count: int | None, output: int) -> list[Prompt]:
    """The prompts of a JSONL file: the first `count`, from the beginning again if there are fewer; None: each once.

    Args: output: tokens of the answer where a line does not say.
    Raises: ConfigError: no such file, or a line that holds no prompt; says which.
    """
    try:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: {error}") from None
    if not lines:
        raise ConfigError(f"--dataset-path: {file} is empty.")
    found = [_read(line, f"{file}, line {number}", output) for number, line in enumerate(lines[:count], 1)]
    return [found[i % len(found)] for i in range(len(found) if count is None else count)]


def _read(line: str, place: str, output: int) -> Prompt:
    try:
        entry = json.loads(line)
        content = entry.get("messages", entry.get("prompt"))
        length = entry.get("output_tokens", output)
    except (ValueError, AttributeError):
        raise ConfigError(f"{place}: not a JSON object.") from None
    if not content or not isinstance(content, (str, list)) or not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"{place}: needs a `prompt` or `messages`, and `output_tokens` of at least 1 if there are any."
        )
    return Prompt(content=content, output=length)


def only_ids(prompts: Sequence[Prompt], encode: Any) -> list[Sequence[int]]:
    """Token ids of prompts for an engine. encode: text to ids. Raises: ConfigError: there are conversations."""
    found = []
    for prompt in prompts:
        if isinstance(prompt.content, list) and isinstance(prompt.content[0], dict):
            raise ConfigError("--dataset-path: conversations are for `bench serve --endpoint chat`; here are none.")
        found.append(encode(prompt.content) if isinstance(prompt.content, str) else prompt.content)
    return found
