"""All that the scheduler sees of the cache: admit, extend, release.

Each call measures and reserves at once, all or nothing. There is no "would it fit?" to ask first, because two answers
can disagree.

    table of a full group      [ 7 ][ 3 ][ 9 ][ 2 ]      one block per B positions
    table of a window group    [ 0 ][ 0 ][ 5 ][ 8 ]      blocks left of the window are given back; null stands there
                                                         (and of a chunked group: blocks of earlier chunks)
                               |         |  named|
                               0       left    covered = 4 * B

    positions   0 ......... computed ......... end of the planned slice ... covered
                named: full blocks below `computed`, whose tokens the host knows and whose step has landed

A block gets its name only when its positions are computed AND its tokens are known, i.e. after commit. So a block in
the index never holds a speculative token, a token still in flight, or the content of a row that turned out bad.

Before: pool.py, groups.py.  After: scheduling/scheduler.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from ..request import Request
from .block import NameChain
from .groups import KVGroup
from .pool import BlockPool
from .tiers import Tier

NEVER = 2**62


class TableChange(NamedTuple):
    """From table index `start` on, group `group` now has `blocks`."""

    group: int
    start: int
    blocks: tuple[int, ...]


@frozen
class Admission:
    """What `admit` reserved. cached: tokens that need no computing; count: tokens that may be computed now.

    count 0: nothing is held, because the beginning is being computed for another sequence; ask again next step.
    """

    cached: int
    count: int


class SequenceKV:
    """What one sequence holds in the cache. Changed by KVCache only; empty before `admit` and after `release`.

    Attributes:
        chain: names of its blocks; outlives a release.
        tables: block ids per group, all equally long; 0 where a window has passed.
        changes: table changes that the device has not been told yet; the scheduler empties it.
        covered: positions that the tables have room for.
        named: blocks of each table that have been named.   left: per group, blocks given back by its window.
        due: value of `computed` at which there is something to name or to give back.
        trusted: whether its content may be shared.
        owed: blocks of its chain that others may count on it to compute; from `named` on they are not done yet.
        awaits: name of a block that another sequence was computing when this one asked.
    """

    __slots__ = ("awaits", "chain", "changes", "covered", "due", "left", "named", "owed", "tables", "trusted")

    def __init__(self, chain: NameChain, groups: int) -> None:
        self.chain = chain
        self.trusted = True
        self.awaits: bytes | None = None
        self.clear(groups)

    def clear(self, groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.changes: list[TableChange] = []
        self.covered = 0
        self.named = 0
        self.owed = 0
        self.left = [0] * groups
        self.due = 0


class KVCache:
    """The block tables of all sequences, over one pool.

    Args:
        groups: from `group_layers`; at least one.
        num_blocks: of the pool, with the null block.
        block_size: B, positions per block.
        enable_prefix_caching: off = nothing is named and nothing is ever found.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        tier: Tier | None = None,
    ) -> None:
        if not groups or block_size < 1:
            raise ValueError(f"A cache needs a group and a block size, got {len(groups)} groups, size {block_size}.")
        self.groups = tuple(groups)
        self.block_size = block_size
        self._names_blocks = enable_prefix_caching
        self._pool = BlockPool(num_blocks, len(groups), tier)
        self._forgetful = [group for group in self.groups if group.reach is not None]
        self._holders: set[SequenceKV] = set()
        self._promised: Counter[bytes] = Counter()  # names of prompt blocks that holders will compute

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out: the null block left out."""
        return len(self._pool.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that stand in no table, named or not."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """1 - free / total, 0..1."""
        return self._pool.usage

    def holdings(self, most: int) -> tuple[int, bytes]:
        """What blocks hold, for people: every k-th one, at most `most`, and k.

        One byte a block: 0 free, 1 free with a prefix that may be found, 2 in one table, 3 in several.
        """
        blocks = self._pool.blocks
        stride = -(-(len(blocks) - 1) // most)
        return stride, bytes(min(b.refs, 2) + 1 if b.refs else b.name is not None for b in blocks[1::stride])

    def sequence(self, request: Request, adapter: str = "") -> SequenceKV:
        """An empty holding for `request`. adapter: identity of the weights that colour its K and V."""
        return SequenceKV(NameChain(request, self.block_size, adapter), len(self.groups))

    def admit(
        self,
        kv: SequenceKV,
        tokens: Sequence[int],
        most: int,
        *,
        whole: bool = False,
        gate: int = 0,
        spare: int = 0,
        reads: bool = True,
    ) -> Admission | None:
        """Reserve blocks for the next tokens of a sequence that holds nothing, and take over a cached prefix.

        Args:
            tokens: all known ones; the last is always computed, so that there are logits to sample from.
            most: tokens that may be computed now, >= 1.   whole: refuse to split what is left to compute.
            gate: 0, or the largest step: then all `tokens` must fit now, computed in steps of this size.
            spare: blocks that must stay free.   reads: whether a cached prefix may be used.
        Returns: None when it does not fit; nothing is held then.
        """
        if kv.awaits in self._promised:
            return Admission(0, 0)
        known, size = len(tokens), self.block_size
        names: list[bytes] = []
        if reads and self._names_blocks:
            names = kv.chain.grow(tokens, (known - 1) // size)[: (known - 1) // size]
        hit = self._hit(names)
        if hit < len(names) and names[hit] in self._promised:
            kv.awaits = names[hit]
            return Admission(0, 0)
        count = min(known - hit * size, most)
        if whole and count < known - hit * size:
            return None
        tables = [self._found(group, names, hit) for group in self.groups]
        blocks = -(-(hit * size + count) // size)
        need = sum(self._pool.is_idle(number) for table in tables for number in table if number)
        for group, table in zip(self.groups, tables, strict=True):
            passed = table.count(0)
            peak = min(-(-known // size) - passed, self._most_held(group, gate)) if gate else 0
            need += max(blocks - hit, peak - (hit - passed))
        if need > self._pool.num_free - spare:
            return None
        self._hold(kv, tables, hit, blocks)
        kv.owed = len(names)
        self._promised.update(names[hit:])
        return Admission(hit * size, count)

    def extend(self, kv: SequenceKV, tokens: Sequence[int], computed: int, end: int) -> bool:
        """Make room for positions below `end`; first name what is complete and give back what windows have passed.

        Args:
            computed: positions whose step has landed; `tokens` holds at least these.
            end: one past the last position of the planned slice.
        Returns: False when the pool is short: nothing new is held then.
        """
        if computed >= kv.due:
            self._settle(kv, tokens, computed)
        if end <= kv.covered:
            return True
        more = -(-(end - kv.covered) // self.block_size)
        if more * len(kv.tables) > self._pool.num_free:
            return False
        self._append(kv, more)
        return True

    def release(self, kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        """Name what is complete, then give back all blocks, the tail first; a second release does nothing."""
        if kv not in self._holders:
            return
        self._name(kv, tokens, computed)
        self._keep_promises(kv.chain.names[kv.named : kv.owed])
        self._pool.free(number for column in zip(*map(reversed, kv.tables), strict=True) for number in column)
        kv.clear(len(self.groups))
        self._holders.remove(kv)

    def distrust(self, kv: SequenceKV) -> None:
        """Take the blocks of a sequence with bad numbers out of the index at once, and keep them out.

        The one call besides admit, extend and release: the blocks themselves may be needed by flights for a while,
        but from now on nobody may find them. Also cached blocks that the sequence found itself are forgotten, since
        the bad numbers may have come from there.
        """
        kv.trusted = False
        self._pool.discard(kv.chain.names)

    def longest(self, step: int) -> int:
        """Positions that one sequence alone can have in the cache, when each step computes at most `step` of them."""

        def need(blocks: int) -> int:
            return sum(min(blocks, self._most_held(group, step)) for group in self.groups)

        low, high = 0, self.num_blocks
        if need(NEVER) <= self.num_blocks:
            return NEVER
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if need(middle) <= self.num_blocks else (low, middle - 1)
        return low * self.block_size

    def reset_prefix_cache(self) -> bool:
        """Forget all names; False, and nothing done, while any block stands in a table."""
        return self._pool.discard_all()

    def check_integrity(self) -> None:
        """Assert every invariant of tables, references, free list and index. For tests, and when idle."""
        uses: Counter[int] = Counter()
        promised: Counter[bytes] = Counter()
        for kv in self._holders:
            lengths = {len(table) for table in kv.tables}
            assert lengths == {kv.covered // self.block_size}, f"tables of {lengths} blocks cover {kv.covered}"
            promised.update(kv.chain.names[kv.named : kv.owed])
            for group, table in zip(self.groups, kv.tables, strict=True):
                left = kv.left[group.index]
                assert not any(table[:left]) and all(table[left:]), f"left {left} of group {group.index}: {table}"
                uses.update(table[left:])
                for index, number in enumerate(table):
                    block = self._pool.blocks[number]
                    if block.name is not None:
                        assert block.group == group.index, f"{block} of group {block.group} in a table of {group}"
                        assert block.name == kv.chain.names[index], f"{block} has another content's name"
        assert promised == self._promised, "promises that no holder will keep, or the reverse"
        self._pool.check_integrity(uses)

    def _most_held(self, group: KVGroup, step: int) -> int:
        """Blocks that a group's table can hold at once: what a query sees, and the `step` tokens being computed."""
        if group.reach is None:
            return NEVER
        return -(-(group.reach - 1 + step) // self.block_size) + 1

    def _hit(self, names: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix on which all groups agree: each shortens it until none does."""
        hit = len(names)
        while hit:
            before = hit
            for group in self.groups:
                hit = self._longest_hit(group, names, hit)
            if hit == before:
                break
        return hit

    def _first_block(self, group: KVGroup, hit: int) -> int:
        """The first block that the position after `hit` blocks sees into."""
        return group.first_seen(hit * self.block_size) // self.block_size

    def _longest_hit(self, group: KVGroup, names: Sequence[bytes], limit: int) -> int:
        """The largest prefix of at most `limit` blocks whose visible part is cached for this group.

        From the right: a hit of `limit` blocks needs those from _first_block on. The last that is missing ends a
        shorter candidate, which sees into earlier blocks; none is looked up twice.
        """
        find = self._pool.find
        if group.reach is None:
            return next((i for i in range(limit) if find(group.index, names[i]) is None), limit)
        hit = at = limit
        while at > self._first_block(group, hit):
            at -= 1
            if find(group.index, names[at]) is None:
                hit = at
        return hit

    def _found(self, group: KVGroup, names: Sequence[bytes], hit: int) -> list[int]:
        """The table of a hit: found blocks, null where the next position does not see."""
        first = self._first_block(group, hit)
        return [0] * first + [self._pool.find(group.index, name) for name in names[first:hit]]

    def _hold(self, kv: SequenceKV, tables: list[list[int]], hit: int, blocks: int) -> None:
        for table in tables:
            self._pool.touch(table)
        kv.tables = tables
        kv.covered = hit * self.block_size
        kv.named = hit
        kv.left = [table.count(0) for table in tables]
        kv.changes = [TableChange(index, 0, tuple(table)) for index, table in enumerate(tables) if table]
        self._holders.add(kv)
        self._append(kv, blocks - hit)
        self._plan_settling(kv)

    def _append(self, kv: SequenceKV, more: int) -> None:
        for index, table in enumerate(kv.tables):
            taken = self._pool.take(more, table[-1] if table else 0)
            kv.changes.append(TableChange(index, len(table), tuple(taken)))
            table += taken
        kv.covered += more * self.block_size

    def _settle(self, kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        """Name complete blocks; then give back those that no position from `computed` on can see."""
        self._name(kv, tokens, computed)
        for group in self._forgetful:
            index = group.index
            table, left = kv.tables[index], kv.left[index]
            first = group.first_seen(computed) // self.block_size
            if first > left:
                self._pool.free(reversed(table[left:first]))
                table[left:first] = nulls = [0] * (first - left)
                kv.changes.append(TableChange(index, left, tuple(nulls)))
                kv.left[index] = first
        self._plan_settling(kv)

    def _name(self, kv: SequenceKV, tokens: Sequence[int], computed: int) -> None:
        full = computed // self.block_size
        if not self._names_blocks or not kv.trusted or full <= kv.named:
            return
        names = kv.chain.grow(tokens, full)
        self._keep_promises(names[kv.named : min(full, kv.owed)])
        for group, table in enumerate(kv.tables):
            for index in range(kv.named, full):
                if table[index]:
                    self._pool.name(table[index], group, names[index])
        kv.named = full

    def _keep_promises(self, names: Sequence[bytes]) -> None:
        """Nobody need wait for these any more: they can be found now, or will not be computed."""
        for name in names:
            self._promised[name] -= 1
            if not self._promised[name]:
                del self._promised[name]

    def _plan_settling(self, kv: SequenceKV) -> None:
        size = self.block_size
        kv.due = (kv.named + 1) * size if self._names_blocks and kv.trusted else NEVER
        for group in self._forgetful:
            kv.due = min(kv.due, group.outgrown((kv.left[group.index] + 1) * size))
