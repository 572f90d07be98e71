"""How much fits: tokens into one step, and rows onto the device.

Before: step.py.  After: scheduler.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

from ..grammar.matcher import Constraint
from ..step import Decodes, SeqSlice, SlotOpening, TableEdit
from .convoy import Convoy
from .sequence import Sequence


class Options(Protocol):
    """The user's choices that the scheduler reads; config.SchedulerOptions has them."""

    max_num_batched_tokens: int
    max_num_seqs: int
    scheduling_policy: str
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduler_reserve_full_isl: bool
    watermark: float
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None


class Crowd(NamedTuple):
    """The most that prompts may take of a step. Where a larger step is launched kernel by kernel, the host needs longer
    for it than the device, and nobody else gets anything from the host meanwhile.

    Args: tokens: of all prompts together.   prompts: that the step computes some of.
    """

    tokens: int = 2**31
    prompts: int = 2**31


ANY = Crowd()


class Flown(NamedTuple):
    """A planned step that has not been committed."""

    step_id: int
    sequences: list[Sequence]
    slices: tuple[SeqSlice, ...] | Decodes
    masks: Any = None
    convoy: Convoy | None = None

    @property
    def late(self) -> bool:
        """Whether its masks wait for tokens of the flights before it."""
        return self.masks is not None and not self.masks.begun


class StepDraft:
    """A step while it is being planned: what is in it, and how many tokens it may still take.

    Args:
        tokens: budget of the step.
        cap: most tokens of one sequence, or 0 for no such cap (it keeps one long prompt from filling every step).
        crowd: what prompts may take of it.
    """

    __slots__ = ("cap", "crowd", "edits", "left", "masked", "opened", "plain", "sequences", "slices")

    def __init__(self, tokens: int, cap: int, crowd: Crowd = ANY) -> None:
        self.left = tokens
        self.cap = cap
        self.crowd = crowd
        self.sequences: list[Sequence] = []
        self.slices: list[SeqSlice] = []
        self.opened: list[SlotOpening] = []
        self.edits: list[TableEdit] = []
        self.masked: list[tuple[int, Constraint]] = []  # slots whose next token a grammar masks
        self.plain = True  # nothing but decodes of simple sequences

    def room(self) -> int:
        """Tokens that one more prompt may get."""
        tokens, prompts = self.crowd
        return min(self.left, self.cap or self.left, tokens if prompts else 0)

    def add(self, seq: Sequence, count: int, drafts: tuple[int, ...] = ()) -> None:
        """Plan the next `count` positions of `seq` (drafts among them), and move its counters."""
        start, slot = seq.scheduled, seq.slot
        end = start + count
        samples = end - len(drafts) == len(seq.tokens) + seq.in_flight
        self.plain = self.plain and count == 1 and samples and seq.simple
        self.slices.append(SeqSlice(slot, start, count, drafts, samples))
        self.sequences.append(seq)
        self.left -= count
        if count > 1 + len(drafts):
            self.crowd = Crowd(self.crowd.tokens - count, self.crowd.prompts - 1)
        seq.scheduled = end
        seq.flights += 1
        if samples:
            seq.in_flight += 1
            if seq.constraint.masks:
                self.masked.append((slot, seq.constraint))
        if seq.kv.changes:
            self.edits += [TableEdit(slot, group, at, blocks) for group, at, blocks in seq.kv.changes]
            seq.kv.changes = []


class Rows:
    """The rows of the device: free ones, and those whose end the device has not been told yet."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._closed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row; the least recently used one."""
        return self._free.popleft()

    def give_back(self, row: int) -> None:
        """End a row; no flight may use it any more."""
        self._free.append(row)
        self._closed.append(row)

    def take_closed(self) -> tuple[int, ...]:
        """The rows ended since the last call, for StepInput.closed."""
        closed, self._closed = tuple(self._closed), []
        return closed
