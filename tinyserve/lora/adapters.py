"""Which adapters there are, and which of them have a place on the device now.

    LoadedAdapters   names ---> Adapter (number, weights on the host)         as many as the host's memory holds
                     places     0 .. max_loras - 1, each with one adapter      as many as may run in one step

An adapter is an object that requests hold, not a name that they look up. So one that is unloaded, or replaced by
another under its name, ends when the last request that began with it does; and its number, which colours the prefix
cache, is never given twice. A place goes to the adapter that was admitted longest ago and has no running request; what
must be copied to the device is told with the step that needs it, as steps run in order.

A request whose adapter has no place is passed by later ones whose adapters have, as one of a kind alone would waste a
step; but only by as many as may run together, and then they wait for it. So two adapters that share a place take turns
by the batch, and neither waits for as long as the other is asked for.

Before: request.py (Request.adapter), names.py (reads weights).  After: scheduling/scheduler.py (asks when a request
arrives and is admitted), batch.py (the places on the device), engine/adapters.py (loads by name).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from attrs import field, frozen

from ..errors import UnknownModel


@frozen(eq=False)
class Adapter:
    """One loaded adapter.

    Args:
        name: by which requests ask for it.   path: where it was read.
        number: of this loading; never used again.   rank: the largest of its matrices'.
        weights: what batch.py copies to a place.
    """

    name: str
    path: str
    number: int
    rank: int = 0
    weights: Any = field(default=None, repr=False)

    @property
    def identity(self) -> str:
        """What distinguishes its weights from all others that this engine ever had."""
        return f"{self.number}:{self.name}"


@frozen(eq=False)
class Move:
    """From this step on a place has this adapter's weights."""

    place: int
    adapter: Adapter


class Turn(Protocol):
    """Who may enter in one step; asked in the order of the queue."""

    def fits(self, request: Any) -> bool:
        """Whether this request may run beside those that run."""

    def entered(self, request: Any) -> None:
        """It runs from now on."""


class Adapters(Protocol):
    """What the scheduler asks about adapters."""

    def identity(self, adapter: Any) -> str:
        """Return what distinguishes this adapter's weights in the prefix cache, "" for the base model (None).

        Raises: UnknownModel: no such adapter can be used here.
        """

    def turn(self, active: Callable[[], Iterable[Any]], patience: int) -> Turn:
        """Begin to admit. active: tells the adapters of what runs.   patience: how many may pass one that waits."""

    def place(self, adapter: Any, active: Iterable[Any]) -> int:
        """Return where an adapter that fits has its weights from now on: its place + 1, or 0 for the base model."""

    def moves(self) -> tuple[Any, ...]:
        """Return what changed since the last call, to be told with the step that is planned."""


class EveryTurn:
    """Nobody waits for an adapter."""

    def fits(self, request: Any) -> bool:
        return True

    def entered(self, request: Any) -> None:
        """Nothing to count."""


class NoAdapters:
    """Only the base model: a request that names an adapter is refused."""

    def identity(self, adapter: Any) -> str:
        if adapter is not None:
            raise UnknownModel(str(getattr(adapter, "name", adapter)), ())
        return ""

    def turn(self, active: Callable[[], Iterable[Any]], patience: int) -> EveryTurn:
        return EveryTurn()

    def place(self, adapter: Any, active: Iterable[Any]) -> int:
        return 0

    def moves(self) -> tuple[Any, ...]:
        return ()


class LoadedAdapters:
    """The adapters of one engine. Used on its loop only.

    Args: places: how many may run at the same time.
    """

    def __init__(self, places: int) -> None:
        self.num_places = places
        self._numbers = itertools.count(1)
        self._named: dict[str, Adapter] = {}
        self._placed: dict[Adapter, int] = {}  # in the order of their last admission
        self._free = list(reversed(range(places)))
        self._moves: list[Move] = []
        self.passed: tuple[str | None, int] = (None, 0)  # id of the first request without a place; how many passed it

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """All that can be asked for, in the order of their loading."""
        return tuple(self._named.values())

    def find(self, name: str) -> Adapter | None:
        """Return the adapter that requests of this name get now."""
        return self._named.get(name)

    def load(self, name: str, path: str, rank: int, weights: Any) -> Adapter:
        """Have requests of this name answered with these weights from now on."""
        adapter = Adapter(name, path, next(self._numbers), rank, weights)
        self._named.pop(name, None)
        self._named[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Take no further requests of this name; those that have begun keep what they began with."""
        del self._named[name]

    def identity(self, adapter: Adapter | None) -> str:
        return "" if adapter is None else adapter.identity

    def fits(self, adapter: Adapter | None, active: Iterable[Adapter | None]) -> bool:
        return adapter is None or len({adapter, *active} - {None}) <= self.num_places

    def turn(self, active: Callable[[], Iterable[Adapter | None]], patience: int) -> _Turn:
        return _Turn(self, active, patience)

    def place(self, adapter: Adapter | None, active: Iterable[Adapter | None]) -> int:
        if adapter is None:
            return 0
        place = self._placed.pop(adapter, None)
        if place is None:
            place = self._free.pop() if self._free else self._placed.pop(self._idle(active))
            self._moves.append(Move(place, adapter))
        self._placed[adapter] = place
        return place + 1

    def _idle(self, active: Iterable[Adapter | None]) -> Adapter:
        """The adapter without a running request that was admitted longest ago; `fits` says that there is one."""
        busy = set(active)
        return next(adapter for adapter in self._placed if adapter not in busy)

    def moves(self) -> tuple[Move, ...]:
        moves, self._moves = tuple(self._moves), []
        return moves


class _Turn:
    """Lets requests in as there are places, and behind one that has waited long enough only those without adapters."""

    def __init__(self, known: LoadedAdapters, active: Callable[[], Iterable[Adapter | None]], patience: int) -> None:
        self._known = known
        self._active = active
        self._patience = patience
        self._unfit: set[Adapter] = set()  # who is let in meanwhile makes no room for them
        self._first: Any = None  # request that does not fit

    def fits(self, request: Any) -> bool:
        adapter = request.adapter
        if adapter is None:
            return True
        if self._first is not None and self._known.passed[1] >= self._patience:
            return False
        if adapter not in self._unfit and not self._known.fits(adapter, self._active()):
            self._unfit.add(adapter)
        if adapter not in self._unfit:
            return True
        if self._first is None:
            self._first = request
            if self._known.passed[0] != request.id:
                self._known.passed = request.id, 0
        return False

    def entered(self, request: Any) -> None:
        if request.adapter is not None and self._first is not None:
            self._known.passed = self._first.id, self._known.passed[1] + 1
