"""Who holds a row and blocks; how room is made by taking them away, and when they really come back.

A preempted sequence loses its blocks but not its tokens: later it is computed again from the beginning, which the
prefix cache usually shortens. That is cheaper than it sounds, and needs no memory to swap to.

    RUNNING --preempt--> WAITING (front of the queue)        row and blocks come back at once when no flight uses them,
    RUNNING --finish---> FINISHED                            else when the last such flight is committed ("returning")

While something is returning, nobody else is preempted: the room is on its way.

Before: queue.py, kv/cache.py.  After: scheduler.py.
"""

from __future__ import annotations

from collections import Counter

from ..kv.cache import KVCache
from .budget import Rows
from .convoy import Convoy
from .queue import RunningList, WaitingQueue
from .sequence import Sequence, State


class Tenants:
    """The sequences that hold a row and blocks.

    Attributes:
        running: those that get a share of each step.
        rows: the free rows.
        preemptions: how often one was sent back to the queue.   preempted: the same of each that has not ended.
        convoy: all that run and have not come to their end, while all do the same; else None.
    """

    def __init__(self, cache: KVCache, waiting: WaitingQueue, rows: int, by_priority: bool) -> None:
        self.running = RunningList(by_priority)
        self.rows = Rows(rows)
        self.preemptions = 0
        self.preempted: Counter[Sequence] = Counter()
        self.convoy: Convoy | None = None
        self._cache = cache
        self._waiting = waiting
        self._returning: set[Sequence] = set()

    @property
    def returning(self) -> int:
        """Sequences that do not run any more, but whose rows and blocks flights still use."""
        return len(self._returning)

    def enter(self, seq: Sequence) -> None:
        """Let in a sequence whose blocks are reserved."""
        seq.slot = self.rows.take()
        seq.state = State.RUNNING
        self.running.add(seq)

    def set_off(self, sequences: list[Sequence]) -> Convoy | None:
        """From the step that was just planned on, these go together, if the others only wait for their last token."""
        others = len(self.running) - len(sequences)
        if others and sum(seq.to_compute() <= 0 for seq in set(self.running).difference(sequences)) < others:
            return None
        self.convoy = Convoy(sequences, self._cache)
        return self.convoy

    def break_up(self) -> None:
        """Let everybody go alone, so that each sequence knows where it is."""
        if self.convoy is not None:
            self.convoy.break_up()
            self.convoy = None

    def leave(self, seq: Sequence, state: State) -> None:
        """Let out a running sequence; what it holds comes back as soon as no flight uses it."""
        if self.convoy is not None and seq in self.convoy.members:
            self.break_up()
        self.running.remove(seq)
        seq.state = state
        if seq.flights:
            self._returning.add(seq)
        else:
            self._give_back(seq)

    def landed(self, seq: Sequence) -> None:
        """Note that the last flight of a sequence that does not run any more has been committed."""
        if seq in self._returning:
            self._returning.remove(seq)
            self._give_back(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take away a running sequence's blocks and let it wait for another turn."""
        self.leave(seq, State.WAITING)
        self._waiting.push_front(seq)
        self.preemptions += 1
        self.preempted[seq] += 1

    def make_room(self, seq: Sequence, end: int) -> bool:
        """Preempt others, last first, until `seq` has room for positions below `end`; at the last, `seq` itself.

        Returns: whether it has. If not, it waits: for what is returning, for its own flights (what its windows have
        passed comes back with them), or in the queue.
        """
        while not self._returning:
            victim = self.running.victim()
            if victim is seq and seq.flights:
                return False
            self.preempt(victim)
            if victim is seq:
                return False
            if self._cache.extend(seq.kv, seq.tokens, seq.computed, end):
                return True
        return False

    def _give_back(self, seq: Sequence) -> None:
        self._cache.release(seq.kv, seq.tokens, seq.computed)
        self.rows.give_back(seq.slot)
        seq.slot = None
        seq.forget_progress()
