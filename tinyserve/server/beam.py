"""Beam search through the generating routes: `use_beam_search: true`, with `n` as the beam width.

The search needs whole answers, so it is not streamed; its beams become one Output each and are written like any other.

Before: engine/beam.py (the search).  After: openai_chat.py, openai_completions.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from attrs import evolve

from ..request import BeamSearchParams, FinishReason, Output, SamplingParams, Usage
from .face import EngineFace
from .fields import Fields

# Fields that would change which answers are the best, with the values that change nothing.
_EDITS = {
    "stop": [], "stop_token_ids": [], "bad_words": [], "logit_bias": {}, "min_tokens": 0, "repetition_penalty": 1,
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_detection": {}, "thinking_token_budget": -1,
}  # fmt: skip


def read_beam(fields: Fields, most: int) -> BeamSearchParams | None:
    """The search that a request asks for, or None. most: tokens of an answer. Raises: RequestError."""
    if not fields.flag("use_beam_search"):
        if fields.given("length_penalty") and fields.raw("length_penalty") != 1:
            fields.refuse("length_penalty", "has a meaning only with use_beam_search: true.")
        return None
    if fields.flag("stream"):
        fields.refuse("use_beam_search", "beams are known only at the end and cannot be streamed.")
    for name, nothing in _EDITS.items():
        if fields.given(name) and fields.raw(name) != nothing:
            fields.refuse(name, "has no effect on a beam search; leave one of them out.")
    if most < 1:
        fields.refuse("max_tokens", "beam search needs at least one token.")
    width = fields.integer("n", 1)
    if not 1 <= width <= 256:
        fields.refuse("n", f"a beam width must be 1 to 256, got {width}.")
    values = {
        "ignore_eos": fields.flag("ignore_eos"),
        "include_stop_str_in_output": fields.flag("include_stop_str_in_output"),
        "skip_special_tokens": fields.flag("skip_special_tokens", True),
        "temperature": 1.0 if fields.raw("temperature") is None else fields.raw("temperature"),
        "length_penalty": 1.0 if fields.raw("length_penalty") is None else fields.raw("length_penalty"),
        "allowed_token_ids": fields.items("allowed_token_ids", int, "a list of token ids"),
    }
    return BeamSearchParams(beam_width=width, max_tokens=most, **values)


def with_form(beam: BeamSearchParams | None, sampling: SamplingParams) -> BeamSearchParams | None:
    """The search with the form that the answer must have, and special tokens shown where tools are read from them."""
    if beam is None:
        return None
    skip = sampling.skip_special_tokens
    return evolve(beam, structured_outputs=sampling.structured_outputs, skip_special_tokens=skip)


async def beam_outputs(
    engine: EngineFace, ids: Sequence[int], params: BeamSearchParams, *, logprobs: bool, **options: Any
) -> AsyncIterator[Output]:
    """One output per beam, best first. options: of Engine.beam_search, the request's id among them."""
    found = await engine.beam_search(list(ids), params, **options)
    for index, beam in enumerate(found.sequences):
        tokens = tuple(beam.tokens[len(ids) :])
        yield Output(
            request_id="beam",
            index=index,
            text=beam.answer,
            token_ids=tokens,
            logprobs=tuple(beam.logprobs) if logprobs else None,
            finish_reason=FinishReason(beam.finish_reason),
            stop_reason=beam.stop_reason,
            usage=Usage(prompt_tokens=len(ids), completion_tokens=len(tokens)),
        )
