"""What a block is, and the name of what it holds.

A block is B consecutive positions of one KV group. A full block of known tokens has a *name*: a hash over everything
that its keys and values depend on, which is all tokens up to its end and whatever else colours them.

    name(i) = sha256(name(i - 1), token ids of block i, extra keys of block i)        name(-1) = ROOT

    extra keys   adapter      in every block: it changes all K and V
                 media        in each block that an item overlaps: its content hash, and where it starts in the block
                 cache salt   in block 0, from where it colours the whole chain

Two sequences share a block exactly when the names are equal. A partly filled block has no name.

Before: request.py.  After: pool.py (finds blocks by name), cache.py (decides which).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from ..request import Request

ROOT = hashlib.sha256(b"tinyserve kv chain 1").digest()


class Block:
    """One block id in the pool; only the pool changes it.

    Attributes:
        id: 0 is the null block.
        refs: tables it stands in; 0 = in the free list (the null block is in neither).
        name: what it holds, or None; `group`: for which KV group.
        before, after: neighbours in the free list, None outside it.
    """

    __slots__ = ("after", "before", "group", "id", "name", "refs")

    def __init__(self, number: int) -> None:
        self.id = number
        self.refs = 0
        self.group = 0
        self.name: bytes | None = None
        self.before: Block | None = None
        self.after: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.refs}, name={self.name and self.name.hex()[:8]})"


class NameChain:
    """The names of one sequence's full blocks, computed once and kept over preemptions.

    Tokens may only be appended between calls: a name is never recomputed.
    """

    __slots__ = ("_adapter", "_block_size", "_media", "_salt", "names")

    def __init__(self, request: Request, block_size: int, adapter: str = "") -> None:
        self.names: list[bytes] = []
        self._block_size = block_size
        self._adapter = adapter
        self._media = request.media
        self._salt = request.cache_salt

    def grow(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Return the names, of at least the first `blocks` blocks of `tokens`, all of which must be full."""
        names, size = self.names, self._block_size
        assert blocks * size <= len(tokens), f"block {blocks - 1} of {len(tokens)} tokens is not full"
        for index in range(len(names), blocks):
            ids = array("i", tokens[index * size : (index + 1) * size])
            parent = names[-1] if names else ROOT
            names.append(hashlib.sha256(parent + ids.tobytes() + self._extra(index)).digest())
        return names

    def _extra(self, index: int) -> bytes:
        """The extra keys of block `index` as bytes, b"" when there are none."""
        keys: list[tuple] = []
        if self._adapter:
            keys.append(("adapter", self._adapter))
        start = index * self._block_size
        for item in self._media:
            if item.offset < start + self._block_size and start < item.offset + item.length:
                keys.append(("media", item.hash, item.offset - start))
        if index == 0 and self._salt is not None:
            keys.append(("salt", self._salt))
        return repr(keys).encode() if keys else b""
