"""Copies of blocks in token order, which all references of attention read."""

import pytest
import torch

from tinyserve.kernels import pages


def caches(joined):
    """K and V [B, Hkv, P, D] of 9 blocks of 4, side by side by token or apart."""
    both = torch.arange(9 * 4 * 2 * 3 * 5, dtype=torch.float32).view(9, 4, 2, 3, 5)
    k, v = (one.transpose(1, 2) for one in both.unbind(2))
    return (k, v) if joined else (k.contiguous(), v.contiguous())


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("room", [4, 4096])
def test_each_sequence_sees_its_own_tokens(monkeypatch, joined, window, room):
    """Breaks if a block lands in a neighbour's place: when portions are cut, at a window's edge, at a length of 0."""
    monkeypatch.setattr(pages, "COPIED_TOKENS", room)
    k, v = caches(joined)
    tables, lengths = torch.tensor([[5, 2, 8], [1, 3, 4], [7, 0, 0]], dtype=torch.int32), [9, 0, 4]
    by_token = pages.by_token(k, v)
    assert len(by_token) == (1 if joined else 2)

    found = []
    for some in pages.copied(tables, lengths, by_token, window):
        for cache, copy in zip(by_token, some.copies, strict=True):
            torch.index_select(cache, 0, some.blocks, out=copy)
        found += [(keys.clone(), values.clone()) for keys, values in some.sequences]

    for (keys, values), table, length in zip(found, tables.tolist(), lengths, strict=True):
        seen = range(max(0, length - window) if window else 0, length)
        for got, cache in ((keys, k), (values, v)):
            wanted = [cache[table[at // 4], :, at % 4] for at in seen]
            assert got.shape == (1, 3, len(wanted), 5)
            assert not wanted or torch.equal(got[0], torch.stack(wanted, dim=1))
