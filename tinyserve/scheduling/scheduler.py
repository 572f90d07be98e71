"""Plan the next step, and book what a step gave: the two halves of every token.

`plan` gives each running sequence its share of one token budget, in order, then admits waiting ones with what is left.
It may run again before the step it planned has landed; a token that the host does not know yet is just a position.
`commit` takes the results in the order of the plans: it moves counters, appends tokens, ends sequences. What a flight
gave for a sequence that ended meanwhile is dropped there, and nowhere else.

    plan ->  [ decode  decode  chunk of a long prompt ......  |  new prompt ...... ]    max_num_batched_tokens
               running, in order                                 waiting, until one does not fit

Before: sequence.py, queue.py, budget.py, preempt.py, kv/cache.py.  After: engine/engine.py, runner/runner.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from itertools import chain, islice
from typing import Any

from ..errors import ConfigError, ContextLengthExceeded, NumericsError, RequestError
from ..grammar.matcher import Constraint, unconstrained
from ..kv.cache import Admission, KVCache
from ..lora.adapters import Adapters, NoAdapters
from ..request import FinishReason, Request
from ..speculative.drafter import Drafter, NoDrafts
from ..step import RowParams, SeqSlice, SliceOutput, SlotOpening, StepInput, StepOutput, TokenLogprobs, Tokens
from .budget import ANY, Crowd, Flown, Options, StepDraft
from .convoy import Grown, book_apart
from .preempt import Tenants
from .queue import WaitingQueue, refuse_overload
from .sequence import Sequence, State
from .update import SchedulerStats, SequenceFacts, Update, nothing_to_choose


class Scheduler:
    """Decides each step. Not thread-safe: all calls come from the engine's loop.

    Args:
        options: see budget.Options.
        cache: the block tables; one maximum-length sequence should fit, else longer ones are refused or cut short.
        max_model_len: prompt and output tokens of one sequence.
        slots: rows of the device, at least 1; default max_num_seqs. One that ended keeps its row while flights use it.
        constrain: gives a request's Constraint, or raises RequestError.
        make_masks: gives the masks of (slot, constraint) rows; they begin when the tokens before them are known.
    Raises: ConfigError: a long prompt could never be computed without chunks.
    """

    def __init__(
        self,
        options: Options,
        cache: KVCache,
        *,
        max_model_len: int,
        slots: int | None = None,
        drafter: Drafter | None = None,
        adapters: Adapters | None = None,
        constrain: Callable[[Request], Constraint] = unconstrained,
        make_masks: Callable[[list[tuple[int, Constraint]]], Any] | None = None,
    ) -> None:
        if not options.enable_chunked_prefill and options.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"Without chunked prefill --max-num-batched-tokens ({options.max_num_batched_tokens}) must be at least "
                f"the context ({max_model_len}); raise it or enable chunked prefill."
            )
        by_priority = options.scheduling_policy == "priority"
        self._options = options
        self._cache = cache
        self._limit = min(max_model_len, cache.longest(options.max_num_batched_tokens) + 1)
        self._drafter = drafter or NoDrafts()
        self._adapters = adapters or NoAdapters()
        self._constrain = constrain
        self._make_masks = make_masks
        self._waiting = WaitingQueue(by_priority)
        self._tenants = Tenants(cache, self._waiting, slots or options.max_num_seqs, by_priority)
        self._sequences: dict[str, Sequence] = {}  # those that have not ended, by request id
        self._flights: deque[Flown] = deque()
        self._steps = self._prefix_queries = self._prefix_hits = self._numerics_errors = 0

    @property
    def max_length(self) -> int:
        """Prompt and output tokens that one sequence can have: max_model_len, or what the pool can hold."""
        return self._limit

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a flight has not been committed."""
        return bool(self._sequences or self._flights)

    @property
    def num_running(self) -> int:
        return len(self._tenants.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            deferred=min(self._waiting.passed, self.num_waiting),
            kv_usage=self._cache.usage,
            preemptions=self._tenants.preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            numerics_errors=self._numerics_errors,
        )

    def listing(self, most: int) -> list[SequenceFacts]:
        """The first `most` sequences that run or wait, in their order."""
        self._tenants.break_up()
        return [seq.facts() for seq in islice(chain(self._tenants.running, self._waiting), most)]

    def progress(self, request_id: str) -> tuple[int, int, int] | None:
        """See Sequence.progress; None when it has ended, too."""
        seq = self._sequences.get(request_id)
        if seq is not None and seq.state is State.RUNNING:  # hundreds that wait may be asked for again and again
            self._tenants.break_up()
        return seq and seq.progress()

    def add(self, request: Request) -> None:
        """Queue a request.

        A request whose max_tokens exceeds the room left (context, or the pool if that is smaller) ends as LENGTH there.

        Raises:
            ContextLengthExceeded: prompt + 1 token can never fit.   UnknownModel: adapters are off.
            RequestError: the id is in use, or something asked is not available.   Overloaded: the queue is full.
        """
        length = len(request.prompt_ids)
        if request.id in self._sequences:
            raise RequestError(f"A request with the id {request.id!r} is already running.", param="request_id")
        if length >= self._limit:
            raise ContextLengthExceeded(length, self._limit)
        kv = self._cache.sequence(request, self._adapters.identity(request.adapter))
        constraint = self._constrain(request)
        refuse_overload(self._waiting, self._options, self.num_running, request)
        seq = self._sequences[request.id] = Sequence(request, kv, constraint, self._limit)
        self._waiting.push(seq)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside, in any state (abort; a stop string seen by the front); unknown ids are ignored.

        No Update follows. Tokens still in flight for it are dropped; blocks come back once no flight uses them.
        """
        if (seq := self._sequences.get(request_id)) is not None:
            self._end(seq)

    def plan(self, crowd: Crowd = ANY) -> StepInput | None:
        """The next step, or None when nothing can be launched now: no work, or all of it waits for flights."""
        if self._flights and self._flights[-1].late:
            return None  # it is launched up to the choice of its tokens; nothing may be launched behind that
        convoy = self._tenants.convoy
        if convoy is not None and self._nobody_enters():
            edits = convoy.advance()
            if edits is not None:
                return self._takes_off(convoy.sequences, convoy.slices(), convoy, convoy.masked, edits=tuple(edits))
        self._tenants.break_up()
        options = self._options
        cap = options.long_prefill_token_threshold if len(self._sequences) > 1 else 0
        step = StepDraft(options.max_num_batched_tokens, cap, crowd if options.enable_chunked_prefill else ANY)
        if self._continue_running(step):
            self._admit_waiting(step)
        if not step.slices:
            return None
        convoy = self._tenants.set_off(step.sequences) if step.plain and isinstance(self._drafter, NoDrafts) else None
        slices = tuple(step.slices) if convoy is None else convoy.slices()
        parts = {"opened": tuple(step.opened), "edits": tuple(step.edits), "moves": self._adapters.moves()}
        return self._takes_off(step.sequences, slices, convoy, step.masked, **parts)

    def _nobody_enters(self) -> bool:
        """Whether no waiting request can be admitted now."""
        tenants = self._tenants
        full = len(tenants.running) >= self._options.max_num_seqs or not tenants.rows.num_free
        return full or not self._waiting

    def _takes_off(self, sequences: list[Sequence], slices: Any, convoy: Any, masked: Any, **parts: Any) -> StepInput:
        masks = self._make_masks(masked) if masked else None
        if masks is not None and not self._flights:
            masks.begin()
        self._steps += 1
        self._flights.append(Flown(self._steps, sequences, slices, masks, convoy))
        parts["closed"] = self._tenants.rows.take_closed()
        return StepInput(step_id=self._steps, slices=slices, masks=masks, **parts)

    def commit(self, output: StepOutput) -> Several[Update]:
        """Book the results of the oldest flight; the updates of sequences that got a token or ended."""
        flown = self._flights.popleft()
        if flown.step_id != output.step_id:
            raise RuntimeError(f"step {output.step_id} was committed, but step {flown.step_id} is the oldest in flight")
        updates = self._land(flown, output)
        if self._flights and self._flights[0].late:
            self._flights[0].masks.begin(waited=True)  # all tokens before it are known now
        return updates

    def _land(self, flown: Flown, output: StepOutput) -> Several[Update]:
        if flown.convoy is not None:
            given = Tokens.of(output.slices)
            free = given is not None and flown.convoy.follow(given.tokens)
            if flown.convoy is self._tenants.convoy:
                if free and flown.convoy.land(given.tokens):
                    return Grown(flown.convoy, given.tokens)
                self._tenants.break_up()
            if given is not None:
                told = self._report, self._fail, self._tenants.landed
                return book_apart(flown.convoy, flown.slices, given.tokens, *told)
        updates = []
        for seq, piece, given in zip(flown.sequences, flown.slices, output.slices, strict=True):
            seq.flights -= 1
            seq.in_flight -= piece.samples
            if seq.state is State.FINISHED:
                self._book_late(seq, piece, given)
            elif given.bad:
                updates.append(self._fail(seq))
            elif (update := self._book(seq, piece, given)) is not None:
                updates.append(update)
            if not seq.flights and seq.state is not State.RUNNING:
                self._tenants.landed(seq)
        return updates

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes; False while sequences hold blocks (preempted ones do until flights land)."""
        if preempt_running:
            while len(self._tenants.running):
                self._tenants.preempt(self._tenants.running.victim())
        return self._cache.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that counters, queues, rows, tables and pool agree. For tests, and when idle."""
        running, waiting = set(self._tenants.running), set(self._waiting)
        convoy = self._tenants.convoy
        for seq in running | waiting if convoy is None else waiting:
            seq.check_integrity()
        if convoy is not None:
            convoy.check_integrity(self._tenants.running)
        assert running | waiting == set(self._sequences.values()) and not running & waiting
        assert all(seq.slot is not None for seq in running)
        assert all(seq.slot is None or seq.flights for seq in waiting)
        if not self.has_work:
            assert self._cache.num_free == self._cache.num_blocks, "an idle cache has blocks in use"
            assert not self._tenants.returning and not self._tenants.preempted
        self._cache.check_integrity()

    def _continue_running(self, step: StepDraft) -> bool:
        """Give each running sequence its share; False when one was short of blocks: nobody is admitted then."""
        running, extend = self._tenants.running, self._cache.extend
        enough, index = True, 0
        while index < len(running) and step.left > 0:
            seq = running[index]
            index += 1
            if (count := seq.to_compute()) <= 0:
                continue
            drafts = ()
            if count > 1:
                if not (count := min(count, step.room())):
                    continue
            elif not seq.in_flight:
                room = min(step.left, seq.ends.limit - len(seq.tokens)) - 1
                drafts = self._drafter.propose(seq.tokens, room)
                count += len(drafts)
            end = seq.scheduled + count
            if extend(seq.kv, seq.tokens, seq.computed, end):
                step.add(seq, count, drafts)
                continue
            enough = False
            if self._tenants.make_room(seq, end):
                step.add(seq, count, drafts)
        return enough

    def _admit_waiting(self, step: StepDraft) -> None:
        """Start waiting requests in order until budget, rows or blocks end.

        Passed, but not moved: those whose grammar is not compiled or whose adapter has no place now, and those whose
        beginning is being computed for another (n answers to one prompt compute it once).
        """
        waiting, tenants, options = self._waiting, self._tenants, self._options
        index, turn = 0, self._adapters.turn(self._active, options.max_num_seqs)
        while index < len(waiting) and step.room() > 0:
            seq = waiting[index]
            if len(tenants.running) >= options.max_num_seqs or not tenants.rows.num_free or seq.slot is not None:
                break
            if not turn.fits(seq.request) or not seq.constraint.ready:
                index += 1
                continue
            if (admission := self._admit(seq, step)) is None:
                break
            if admission.count:
                turn.entered(seq.request)
            index += not admission.count
        waiting.passed = index

    def _active(self) -> Iterator[Any]:  # the adapters of what runs, None for the base model
        return (seq.request.adapter for seq in self._tenants.running)

    def _admit(self, seq: Sequence, step: StepDraft) -> Admission | None:
        """Reserve, open a row and plan the first chunk; None when the cache or the budget has no room for it."""
        options = self._options
        whole = not options.enable_chunked_prefill
        admission = self._cache.admit(
            seq.kv,
            seq.tokens,
            step.left if whole else step.room(),
            whole=whole,
            gate=options.max_num_batched_tokens if options.scheduler_reserve_full_isl else 0,
            spare=int(options.watermark * self._cache.num_blocks) if len(self._tenants.running) else 0,
            reads=seq.reads_cache,
        )
        if admission is None or not admission.count:
            return admission
        if seq.cached is None:
            seq.cached = admission.cached
            seq.started = time.monotonic()
            self._prefix_queries += len(seq.tokens)
            self._prefix_hits += admission.cached
        self._waiting.remove(seq)
        self._tenants.enter(seq)
        seq.computed = seq.scheduled = admission.cached
        prompt_len, place = len(seq.request.prompt_ids), self._adapters.place(seq.request.adapter, self._active())
        params = RowParams.of(seq.request, place)
        step.opened.append(SlotOpening(seq.slot, prompt_len, tuple(seq.tokens), params))
        step.add(seq, admission.count)
        return admission

    def _book(self, seq: Sequence, piece: SeqSlice, given: SliceOutput) -> Update | None:
        """Move the counters over a landed slice and take its tokens, up to one that ends the sequence."""
        if given.prompt_logprobs and seq.prompt_logprobs is not None:
            end = min(piece.end + 1, len(seq.prompt_logprobs))  # of the tokens that the slice's positions predict
            seq.prompt_logprobs[end - len(given.prompt_logprobs) : end] = given.prompt_logprobs
        if not piece.samples:
            seq.computed = piece.end
            return None
        new = given.tokens
        if piece.drafts:
            seq.computed = seq.scheduled = piece.end - len(piece.drafts) + len(new) - 1  # the rejected are written over
        else:
            seq.computed = piece.end
        ended, tokens, check, constraint = None, seq.tokens, seq.ends.check, seq.constraint
        for count, token in enumerate(new, 1):
            tokens.append(token)
            constraint.advance(token)
            if constraint.error is not None:
                return self._fail(seq, constraint.error)
            ended = check(token, len(tokens))
            if constraint.ended and (ended is None or ended[0] is not FinishReason.STOP):
                ended = seq.ends.complete(token, len(tokens))
            if ended is not None:
                new = new[:count]
                seq.computed = min(seq.computed, len(tokens))  # accepted drafts after the end are not its tokens
                break
        update = self._report(seq, new, given.logprobs, ended)
        return update if given.pooled is None else update._replace(pooled=given.pooled)

    def _report(
        self,
        seq: Sequence,
        new: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        ended: tuple[FinishReason, int | str | None] | None,
    ) -> Update:
        """The update for new tokens; ends the sequence when they did."""
        request, prompt_logprobs = seq.request, seq.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs, seq.prompt_logprobs = tuple(prompt_logprobs), None
        if logprobs is not None:
            logprobs = logprobs[: len(new)]
        reason, stop, preempted = None, None, 0
        if ended is not None:
            (reason, stop), preempted = ended, self._end(seq)
            if request.sampling.max_tokens == 0:  # one token was sampled because a prompt cannot be computed without
                new, logprobs, reason, stop = (), None, FinishReason.LENGTH, None
        more = seq.cached, None, seq.started, None, preempted
        return Update(request.id, new, logprobs, prompt_logprobs, reason, stop, *more)

    def _book_late(self, seq: Sequence, piece: SeqSlice, given: SliceOutput) -> None:
        """A slice of a sequence that has ended: its tokens are dropped, its positions may still serve as a prefix."""
        if given.bad:
            self._cache.distrust(seq.kv)
        elif not piece.drafts:
            seq.computed = max(seq.computed, min(piece.end, len(seq.tokens)))

    def _fail(self, seq: Sequence, error: Exception | None = None) -> Update:
        """End a sequence by an error; None: its logits were not numbers, so its blocks do not become a prefix."""
        if error is None:
            self._cache.distrust(seq.kv)
            error = nothing_to_choose(seq.request, len(seq.tokens) - len(seq.request.prompt_ids) + 1)
            self._numerics_errors += isinstance(error, NumericsError)
        more = seq.cached, error, seq.started, None, self._end(seq)
        return Update(seq.request.id, (), None, None, FinishReason.ERROR, None, *more)

    def _end(self, seq: Sequence) -> int:  # how often it was preempted
        del self._sequences[seq.request.id]
        if seq.state is State.RUNNING:
            self._tenants.leave(seq, State.FINISHED)
        else:
            self._waiting.remove(seq)
            seq.state = State.FINISHED
        return self._tenants.preempted.pop(seq, 0)
