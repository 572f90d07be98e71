"""Who holds which block: the free lists, the reference counts, and the index from names to blocks.

Freeing a block does not forget what it holds. A named block waits in a free list, where a later sequence may find it by
name and take it out again; it loses its name only when it is handed out for something else. So that list IS the
eviction order (least recently used first), and a cache hit costs no copy. Blocks without a name are handed out before
them: nothing is lost when those are overwritten.

    nameless   [ 9 ] <-> [ 4 ] <-> [ 8 ]                             both are handed out from the left, named ones
    named      [ 7: name ] <-> [ 2: name ] <-> ... <-> [ 5: name ]   last; blocks come back at the right

The lists are linked through the blocks themselves, because a hit removes a block from the middle in constant time.

A sequence whose blocks follow each other can be read in place on the CPU (kernels/pages.py), where copying them out is
a twentieth of a step. So a sequence that grows gets the block behind its last one, if that is idle and nameless, and
new sequences begin with room behind them: a new pool hands out 1, then the middle, then the quarters; of a run of
blocks that comes back nameless, the first goes to the front (memory that was touched is used again), the others to the
back. Once everything is named, eviction alone decides, and those sequences are copied.

Before: block.py.  After: cache.py (tables of sequences).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .block import Block
from .tiers import NoTier, Tier


class FreeList:
    """Idle blocks in the order in which they are handed out, linked through `Block.before` and `after`."""

    def __init__(self) -> None:
        self._end = Block(-1)  # closes the ring: .after is the first block, .before the last
        self._end.before = self._end.after = self._end

    def __iter__(self) -> Iterator[Block]:
        at = self._end.after
        while at is not self._end:
            yield at
            at = at.after

    @property
    def first(self) -> Block | None:
        """The next block to hand out."""
        return None if self._end.after is self._end else self._end.after

    def add(self, block: Block, *, front: bool = False) -> None:
        """Put a block at the back, or at the front."""
        block.after = self._end.after if front else self._end
        block.before = block.after.before
        block.before.after = block.after.before = block

    @staticmethod
    def remove(block: Block) -> None:
        """Take a block out of the list that it is in."""
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = None


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
        self._nameless, self._named = FreeList(), FreeList()
        for number in halving(num_blocks - 1):
            self._nameless.add(self.blocks[1 + number])

    @property
    def usage(self) -> float:
        """Part of the blocks that stand in some table, 0..1; free blocks that are still named do not count."""
        return 1 - self.num_free / (len(self.blocks) - 1)

    def take(self, count: int, last: int = 0) -> list[int]:
        """Hand out `count` blocks: each the one behind the one before, if that is idle and nameless, otherwise the
        first that is free. Each loses its name and starts with one reference.

        The caller has checked `num_free`.   last: the block that the first one should follow; 0: none.
        """
        taken = []
        for _ in range(count):
            block = self._nameless.first or self._named.first
            if self._idle_nameless(last + 1) and last:
                block = self.blocks[last + 1]
            FreeList.remove(block)
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
                FreeList.remove(block)
                self.num_free -= 1
            block.refs += 1

    def free(self, numbers: Iterable[int]) -> None:
        """Drop a reference of each, in this order; pass a sequence's tail first, so that it is evicted first."""
        nameless = set()
        for number in numbers:
            if number == 0:
                continue
            block = self.blocks[number]
            block.refs -= 1
            if block.refs:
                continue
            self.num_free += 1
            if block.name is None:
                nameless.add(number)
            else:
                self._named.add(block)
        for number in sorted(nameless):
            self._nameless.add(self.blocks[number], front=number - 1 not in nameless)

    def name(self, number: int, group: int, name: bytes) -> None:
        """Record that block `number` now holds `name`. Several blocks may hold the same; a named one keeps its name."""
        block = self.blocks[number]
        if block.name is None:
            block.name, block.group = name, group
            self._index[group].setdefault(name, []).append(block)

    def discard(self, names: Iterable[bytes]) -> None:
        """Forget all that is stored under `names`, in all groups; idle blocks are handed out before named ones."""
        for name in names:
            for index in self._index:
                for block in list(index.get(name, ())):
                    self.forget(block)

    def forget(self, block: Block) -> None:
        """Take the name of one named block away."""
        if block.refs == 0:
            FreeList.remove(block)
        self._forget(block)
        if block.refs == 0:
            self._nameless.add(block)

    def discard_all(self) -> bool:
        """Forget every name, if no block stands in a table; otherwise change nothing and return False."""
        if self.num_free != len(self.blocks) - 1:
            return False
        for index in self._index:
            index.clear()
        for block in list(self._named):
            block.name = None
            FreeList.remove(block)
            self._nameless.add(block)
        return True

    def check_integrity(self, uses: dict[int, int]) -> None:
        """Assert every invariant. uses: how many tables each block id stands in, null blocks left out."""
        null, idle = self.blocks[0], set()
        assert null.refs == 0 and null.name is None and null.after is None, f"null block changed: {null}"
        for free_list in (self._nameless, self._named):
            for block in free_list:
                assert block.after.before is block and block.id not in idle, f"free list broken at {block}"
                assert (block.name is None) == (free_list is self._nameless), f"{block} in the wrong free list"
                idle.add(block.id)
        for block in self.blocks[1:]:
            assert block.refs == uses.get(block.id, 0), f"{block} stands in {uses.get(block.id, 0)} tables"
            assert (block.refs == 0) == (block.id in idle), f"{block} idle but not free, or the reverse"
            if block.name is not None:
                assert block in self._index[block.group].get(block.name, ()), f"{block} missing in the index"
        indexed = [block for index in self._index for found in index.values() for block in found]
        assert len(indexed) == sum(block.name is not None for block in self.blocks), "index holds forgotten blocks"
        assert all(found for index in self._index for found in index.values()), "empty index entry"
        assert self.num_free == len(idle), f"num_free {self.num_free}, free list {len(idle)}"

    def _idle_nameless(self, number: int) -> bool:
        """Whether nothing is lost when this block is handed out."""
        if not 0 < number < len(self.blocks):
            return False
        block = self.blocks[number]
        return block.refs == 0 and block.name is None

    def _forget(self, block: Block) -> None:
        found = self._index[block.group][block.name]
        found.remove(block)
        if not found:
            del self._index[block.group][block.name]
        block.name = None


def halving(count: int) -> list[int]:
    """The numbers below `count`, each as far as possible from those before: 0, the half, the quarters, the eighths."""
    order = [0]
    while len(order) < count:
        order = [2 * number for number in order] + [2 * number + 1 for number in order]
    return [number for number in order if number < count]
