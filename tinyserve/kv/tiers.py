"""Where cached blocks may go when the pool needs their memory: nowhere, as long as there is no second tier.

A tier (host memory, disk) is told of every named block that is about to be overwritten, while its content is still
there. It knows hashes and block ids, not sequences.

Before: block.py.  After: pool.py (calls it).
"""

from __future__ import annotations

from typing import Protocol


class Tier(Protocol):
    """A slower place for blocks that leave the pool."""

    def evicted(self, group: int, block: int, name: bytes) -> None:
        """Note that the content of `block`, which held `name` for `group`, is overwritten from the next step on."""


class NoTier:
    """There is no second tier: what leaves the pool is forgotten."""

    def evicted(self, group: int, block: int, name: bytes) -> None:
        pass
