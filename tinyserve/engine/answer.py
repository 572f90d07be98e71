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

from attrs import define, evolve

from ..errors import EngineError
from ..request import FinishReason, Logprob, Output, Request, Usage
from ..scheduling.scheduler import Update
from ..text.detokenize import Detokenizer
from ..text.stop import StopFinder
from .backlog import Backlog, Held
from .flat import FlatLogprobs
from .logprobs import NamedPrompt, TokenTexts, matrix, named

READ_AT = 64  # tokens that may wait for their text: all at once cost less than one by one, but the loop waits for them


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
    Attributes: preemptions: how often it was sent back to the queue; known at its end, 0 if it is aborted.
    """

    def __init__(self, request: Request, name: str, index: int, tokenizer: Any, *, siblings: int = 1) -> None:
        params = request.sampling
        self.request = request
        self.name = name
        self.index = index
        self.siblings = siblings
        self.preemptions = 0
        self._timing = Timing(time.time() - (time.monotonic() - request.arrival), request.arrival)
        self._tokenizer = tokenizer
        self._produced = 0
        self._cached = 0
        self._detokenizer: Detokenizer | None = None
        self._stops: StopFinder | None = None
        self._texts: TokenTexts | None = None
        self._logprobs = params.logprobs
        self._asked = params.logprob_token_ids or ()
        self._held = Held()
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

    @property
    def held(self) -> int:
        """Tokens that the next output shows although they came before."""
        held = self._claimed()
        return len(held.ids) + len(held.unread)

    def has(self, tokens: int) -> bool:
        """Whether it holds so many, or some of which `shown` will say why they give no text."""
        held = self._claimed()
        return len(held.ids) + len(held.unread) >= tokens or held.error is not None

    @property
    def timing(self) -> Timing:
        """When things happened to it so far."""
        self._claimed()
        return self._timing

    @property
    def quiet(self) -> bool:
        """Whether a token more can wait until somebody looks: nothing but its id, and its text later, is asked for."""
        return self._stops is None and self._logprobs is None and self._timing.first_token_ts is not None

    def share(self, backlog: Backlog, place: int) -> float:
        """From now on find new tokens in `backlog`, number `place` of each step. Returns: when the last token came."""
        self._claimed().share(backlog, place)
        return self._timing.last_token_ts

    def leave(self) -> None:
        """What the backlog gets from now on is not this answer's."""
        self._claimed().backlog = None

    def hold(self, update: Update) -> bool:
        """Keep what `update` adds for the next output, when it only adds tokens; False: it must go through `advance`.

        An output a token would be made only to be joined with the others.
        """
        if (
            update.finish_reason is not None
            or update.error is not None
            or update.prompt_logprobs is not None
            or not self.quiet
            or self._claimed().error is not None
        ):
            return False
        self._note(update.token_ids, time.monotonic())
        if len(self._held.unread) >= READ_AT:
            self._all_held()
        return True

    def _note(self, ids: Sequence[int], now: float) -> None:
        self._held.unread += ids
        self._produced += len(ids)
        self._timing.count(len(ids), now)

    def _claimed(self) -> Held:
        """What is held, up to date; the text of some of it may still have to be made."""
        backlog = self._held.backlog
        if backlog is not None and (ids := self._held.claim()):
            self._note(ids, backlog.last)
        return self._held

    def _all_held(self) -> Held:
        """What is held, with its text."""
        held = self._claimed()
        if held.unread and held.error is None:
            ids, held.unread = held.unread, []
            held.ids += ids
            if self._detokenizer is not None:
                try:
                    held.texts.append(self._detokenizer.push(ids))
                except Exception as error:  # told by `advance`: who only looks must not be the one to fail
                    held.error = error
        return held

    def advance(self, update: Update) -> Output:
        """The piece of the answer that `update` adds.

        A stop string in it makes the output final although the update is not: the scheduler has to be told then.
        """
        if (error := self._all_held().error) is not None:
            raise error
        self._cached, self.preemptions = update.cached_tokens, update.preemptions
        self._timing.scheduled_ts = update.started
        reason, stop, ids = update.finish_reason, update.stop_reason, update.token_ids
        if update.error is not None or reason is FinishReason.ERROR:
            return self.ended(FinishReason.ERROR, update.error or EngineError("The request failed in the engine."))
        if self._stops is None:
            text = self._text(ids, reason)
        else:
            text, count, matched = self._text_to_stop(ids, reason)
            if matched is not None:
                reason, stop, ids = FinishReason.STOP, matched, ids[:count]
        self._produced += len(ids)
        self._timing.count(len(ids), time.monotonic())
        output = Output(
            request_id=self.name,
            index=self.index,
            text=self._with_held(text),
            token_ids=(*self._take_ids(), *ids) if self._held.ids else ids,
            logprobs=None if self._logprobs is None else self._named(update, len(ids)),
            finish_reason=reason,
            stop_reason=stop,
            usage=self._usage(),
            metrics=self._timing,
            pooled=update.pooled,
        )
        return output if update.prompt_logprobs is None else evolve(output, **self._prompt_reports(update))

    def ended(self, reason: FinishReason, error: Exception | None = None) -> Output:
        """The last output of an answer that is cut off from outside; text held back so far is dropped on an error."""
        self._all_held()
        text = self._rest()[0] if error is None else ""
        return Output(
            request_id=self.name,
            index=self.index,
            text=self._with_held(text),
            token_ids=self._take_ids(),
            finish_reason=reason,
            usage=self._usage(),
            error=error,
            metrics=self._timing,
        )

    def shown(self) -> Output:
        """What is held, as an output that ends nothing. Raises: why its text could not be made."""
        if (error := self._all_held().error) is not None:
            raise error
        text, ids, usage = self._with_held(""), self._take_ids(), self._usage()
        return Output(
            request_id=self.name, index=self.index, text=text, token_ids=ids, usage=usage, metrics=self._timing
        )

    def _with_held(self, text: str) -> str:
        if self._held.texts:
            text, self._held.texts = "".join([*self._held.texts, text]), []
        return text

    def _take_ids(self) -> tuple[int, ...]:
        held, self._held.ids = self._held.ids, []
        return tuple(held)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_ids), completion_tokens=self._produced, cached_tokens=self._cached
        )

    def _shown(self, ids: tuple[int, ...], reason: FinishReason | None) -> tuple[int, ...]:
        """Without the end token, if that is what ended the answer: it counts, but its text does not.

        A grammar may end with any token where the model has none that says so, and with one of the request's own stop
        tokens before min_tokens, when it has no other way on.
        """
        request, params = self.request, self.request.sampling
        if not ids or reason is not FinishReason.STOP or params.include_stop_str_in_output:
            return ids
        early = self._produced + len(ids) <= params.min_tokens
        ends = request.eos_ids | request.extra_eos_ids if early else request.end_ids
        return ids[:-1] if ids[-1] in ends else ids

    def _text(self, ids: tuple[int, ...], reason: FinishReason | None) -> str:
        """Text of new ids, where there are no stop strings."""
        if self._detokenizer is None:
            return ""
        if reason is None:
            return self._detokenizer.push(ids)
        return self._detokenizer.push(self._shown(ids, reason)) + self._rest()[0]

    def _text_to_stop(self, ids: tuple[int, ...], reason: FinishReason | None) -> tuple[str, int, str | None]:
        """Text that may go out, how many of the ids belong to the answer, and the stop string that ended it."""
        pieces: list[str] = []
        for number, token in enumerate(self._shown(ids, reason), start=1):
            armed = self._produced + number > self.request.sampling.min_tokens
            text, matched = self._stops.push(self._detokenizer.push((token,)), armed=armed)
            pieces.append(text)
            if matched is not None:
                return "".join(pieces), number, matched
        matched = None
        if reason is not None:
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

    def _named(self, update: Update, count: int) -> Sequence[Mapping[int, Logprob]]:
        entries = (named(record, self._texts, self._asked) for record in (update.logprobs or ())[:count])
        return self._collected(entries)

    def _prompt_reports(self, update: Update) -> dict[str, Any]:
        """What was asked about the prompt, as fields of an Output."""
        records, params = update.prompt_logprobs or (), self.request.sampling
        found: dict[str, Any] = {}
        if params.prompt_logprobs is not None:
            tokenizer = self._tokenizer if params.detokenize else None
            entries = NamedPrompt(records, self.request.prompt_ids, tokenizer)
            found["prompt_logprobs"] = FlatLogprobs.of(entries) if params.flat_logprobs else entries
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
