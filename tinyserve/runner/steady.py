"""A decode on the CPU, computed again one position further: what a replayed graph is on a GPU.

    decode of rows 3, 0, 5    find out everything: slices, shapes, rows, tables, what they ask for -> compute
    the same rows, next step  lengths + 1 -> compute                                               compute
    ...                       until one of them enters another block

Between two products of a small model everything that Python does for a step comes out of main memory, because the
weights have just gone through all caches: a dozen small operations on integers take as long as a layer. So what the
step before has found out is kept, and the next one moves its positions only. Nothing is recorded: kernels run as ever.

Before: graphs.py (the seam).  After: runner.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .batch import Shape, Views
from .graphs import Computed, Eager


class Steady(Eager):
    """Runs every kernel of every step, and a decode once more.

    Args: tokens: [N, W] int32, the token table.   block_size: P, positions of a block.
    """

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._shape: Shape | None = None  # of the decode that can be computed again
        self._compute: Callable[..., Computed] | None = None
        self._left = 0  # how often, before a row of it enters another block
        self._moved: tuple[np.ndarray, ...] = ()

    def run(self, views: Views, compute: Callable[..., Computed]) -> Computed:
        """Return compute(), and keep it if this is a decode."""
        self._forget()
        computed = compute()
        if views.shape.is_decode:
            self._shape, self._compute, out = views.shape, compute, views.out
            parts = views.slots, views.seq_lens, out.positions, out.writes, out.tokens
            self._moved = tuple([part.numpy() for part in parts])
            self._left = min([-length % self._block_size for length in views.seq_lens.tolist()])
        return computed

    def holds(self, shape: Shape) -> bool:
        """Whether the step before was a decode of this shape, and can be computed again."""
        return self._left > 0 and shape == self._shape

    def replay(self, shape: Shape) -> Computed:
        """Compute it, one position further."""
        self._left -= 1
        slots, lengths, positions, writes, tokens = self._moved
        tokens[:] = self._tokens[slots, lengths]
        for numbers in (lengths, positions, writes):
            numbers += 1
        return self._compute(further=True)

    def close(self) -> None:
        """Keep nothing."""
        self._forget()
        self._tokens = self._tokens[:0]

    def _forget(self) -> None:
        self._shape, self._compute, self._left, self._moved = None, None, 0, ()
