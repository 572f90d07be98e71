"""The runner launches steps: rows updated, model run, token chosen, result sent home.

    launch:   rows.apply -> BatchBuilder.build -> [ model.forward -> model.logits -> sampler.sample -> token table ]
                                                  '----------------------- graphs.run -----------------------'
    landing:  copies to the host done -> StepOutput

On a GPU `launch` runs on the event loop's thread and returns as soon as the kernels are queued; a helper thread sleeps
until the device is done and builds the StepOutput. On the CPU there is no queue to hide behind, so the whole step runs
on that thread and the loop keeps serving meanwhile. Either way steps run and land in launch order.

Before: runner/batch.py, models/decoder.py, sampling/sampler.py.  After: engine/engine.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from attrs import frozen

from ..device import Device
from ..errors import EngineDead
from ..sampling.sampler import Sampled, Sampler
from ..step import RowParams, SeqSlice, SliceOutput, SlotOpening, StepInput, StepOutput, TokenLogprobs
from .batch import Batch, BatchBuilder
from .flight import Flight
from .graphs import Eager, Graphs
from .slots import Rows
from .workers import Workers

PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits exist at once: 256 x 152k x 4 bytes = 156 MB


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
    """The largest step and the number of rows that a runner is built for."""

    rows: int
    max_seqs: int
    max_tokens: int
    max_model_len: int
    block_size: int
    groups: int
    depth: int = 1


@frozen
class _Launched:
    """A step whose kernels are queued: what `_land` needs to build the output."""

    step: StepInput
    order: list[int]
    sampled: Sampled | None
    prompt_scores: dict[int, list[Any]]
    event: Any
    started: float


class Runner:
    """Runs steps for one model on one device.

    Args:
        model: bound to its KV storage.   sampler: with as many rows as `limits.rows`.
        limits: see there.   device: where model and sampler are.
        graphs: how a step's computation is run; Eager unless given.
    """

    def __init__(
        self, model: Model, sampler: Sampler, limits: Limits, device: Device, graphs: Graphs | None = None
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.device = device
        self.graphs: Graphs = graphs or Eager()
        self.rows = Rows(limits.rows, limits.max_model_len, limits.groups, limits.block_size, device.torch)
        self.batches = BatchBuilder(self.rows, limits.max_tokens, limits.max_seqs, device, limits.depth + 1)
        self._worker = Workers("tinyserve-step")
        self._closed = False

    def launch(self, step: StepInput) -> Flight:
        """Start a step; its Flight resolves to the StepOutput. Steps take effect in the order of these calls."""
        if self._closed:
            raise EngineDead("The runner is closed.")
        if self.device.is_cpu:
            landing: Future[StepOutput] = self._worker.submit(lambda: self._land(self._enqueue(step)))
        else:
            launched = self._enqueue(step)
            landing = self._worker.submit(self._land, launched)
        return Flight(step.step_id, landing)

    def rehearse(self, limits: Limits) -> None:
        """Run one step of the largest size on rows that are closed again, so that its memory can be measured.

        All block tables of the rows name the null block; what is written there is never read as data.
        """
        share, rest = divmod(limits.max_tokens, limits.max_seqs)
        counts = [min(share + (seq < rest), limits.max_model_len) for seq in range(limits.max_seqs)]
        params = RowParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=5)
        step = StepInput(
            step_id=0,
            opened=tuple(SlotOpening(s, n, (0,) * n, params) for s, n in enumerate(counts) if n),
            slices=tuple(SeqSlice(s, 0, n) for s, n in enumerate(counts) if n),
        )
        for part in (step, StepInput(step_id=0, closed=tuple(piece.slot for piece in step.slices))):
            self.launch(part).landing.result()

    def close(self) -> None:
        """Wait for the steps under way, then free the device's memory. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._worker.close()
        self.graphs.close()
        del self.model, self.sampler, self.rows, self.batches
        self.device.release_unused()

    @torch.inference_mode()
    def _enqueue(self, step: StepInput) -> _Launched:
        """Queue all kernels of a step and the copies of its results (on the CPU: run them)."""
        started = time.perf_counter()
        with self.device.use():
            self._update_rows(step)
            order = self.batches.order(step)
            pieces = [step.slices[i] for i in order]
            sampled, scores = None, {}
            if pieces:
                batch = self.batches.build(pieces)
                scored = self._scored(pieces)
                sampled, hidden = self.graphs.run(batch, lambda b: self._compute(b, pieces))
                scores = {order[i]: self._score_prompt(hidden, pieces, i) for i in scored}
                if sampled is not None and not self.device.is_cpu:
                    sampled = sampled.to("cpu", non_blocking=True)
            event = self.device.event()
            event.record(self.device.current_stream())
        return _Launched(step, order, sampled, scores, event, started)

    def _update_rows(self, step: StepInput) -> None:
        for slot in step.closed:
            self.sampler.close(slot)
        self.rows.apply(step)
        for opening in step.opened:
            self.sampler.open(opening.slot, opening.prompt_len, opening.params)

    def _compute(self, batch: Batch, pieces: Sequence[SeqSlice]) -> tuple[Sampled | None, torch.Tensor]:
        """Forward, logits of the rows that sample, the chosen tokens; these go straight into the token table."""
        hidden = self.model.forward(batch)
        sampling = [piece for piece in pieces if piece.samples]
        if not sampling:
            return None, hidden
        logits = self.model.logits(hidden.index_select(0, batch.logit_rows))
        device = logits.device
        slots = [piece.slot for piece in sampling]
        positions = [piece.end for piece in sampling]
        sampled = self.sampler.sample(logits, slots, positions, self.rows.tokens)
        where = torch.tensor(slots, device=device), torch.tensor(positions, device=device)
        self.rows.tokens.index_put_(where, sampled.tokens.to(torch.int32))
        return sampled, hidden

    def _scored(self, pieces: Sequence[SeqSlice]) -> list[int]:
        """Which pieces hold prompt positions whose next token's log-probability was asked for."""
        return [
            i
            for i, piece in enumerate(pieces)
            if (params := self.rows.params[piece.slot]) is not None
            and (first := params.scores_from()) is not None
            and max(piece.start, first) < min(piece.end, self.rows.prompt_lens[piece.slot] - 1)
        ]

    def _score_prompt(self, hidden: torch.Tensor, pieces: Sequence[SeqSlice], index: int) -> list[Any]:
        """Log-probabilities of the prompt tokens that follow the positions of a piece, some rows at a time."""
        piece = pieces[index]
        params = self.rows.params[piece.slot]
        stop = min(piece.end, self.rows.prompt_lens[piece.slot] - 1)
        offset = sum(before.count for before in pieces[:index]) - piece.start
        scores = []
        for start in range(max(piece.start, params.scores_from()), stop, PROMPT_LOGPROB_ROWS):
            end = min(start + PROMPT_LOGPROB_ROWS, stop)
            logits = self.model.logits(hidden[offset + start : offset + end])
            targets = self.rows.tokens[piece.slot, start + 1 : end + 1]
            before = max(0, params.prompt_start - start)  # positions here whose row was not asked for
            ids = [()] * before + list(
                params.prompt_ids[start + before - params.prompt_start :][: end - start - before]
            )
            report = self.sampler.prompt_logprobs(logits, targets, params.prompt_logprobs or 0, ids if any(ids) else ())
            scores.append(report if self.device.is_cpu else report.to("cpu", non_blocking=True))
        return scores

    def _land(self, launched: _Launched) -> StepOutput:
        """Wait for the device (sleeping), then say in Python what the step gave."""
        launched.event.synchronize()
        tokens: list[int] = []
        bad: list[bool] = []
        logprobs: list[TokenLogprobs | None] = []
        if launched.sampled is not None:
            tokens, bad, logprobs = launched.sampled.to_host()
        outputs: list[SliceOutput | None] = [None] * len(launched.order)
        row = 0
        for index in launched.order:
            piece = launched.step.slices[index]
            scores = launched.prompt_scores.get(index)
            prompt = tuple(record for part in scores for record in part.records()) if scores else None
            if not piece.samples:
                outputs[index] = SliceOutput(piece.slot, prompt_logprobs=prompt)
                continue
            found = logprobs[row] if logprobs else None
            outputs[index] = SliceOutput(
                piece.slot,
                (tokens[row],),
                logprobs=None if found is None else (found,),
                prompt_logprobs=prompt,
                bad=bad[row],
            )
            row += 1
        return StepOutput(launched.step.step_id, tuple(outputs), time.perf_counter() - launched.started)
