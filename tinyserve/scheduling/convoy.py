"""Sequences that all do the same, one token a step, planned and booked together.

A step in which every running sequence decodes is followed by nearly the same step: positions one further, and a new
block for the few that reach the end of theirs. Booking 256 sequences one by one costs the host more than a small model
costs the device. A convoy keeps what its sequences have in common in two numbers instead:

    position of sequence s in the next step = first[s] + planned           computed by it = first[s] + landed - 1

and for each sequence the step in which something of its own comes up: a block, a name for a block, or its last token.
What the sequences themselves say meanwhile is what was true when the convoy set off; `break_up` makes it true again.
It breaks up whenever anything happens that is not that: somebody enters, leaves, fails, or may have ended.

Grammars are told each token as it lands, in a convoy or not.

Before: sequence.py, kv/cache.py.  After: preempt.py, scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from types import MappingProxyType
from typing import Any

import numpy as np

from ..grammar.matcher import UNCONSTRAINED
from ..kv.cache import KVCache
from ..request import FinishReason
from ..step import Decodes, TableEdit
from .sequence import Sequence, State
from .update import Update

NOBODY: Mapping[int, Any] = MappingProxyType({})
LATE = 3  # steps after which a position has certainly been computed: more than are ever in flight behind it


class Convoy:
    """Its first step is the one that has just been planned, of which the sequences know already.

    Args: sequences: all that run, each simple (Sequence.simple), in the order of the step's slices.

    Attributes:
        members: the same.   slots: their rows.   masked: (row, constraint) of those whose choice needs a mask.
        planned: steps after the first.   landed: steps whose tokens are known, the first included.
    """

    def __init__(self, sequences: list[Sequence], cache: KVCache) -> None:
        self.sequences = sequences
        self.members = frozenset(sequences)
        self.slots = tuple([seq.slot for seq in sequences])
        self.masked = [(seq.slot, seq.constraint) for seq in sequences if seq.constraint.masks]
        every = enumerate([seq.constraint for seq in sequences])
        self._constraints = [(place, one) for place, one in every if one is not UNCONSTRAINED]
        self.planned = self.landed = 0
        self._cache = cache
        self._first = np.array([seq.scheduled for seq in sequences], dtype=np.int32)
        self._turns = np.array([self._turn(seq) for seq in sequences], dtype=np.int64)
        self._next = int(self._turns.min())
        self._last = min([seq.ends.limit - seq.scheduled for seq in sequences])
        self._end_ids = frozenset().union(*{seq.ends.ids for seq in sequences})
        self._steps: list[list[int]] = []  # the tokens of each step that has landed
        self._told: dict[int, int] = {}  # of how many of these some sequences know

    def slices(self) -> Decodes:
        """Of the step planned last."""
        return Decodes(self.slots, self._first, self.planned - 1)

    def advance(self) -> list[TableEdit] | None:
        """Plan the next step; what changes in the tables. None: not everybody can go on, and nothing is planned."""
        edits: list[TableEdit] | None = []
        if self.planned >= self._next:
            edits = self._attend()
        if edits is not None:
            self.planned += 1
        return edits

    def follow(self, tokens: list[int]) -> bool:
        """Tell the grammars the tokens of a step that has landed. False: one of them ends, or fails, with its token."""
        free = True
        for place, constraint in self._constraints:
            constraint.advance(tokens[place])
            if constraint.ended or constraint.error is not None:
                free = False
        return free

    def land(self, tokens: list[int]) -> bool:
        """Book the tokens of the oldest step in flight. False, and nothing is done: one may be its sequence's last."""
        if self.landed + 1 >= self._last or not self._end_ids.isdisjoint(tokens):
            return False
        self.landed += 1
        self._steps.append(tokens)
        return True

    def break_up(self) -> None:
        """Tell the sequences where they are. The convoy is not used any more."""
        flying = self.planned - self.landed
        columns = zip(*self._steps, strict=True) if self._steps else [()] * len(self.slots)
        for index, (seq, tokens) in enumerate(zip(self.sequences, columns, strict=True)):
            seq.tokens += tokens[self._told.get(index, 0) :]
            seq.computed = self._computed(seq)
            seq.scheduled += self.planned
            seq.flights += flying
            seq.in_flight += flying

    def check_integrity(self, running: list[Sequence]) -> None:
        """Assert that these are the ones that go together, and that every position planned has its block."""
        assert self.members <= set(running), "somebody does not run any more"
        assert all(seq.to_compute() <= 0 for seq in running if seq not in self.members), "somebody is left behind"
        assert 0 <= self.landed <= self.planned + 1 and len(self._steps) == self.landed, (self.landed, self.planned)
        for seq, first in zip(self.sequences, self._first.tolist(), strict=True):
            assert seq.scheduled == first and first + self.planned <= seq.kv.covered, seq
            assert first + self.planned < seq.ends.limit, f"{seq} was planned beyond its end"

    def _computed(self, seq: Sequence) -> int:
        return seq.scheduled + self.landed - 1 if self.landed else seq.computed

    def _turn(self, seq: Sequence) -> int:
        """The value of `planned` at which this sequence has to be looked at."""
        kv = seq.kv
        return min(seq.ends.limit - 1, kv.covered, kv.due + LATE) - seq.scheduled

    def _attend(self) -> list[TableEdit] | None:
        """Give blocks to those whose turn it is."""
        now = self.planned
        turns = np.flatnonzero(self._turns <= now).tolist()
        some = [self.sequences[index] for index in turns]
        if any([seq.scheduled + now + 1 >= seq.ends.limit for seq in some]):
            return None
        for index, seq in zip(turns, some, strict=True):
            seq.tokens += [step[index] for step in self._steps[self._told.get(index, 0) :]]
            self._told[index] = len(self._steps)
            if not self._cache.extend(seq.kv, seq.tokens, self._computed(seq), seq.scheduled + now + 1):
                return None  # changes of those before stay with them, for the step that is planned instead
        edits = []
        for index, seq in zip(turns, some, strict=True):
            edits += [TableEdit(seq.slot, *change) for change in seq.kv.changes]
            seq.kv.changes = []
            self._turns[index] = self._turn(seq)
        self._next = int(self._turns.min())
        return edits


class Grown(Several[Update]):
    """The updates of a convoy's step: each sequence has one more token.

    Args:
        convoy: the same object in step after step.   tokens: of its sequences, in their order.
        others: places with another update, or with none because the sequence had ended before.
    """

    __slots__ = ("convoy", "others", "tokens")

    def __init__(self, convoy: Convoy, tokens: list[int], others: Mapping[int, Update | None] = NOBODY) -> None:
        self.convoy = convoy
        self.tokens = tokens
        self.others = others

    def at(self, place: int) -> Update | None:
        """The update of the sequence at this place of the convoy, if it has one."""
        if place in self.others:
            return self.others[place]
        seq = self.convoy.sequences[place]
        return Update(seq.request.id, (self.tokens[place],), None, None, None, None, seq.cached, None, seq.started)

    def __iter__(self) -> Iterator[Update]:
        updates = map(self.at, range(len(self.tokens)))
        return (update for update in updates if update is not None)

    def __len__(self) -> int:
        return len(self.tokens) - sum(update is None for update in self.others.values())

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Several) and list(self) == list(other)


def book_apart(
    convoy: Convoy,
    slices: Decodes,
    tokens: list[int],
    report: Callable[..., Update],
    fail: Callable[[Sequence, Exception], Update],
    landed: Callable[[Sequence], None],
) -> Grown:
    """Book a step of a convoy that has broken up: some of its sequences may end with these tokens, or have ended.

    Args: report, fail: make the update of one that ends.   landed: told of each that has no flight any more and has
        left.
    """
    others: dict[int, Update | None] = {}
    ends = (slices.starts + 1).tolist()
    for place, (seq, end, token) in enumerate(zip(convoy.sequences, ends, tokens, strict=True)):
        seq.flights -= 1
        seq.in_flight -= 1
        known, rules = seq.tokens, seq.ends
        if seq.state is State.FINISHED:  # its token is dropped, its position may still serve as a prefix
            seq.computed = max(seq.computed, min(end, len(known)))
            others[place] = None
        else:
            seq.computed = end
            known.append(token)
            ended = rules.check(token, len(known)) if token in rules.ids or len(known) >= rules.limit else None
            if seq.constraint.ended and (ended is None or ended[0] is not FinishReason.STOP):
                ended = rules.complete(token, len(known))
            if seq.constraint.error is not None:
                others[place] = fail(seq, seq.constraint.error)
            elif ended is not None:
                others[place] = report(seq, (token,), None, ended)
        if not seq.flights and seq.state is not State.RUNNING:
            landed(seq)
    return Grown(convoy, tokens, others)
