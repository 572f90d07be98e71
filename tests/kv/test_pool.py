"""pool.py: the order in which blocks are handed out and forgotten."""

from collections import Counter

import pytest

from tinyserve.kv.pool import BlockPool, halving


def named_pool(count):
    """A pool whose blocks 1..count are named b"1".. and idle, block 1 freed last."""
    pool = BlockPool(count + 1, 1)
    blocks = pool.take(count)
    for number in blocks:
        pool.name(number, 0, b"%d" % number)
    pool.free(reversed(blocks))
    return pool


def test_blocks_are_handed_out_in_id_order_at_first():
    assert BlockPool(5, 1).take(4) == [1, 2, 3, 4]


def test_sequences_that_grow_in_turn_each_stay_in_one_piece():
    """Breaks if new sequences begin side by side: after one block each, none could grow in place."""
    pool = BlockPool(33, 1)
    sequences = [pool.take(2) for _ in range(4)]
    for _ in range(6):
        for blocks in sequences:
            blocks += pool.take(1, blocks[-1])

    assert [blocks[0] for blocks in sequences] == [1, 17, 9, 25]
    assert all(blocks == [*range(blocks[0], blocks[0] + 8)] for blocks in sequences)
    assert pool.num_free == 0
    pool.check_integrity(Counter(range(1, 33)))


def test_what_one_sequence_left_is_not_begun_by_two():
    """Breaks if the next two sequences both begin in the piece that the first one left: neither could grow."""
    pool = BlockPool(33, 1)
    pool.free(reversed(pool.take(8)))

    assert pool.take(3) == [1, 2, 3] and pool.take(3) == [17, 18, 19]
    pool.check_integrity(Counter([1, 2, 3, 17, 18, 19]))


@pytest.mark.parametrize("state", ["in use", "named", "past the end"])
def test_a_block_behind_is_taken_only_if_nothing_is_lost(state):
    """A neighbour in use would be shared by two sequences; a named one is in the cache, and not the oldest there."""
    pool = BlockPool(6, 1)
    blocks = pool.take(5)
    pool.name(3, 0, b"3")
    pool.free([3, 4] if state != "in use" else [4])
    last = 5 if state == "past the end" else 2

    assert blocks == [1, 2, 3, 4, 5] and pool.take(1, last) == [4]
    pool.check_integrity(Counter([1, 2, 4, 5, *([3] if state == "in use" else [])]))


@pytest.mark.parametrize("count", [1, 2, 5, 8, 1000])
def test_halving_leaves_out_no_number(count):
    assert sorted(halving(count)) == list(range(count))


def test_the_null_block_is_never_handed_out_nor_counted():
    pool = BlockPool(5, 1)

    assert pool.usage == 0
    pool.take(4)
    assert pool.usage == 1 and pool.num_free == 0
    pool.free([0])
    pool.touch([0])
    pool.check_integrity(Counter([1, 2, 3, 4]))


def test_a_pool_without_usable_blocks_is_refused():
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1, 1)


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool = named_pool(4)

    assert pool.take(4) == [4, 3, 2, 1]


def test_a_block_keeps_its_name_until_it_is_handed_out():
    pool = named_pool(3)

    assert pool.find(0, b"3") == 3
    pool.take(1)
    assert pool.find(0, b"3") is None and pool.find(0, b"2") == 2
    pool.check_integrity(Counter([3]))


def test_nameless_blocks_are_reused_first():
    pool = named_pool(3)
    (number,) = pool.take(1)
    pool.free([number])

    assert pool.take(1) == [number]
    assert pool.take(1) == [2]


def test_touching_an_idle_block_takes_it_out_of_the_middle_of_the_free_list():
    pool = named_pool(3)

    pool.touch([2])

    assert pool.num_free == 2 and not pool.is_idle(2)
    assert pool.take(2) == [3, 1]
    pool.check_integrity(Counter([1, 2, 3]))


def test_two_blocks_may_hold_the_same_and_either_is_found():
    pool = BlockPool(4, 1)
    first, second = pool.take(2)
    pool.name(first, 0, b"same")
    pool.name(second, 0, b"same")

    pool.free([first])
    pool.take(2)

    assert pool.find(0, b"same") == second


def test_groups_do_not_find_each_others_blocks():
    """Block 1 of group 0 holds layers that group 1 does not have."""
    pool = BlockPool(4, 2)
    pool.name(pool.take(1)[0], 0, b"x")

    assert (pool.find(0, b"x"), pool.find(1, b"x")) == (1, None)


def test_discarded_names_are_not_found_and_their_idle_blocks_come_first():
    pool = named_pool(3)

    pool.discard([b"1", b"unknown"])

    assert pool.find(0, b"1") is None
    assert pool.take(1) == [1]
    pool.check_integrity(Counter([1]))


def test_all_blocks_of_a_discarded_name_are_forgotten():
    pool = BlockPool(4, 2)
    blocks = pool.take(3)
    for number, group in zip(blocks, (0, 0, 1), strict=True):
        pool.name(number, group, b"same")

    pool.discard([b"same"])

    assert pool.find(0, b"same") is pool.find(1, b"same") is None
    pool.check_integrity(Counter(blocks))


def test_forgetting_everything_needs_an_idle_pool():
    pool = named_pool(3)
    pool.touch([1])

    assert not pool.discard_all() and pool.find(0, b"2") == 2
    pool.free([1])
    assert pool.discard_all() and pool.find(0, b"2") is None
    pool.check_integrity(Counter())


def test_a_tier_hears_of_a_named_block_before_it_is_overwritten():
    heard = []

    class Listener:
        def evicted(self, group, block, name):
            heard.append((group, block, name))

    pool = BlockPool(3, 1, Listener())
    (number,) = pool.take(1)
    pool.name(number, 0, b"x")
    pool.free([number])
    pool.take(2)

    assert heard == [(0, 1, b"x")]
