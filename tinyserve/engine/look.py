"""A look at a running engine, for the dashboard: cheap enough to be taken every second.

Before: scheduling/scheduler.py, kv/cache.py, meter.py.  After: engine.py, server/dashboard.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from attrs import frozen

from ..scheduling.update import SchedulerStats, SequenceFacts
from .assemble import Machine
from .meter import Meter, StepRecord


@frozen(kw_only=True)
class Look:
    """What there was at `now` (time.monotonic()).

    Args:
        sequences: the first ones that run or wait.   steps: the last ones, oldest first.
        blocks: a byte for each `stride`-th block, see KVCache.holdings; of `num_blocks` with `block_size` tokens each.
    """

    now: float
    stats: SchedulerStats
    sequences: Sequence[SequenceFacts]
    steps: Sequence[StepRecord]
    blocks: bytes
    stride: int
    num_blocks: int
    block_size: int


def look(machine: Machine, meter: Meter, sequences: int, blocks: int) -> Look:
    """Take one. sequences, blocks: how many to show at most."""
    stride, held = machine.cache.holdings(blocks)
    return Look(
        now=time.monotonic(),
        stats=machine.scheduler.stats(),
        sequences=machine.scheduler.listing(sequences),
        steps=tuple(meter.steps),
        blocks=held,
        stride=stride,
        num_blocks=machine.cache.num_blocks,
        block_size=machine.cache.block_size,
    )
