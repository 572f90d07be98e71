"""The cache's tensors: their shapes, and that unequal layers can share one."""

from pathlib import Path

import pytest
import torch

from tinyserve.errors import ConfigError
from tinyserve.kv.groups import LayerKV, bytes_per_block, group_layers
from tinyserve.kv.storage import allocate, block_bytes, layer_view, token_bytes

CPU = torch.device("cpu")


def test_one_pair_for_each_layer_of_a_group():
    """6 layers of two kinds, 4 + 2: groups of 2 layers, so 2 pairs, whose bytes are what the planner counts."""
    layers = [LayerKV(2, 8, window=16 if index % 3 else None) for index in range(6)]
    groups = group_layers(layers)
    pairs = allocate(groups, layers, 10, 4, torch.float16, CPU)

    assert [tensor.shape for pair in pairs for tensor in pair] == [(10, 2, 4, 8)] * 4
    assert all(not tensor.any() for pair in pairs for tensor in pair)
    assert sum(tensor.nbytes for pair in pairs for tensor in pair) == 10 * bytes_per_block(groups, layers, 4, 2)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
def test_blocks_take_memory_when_they_are_written_and_no_more():
    """A token in each of 8 heads of 4 MB, K and V: 16 pages of 4 KB, where huge ones would be 32 MB."""
    layers = [LayerKV(8, 64)]
    ((k, v),) = allocate(group_layers(layers), layers, 1024, 16, torch.float32, CPU)

    def resident():
        (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Rss:")]
        return int(line.split()[1]) // 4

    before = resident()
    for cache in (k, v):
        cache[500, :, 3] = 1
    assert 16 <= resident() - before < 512


def test_a_system_that_gives_no_memory_is_told_with_its_cure():
    """As with `ulimit -v`, or where no more is promised than there is: a traceback that ended in "Cannot allocate"."""
    layers = [LayerKV(8, 64)]
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        allocate(group_layers(layers), layers, 2**40, 16, torch.float32, CPU)


def test_layers_of_unequal_shape_share_a_pair_by_block():
    """A narrow layer writes the front of its blocks and nothing of the blocks of the wide one."""
    layers = [LayerKV(1, 8), LayerKV(3, 4, window=5)]
    ((k, _),) = allocate(group_layers(layers), layers, 4, 2, torch.float32, CPU)
    narrow, wide = layer_view(k, layers[0]), layer_view(k, layers[1])
    narrow[1] = 1
    wide[2] = 2

    assert (narrow.shape, wide.shape) == ((4, 1, 2, 8), (4, 3, 2, 4))
    assert [int(block.sum()) for block in k] == [0, 16, 48, 0]
    assert int((wide[1] == 1).sum()) == 16


def test_a_latent_layer_has_keys_only():
    """3 layers of 24 numbers a position: K [B, 1, P, 24] and an empty V, whose bytes the planner does not count."""
    layers = [LayerKV(1, 24, latent=True)] * 3
    groups = group_layers(layers)
    pairs = allocate(groups, layers, 5, 4, torch.float32, CPU)

    assert [(tuple(k.shape), v.numel()) for k, v in pairs] == [((5, 1, 4, 24), 0)] * 3
    assert all(k.is_contiguous() for k, _ in pairs)
    assert sum(k.nbytes for k, _ in pairs) == 5 * bytes_per_block(groups, layers, 4, 4)
    assert layer_view(pairs[0][1], layers[0]).numel() == 0


def test_codes_are_half_the_bytes():
    """The bytes of what is allocated are those that the planner counts; int8 has 4 more for each head of a token."""
    layers = [LayerKV(2, 64, window=16 if index % 3 else None) for index in range(6)]
    groups = group_layers(layers)
    for dtype, scales in ((torch.float8_e4m3fn, 0), (torch.float8_e5m2, 0), (torch.int8, 4)):
        pairs = allocate(groups, layers, 10, 16, dtype, CPU)
        views = [layer_view(cache, layers[0]) for pair in pairs for cache in pair]
        taken = sum(one.codes.nbytes + (one.scales.nbytes if one.each else 0) for one in views)

        assert [one.shape for one in views] == [(10, 2, 16, 64)] * 4
        assert taken == 10 * block_bytes(groups, layers, 16, dtype) == 10 * 2 * 16 * 2 * 2 * (64 + scales)
        assert token_bytes(layers[0], dtype) == 2 * 2 * (64 + scales)
    assert block_bytes(groups, layers, 16, torch.bfloat16) == 2 * block_bytes(groups, layers, 16, torch.float8_e5m2)


def test_codes_of_unequal_layers_share_a_pair():
    """A layer of few wide heads and one of many narrow ones: each has a scale for each of its heads."""
    layers = [LayerKV(1, 8), LayerKV(3, 4, window=5)]
    ((k, _),) = allocate(group_layers(layers), layers, 4, 2, torch.int8, CPU)
    few, many = layer_view(k, layers[0]), layer_view(k, layers[1])

    assert (few.shape, many.shape) == ((4, 1, 2, 8), (4, 3, 2, 4))
    assert (few.scales.shape, many.scales.shape) == ((4, 1, 2), (4, 3, 2))
