"""How references of attention find each sequence's keys: where they lie, or copied in token order."""

import pytest
import torch

from tinyserve.kernels import pages


def caches(layout):
    """K and V [B, Hkv, P, D] of 9 blocks of 4: all of a head together (as in kv/storage.py), by token, or by block."""
    if layout == "together":
        return tuple(torch.arange(9 * 4 * 2 * 3 * 5, dtype=torch.float32).view(2, 3, 9, 4, 5).transpose(1, 2).unbind(0))
    both = torch.arange(9 * 4 * 2 * 3 * 5, dtype=torch.float32).view(9, 4, 2, 3, 5)
    k, v = (one.transpose(1, 2) for one in both.unbind(2))
    if layout == "apart":
        return tuple(one.transpose(1, 2).contiguous().transpose(1, 2) for one in (k, v))
    return (k, v) if layout == "joined" else (k.contiguous(), v.contiguous())


@pytest.mark.parametrize("by", ["together", "joined", "apart", "head"])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("room", [4, 4096])
def test_each_sequence_sees_its_own_tokens(monkeypatch, by, window, room):
    """Breaks if a block lands in a neighbour's place: when portions are cut, at a window's edge, at a length of 0, and
    where sequences that lie in one piece (2 3 4) stand between scattered ones.
    """
    monkeypatch.setattr(pages, "COPIED_TOKENS", room)
    k, v = caches(by)
    tables = torch.tensor([[5, 2, 8], [1, 3, 4], [2, 3, 4], [7, 0, 0], [8, 7, 6], [6, 7, 0]], dtype=torch.int32)
    lengths = [9, 0, 10, 4, 12, 7]

    found, kinds = [], []
    for some in pages.layout(tables, lengths, k, v, window):
        found += [(keys.clone(), values.clone()) for keys, values in some.read(k, v, None)]
        kinds.append(type(some).__name__)

    assert kinds.count("InPlace") == (0 if by == "head" else 3 if not window else 4)  # of 8 7 6 a window sees only 6
    for (keys, values), table, length in zip(found, tables.tolist(), lengths, strict=True):
        seen = range(max(0, length - window) if window else 0, length)
        for got, cache in ((keys, k), (values, v)):
            wanted = [cache[table[at // 4], :, at % 4] for at in seen]
            assert got.shape == (1, 3, len(wanted), 5)
            assert not wanted or torch.equal(got[0], torch.stack(wanted, dim=1))


@pytest.mark.parametrize("by", ["together", "joined", "apart", "head"])
def test_one_sequence_is_a_view_where_its_blocks_follow_each_other(by):
    k, v = caches(by)
    for blocks, lies in (([2, 3, 4], by != "head"), ([5, 2, 8], False)):
        keys, values = pages.tokens_of(k, v, torch.tensor(blocks), slice(3, 11))
        for got, cache in ((keys, k), (values, v)):
            wanted = torch.stack([cache[blocks[at // 4], :, at % 4] for at in range(3, 11)], dim=1)
            assert torch.equal(got[0], wanted)
            inside = cache.untyped_storage().data_ptr() == got.untyped_storage().data_ptr()
            assert inside == lies


def test_layers_that_share_memory_in_other_shapes_keep_their_own_copies():
    """Two layers of one step over the same numbers, (2, 4) heads and columns and (1, 8): each reads its own."""
    memory = torch.arange(2 * 2 * 9 * 4 * 4, dtype=torch.float32)
    table, memo = torch.tensor([[5, 2, 8]], dtype=torch.int32), {}
    for heads, columns in ((2, 4), (1, 8), (2, 4)):
        k, v = memory.view(2, heads, 9, 4, columns).transpose(1, 2).unbind(0)
        found = [pair for some in pages.layout(table, [9], k, v, 0) for pair in some.read(k, v, memo)]
        for got, cache in zip(found[0], (k, v), strict=True):
            assert torch.equal(got[0], cache[[5, 2, 8]].transpose(0, 1).flatten(1, 2)[:, :9])
