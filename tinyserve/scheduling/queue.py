"""Who is next: the waiting requests, and the running ones, both kept in order of rank.

First come, first served is the policy in which all have the same priority. A preempted sequence goes to the front then;
under the priority policy its place follows from its priority and arrival, as for everybody.

The running list is kept in the order in which room is taken away: its last one is the victim.

Before: sequence.py.  After: preempt.py, scheduler.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ..errors import Overloaded
from ..request import Request
from .sequence import Sequence

_rank = attrgetter("rank")


class WaitingQueue:
    """Requests that do not run, next one first.

    Args: by_priority: order by (priority, arrival), lower first; else by the order of `push`.

    Attributes:
        prompt_tokens: of all of them.
        passed: how many the scheduler passed, when one could last enter, to look at those behind them.
    """

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._queue: list[Sequence] = []
        self._turn = 0
        self.prompt_tokens = self.passed = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def __getitem__(self, index: int) -> Sequence:
        return self._queue[index]

    def push(self, seq: Sequence) -> None:
        """Take in a new request."""
        self._turn += 1
        request = seq.request
        seq.rank = (request.priority, request.arrival, self._turn) if self._by_priority else (0, 0, self._turn)
        self._insert(seq)

    def push_front(self, seq: Sequence) -> None:
        """Take back a preempted one: to the very front, or to where its priority puts it."""
        if not self._by_priority:
            seq.rank = (0, 0, self._queue[0].rank[2] - 1 if self._queue else 0)
        self._insert(seq)

    def remove(self, seq: Sequence) -> None:
        """Take one out, wherever it stands."""
        index = bisect_left(self._queue, seq.rank, key=_rank)
        assert self._queue[index] is seq, f"{seq} is not in the queue"
        del self._queue[index]
        self.prompt_tokens -= len(seq.request.prompt_ids)

    def _insert(self, seq: Sequence) -> None:
        insort(self._queue, seq, key=_rank)
        self.prompt_tokens += len(seq.request.prompt_ids)


def refuse_overload(waiting: WaitingQueue, options: Any, running: int, request: Request) -> None:
    """Refuse what would wait behind too much; a request that can start in the next step does not count.

    Args: options: see budget.Options.   running: how many run.   request: the new one; a beam's next step is none.
    Raises: Overloaded.
    """
    if request.answered:
        return
    most, most_tokens = options.max_num_queued_reqs, options.max_num_queued_tokens
    queued = len(waiting) - max(0, options.max_num_seqs - running)
    if most is not None and queued >= most:
        raise Overloaded(f"{queued} requests wait already (--max-num-queued-reqs {most}). Retry later.")
    tokens = waiting.prompt_tokens
    if most_tokens is not None and tokens and tokens + len(request.prompt_ids) > most_tokens:
        raise Overloaded(f"{tokens} prompt tokens wait (--max-num-queued-tokens {most_tokens}). Retry later.")


class RunningList(list[Sequence]):
    """Sequences with a row and blocks, in the order in which they get their share of a step."""

    def __init__(self, by_priority: bool) -> None:
        super().__init__()
        self._by_priority = by_priority

    def add(self, seq: Sequence) -> None:
        """By priority and arrival, or at the end."""
        if self._by_priority:
            insort(self, seq, key=_rank)
        else:
            self.append(seq)

    def victim(self) -> Sequence:
        """The one that gives up its blocks first: the last admitted, or the largest (priority, arrival)."""
        return self[-1]
