"""Beam searches under way: work that is more than the requests it has queued at the moment.

A search asks for one token at a time, and between two of its steps there is nothing of it in the scheduler. It is
running all the same: whoever waits until nothing runs waits for it, its steps are taken while new requests are refused,
and an abort ends it by the name that its answer carries, with the beams that it has by then.

Before: errors.py.  After: streams.py (which knows everything that runs), beam.py (which searches).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from attrs import define, field

Failed = Callable[[], Exception]
Meant = Callable[[str], bool]  # of a name: is it one of those?


@define(eq=False)
class Search:
    """One search. name: of the call, and of all requests that it makes.   width: beams.

    Attributes:
        aborted: it ends before its next step.   error: what its reader is told if no step has ended by then.
    """

    name: str
    width: int
    aborted: bool = field(default=False, init=False)
    error: Failed | None = field(default=None, init=False)


class Searches:
    """Those that run. Args: begun, ended: called when there is one more, and one less."""

    def __init__(self, begun: Callable[[], None], ended: Callable[[], None]) -> None:
        self._begun = begun
        self._ended = ended
        self._running: dict[Search, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextlib.contextmanager
    def running(self, name: str, width: int) -> Iterator[Search]:
        """A search that runs for as long as the context."""
        search = Search(name, width)
        self._running[search] = None
        self._begun()
        try:
            yield search
        finally:
            del self._running[search]
            self._ended()

    def abort(self, meant: Meant, error: Failed | None = None) -> list[Search]:
        """Have the searches whose names are `meant` end; those that had not been told before."""
        found = [one for one in self._running if meant(one.name) and not one.aborted]
        for one in found:
            one.aborted, one.error = True, error
        return found
