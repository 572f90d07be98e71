"""What is known of a step whose kernels are queued, until its tokens are home.

Before: batch.py, graphs.py.  After: runner.py (makes them, and builds the output from them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attrs import frozen

from ..sampling.logprobs import TokenReports
from ..step import SeqSlice, StepInput
from .batch import Shape, Views
from .graphs import Computed


class Launched(NamedTuple):
    """A step whose kernels are queued: what `_land` needs to build the output.

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
