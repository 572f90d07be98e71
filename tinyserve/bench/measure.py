"""One batch of requests through an engine, and the times that come out of it.

    submitted |--- time to first token ---|-- token --|-- token --| ... |
              |------------------------ latency ------------------------|

Times are the engine's own (Output.metrics): when a token reached the loop, not when some reader looked. The pace of a
batch is that of the request that started last, over its tokens after the first: all of the batch runs then.

Before: engine/engine.py.  After: command.py, and bench/anchors.py of the repository.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from ..request import RequestOutputKind, SamplingParams
from .prompts import RANDOM_IDS, Size, random_ids


@frozen(kw_only=True)
class Work:
    """Requests that are given at once.

    Args:
        prompts: token ids of each.   outputs: how many tokens each is to get; end tokens are ignored.
        temperature: of all.   stream: whether readers get each token, or an answer once as LLM.generate does.
        detokenize: whether ids are turned into text.
    """

    prompts: Sequence[Sequence[int]]
    outputs: Sequence[int]
    temperature: float = 0.0
    stream: bool = True
    detokenize: bool = False

    @classmethod
    def random(
        cls, batch: int, prompt: Size, output: Size, *, seed: int = 0, ids: int = RANDOM_IDS, **how: Any
    ) -> Work:
        """Prompts of random ids, see random_ids. prompt, output: tokens, or the two ends of a uniform range."""
        prompts, outputs = random_ids(batch, prompt, output, seed=seed, ids=ids)
        return cls(prompts=prompts, outputs=outputs, **how)


@frozen(kw_only=True)
class Measured:
    """What one run of a Work took.

    Args:
        seconds: from the first submission until every answer was read.
        prompt_tokens, output_tokens: of all requests.
        first_ms: to the first token, of each request, ascending.   latency_ms: to the last one, likewise.
        pace_ms: between tokens of the request that started last.
        prefill_seconds: until the last request had its first token.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    first_ms: Sequence[float]
    latency_ms: Sequence[float]
    pace_ms: float
    prefill_seconds: float

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, over the whole run."""
        return self.prompt_tokens / self.seconds


async def measure(engine: Any, work: Work, answered: Callable[[], None] = lambda: None) -> Measured:
    """Run all requests of `work` together; `answered` is called after each. Raises: what the engine raises for one."""
    kind = RequestOutputKind.DELTA if work.stream else RequestOutputKind.FINAL_ONLY

    async def one(prompt: Sequence[int], count: int) -> tuple[int, Any]:
        sampling = SamplingParams(
            temperature=work.temperature,
            seed=1,
            max_tokens=count,
            ignore_eos=True,
            detokenize=work.detokenize,
            output_kind=kind,
        )
        tokens, timing = 0, None
        async for output in engine.generate(prompt, sampling):
            tokens, timing = tokens + len(output.token_ids), output.metrics
        answered()
        return tokens, timing

    began = time.monotonic()
    answers = await asyncio.gather(*map(one, work.prompts, work.outputs))
    seconds = time.monotonic() - began
    tokens, last = max(answers, key=lambda answer: answer[1].first_token_ts)
    return Measured(
        seconds=seconds,
        prompt_tokens=sum(map(len, work.prompts)),
        output_tokens=sum(count for count, _ in answers),
        first_ms=sorted((timing.first_token_ts - began) * 1000 for _, timing in answers),
        latency_ms=sorted((timing.last_token_ts - began) * 1000 for _, timing in answers),
        pace_ms=(last.last_token_ts - last.first_token_ts) / max(tokens - 1, 1) * 1000,
        prefill_seconds=last.first_token_ts - began,
    )
