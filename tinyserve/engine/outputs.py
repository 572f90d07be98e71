"""What `LLM` returns: whole answers, with vLLM's field names, so that a user's code moves over unchanged.

The engine speaks in `Output`s, each a small piece of one answer; `collect` adds the pieces of all answers of a prompt
up. Fields of features that this version lacks are kept as None rather than left out.

Before: request.py (Output).  After: llm.py, and whoever reads the results.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from attrs import define, field

from ..request import Logprob, Output
from .flat import FlatLogprobs


@define
class CompletionOutput:
    """One answer. logprobs: one dict per token of `token_ids`, or None when not asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def add(self, output: Output) -> None:
        """Append the next piece of this answer."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = FlatLogprobs() if isinstance(output.logprobs, FlatLogprobs) else []
            self.logprobs.extend(output.logprobs)
            chosen = (entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(chosen)
        if output.finished:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = output.stop_reason


@define
class RequestOutput:
    """The answers to one prompt, sorted by index.

    Args:
        prompt_token_id_logprobs: [rows, K] float32; see SamplingParams.prompt_logprob_token_ids. -inf fills short rows.
        metrics: see answer.Timing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Mapping[int, Logprob] | None] | FlatLogprobs | None = None
    prompt_token_id_logprobs: np.ndarray | None = None
    outputs: list[CompletionOutput] = field(factory=list)
    finished: bool = False
    metrics: Any = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


@define(eq=False)
class EmbeddingOutput:
    """One vector. embedding: [H] float32."""

    embedding: np.ndarray

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@define(eq=False)
class EmbeddingRequestOutput:
    """The vector of one prompt. prompt_tokens: of it; num_cached_tokens: those found in the prefix cache."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_tokens: int
    num_cached_tokens: int
    finished: bool = True


@define
class BeamSearchSequence:
    """One beam.

    Args:
        tokens: the prompt's and the new ones.   text: of all of them, as vLLM's LLM has it.   answer: of the new ones.
        logprobs: one dict per new token, of the candidates that it was chosen from.
    """

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]] = field(factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    answer: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None


@define
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def _array(rows: Sequence[Sequence[float]]) -> np.ndarray:
    array = np.full((len(rows), max(map(len, rows))), -np.inf, dtype=np.float32)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return array


async def collect(outputs: AsyncGenerator[Output, None], result: RequestOutput, count: int) -> RequestOutput:
    """Read `outputs` to their end and add them up in `result`, which gets `count` answers.

    Raises: the error of an answer that failed.
    """
    result.outputs = [CompletionOutput(index) for index in range(count)]
    async with aclosing(outputs):
        async for output in outputs:
            if output.error is not None:
                raise output.error
            result.outputs[output.index].add(output)
            if output.prompt_logprobs is not None and output.index == 0:
                flat = isinstance(output.prompt_logprobs, FlatLogprobs)
                result.prompt_logprobs = output.prompt_logprobs if flat else list(output.prompt_logprobs)
            if output.prompt_token_id_logprobs is not None and output.index == 0:
                result.prompt_token_id_logprobs = _array(output.prompt_token_id_logprobs)
            if output.index == 0:
                result.num_cached_tokens = output.usage.cached_tokens
            result.metrics = output.metrics or result.metrics
    result.finished = all(answer.finished() for answer in result.outputs)
    return result
