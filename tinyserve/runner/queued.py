"""What is known of a step whose kernels are queued, until its tokens are home.

Before: batch.py, graphs.py.  After: runner.py (makes them, and has the output built from them).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from attrs import frozen

from ..sampling.logprobs import TokenReports
from ..step import Decodes, SeqSlice, SliceOutput, StepInput, StepOutput, TokenLogprobs, Tokens
from .batch import Shape, Views
from .graphs import Computed
from .hands import done


class Launched(NamedTuple):
    """A step whose kernels are queued: what `land` needs to build the output.

    Args:
        order: the slice of each sequence of the batch.   places: where its token stands in the result.
        result: [2 S] tokens and bad flags; they are there once the event has come. None if nothing was chosen.
        reports: of the sequences, by their place.   prompt_scores, pooled: by slice.
    """

    step: StepInput
    order: Sequence[int]
    places: Sequence[int]
    result: memoryview | None
    reports: TokenReports | None
    prompt_scores: dict[int, list[Any]]
    pooled: dict[int, torch.Tensor]
    event: Any
    started: float


@frozen
class Forward:
    """The forward of a step, queued. exact: its shape without padding; shape: what was run.   again: choose anew."""

    pieces: Sequence[SeqSlice]
    slots: tuple[int, ...]
    exact: Shape
    shape: Shape
    views: Views
    computed: Computed
    sampled: bool
    again: bool


@frozen
class Begun:
    """A step whose tokens are still to be chosen. forward: None if it computes nothing.   stream: it is queued on."""

    step: StepInput
    order: Sequence[int]
    forward: Forward | None
    started: float
    stream: Any


def land(launched: Launched | Future[Launched]) -> StepOutput:
    """Wait for the device (sleeping), then say in Python what the step gave."""
    launched = done(launched)
    launched.event.synchronize()
    result = launched.result.tolist() if launched.result is not None else []
    seqs, slices = len(result) // 2, launched.step.slices
    seconds = time.perf_counter() - launched.started
    bad = result[seqs : seqs + len(slices)]
    if isinstance(slices, Decodes) and launched.reports is None and not launched.pooled and not any(bad):
        return StepOutput(launched.step.step_id, Tokens(slices.slots, result[: len(slices)]), seconds)
    records: dict[int, TokenLogprobs] = {}
    if launched.reports is not None:
        records = dict(zip(launched.reports.rows, launched.reports.records(), strict=True))
    outputs: list[SliceOutput | None] = [None] * len(slices)
    for index, place in zip(launched.order, launched.places, strict=True):
        piece = slices[index]
        scores = launched.prompt_scores.get(index)
        prompt = tuple(record for part in scores for record in part.records()) if scores else None
        if not piece.samples:
            outputs[index] = SliceOutput(piece.slot, prompt_logprobs=prompt)
            continue
        wrong = result[seqs + place] > 0
        record = None if wrong else records.get(place)
        logprobs = None if record is None else (record,)
        vector = launched.pooled[index].tolist() if index in launched.pooled else None
        outputs[index] = SliceOutput(piece.slot, (result[place],), logprobs, prompt, vector, bad=wrong)
    return StepOutput(launched.step.step_id, tuple(outputs), seconds)
