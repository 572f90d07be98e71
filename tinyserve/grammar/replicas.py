"""Answers that processes of their own follow, so that the masks of a step are there when the loop wants them.

    token k of row r:  loop --told--> worker of r: next mask --made-->  loop: is it there?     64 rows: some 10 us each,
                       loop: the same for its own matcher               by 4 to 8 workers while the loop tells the rest

The loop's matchers stay the ones that count: they say what an answer may be, when it ends and why it fails. A replica
is one of them in another process, and tells nothing but masks. The loop computes what is not there: a row that has just
come or went back, a worker that is late, or has died. It waits for workers that were in time before, for LATE_SECONDS.

Where the loop has the masks before the forward has ended, as on a host with fast cores, all of this is of no use: it
costs some 5 %. So it begins when the device has waited for the loop in STARVED of WINDOW steps, and after TRUSTED steps
it is tried whether the loop would do.

Before: board.py, crew.py.  After: mask.py, which computes the rest.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import define

from .board import LONGEST, MASKS, NANOSECONDS, NUMBER, ORDERED, RING, Board
from .crew import Crew, Facts

if TYPE_CHECKING:
    from .matcher import Matcher

FEWEST_CORES = 8
FEWEST = 16  # rows of a step; the loop computes less in 0.2 ms
STEP_SECONDS = 8e-3  # a step that takes longer hides its masks
LATE_SECONDS = 4e-3  # that the loop waits
HOT_LOOKS = 64  # at the board, before others get a turn between two
WINDOW, STARVED = 32, 8
TRUSTED = 2048  # steps
OPENED = 16  # answers that get a replica in a step
FORGOTTEN = 8  # steps without an answer, until another one gets its place
Rows = Sequence[tuple[int, "Matcher"]]  # (slot, matcher) of a step
_NONE = np.zeros(0, dtype=np.intp)
MOST_TOKENS = 8192  # of an answer that is to be followed from its middle
MOST_BYTES = 4 * 2**20  # of a grammar; each worker keeps 32


def usual_workers(cores: int) -> int:
    """Processes for a machine with so many cores, most of which are to stay idle."""
    return min(cores * 3 // 8, 6) if ORDERED and cores >= FEWEST_CORES else 0


class Replica:
    """The loop's hold on one. Attributes: place: of its masks; live: whether it is told of tokens."""

    __slots__ = ("_cell", "_ring", "_start", "_told", "_word", "live", "place")

    def __init__(self, board: Board, place: int, word: int) -> None:
        self.place = place
        self.live = True
        self._cell = board.cell(place)
        self._start = self._cell * RING
        self._ring, self._told = memoryview(board.ring), memoryview(board.told)
        self._word = self._told[self._cell] = word

    def tell(self, token: int) -> None:
        """The answer has one more token."""
        if self.live:
            word = self._word = self._word + 1
            number = word & NUMBER
            self._ring[self._start + number % RING] = number << 32 | token
            self._told[self._cell] = word

    def drop(self) -> None:
        """It goes another way than was told: none of its masks counts any more."""
        if self.live:
            self.live = False
            self._told[self._cell] = self._word | NUMBER


@define(eq=False)
class _Group:
    """The answers of a step.

    Args:
        all: of them.   rows, places, cells: of those with a replica, where it is among them and on the board.
        order: the places, if they are not 0, 1, 2 ...   settled: each has a replica.
    """

    all: Rows = ()
    rows: np.ndarray = _NONE
    places: np.ndarray = _NONE
    cells: np.ndarray = _NONE
    order: np.ndarray | None = None
    settled: bool = False


class MaskProcesses(Protocol):
    """What a step's masks are asked of first."""

    def start(self) -> None:
        """Have the processes started, if they are not."""

    def note(self, starved: bool) -> None:
        """The choice of a step was launched. starved: the device had waited for that."""

    def follow(self, rows: Rows) -> None:
        """A step with these rows is planned; its tokens are not known yet."""

    def missing(self, rows: Rows) -> Sequence[int]:
        """Which of these rows, followed last, have no mask here; waits for those that may come soon."""

    def placed(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The masks of those followed last, if none is missing: bits, and the row of each there; None: in order.

        They stay until one of them is told of another token.
        """

    def copy(self, bits: np.ndarray) -> None:
        """Write the masks that are not missing to their rows of `bits`."""

    def close(self) -> None:
        """End the processes."""


class NoReplicas:
    """The loop computes all masks."""

    direct, count, workers, spent = False, 0, 0, (0.0, 0)

    def start(self) -> None:
        pass

    def note(self, starved: bool) -> None:
        pass

    def follow(self, rows: Rows) -> None:
        pass

    def missing(self, rows: Rows) -> Sequence[int]:
        return range(len(rows))

    def copy(self, bits: np.ndarray) -> None:
        pass

    def close(self) -> None:
        pass


class Replicas:
    """Replicas of the answers of one engine. Used by its loop.

    Args: count: processes.   facts: what they are made from.
    """

    def __init__(self, count: int, facts: Facts) -> None:
        self._crew = Crew(count, facts)
        self._holders: list[Replica | None] = []  # by place
        self._born: list[int] = [0] * count  # the processes that the holders are told to
        self._used = np.zeros(0, dtype=np.int64)  # turn in which each place was used last
        self._late = np.zeros(0, dtype=bool)  # by cell: was waited for too long, and has not made up for it
        self._turn = FORGOTTEN
        self._generation = 0
        self._last = 0.0
        self._hot = False  # in this step
        self._wanted = False  # in these steps
        self._noted, self._starved = 0, 0  # steps since that was decided, and those in which the device waited
        self._group = _Group()
        self._there = np.zeros(0, dtype=bool)  # of its replicas, those whose mask was there when it was asked for

    @property
    def direct(self) -> bool:
        """Whether the device reads their masks itself."""
        return self._crew.direct

    @property
    def count(self) -> int:
        """Processes that there are to be."""
        return len(self._crew)

    @property
    def workers(self) -> int:
        """Processes that take orders now."""
        return sum(self._crew.born(index) > 0 for index in range(len(self._crew)))

    @property
    def spent(self) -> tuple[float, int]:
        """Seconds that all of them computed, and masks, so far."""
        if self._crew.board is None:
            return 0.0, 0
        notes = self._crew.board.notes.sum(axis=0)
        return float(notes[NANOSECONDS]) / 1e9, int(notes[MASKS])

    def start(self) -> None:
        self._crew.start()

    def note(self, starved: bool) -> None:
        self._noted += 1
        self._starved += starved
        if self._noted >= (TRUSTED if self._wanted else WINDOW):
            self._wanted = not self._wanted and self._starved >= STARVED
            self._noted = self._starved = 0

    def close(self) -> None:
        self._crew.close()

    def follow(self, rows: Rows) -> None:
        now = time.perf_counter()
        self._hot = self._wanted and now - self._last < STEP_SECONDS and len(rows) >= FEWEST
        self._last = now
        if not self._hot:
            return
        if (board := self._crew.board) is None:
            self._crew.start()
            return
        if not self._holders:
            self._holders = [None] * len(board.bits)
            self._used = np.zeros(len(board.bits), dtype=np.int64)
            self._late = np.zeros(len(board.told), dtype=bool)
        self._turn += 1
        self._crew.wake()
        born = [self._crew.born(index) for index in range(len(self._crew))]
        if born != self._born:
            self._bury(born)
        if rows is not self._group.all or not self._group.settled:
            self._gather(rows, board)
        self._used[self._group.places] = self._turn

    def _bury(self, born: list[int]) -> None:
        """Let go of replicas whose process is not the one that they were told to."""
        for place, replica in enumerate(self._holders):
            index = place % len(born)
            if replica is not None and born[index] != self._born[index]:
                replica.drop()
        self._born, self._group.settled = born, False

    def _gather(self, every: Rows, board: Board) -> None:
        """Find the replicas of these, and begin some that are not there."""
        have = [matcher.replica.place for _, matcher in every if matcher.replica is not None and matcher.replica.live]
        self._used[have] = self._turn  # who was away for long, and comes back, still has its place
        free = self._used < self._turn - FORGOTTEN
        free &= np.resize(np.array(self._born) > 0, len(free))
        left = np.flatnonzero(free)[:OPENED].tolist()[::-1]
        rows, places = [], []
        for row, (_, matcher) in enumerate(every):
            replica: Any = matcher.replica
            if (replica is None or not replica.live) and (not left or not self._open(matcher, board, left)):
                continue
            rows.append(row)
            places.append(matcher.replica.place)
        at = np.array(places, dtype=np.intp)
        self._group = _Group(
            all=every,
            rows=np.array(rows, dtype=np.intp),
            places=at,
            cells=at % board.workers * board.cells + at // board.workers,
            order=None if (at == np.arange(len(at))).all() else at,
            settled=len(rows) == len(every),
        )

    def _open(self, matcher: Matcher, board: Board, left: list[int]) -> bool:
        """Have a process follow an answer at the last place of `left`. False: it is none that can be followed."""
        described = matcher.described(MOST_TOKENS, MOST_BYTES, LONGEST // 2)
        if described is None:
            return False
        place, word = left[-1], self._generation + 1 << 32
        worker, cell = place % board.workers, board.cell(place)
        message = pickle.dumps(("open", cell - worker * board.cells, place, word, *described))
        if len(message) > LONGEST:
            return False
        left.pop()
        self._generation += 1
        if (before := self._holders[place]) is not None:
            before.live = False
        replica = Replica(board, place, word)
        if not self._crew.order(worker, message):
            replica.live = False
            return False
        self._late[cell] = False
        self._holders[place] = matcher.replica = replica
        return True

    def missing(self, rows: Rows) -> Sequence[int]:
        if not self._hot or rows is not self._group.all or not len(self._group.rows):
            self._there = np.zeros(len(self._group.rows), dtype=bool)
            return range(len(rows))
        board, cells = self._crew.board, self._group.cells
        self._there = board.made[cells] == board.told[cells]
        if not self._there.all() or self._late[cells].any():
            self._wait(board, cells)
        if self._group.settled and self._there.all():
            return ()
        return sorted(set(range(len(rows))).difference(self._group.rows[self._there].tolist()))

    def _wait(self, board: Board, cells: np.ndarray) -> None:
        """Give those that were in time before LATE_SECONDS; book who is late, and let go of who is far behind."""
        made, told = board.made, board.told
        late = self._late[cells] | (told[cells] - made[cells] > 1)  # the token before this one is still to be followed
        end, looks = time.perf_counter() + LATE_SECONDS, 0
        while not (self._there | late).all() and time.perf_counter() < end:
            if (looks := looks + 1) > HOT_LOOKS:
                time.sleep(0)
            self._there = made[cells] == told[cells]
        self._late[cells] = ~self._there & (self._late[cells] | ~late)
        told, made = told[cells], made[cells]
        behind = np.where(told >> 32 == made >> 32, told - made, told & NUMBER)
        for place in self._group.places[~self._there & (behind > RING // 2)].tolist():
            self._holders[place].drop()
        self._group.settled = self._group.settled and all(
            self._holders[place].live for place in self._group.places.tolist()
        )

    def placed(self) -> tuple[np.ndarray, np.ndarray | None]:
        bits, order = self._crew.board.bits, self._group.order
        return (bits[: len(self._group.places)], None) if order is None else (bits[: int(order.max()) + 1], order)

    def copy(self, bits: np.ndarray) -> None:
        if self._there.any():
            bits[self._group.rows[self._there]] = self._crew.board.bits[self._group.places[self._there]]
