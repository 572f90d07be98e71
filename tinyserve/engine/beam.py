"""Beam search from one-token requests: the engine is asked what could come next, and the best continuations live on.

    step k:  each live beam --one-token request, 2 * width logprobs--> candidates
             a candidate that is an end token is complete; the best `width` of the others live

Twice the width, so that end tokens among the candidates cannot crowd out the live ones. Every beam's prompt is the
one before plus a token, so all but the last block of it is found in the prefix cache. Neither the scheduler nor the
runner knows that beams exist.

With a grammar, a beam's request tells how much of its prompt is answer already: its matcher walks that first. The
log-probabilities are then those among the tokens that the grammar allows. Where the model has no end token, a beam is
complete as soon as nothing may follow.

A search that is aborted ends with the beams that it has (searches.py).

Score = total log-probability / generated tokens ** length_penalty, the end token counted.

Before: intake.py, fanout.py, streams.py.  After: engine.py and llm.py (beam_search).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from attrs import evolve, frozen

from ..errors import EngineError
from ..request import BeamSearchParams, FinishReason, Logprob, Output, Request, SamplingParams
from ..text.detokenize import Detokenizer
from .intake import Call, Intake, Prepared
from .outputs import BeamSearchOutput, BeamSearchSequence
from .searches import Search
from .streams import Streams


class Front(Protocol):
    """What beam search needs of the engine."""

    intake: Intake
    streams: Streams
    tokenizer: Any
    machine: Any

    def admit(self) -> None:
        """Raises: Overloaded, EngineDead: nothing new is taken."""
        ...

    def outputs(self, prepared: Prepared) -> AsyncGenerator[Output, None]:
        """Queue a prepared call and yield its outputs."""
        ...


@frozen
class Beam:
    """A continuation. tokens: the new ones; logprob: their sum; entries: one dict of candidates per new token."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[Mapping[int, Logprob], ...] = ()
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        """Higher is better; see the module's docstring."""
        return self.logprob / len(self.tokens) ** length_penalty if self.tokens else 0.0

    def grown(self, token: int, logprob: float, entry: Mapping[int, Logprob], ended: bool) -> Beam:
        """This beam with one more token."""
        return Beam((*self.tokens, token), self.logprob + logprob, (*self.entries, entry), ended)


async def search(engine: Front, call: Call, params: BeamSearchParams) -> BeamSearchOutput:
    """The `beam_width` best answers to a prompt, best first.

    Raises: RequestError, Overloaded: before anything runs.
    """
    engine.admit()
    asked = SamplingParams(
        max_tokens=params.max_tokens,
        allowed_token_ids=params.allowed_token_ids,
        structured_outputs=params.structured_outputs,
    )
    prepared = await engine.intake.prepare(evolve(call, sampling=asked))
    engine.admit()  # much may have happened while a long text was tokenised
    wanted = prepared.requests[0].constraint
    held = contextlib.nullcontext() if wanted is None else engine.machine.grammars.held(wanted)
    with engine.streams.searches.running(prepared.name, params.beam_width) as search, held:
        beams = await _searched(engine, prepared.requests[0], params, search)
    if search.aborted and search.error is not None and not any(beam.tokens for beam in beams):
        raise search.error()
    cut = FinishReason.ABORT if search.aborted else FinishReason.LENGTH
    return BeamSearchOutput([_sequence(beam, prepared.requests[0], engine.tokenizer, params, cut) for beam in beams])


async def _searched(engine: Front, request: Request, params: BeamSearchParams, search: Search) -> list[Beam]:
    """The best beams, best first, when the search has come to its end."""
    size = engine.intake.rules.vocab_size
    one_token = SamplingParams(
        temperature=params.temperature,
        max_tokens=1,
        # raw log-probabilities do not know allowed_token_ids, so the allowed ones may be anywhere in the order
        logprobs=0 if params.allowed_token_ids else min(2 * params.beam_width, size),
        logprob_token_ids=params.allowed_token_ids,
        allowed_token_ids=params.allowed_token_ids,
        ignore_eos=True,
    )
    live, completed = [Beam()], []
    for _ in range(request.sampling.max_tokens or 0):
        entries = await _next_tokens(engine, request, live, one_token, search)
        if entries is None:
            break
        grown = [
            candidate
            for beam, entry in zip(live, entries, strict=True)
            for candidate in _candidates(beam, entry, request, params)
        ]
        grown = await _told(engine, request, grown, params)
        completed = _best([*completed, *(beam for beam in grown if beam.ended)], params)
        live = _best([beam for beam in grown if not beam.ended], params)
        if not live:
            break
    return _best([*completed, *live], params)


async def _told(engine: Front, request: Request, grown: list[Beam], params: BeamSearchParams) -> list[Beam]:
    """The beams, and of those that might live on which are complete: nothing may follow in their grammar.

    A model with end tokens is asked for one; one without has no other way to say it.
    """
    if not request.has_grammar or engine.machine.grammars.words.no_end is None:
        return grown
    grammars, found, live = engine.machine.grammars, [beam for beam in grown if beam.ended], 0
    for beam in sorted((beam for beam in grown if not beam.ended), key=lambda one: -one.score(params.length_penalty)):
        if live == params.beam_width:
            break
        tokens = (*request.prompt_ids, *beam.tokens)
        match = grammars.constrain(evolve(request, prompt_ids=tokens, answered=len(beam.tokens)))
        ended = await engine.intake.off_loop(lambda match=match: match.complete)
        found.append(evolve(beam, ended=ended))
        live += not ended
    return found


async def _next_tokens(
    engine: Front, request: Request, live: list[Beam], one_token: SamplingParams, search: Search
) -> list[Mapping[int, Logprob]] | None:
    """For each live beam, the candidates for its next token; None if the search was aborted before they were known.

    All beams are asked at once, so they share steps.
    """

    async def ask(beam: Beam) -> Mapping[int, Logprob] | None:
        if search.aborted:
            return None
        tokens = (*request.prompt_ids, *beam.tokens)
        async with aclosing(
            engine.outputs(engine.intake.beam_step(search.name, tokens, one_token, request))
        ) as outputs:
            async for output in outputs:
                if output.error is not None and not search.aborted:
                    raise output.error
                if output.logprobs:
                    return output.logprobs[0]
                if output.finish_reason is FinishReason.ABORT:
                    search.aborted = True
                    return None
        if not search.aborted:
            raise EngineError("The engine gave a beam no next token.")
        return None

    tasks = [asyncio.ensure_future(ask(beam)) for beam in live]
    try:
        found = await asyncio.gather(*tasks)
        return None if None in found else found
    finally:
        for task in tasks:
            task.cancel()


def _candidates(beam: Beam, entry: Mapping[int, Logprob], request: Request, params: BeamSearchParams) -> list[Beam]:
    """The beam with each of the 2 * width most likely next tokens behind it."""
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    endless = params.ignore_eos and not request.has_grammar  # which says itself when an answer is complete
    ends = frozenset() if endless else request.eos_ids | request.extra_eos_ids
    found = [(token, one.logprob) for token, one in entry.items() if allowed is None or token in allowed]
    found = sorted((pair for pair in found if pair[1] > float("-inf")), key=lambda pair: -pair[1])
    return [beam.grown(token, logprob, entry, token in ends) for token, logprob in found[: 2 * params.beam_width]]


def _best(beams: list[Beam], params: BeamSearchParams) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]


def _sequence(
    beam: Beam, request: Request, tokenizer: Any, params: BeamSearchParams, cut: FinishReason
) -> BeamSearchSequence:
    """The beam as it is returned. cut: why one without an end token ended."""
    skip = params.skip_special_tokens
    hidden = beam.ended and not params.include_stop_str_in_output
    hidden = hidden and beam.tokens[-1] in request.eos_ids | request.extra_eos_ids
    shown = beam.tokens[:-1] if hidden else beam.tokens
    detokenizer = Detokenizer(
        tokenizer, request.prompt_ids, skip_special_tokens=skip, spaces_between_special_tokens=True
    )
    return BeamSearchSequence(
        tokens=[*request.prompt_ids, *beam.tokens],
        logprobs=list(beam.entries),
        cum_logprob=beam.logprob,
        text=tokenizer.decode([*request.prompt_ids, *shown], skip_special_tokens=skip),
        answer=detokenizer.push(shown) + detokenizer.finish(),
        finish_reason="stop" if beam.ended else str(cut),
    )
