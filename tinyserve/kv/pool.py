"""Who holds which block: the free list, the reference counts, and the index from names to blocks.

Freeing a block does not forget what it holds. A named block waits at the back of the free list, where a later sequence
may find it by name and take it out again; it loses its name only when it is handed out for something else. So the free
list IS the eviction order (least recently used first), and a cache hit costs no copy.

    handed out from here                                             named blocks return here
            |                                                                  |
            v                                                                  v
          [ 9 ] <-> [ 4 ] <-> [ 7: name ] <-> [ 2: name ] <-> ... <-> [ 5: name ]
            ^
            |
    nameless blocks return here: nothing is lost when they are overwritten

The list is linked through the blocks themselves, because a hit removes a block from its middle in constant time.

A sequence whose blocks follow each other can be read in place on the CPU (kernels/pages.py), where copying its blocks
out is a tenth of a step. So a sequence that grows gets the block behind its last one, if that is free and nameless, and
a new pool hands its blocks out in an order that leaves room between sequences: 1, then the middle, then the quarters.
Once everything is named, eviction decides alone, and those sequences are copied.

Before: block.py.  After: cache.py (tables of sequences).
"""

from __future__ import annotations

from collections.abc import Iterable

from .block import Block
from .tiers import NoTier, Tier


class BlockPool:
    """All blocks of one engine. Block 0, the null block, is never handed out, named, counted or freed.

    Args:
        num_blocks: with the null block, so at least 2.
        num_groups: KV groups that draw from it; the index is kept per group.
    """

    def __init__(self, num_blocks: int, num_groups: int, tier: Tier | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"A pool needs the null block and one more, got {num_blocks} blocks.")
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.num_free = num_blocks - 1
        self._tier = tier or NoTier()
        self._index: list[dict[bytes, list[Block]]] = [{} for _ in range(num_groups)]
        self._end = Block(-1)  # ring sentinel: .after is the next block to hand out, .before the last
        self._end.before = self._end.after = self._end
        for number in halving(num_blocks - 1):
            self._link(self.blocks[1 + number], self._end)

    @property
    def usage(self) -> float:
        """Part of the blocks that stand in some table, 0..1; free blocks that are still named do not count."""
        return 1 - self.num_free / (len(self.blocks) - 1)

    def take(self, count: int, last: int = 0) -> list[int]:
        """Hand out `count` blocks: each the one behind the one before, if that is free and nameless, otherwise the
        front of the free list. Each loses its name and starts with one reference.

        The caller has checked `num_free`.   last: the block that the first one should follow; 0: none.
        """
        taken = []
        for _ in range(count):
            block = self._behind(last) or self._end.after
            self._unlink(block)
            last = block.id
            if block.name is not None:
                self._tier.evicted(block.group, block.id, block.name)
                self._forget(block)
            block.refs = 1
            taken.append(block.id)
        self.num_free -= count
        return taken

    def find(self, group: int, name: bytes) -> int | None:
        """A block that holds `name` for `group`, or None."""
        found = self._index[group].get(name)
        return found[0].id if found else None

    def is_idle(self, number: int) -> bool:
        """Whether the block stands in no table, so that touching it takes one from the free list."""
        return self.blocks[number].refs == 0

    def touch(self, numbers: Iterable[int]) -> None:
        """Add a reference to each of these found blocks; null blocks are passed over."""
        for number in numbers:
            block = self.blocks[number]
            if number == 0:
                continue
            if block.refs == 0:
                self._unlink(block)
                self.num_free -= 1
            block.refs += 1

    def free(self, numbers: Iterable[int]) -> None:
        """Drop a reference of each, in this order; pass a sequence's tail first, so that it is evicted first."""
        for number in numbers:
            if number == 0:
                continue
            block = self.blocks[number]
            block.refs -= 1
            if block.refs == 0:
                self._link(block, self._end.after if block.name is None else self._end)
                self.num_free += 1

    def name(self, number: int, group: int, name: bytes) -> None:
        """Record that block `number` now holds `name`. Several blocks may hold the same; a named one keeps its name."""
        block = self.blocks[number]
        if block.name is None:
            block.name, block.group = name, group
            self._index[group].setdefault(name, []).append(block)

    def discard(self, names: Iterable[bytes]) -> None:
        """Forget all that is stored under `names`, in all groups; idle blocks move to the front of the free list."""
        for name in names:
            for index in self._index:
                for block in list(index.get(name, ())):
                    self._forget(block)
                    if block.refs == 0:
                        self._unlink(block)
                        self._link(block, self._end.after)

    def discard_all(self) -> bool:
        """Forget every name, if no block stands in a table; otherwise change nothing and return False."""
        if self.num_free != len(self.blocks) - 1:
            return False
        for index in self._index:
            index.clear()
        for block in self.blocks:
            block.name = None
        return True

    def check_integrity(self, uses: dict[int, int]) -> None:
        """Assert every invariant. uses: how many tables each block id stands in, null blocks left out."""
        null, idle, at = self.blocks[0], set(), self._end.after
        assert null.refs == 0 and null.name is None and null.after is None, f"null block changed: {null}"
        while at is not self._end:
            assert at.after.before is at and at.id not in idle, f"free list broken at {at}"
            idle.add(at.id)
            at = at.after
        for block in self.blocks[1:]:
            assert block.refs == uses.get(block.id, 0), f"{block} stands in {uses.get(block.id, 0)} tables"
            assert (block.refs == 0) == (block.id in idle), f"{block} idle but not free, or the reverse"
            if block.name is not None:
                assert block in self._index[block.group].get(block.name, ()), f"{block} missing in the index"
        indexed = [block for index in self._index for found in index.values() for block in found]
        assert len(indexed) == sum(block.name is not None for block in self.blocks), "index holds forgotten blocks"
        assert all(found for index in self._index for found in index.values()), "empty index entry"
        assert self.num_free == len(idle), f"num_free {self.num_free}, free list {len(idle)}"

    def _behind(self, number: int) -> Block | None:
        """The block that follows this one in memory, if nothing is lost when it is handed out."""
        if not 0 < number < len(self.blocks) - 1:
            return None
        block = self.blocks[number + 1]
        return block if block.refs == 0 and block.name is None else None

    def _forget(self, block: Block) -> None:
        found = self._index[block.group][block.name]
        found.remove(block)
        if not found:
            del self._index[block.group][block.name]
        block.name = None

    def _link(self, block: Block, successor: Block) -> None:
        block.before, block.after = successor.before, successor
        successor.before.after = block
        successor.before = block

    def _unlink(self, block: Block) -> None:
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = None


def halving(count: int) -> list[int]:
    """The numbers below `count`, each as far as possible from those before: 0, the half, the quarters, the eighths."""
    order = [0]
    while len(order) < count:
        order = [2 * number for number in order] + [2 * number + 1 for number in order]
    return [number for number in order if number < count]
