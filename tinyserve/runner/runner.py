"""The runner launches steps: rows updated, model run, token chosen, result sent home.

    launch:   integers -> the host's ring -> [ fetch, gather -> model.forward -> logits -> choose -> keep ]
                                             '---------------------- graphs.run -------------------------'
    landing:  tokens in the host's ring -> StepOutput

On a GPU a step that is replayed as a graph is launched on the event loop's thread, which takes a fraction of a
millisecond; a large one by a thread of its own (hands.py). Another thread sleeps until the device is done and builds
the StepOutput. On the CPU there is no queue to hide behind, so the whole step runs on that thread, and a decode
repeats the one before where it can (steady.py). The loop keeps serving meanwhile; steps run and land in launch order.

What few rows ask for (log-probabilities, edits of logits) is launched after the graph, over the logits that it left.

Before: runner/batch.py, models/decoder.py, sampling/sampler.py.  After: engine/engine.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from attrs import frozen

from ..device import Device
from ..errors import EngineDead
from ..kernels.keep_tokens import keep_tokens
from ..lora.batch import DeviceAdapters, NoDeviceAdapters
from ..sampling.logprobs import TokenReports
from ..sampling.sampler import GrammarMask, Sampler
from ..step import Decodes, SeqSlice, StepInput, StepOutput
from .batch import Batch, BatchBuilder, Shape, Views
from .flight import WATCHED_ROWS, Flight, Patience, Watch, pass_on
from .graphs import Computed, Eager, Graphs
from .hands import Hands, by_graph, done
from .held import HeldChoice
from .pooled import pooled, wanted
from .queued import Begun, Forward, Launched, land
from .scored import score_all, scored
from .slots import Differences, Rows
from .steady import Steady
from .workers import Workers

_log = logging.getLogger(__name__)


class Model(Protocol):
    """What the runner needs of a model; models/decoder.py has it, and so have the scripted models of the tests."""

    vocab_size: int

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, V]."""
        ...


@frozen(kw_only=True)
class Limits:
    """The largest step and the number of rows that a runner is built for. words: of 32 tokens, in a grammar's mask."""

    rows: int
    max_seqs: int
    max_tokens: int
    max_model_len: int
    block_size: int
    groups: int
    depth: int = 1
    words: int = 0


class Runner:
    """Runs steps for one model on one device.

    Args:
        model: bound to its KV storage.   sampler: with as many rows as `limits.rows`.
        limits: see there.   device: where model and sampler are.
        graphs: how a step's computation is run; kernel by kernel unless given.   adapters: of the model, if it has any.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        limits: Limits,
        device: Device,
        graphs: Graphs | None = None,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.device = device
        self.adapters = adapters or NoDeviceAdapters()
        self.limits = limits
        self.rows = Rows(limits.rows, limits.max_model_len, limits.groups, limits.block_size, device.torch)
        steady = Steady(self.rows.tokens.numpy(), limits.block_size) if device.is_cpu else Eager()
        self.graphs: Graphs = graphs or steady
        ring, tokens, seqs = limits.depth + 1, limits.max_tokens, limits.max_seqs
        for shape in self.graphs.shapes():  # room for padding
            tokens, seqs = max(tokens, shape.tokens), max(seqs, shape.seqs)
        self.adapters.reserve(tokens)
        self.batches = BatchBuilder(self.rows, sampler.table, tokens, seqs, device, ring)
        self._events = [device.event() for _ in range(ring + 1)]  # the last: of a forward whose tokens are chosen later
        self._worker = Workers("tinyserve-step")
        self._hands = Hands(self._worker if device.is_cpu else None)
        self._held = HeldChoice(sampler, self.graphs, limits.words, device)
        self._before: Begun | None = None  # the step before, if all of it was a graph's
        self._patience = Patience()
        self._closed = False

    def launch(self, step: StepInput) -> Flight:
        """Start a step; its Flight resolves to the StepOutput. Steps take effect in the order of these calls."""
        if self._closed:
            raise EngineDead("The runner is closed.")
        if step.masks is not None and not step.masks.begun:
            return self._launch_early(step)
        if self._hands.everything:
            return Flight(step.step_id, self._hands.do(False, self._run, step))
        if step.masks is None and self._hands.free and self._repeats(step):
            launched = self._repeat(step)
        else:
            quick = step.masks is None and self._is_quick(step)
            launched = self._hands.do(quick, self._enqueue, step)
        return Flight(step.step_id, self._worker.submit(land, launched))

    def _run(self, step: StepInput) -> StepOutput:
        """All of a step, on the thread that does everything."""
        repeats = step.masks is None and self._repeats(step) and self.graphs.holds(self._before.forward.shape)
        return land(self._on_device(self._repeat, step) if repeats else self._enqueue(step))

    def _launch_early(self, step: StepInput) -> Flight:
        """Queue the forward now, and the rest once its masks are known; nothing is planned behind such a step."""
        flight = Flight(step.step_id, Future())
        repeats = not self._hands.everything and self._hands.free and self._repeats(step)
        early = repeats or self._is_quick(step)
        begun = self._replay(step) if repeats else self._hands.do(early, self._on_device, self._begin, step)
        if noted := early and isinstance(begun, Begun):
            self._events[-1].record(begun.stream)

        def choose() -> None:  # who waits for the masks is not quick, nor is what reports on prompts
            quick = early and step.masks.there and isinstance(step.slices, Decodes)
            if noted:
                flight.starved = self._events[-1].query()
                step.masks.launched(flight.starved)
            self._bring_home(self._hands.do(quick, self._on_device, self._finish, begun), flight)

        step.masks.when_begun(choose)
        return flight

    def _bring_home(self, launched: Launched | Future[Launched], flight: Flight) -> None:
        """Let the loop itself land the flight, if it may come soon; else a thread."""

        def leave() -> None:
            landing = self._worker.submit(land, launched)
            landing.add_done_callback(lambda done: pass_on(done, flight.landing))

        many = isinstance(launched, Launched) and launched.reports is None and len(launched.order) >= WATCHED_ROWS
        if many and self._patience.lasts():
            flight.watch = Watch(launched.event.query, lambda: land(launched), leave, self._patience)
        else:
            leave()

    def _is_quick(self, step: StepInput) -> bool:
        """Whether a step is launched in less than a millisecond: on a GPU, by a graph, and no adapter is copied."""
        return not (self.device.is_cpu or step.moves) and by_graph(step, self.graphs, self.rows, self.sampler)

    def launch_aside(self) -> None:
        """From now on a thread of its own launches on a GPU what takes long, and records graphs."""
        self._hands.start()

    def improve(self) -> bool:
        """Record one more graph, if one is wanted; for when there is nothing to do. Returns whether it did."""
        shape = None if self._closed else self.graphs.next()
        if shape is not None:
            self.record(shape)
        return shape is not None

    def close(self) -> None:
        """Wait for the steps under way, then free the device's memory. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._hands.close()
        self._before = None
        self._worker.close()
        with contextlib.suppress(RuntimeError):  # a device that failed has nothing under way
            self.device.synchronize()  # a flight that was watched may not have landed
        self.graphs.close()
        self.adapters.close()
        del self.model, self.sampler, self.rows, self.batches, self.adapters, self._held
        self.device.release_unused()

    def record(self, shape: Shape) -> None:
        """Make the graph of a shape, over sequences of padding. No step may be under way.

        If it cannot be made (no memory, or a model that waits for the device inside a step), no more are tried."""
        done(self._hands.do(False, self._on_device, self._record, shape))

    def _record(self, shape: Shape) -> None:
        batch = self._padding(shape)
        choose = self._held.choice(batch.views, self._keep) if shape.is_decode else None
        try:
            self.graphs.record(shape, lambda: self._compute(batch, filters=True), choose)
        except RuntimeError as error:
            _log.warning("no more device graphs, so steps without one run slower: %s: %s", shape, error)
            self.graphs.give_up()
        self.batches.follow()

    def try_shape(self, shape: Shape) -> None:
        """Launch what the graph of a shape would."""
        self._on_device(lambda: self._compute(self._padding(shape), filters=True))

    def _padding(self, shape: Shape) -> Batch:
        views = self.batches.send((), shape)
        longest = self.limits.max_model_len
        return self.batches.batch(views, max(shape.tokens - shape.decodes, 1), longest, longest)

    def _on_device(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call what launches kernels."""
        with torch.inference_mode(), self.device.use():
            return work(*args)

    def _enqueue(self, step: StepInput) -> Launched:
        """Queue all kernels of a step and the copies of its results (on the CPU: run them)."""
        return self._on_device(lambda: self._finish(self._begin(step)))

    def _repeats(self, step: StepInput) -> bool:
        """Whether a step differs from the one before only in positions, and that one is replayed from end to end."""
        before, slices = self._before, step.slices
        same = before is not None and isinstance(slices, Decodes) and slices.slots is before.forward.slots
        same = same and before.forward.again == (step.masks is not None)
        return same and not (step.opened or step.closed or step.edits or step.moves)

    def _replay(self, step: StepInput) -> Begun:
        """Queue the forward of such a step: nothing has to be found out, and no tensor is touched from here."""
        before, started = self._before, time.perf_counter()
        self.batches.resend(step.slices, before.forward.shape)
        self.graphs.replay(before.forward.shape)
        return Begun(step, before.order, before.forward, started, before.stream)

    def _repeat(self, step: StepInput) -> Launched:
        """Queue such a step, whose tokens its graph chooses."""
        begun, event = self._replay(step), self._events[self.batches.slot]
        event.record(begun.stream)
        return self._chosen(begun, event)

    def _chosen(self, begun: Begun, event: Any) -> Launched:
        """A step of a graph that is queued as a whole, with a token for each of its sequences and nothing else."""
        result = self.batches.given(begun.forward.shape.seqs)
        return Launched(begun.step, begun.order, begun.order, result, None, {}, {}, event, begun.started)

    def _begin(self, step: StepInput) -> Begun:
        """Queue what does not depend on grammars."""
        started = time.perf_counter()
        differences = self._take(step)
        order, forward = self.batches.order(step), None
        if order:
            slices = step.slices
            pieces = slices if isinstance(slices, Decodes) else [slices[i] for i in order]
            forward = self._forward(pieces, differences, masked=step.masks is not None)
        else:
            self.rows.write(differences)
        return Begun(step, order, forward, started, self.device.current_stream())

    def _finish(self, begun: Begun | Future[Begun]) -> Launched:
        """Queue the choice of tokens as far as the forward has not made it, and what brings results home."""
        begun = done(begun)
        step, order, forward = begun.step, begun.order, begun.forward
        held = forward is not None and forward.again and self._held.replay(step.masks, forward.slots, forward.shape)
        whole = forward is not None and isinstance(step.slices, Decodes) and (held or not forward.again)
        self._before = begun if whole and self.graphs.holds(forward.shape) else None
        event = self.device.event() if forward is None else self._events[self.batches.slot]
        if held and whole:
            event.record(begun.stream)
            return self._chosen(begun, event)
        places, result, reports, scores, pools = order, None, None, {}, {}
        if forward is not None:
            places, result, reports = self._choose(forward, step.masks, chosen=held or not forward.again)
            pieces, hidden = forward.pieces, forward.computed.hidden
            scores = score_all(hidden, pieces, order, self.rows, self.model, self.sampler)
            if which := wanted(pieces, self.rows.pooled):
                pools = {order[i]: vector for i, vector in pooled(hidden, pieces, which).items()}
        event.record(begun.stream)
        return Launched(step, order, places, result, reports, scores, pools, event, begun.started)

    def _take(self, step: StepInput) -> Differences | None:
        """Book rows that close and open, with the sampler too; what the rows on the device must be told."""
        for slot in step.closed:
            self.sampler.close(slot)
        for opening in step.opened:
            self.sampler.open(opening.slot, opening.prompt_len, opening.params)
        self.sampler.flush()
        self.adapters.apply(step.moves)
        return self.rows.take(step)

    def _forward(self, pieces: Sequence[SeqSlice], differences: Differences | None, *, masked: bool) -> Forward:
        """Queue the forward, and the choice of tokens where that is all that the rows ask for."""
        slots = pieces.slots if isinstance(pieces, Decodes) else tuple([piece.slot for piece in pieces])
        asks = self.sampler.asks(slots)
        own = Shape.of(pieces, adapted=bool(self.rows.adapted) and not self.rows.adapted.isdisjoint(slots))
        sampled = isinstance(pieces, Decodes) or any(piece.samples for piece in pieces)
        whole = not own.is_decode and bool(scored(pieces, self.rows) or wanted(pieces, self.rows.pooled))
        shape = own if whole or (asks.more and not own.is_decode) else self.graphs.fit(own)
        views = self.batches.send(pieces, shape, differences, slots)
        again = sampled and (asks.more or masked)  # the choice of a graph is not enough

        batch: Batch | None = None

        def compute(*, further: bool = False) -> Computed:
            nonlocal batch
            if further:
                return self._further(batch, asks.filters)
            longest = max(piece.end for piece in pieces)
            cached = max((piece.start for piece in pieces if piece.count > 1), default=0)
            batch = self.batches.batch(views, max(piece.count for piece in pieces), longest, cached)
            return self._compute(batch, filters=asks.filters, sampled=sampled, chosen=not again, whole=whole)

        computed = self.graphs.run(views, compute)
        return Forward(pieces, slots, own, shape, views, computed, sampled, again)

    def _choose(
        self, forward: Forward, masks: Any, *, chosen: bool
    ) -> tuple[Sequence[int], memoryview | None, TokenReports | None]:
        """Choose tokens if that is not done; the places of sequences in the result, the result, and reports."""
        own, shape, slots, views = forward.exact, forward.shape, forward.slots, forward.views
        reports, places = None, range(len(forward.pieces))
        if shape != own and not own.is_decode:
            places = [shape.place(i, own.decodes) for i in places]
            if not chosen:
                self._held.launch(masks, dict(zip(slots, places, strict=True)), forward.computed, views, self._keep)
        elif not chosen:
            views = self.batches.views(own)
            grammar = None if masks is None else GrammarMask.of(masks.result(), masks.slots, slots, self.device.torch)
            reports = self._sample(forward.computed, slots, views, grammar)
        return places, self.batches.given(views.shape.seqs) if forward.sampled else None, reports

    def _compute(
        self, batch: Batch, *, filters: bool, sampled: bool = True, chosen: bool = True, whole: bool = False
    ) -> Computed:
        """Gather, forward, logits, the chosen tokens and where they go; nothing depends on the host's numbers.

        Args: filters: some row may ask for top-k, top-p or min-p.   sampled: some sequence of the step gets a token.
            chosen: it is chosen here.   whole: the hidden states of all tokens are looked at.
        """
        views = batch.views
        batch.memo.clear()  # a recording computes twice, and what the first run made is gone when the graph is replayed
        self.batches.gather(views)
        self.adapters.wear(views.shape.adapted, self.rows.adapters, batch.token_rows)
        every = views.shape.is_decode or whole or views.shape.adapted or not getattr(self.model, "narrows", False)
        hidden = self.model.forward(batch) if every else self.model.forward(batch, batch.logit_rows)
        if not sampled:
            self._keep(views.slots[:0], views.kept[:0] > 0, views)
            return Computed(hidden, None, True)
        wide = len(hidden) != views.shape.seqs
        logits = self.model.logits(hidden.index_select(0, batch.logit_rows) if wide else hidden)
        if chosen:
            tokens, bad = self.sampler.choose(logits, views.values, views.seq_lens, filters=filters)
            self._keep(tokens, bad, views)
        return Computed(hidden, logits, chosen)

    def _further(self, batch: Batch, filters: bool) -> Computed:
        """`_compute` for the decode computed last, whose buffers stand one position further now (steady.py)."""
        views = batch.views
        batch.memo.clear()
        self.adapters.wear(views.shape.adapted, self.rows.adapters, batch.token_rows)
        hidden = getattr(self.model, "further", self.model.forward)(batch)
        logits = self.model.logits(hidden)
        tokens, bad = self.sampler.choose(logits, views.values, views.seq_lens, filters=filters)
        self._keep(tokens, bad, views)
        return Computed(hidden, logits, True)

    def _sample(
        self, computed: Computed, slots: tuple[int, ...], views: Views, grammar: GrammarMask | None
    ) -> TokenReports | None:
        """Choose with everything that the rows and their grammars ask for."""
        logits = computed.logits[: len(slots)]
        sampled = self.sampler.sample(logits, slots, views.seq_lens, self.rows.tokens, grammar, values=views.values)
        self._keep(sampled.tokens, sampled.bad, views, late=computed.ended)
        reports = sampled.reports
        return reports if reports is None or self.device.is_cpu else reports.to("cpu", non_blocking=True)

    def _keep(self, tokens: torch.Tensor, bad: torch.Tensor, views: Views, *, late: bool = False) -> None:
        """End the step with these tokens, fewer than its sequences or none; late: it has been ended."""
        where = (part[: len(tokens)] for part in (views.slots, views.seq_lens, views.kept))
        keep_tokens(tokens, bad, *where, self.rows.tokens, self.batches.home, self.batches.turn, late=late)
