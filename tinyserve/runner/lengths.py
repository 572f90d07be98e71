"""How long rows are that decode together, added up for many steps at once.

A processor that has just woken up takes 25 us for the cheapest sum of two arrays (the code of the sum is in none of its
caches), and 4 us for copying a part of one. A step that only decodes costs the host 80 to 150 us in all.

Before: step.py (Decodes).  After: batch.py.
"""

from __future__ import annotations

import numpy as np

from ..step import Decodes

AHEAD = 64  # steps


class Lengths:
    """Of the rows of one convoy at a time."""

    def __init__(self) -> None:
        self._first: np.ndarray | None = None
        self._from = 0
        self._sums = memoryview(b"")

    def of(self, pieces: Decodes) -> memoryview:
        """[S] int32: how long each row is after this step."""
        count, step = len(pieces.slots), pieces.further - self._from
        if pieces.first is not self._first or not 0 <= step < AHEAD:
            self._first, self._from, step = pieces.first, pieces.further, 0
            longer = np.arange(pieces.further + 1, pieces.further + 1 + AHEAD, dtype=np.int32)
            self._sums = memoryview(np.add.outer(longer, pieces.first).reshape(-1))
        return self._sums[step * count : (step + 1) * count]
