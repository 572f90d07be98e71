"""cache.py: all or nothing, hits in whole blocks, windows that give back what they passed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import first_visible
from tests.scheduling.harness import kv_groups, request
from tinyserve.kv.cache import NEVER, KVCache

B = 4


def make(blocks=20, windows=(None,), **kwargs):
    return KVCache(kv_groups(windows), blocks + 1, B, **kwargs)


def admit(cache, tokens, most=1000, adapter="", salt=None, **kwargs):
    """(holding, admission) of a new sequence with these tokens."""
    kv = cache.sequence(request(prompt=tokens, salt=salt), adapter)
    admission = cache.admit(kv, tokens, most, **kwargs)
    cache.check_integrity()
    return kv, admission


def run_through(cache, tokens, **kwargs):
    """Compute `tokens` in one step and release them: what a finished request leaves behind."""
    kv, admission = admit(cache, tokens, **kwargs)
    assert admission is not None
    cache.release(kv, tokens, len(tokens))
    cache.check_integrity()


def cached(cache, tokens, **kwargs):
    """Tokens that a new sequence finds; it is let go at once."""
    kv, admission = admit(cache, tokens, **kwargs)
    cache.release(kv, tokens, 0)
    return admission.cached


def tokens(count, first=0):
    return list(range(first, first + count))


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (32, 28), (33, 32)])
def test_a_hit_covers_whole_blocks_and_never_the_last_token(length, hit):
    """32 tokens = 8 full blocks, all cached; yet position 31 must be computed for its logits: 28."""
    cache = make()
    run_through(cache, tokens(length))

    assert cached(cache, tokens(length)) == hit


def test_other_salts_and_adapters_share_nothing():
    cache = make()
    run_through(cache, tokens(12), salt="a")

    assert cached(cache, tokens(12)) == cached(cache, tokens(12), salt="b") == 0
    assert cached(cache, tokens(12), salt="a", adapter="lora") == 0
    assert cached(cache, tokens(12), salt="a") == 8


def test_a_sequence_that_does_not_read_still_writes():
    cache = make()
    run_through(cache, tokens(12))

    assert cached(cache, tokens(12), reads=False) == 0
    run_through(cache, tokens(9, 50), reads=False)
    assert cached(cache, tokens(9, 50)) == 8


def test_with_caching_off_nothing_is_found():
    cache = make(enable_prefix_caching=False)
    run_through(cache, tokens(12))

    assert cached(cache, tokens(12)) == 0


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat():
    cache = make()
    known = tokens(5)
    kv, _ = admit(cache, known)
    for token in range(5, 12):
        known.append(token)
        assert cache.extend(kv, known, len(known) - 1, len(known))
    cache.release(kv, known, 11)

    assert cached(cache, tokens(20)) == 8


def test_a_block_is_named_only_when_its_positions_have_landed():
    """12 tokens are planned; with 7 landed one block can be found, with 8 two."""
    cache = make()
    kv, _ = admit(cache, tokens(12))
    fork = [*tokens(8), 77]

    for landed, hit in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8)):
        cache.extend(kv, tokens(12), landed, 12)
        assert len([name for name in kv.chain.names if cache._pool.find(0, name)]) * B == hit
    assert cached(cache, fork) == 8


def test_a_sequence_waits_while_another_computes_its_beginning():
    """Both start with 8 equal tokens: the second asks again until they have landed, then finds them."""
    cache = make()
    first, _ = admit(cache, tokens(12))
    kv, admission = admit(cache, [*tokens(8), 77, 78])

    assert (admission.count, kv.tables, cache.num_free) == (0, [[]], 17)
    cache.extend(first, tokens(12), 4, 12)
    assert cache.admit(kv, [*tokens(8), 77, 78], 100).count == 0
    cache.extend(first, tokens(12), 8, 12)
    assert cache.admit(kv, [*tokens(8), 77, 78], 100).cached == 8
    cache.check_integrity()


def test_nobody_waits_for_a_sequence_that_was_released():
    cache = make()
    first, _ = admit(cache, tokens(12))
    second, admission = admit(cache, tokens(12))
    assert admission.count == 0

    cache.release(first, tokens(12), 5)

    assert cache.admit(second, tokens(12), 100).cached == 4


def test_a_sequence_that_does_not_read_does_not_wait():
    cache = make()
    admit(cache, tokens(12))

    assert admit(cache, tokens(12), reads=False)[1].count == 12


def test_sharing_costs_no_blocks():
    """9 tokens = 3 blocks; the second sequence shares two and takes one more: 4 of 20 in use."""
    cache = make()
    first, _ = admit(cache, tokens(9))
    cache.extend(first, tokens(9), 8, 9)
    second, _ = admit(cache, tokens(9))

    assert first.tables[0][:2] == second.tables[0][:2] and first.tables[0][2] != second.tables[0][2]
    assert cache.usage == pytest.approx(4 / 20)
    cache.release(first, tokens(9), 9)
    cache.check_integrity()
    assert cache.num_free == 17


def test_admit_is_all_or_nothing():
    cache = make(blocks=3)
    held, _ = admit(cache, tokens(8))

    kv, admission = admit(cache, tokens(8, 50))

    assert admission is None and kv.tables == [[]] and cache.num_free == 1
    cache.release(held, tokens(8), 8)
    assert cache.admit(kv, tokens(8, 50), 100) is not None


def test_idle_blocks_of_a_hit_count_as_needed():
    """3 blocks, 2 of them cached and idle: a hit on both leaves 1, so a prompt of 4 blocks does not fit."""
    cache = make(blocks=3)
    run_through(cache, tokens(9))

    assert admit(cache, tokens(13))[1] is None
    assert cached(cache, tokens(12)) == 8


def test_extend_is_all_or_nothing_over_groups():
    """Two groups need one block each and one is free: neither gets it."""
    cache = make(blocks=5, windows=(None, None))
    known = tokens(8)
    kv, _ = admit(cache, known)

    assert cache.num_free == 1
    assert not cache.extend(kv, [*known, 9], 8, 9)
    assert cache.num_free == 1
    cache.check_integrity()


def test_a_chunk_reserves_only_its_blocks_but_the_gate_asks_for_the_whole_prompt():
    cache = make(blocks=4)

    kv, admission = admit(cache, tokens(20), most=6)
    assert (admission.count, cache.num_free) == (6, 2)
    cache.release(kv, tokens(20), 0)
    assert admit(cache, tokens(20), most=6, gate=6)[1] is None
    assert admit(cache, tokens(16), most=6, gate=6)[1] is not None


def test_the_gate_counts_at_most_window_and_chunk_blocks_for_a_window():
    """W = 5, steps of 4: a prompt of 10 blocks never holds more than ceil((4 + 4) / 4) + 1 = 3 of the pool's."""
    assert admit(make(blocks=3, windows=(5,)), tokens(40), most=4, gate=4)[1].count == 4
    assert admit(make(blocks=2, windows=(5,)), tokens(40), most=4, gate=4)[1] is None
    assert admit(make(blocks=12, windows=(None, 5)), tokens(40), most=4, gate=4)[1] is None
    assert admit(make(blocks=13, windows=(None, 5)), tokens(40), most=4, gate=4)[1].count == 4


def test_whole_refuses_to_split():
    cache = make()

    assert admit(cache, tokens(9), most=8, whole=True)[1] is None
    run_through(cache, tokens(9))
    assert admit(cache, tokens(9), most=8, whole=True)[1].count == 1


def test_spare_blocks_stay_free():
    cache = make(blocks=4)

    assert admit(cache, tokens(8), spare=3)[1] is None
    assert admit(cache, tokens(8), spare=2)[1] is not None


def test_changes_tell_the_device_each_new_block_once():
    cache = make(windows=(None, 4))
    known = tokens(6)
    kv, _ = admit(cache, known)

    assert [(c.group, c.start, len(c.blocks)) for c in kv.changes] == [(0, 0, 2), (1, 0, 2)]
    kv.changes = []
    known += tokens(3, 6)
    cache.extend(kv, known, 8, 9)
    assert [(c.group, c.start, len(c.blocks)) for c in kv.changes] == [(1, 0, 1), (0, 2, 1), (1, 2, 1)]
    assert kv.changes[0].blocks == (0,)


@pytest.mark.parametrize(("computed", "left"), [(6, 0), (7, 1), (10, 1), (11, 2)])
def test_a_window_gives_back_blocks_that_the_next_position_cannot_see(computed, left):
    """W = 4, B = 4: position 7 sees 4..7, so block 0 (0..3) is free from computed = 7 on."""
    cache = make(windows=(4,))
    kv, _ = admit(cache, tokens(12))

    cache.extend(kv, tokens(12), computed, 12)

    assert kv.tables[0].count(0) == left and cache.num_free == 20 - 3 + left
    cache.check_integrity()


def test_a_window_holds_a_bounded_number_of_blocks():
    """W = 6, B = 4, one token a step: 6 positions touch at most 3 blocks, however long the sequence."""
    cache = make(windows=(6,))
    known = tokens(3)
    kv, _ = admit(cache, known)
    for token in range(3, 200):
        known.append(token)
        cache.extend(kv, known, len(known) - 1, len(known))
        assert sum(map(bool, kv.tables[0])) <= 3


def test_a_window_hit_needs_only_the_blocks_that_the_next_position_sees():
    """W = 6: ceil(5 / 4) = 2 blocks before the boundary. Blocks 0 and 1 of 5 are lost, and all the same 16 hit."""
    cache = make(windows=(6,))
    run_through(cache, tokens(20))
    cache._pool.discard(cache.sequence(request(prompt=tokens(20))).chain.grow(tokens(20), 2))

    kv, admission = admit(cache, tokens(20))

    assert admission.cached == 16 and [bool(block) for block in kv.tables[0]] == [False, False, True, True, True]


def test_a_window_hit_with_a_hole_falls_back_to_what_is_contiguous():
    """W = 6 needs 2 neighbours: with blocks 0 1 _ 3 the run 0..1 counts (8 tokens); with _ 1 _ 3 none does."""
    cache = make(blocks=10, windows=(6,))
    run_through(cache, tokens(17))
    names = cache.sequence(request(prompt=tokens(17))).chain.grow(tokens(17), 4)
    cache._pool.discard([names[2]])

    assert cached(cache, tokens(17)) == 8
    cache._pool.discard([names[0]])
    assert cached(cache, tokens(17)) == 0


def test_a_short_run_from_the_beginning_is_enough():
    """W = 13 needs 3 blocks before a boundary, but at position 4 only one exists."""
    cache = make(windows=(13,))
    run_through(cache, tokens(5))

    assert cached(cache, tokens(17)) == 4


def test_a_window_of_one_needs_no_cached_block_at_all():
    cache = make(windows=(1,))

    kv, admission = admit(cache, tokens(9))

    assert admission.cached == 8 and kv.tables[0][:2] == [0, 0]


def test_groups_shorten_a_hit_until_all_agree():
    """Full: 0 1 2 3 cached. Window 5 (one block needed): block 3 lost. So 12 tokens; with 2 lost as well, 8."""
    cache = make(windows=(None, 5))
    run_through(cache, tokens(17))
    names = cache.sequence(request(prompt=tokens(17))).chain.grow(tokens(17), 4)
    window = cache._pool._index[1]
    for lost, hit in ((3, 12), (2, 8)):
        for block in list(window[names[lost]]):
            cache._pool.forget(block)
        assert cached(cache, tokens(17)) == hit
        run = admit(cache, tokens(17))
        assert run[0].tables[1][: hit // B - 1] == [0] * (hit // B - 1)
        cache.release(run[0], tokens(17), 0)


def test_a_group_that_agreed_is_asked_again_when_a_later_one_shortens():
    """W = 9 has blocks 0 _ 2 3 and agrees to 16; W = 5 lost block 3, so 12; for that W = 9 needs 1 and 2, so 4."""
    cache = make(windows=(None, 9, 5), blocks=40)
    run_through(cache, tokens(17))
    names = cache.sequence(request(prompt=tokens(17))).chain.grow(tokens(17), 4)
    for group, lost in ((1, 1), (2, 3)):
        cache._pool.forget(cache._pool._index[group][names[lost]][0])

    assert cached(cache, tokens(17)) == 4


@pytest.mark.parametrize(("computed", "left"), [(7, 0), (8, 2), (15, 2), (16, 4)])
def test_a_chunk_gives_back_its_blocks_when_the_next_one_begins(computed, left):
    """C = 8, B = 4: position 7 sees 0..7, position 8 only itself: blocks 0 and 1 are free from 8 on."""
    cache = make(windows=(None, -8))
    kv, _ = admit(cache, tokens(20))

    cache.extend(kv, tokens(20), computed, 20)

    assert kv.tables[1].count(0) == left and cache.num_free == 20 - 2 * 5 + left
    cache.check_integrity()


@pytest.mark.parametrize(
    ("lost", "hit"), [((), 20), ((0, 1), 20), ((4,), 16), ((2, 4), 16), ((3, 4), 16), ((2, 3), 20)]
)
def test_a_chunk_hit_needs_only_the_blocks_of_the_chunk_that_goes_on(lost, hit):
    """C = 8, B = 4: five blocks, the chunk of position 20 begins at 16, that of 12 at 8; none is needed at 16 or 8.

    The full group has them all. With chunks only, nothing before a chunk counts, and a hit needs no block at all.
    """
    cache = make(windows=(None, -8))
    run_through(cache, tokens(21))
    names = cache.sequence(request(prompt=tokens(21))).chain.grow(tokens(21), 5)
    for index in lost:
        cache._pool.forget(cache._pool._index[1][names[index]][0])

    assert cached(cache, tokens(21)) == hit


@settings(max_examples=150, deadline=None)
@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 5, 9, 14, -3, -4, -8, -12]), min_size=1, max_size=4),
    lost=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 9))),
)
def test_a_hit_is_the_longest_that_every_group_can_go_on_from(windows, lost):
    """Breaks with the groups and blocks for which the fixed point is not what trying every length gives."""
    cache = make(windows=tuple(windows), blocks=200)
    run_through(cache, tokens(41))
    names = cache.sequence(request(prompt=tokens(41))).chain.grow(tokens(41), 10)
    for group, block in lost:
        for found in list(cache._pool._index[group].get(names[block], ())) if group < len(windows) else ():
            cache._pool.forget(found)

    def goes_on(hit):
        seen = [(cache._pool._index[g.index], first_visible(g, hit * B) // B) for g in cache.groups]
        return all(names[block] in index for index, first in seen for block in range(first, hit))

    kv, admission = admit(cache, tokens(41))

    assert admission.cached == B * max(hit for hit in range(11) if goes_on(hit))
    cache.release(kv, tokens(41), 0)
    cache.check_integrity()


@pytest.mark.parametrize("windows", [(None,), (None, 5), (5,)])
def test_distrusted_blocks_are_not_found_and_never_named(windows):
    """Also not later, when another sequence has named the blocks before them: 8 tokens, not 16."""
    cache = make(windows=windows)
    kv, _ = admit(cache, tokens(17))
    cache.extend(kv, tokens(17), 8, 17)
    assert cached(cache, [*tokens(8), 77]) == 8

    cache.distrust(kv)

    assert cached(cache, [*tokens(8), 77]) == 0
    cache.extend(kv, tokens(17), 17, 17)
    cache.release(kv, tokens(17), 17)
    assert cached(cache, tokens(17)) == 0
    run_through(cache, [*tokens(8), 77])
    assert cached(cache, tokens(17)) == 8


def test_the_longest_sequence_of_a_pool():
    """20 blocks: one full group holds 80 positions; full + window 5 in steps of 4: (20 - 3) * 4; windows alone: any."""
    assert make().longest(4) == 80
    assert make(windows=(None, 5)).longest(4) == 17 * B
    assert make(windows=(5,)).longest(4) == NEVER
    assert make(blocks=2, windows=(5,)).longest(4) == 2 * B


def test_reset_waits_for_the_last_holder():
    cache = make()
    run_through(cache, tokens(9))
    kv, _ = admit(cache, tokens(9))

    assert not cache.reset_prefix_cache()
    cache.release(kv, tokens(9), 0)
    assert cache.reset_prefix_cache()
    assert cached(cache, tokens(9)) == 0


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head():
    """Of 3 named blocks and a nameless one, a newcomer takes the nameless one and the last: 8 of 12 tokens remain."""
    cache = make(blocks=4)
    run_through(cache, tokens(13))
    run_through(cache, tokens(5, 50))

    assert cached(cache, tokens(13)) == 8


def test_releasing_twice_does_nothing():
    cache = make()
    kv, _ = admit(cache, tokens(9))
    cache.release(kv, tokens(9), 9)
    cache.release(kv, tokens(9), 9)

    cache.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_stay_in_one_piece_after_others_have_ended(caching):
    """What is read in place on the CPU. Breaks if two begin in what a longer one left, or if groups take turns."""
    cache = make(blocks=255, windows=(None, 100), enable_prefix_caching=caching)
    run_through(cache, tokens(30))
    sequences = [admit(cache, tokens(9, first=100 * i))[0] for i in range(1, 5)]
    for end in range(10, 41):
        for kv in sequences:
            assert cache.extend(kv, [], 0, end)

    assert all(table == [*range(table[0], table[0] + 10)] for kv in sequences for table in kv.tables), [
        kv.tables for kv in sequences
    ]
