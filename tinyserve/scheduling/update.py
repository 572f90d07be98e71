"""What the scheduler reports: to the streams after each step, to the metrics whenever asked.

Before: step.py.  After: scheduler.py (makes them), engine/streams.py, telemetry.
"""

from __future__ import annotations

from typing import NamedTuple

from attrs import frozen

from ..errors import NumericsError, RequestError
from ..request import FinishReason, Request
from ..step import TokenLogprobs


class Update(NamedTuple):
    """What one step added to one request.

    Attributes:
        token_ids: new tokens, the end token included; () for an error, and for max_tokens = 0.
        logprobs: one per new token, None when not asked.
        prompt_logprobs: with the first update, when asked: one per prompt token, None where nothing was computed.
        finish_reason, stop_reason: set on the last update; stop_reason is the stop id, None for the tokenizer's EOS,
            a word for a repetition.
        cached_tokens: prompt tokens that the first admission found in the prefix cache.
        error: what went wrong when finish_reason is ERROR.
        pooled: when asked: the hidden state [H] of the prompt's last token.
        started: time.monotonic() when a step first computed some of it.
        preemptions: with the last update: how often it was sent back to the queue.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    cached_tokens: int
    error: Exception | None
    started: float
    pooled: tuple[float, ...] | None = None
    preemptions: int = 0


class SequenceFacts(NamedTuple):
    """One sequence that has not ended, for people.

    Args: known: prompt and output tokens.   started: 0.0 before it ran.   adapter: its name, "" for none.
    """

    id: str
    running: bool
    prompt: int
    known: int
    computed: int
    blocks: int
    started: float
    arrival: float
    adapter: str = ""


@frozen(kw_only=True)
class SchedulerStats:
    """Numbers of the moment (up to kv_usage, 0..1) and totals since the start (the rest).

    Attributes:
        deferred: those of `waiting` that others passed when one could last enter: their grammar is being compiled,
            their adapter has no place, or their prompt is being computed for another.
    """

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    numerics_errors: int = 0


def nothing_to_choose(request: Request, place: int) -> Exception:
    """Why output token `place` (from 1) cannot be chosen: the request forbids every token, or the model is at fault."""
    sampling = request.sampling
    limits = {
        "structured_outputs": request.has_grammar,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": request.bad_words_ids,
        "min_tokens": sampling.min_tokens,
    }
    if named := [name for name, value in limits.items() if value]:
        return RequestError(
            f"No token is left to choose as output token {place}: {', '.join(named)} of this request leave none "
            "(or the model produced no numbers)."
        )
    return NumericsError(
        f"The model produced numbers that are no probabilities (NaN or infinite) for output token {place} of this "
        "request. Its cached blocks were discarded; other requests are not affected."
    )
