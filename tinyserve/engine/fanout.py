"""Several answers to one prompt: n requests with seeds of their own, which the rest of the engine treats as strangers.

They meet again in one stream, told apart by `Output.index`, and they share the prompt's blocks through the prefix
cache like any requests that begin alike and arrive together: the scheduler computes the common beginning once. It
therefore knows nothing of n. A request is made when it is asked for, because n may be 16384 and the prompt long.

Before: request.py.  After: intake.py (which calls this last), beam.py (where one prompt makes many requests in turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from attrs import evolve

from ..request import Request


def child_seed(seed: int, index: int) -> int:
    """Seed of answer `index`: seed + index, wrapped around at the ends of int64."""
    return (seed + index + 2**63) % 2**64 - 2**63


class Children(Sequence[Request]):
    """The requests for the `sampling.n` answers of one; ids are those of the parent with the index behind it."""

    def __init__(self, parent: Request) -> None:
        self.parent = parent
        self._params = parent.sampling if parent.sampling.n == 1 else evolve(parent.sampling, n=1, seed=None)

    def __len__(self) -> int:
        return self.parent.sampling.n

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        """The request for answer `index`, made anew each time."""
        parent, place = self.parent, range(len(self))[index]
        if isinstance(place, range):
            return [self[one] for one in place]
        if len(self) == 1:
            return parent
        seed = child_seed(parent.seed, place)
        return evolve(parent, id=f"{parent.id}.{place}", sampling=self._params, seed=seed)
