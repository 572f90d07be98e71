"""One answer while it is generated: ids of a step go in, a piece of the answer comes out.

    ids -> detokenizer -> stop strings -> text           logprob records -> dicts          counts -> usage

The scheduler ends an answer by ids and lengths. Only here is the text known, so only here can a stop string end it:
then everything after the token that completed it is dropped, and the scheduler is told by streams.py.

Before: text/detokenize.py, text/stop.py, logprobs.py.  After: streams.py, which holds one of these per running request.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define

from ..errors import EngineError
from ..request import FinishReason, Logprob, Output, Request, Usage
from ..scheduling.scheduler import Update
from ..text.detokenize import Detokenizer
from ..text.stop import StopFinder
from .flat import FlatLogprobs
from .logprobs import TokenTexts, matrix, named, named_prompt


@define
class Timing:
    """When things happened to one answer; vLLM's names. `_ts`: time.monotonic() seconds; arrival_time: wall clock."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_ts is None else self.first_token_ts - self.queued_ts

    def count(self, tokens: int, now: float) -> None:
        """Note that `tokens` tokens came at `now`."""
        if tokens:
            self.first_token_ts = now if self.first_token_ts is None else self.first_token_ts
            self.last_token_ts = now
            self.num_generation_tokens += tokens


class Answer:
    """Turns the updates of one request into outputs.

    Args:
        request: as the scheduler got it.   name: the request id that the caller knows.   index: which answer of n.
        tokenizer: text/tokenizer.Tokenizer.
        siblings: n.
    """

    def __init__(self, request: Request, name: str, index: int, tokenizer: Any, *, siblings: int = 1) -> None:
        params = request.sampling
        self.request = request
        self.name = name
        self.index = index
        self.siblings = siblings
        self.timing = Timing(time.time() - (time.monotonic() - request.arrival), request.arrival)
        self._tokenizer = tokenizer
        self._produced = 0
        self._cached = 0
        self._detokenizer: Detokenizer | None = None
        self._stops: StopFinder | None = None
        self._texts: TokenTexts | None = None
        self._asked = params.logprob_token_ids or ()
        if params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                request.prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.logprobs is not None:
                self._texts = TokenTexts(tokenizer, request.prompt_ids)
        if params.stop:
            self._stops = StopFinder(params.stop, include=params.include_stop_str_in_output)

    def advance(self, update: Update) -> Output:
        """The piece of the answer that `update` adds.

        A stop string in it makes the output final although the update is not: the scheduler has to be told then.
        """
        self._cached = update.cached_tokens
        self.timing.scheduled_ts = update.started
        now = time.monotonic()
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            return self.ended(FinishReason.ERROR, update.error or EngineError("The request failed in the engine."))
        text, count, matched = self._read(update)
        self._produced += count
        self.timing.count(count, now)
        return self._output(
            text=text,
            token_ids=update.token_ids[:count],
            logprobs=self._logprobs(update, count),
            **self._prompt_reports(update),
            finish_reason=update.finish_reason if matched is None else FinishReason.STOP,
            stop_reason=update.stop_reason if matched is None else matched,
        )

    def ended(self, reason: FinishReason, error: Exception | None = None) -> Output:
        """The last output of an answer that is cut off from outside; text held back so far is dropped on an error."""
        text = self._rest()[0] if error is None else ""
        return self._output(text=text, finish_reason=reason, error=error)

    def _output(self, **parts: Any) -> Output:
        usage = Usage(
            prompt_tokens=len(self.request.prompt_ids), completion_tokens=self._produced, cached_tokens=self._cached
        )
        return Output(request_id=self.name, index=self.index, usage=usage, metrics=self.timing, **parts)

    def _read(self, update: Update) -> tuple[str, int, str | None]:
        """Text that may go out, how many of the ids belong to the answer, and the stop string that ended it."""
        ids = update.token_ids
        if self._detokenizer is None:
            return "", len(ids), None
        params = self.request.sampling
        ended_by_token = update.finish_reason is FinishReason.STOP
        pieces: list[str] = []
        for number, token in enumerate(ids, start=1):
            if ended_by_token and number == len(ids) and not params.include_stop_str_in_output:
                break  # the end token counts, its text does not
            text = self._detokenizer.push((token,))
            if self._stops is not None:
                text, matched = self._stops.push(text, armed=self._produced + number > params.min_tokens)
                if matched is not None:
                    pieces.append(text)
                    return "".join(pieces), number, matched
            pieces.append(text)
        matched = None
        if update.finish_reason is not None:
            text, matched = self._rest()
            pieces.append(text)
        return "".join(pieces), len(ids), matched

    def _rest(self) -> tuple[str, str | None]:
        """What was held back: the beginning of a character, or of a stop string that did not come."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.finish()
        if self._stops is None:
            return text, None
        text, matched = self._stops.push(text)
        return (text, matched) if matched is not None else (text + self._stops.finish(), None)

    def _logprobs(self, update: Update, count: int) -> Sequence[Mapping[int, Logprob]] | None:
        if self.request.sampling.logprobs is None:
            return None
        entries = (named(record, self._texts, self._asked) for record in (update.logprobs or ())[:count])
        return self._collected(entries)

    def _prompt_reports(self, update: Update) -> dict[str, Any]:
        """What was asked about the prompt, as fields of an Output."""
        records, params = update.prompt_logprobs, self.request.sampling
        if records is None:
            return {}
        found: dict[str, Any] = {}
        if params.prompt_logprobs is not None:
            tokenizer = self._tokenizer if params.detokenize else None
            found["prompt_logprobs"] = self._collected(named_prompt(records, self.request.prompt_ids, tokenizer))
        if params.prompt_logprob_token_ids is not None:
            found["prompt_token_id_logprobs"] = matrix(records, params.prompt_logprob_start or 0)
        return found

    def _collected(self, entries: Iterable[Mapping[int, Logprob] | None]) -> Sequence[Any]:
        return FlatLogprobs.of(entries) if self.request.sampling.flat_logprobs else tuple(entries)


def _joined(parts: Sequence[Sequence[Mapping[int, Logprob]]]) -> Sequence[Mapping[int, Logprob]]:
    if not isinstance(parts[0], FlatLogprobs):
        return tuple(itertools.chain.from_iterable(parts))
    whole = FlatLogprobs()
    for part in parts:
        whole.extend(part)
    return whole


def merged(outputs: Sequence[Output]) -> Output:
    """Several consecutive outputs of one answer as one: texts and ids joined, the rest from the last that has it."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    entries = [output.logprobs for output in outputs if output.logprobs is not None]
    first = next((o for o in outputs if o.prompt_logprobs or o.prompt_token_id_logprobs), last)
    return Output(
        request_id=last.request_id,
        index=last.index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=_joined(entries) if entries else None,
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_id_logprobs=first.prompt_token_id_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        error=last.error,
        metrics=last.metrics,
    )
