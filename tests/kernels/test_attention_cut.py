"""The list of parts: against its reference, and that it holds every key once, in a grid as large as was promised."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.kernels import attention_cut as module

LENGTHS = st.lists(st.one_of(st.integers(0, 130), st.integers(0, 5000)), min_size=1, max_size=40)


def step(lengths, queries, device):
    """Lengths, starts of sequences of 1 to `queries` tokens, and block tables that say where they are read."""
    own = [min(length, 1 + number % queries) for number, length in enumerate(lengths)]
    starts = torch.tensor([0, *own], dtype=torch.int32).cumsum(0).to(torch.int32)
    tables = torch.arange(len(lengths), dtype=torch.int32)[:, None] * 1000 + torch.arange(1300, dtype=torch.int32)
    return torch.tensor(lengths, dtype=torch.int32).to(device), starts.to(device), tables.to(device)


def check_same(lengths, cut, tile, page, device):
    """Assert that kernel and reference agree."""
    where = step(lengths, cut.queries, device)
    expected = module.attention_cut_reference(*where, cut, tile=tile, page=page)
    found = module.attention_cut(*where, cut, tile=tile, page=page)
    assert torch.equal(found[:, 0], expected[:, 0])
    for rows, columns in ((slice(0, cut.parts), 6 if page >= tile else 5), (slice(cut.parts, None), 3)):
        one, other = found[rows, :columns], expected[rows, :columns]
        there = other[:, 0] < len(lengths)
        assert torch.equal(one[there], other[there])


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("window, queries", [(0, 1), (0, 4), (100, 1), (100, 4)])
@pytest.mark.parametrize("lengths", [[65, 0, 5000, 1, 64], [300] * 2 + [512] * 300 + [4000]], ids=["few", "many"])
def test_the_list_is_its_reference(device, lengths, window, queries, page):
    """Breaks at 303 sequences if only those that a program compares at a time are counted."""
    cut = module.make_cut(len(lengths), 1, 24, invariant=False, window=window, queries=queries)
    check_same(lengths, cut, 64, page, device)


@pytest.mark.parametrize("lengths", [[65, 0, 5000, 1, 64], [4096] * 16, [64] * 30 + [0, 9000]])
def test_parts_are_as_small_as_the_grid_allows(device, lengths):
    """Breaks at 16 sequences if they are not cut into two parts each, or at the long one if it gets less than 18."""
    cut = module.make_cut(len(lengths), 1, 33, invariant=False)
    assert cut.parts == (32 if len(lengths) <= 16 else 49)
    check_same(lengths, cut, 64, 64, device)


@pytest.mark.parametrize("seed", range(8))
def test_any_crowd_is_its_reference(device, seed):
    """2 to 300 sequences, padding of length 0 among them, all alike, or one of 20,000; any window, tile and grid."""
    draw = random.Random(seed)
    count = draw.choice([2, 3, 7, 16, 17, 31, 64, 257, 300])
    lengths = [draw.choice([0, draw.randint(0, 130), draw.randint(0, 5000)]) for _ in range(count)]
    if seed % 4 == 1:
        lengths = [draw.randint(1, 4000)] * count
    elif seed % 4 == 2:
        lengths[draw.randrange(count)] = 20_000
    window, queries = draw.choice([0, 1, 700, 4096]), draw.choice([1, 4, 16])
    heads, programs = draw.choice([1, 8]), draw.choice([3, 33, 264])
    cut = module.make_cut(count, heads, programs, invariant=False, window=window, queries=queries)
    check_same(lengths, cut, draw.choice([16, 64]), draw.choice([16, 128]), device)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([0, 100, 700]), st.sampled_from([1, 4]), st.integers(1, 70), st.sampled_from([16, 64]))
def test_every_key_is_in_one_part(lengths, window, queries, target, tile):
    """Breaks if parts overlap, leave a key out, are more than the grid, or if a merge would miss one."""
    cut = module.make_cut(len(lengths), 1, target, invariant=False, window=window, queries=queries)
    where = step(lengths, queries, "cpu")
    found = module.attention_cut_reference(*where, cut, tile=tile, page=64)

    rows, merges = found[: cut.parts].tolist(), found[cut.parts :].tolist()
    there = [row for row in rows if row[0] < len(lengths)]
    assert rows[: len(there)] == there
    sizes = [
        module.cdiv(row[3] - row[2], tile)
        for row, before in zip(there, [[None], *there], strict=False)
        if row[0] != before[0]
    ]
    assert all(one >= other for one, other in pairwise(sizes))
    firsts = {sequence: (first, parts) for sequence, first, parts, *_ in merges if sequence < len(lengths)}
    for sequence, length in enumerate(lengths):
        own = [(number, row) for number, row in enumerate(there) if row[0] == sequence]
        number, (_, _, begin, end, parts, block, *_) = own[0]
        queries_here = int(where[1][sequence + 1] - where[1][sequence]) if queries > 1 else 1
        assert begin <= max(length - queries_here - window + 1, 0) if window else begin == 0
        assert block == (sequence * 1000 + begin // 64 if begin < end else 0)
        assert parts == len(own) and [place for place, _ in own] == list(range(number, number + parts))
        assert firsts.get(sequence, (number, 1)) == (number, parts)
        for _, row in own[1:]:
            assert row[2] == end and row[3] > end
            end = row[3]
        assert end == length


def compile_cases():
    def case(sequences, page, window=0, queries=1):
        lens, starts = torch.empty(sequences, dtype=torch.int32), torch.empty(sequences + 1, dtype=torch.int32)
        tables = torch.empty(sequences, 64, dtype=torch.int32)
        cut = module.make_cut(sequences, 8, 264, invariant=False, window=window, queries=queries)
        module.attention_cut(lens, starts, tables, cut, tile=64, page=page)

    yield lambda: case(256, 64)
    yield lambda: case(32, 16, 1024, 16)
