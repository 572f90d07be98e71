"""groups.py: which layers share tables, and what a block costs."""

import pytest

from tinyserve.errors import UnsupportedModel
from tinyserve.kv.groups import KVGroup, LayerKV, bytes_per_block, group_layers, tensor_widths


def test_equal_layers_are_one_group():
    (group,) = group_layers([LayerKV(2, 64)] * 30)

    assert (group.index, group.window, group.layers) == (0, None, tuple(range(30)))


def test_gemma3_gives_one_full_group_and_five_windows_of_three_layers():
    layers = [LayerKV(1, 256, None if i % 6 == 5 else 512) for i in range(18)]

    groups = group_layers(layers)

    assert [group.window for group in groups] == [None] + [512] * 5
    assert [group.layers for group in groups[:2]] == [(5, 11, 17), (0, 1, 2)]
    assert sorted(sum((group.layers for group in groups), ())) == list(range(18))
    assert bytes_per_block(groups, layers, 16, 2) == 3 * 2 * 16 * 256 * 2


def test_the_last_group_of_a_kind_may_be_shorter_but_never_the_first_of_all():
    """26 layers, 4 of them full: 22 windows make 5 groups of 4 and one of 2."""
    layers = [LayerKV(1, 256, None if i % 6 == 5 else 512) for i in range(26)]

    assert [len(group.layers) for group in group_layers(layers)] == [4, 4, 4, 4, 4, 4, 2]


def test_different_windows_do_not_share_a_group():
    groups = group_layers([LayerKV(1, 8, 4), LayerKV(1, 8, 16), LayerKV(1, 8)])

    assert [group.window for group in groups] == [None, 16, 4]


def test_a_block_is_as_wide_as_the_widest_layer_of_each_tensor():
    """Layer 1 needs 4*64 numbers a position and layer 0 only 1*64, yet block 7 must serve both groups."""
    layers = [LayerKV(1, 64, 8), LayerKV(4, 64)]
    groups = group_layers(layers)

    assert tensor_widths(groups, layers) == ((256, 256),)
    assert bytes_per_block(groups, layers, 16, 4) == 2 * 16 * 256 * 4


def test_no_layers_no_groups():
    assert group_layers([]) == ()


@pytest.mark.parametrize("layer", [LayerKV(1, 64, 0), LayerKV(0, 64), LayerKV(1, 64, chunk=0), LayerKV(1, 64, 4, 4)])
def test_layers_that_keep_nothing_are_refused(layer):
    with pytest.raises(UnsupportedModel, match="Layer 0"):
        group_layers([layer])


def test_llama4_gives_one_full_group_and_three_chunked_ones():
    """48 layers, every fourth sees everything: 12 and 3 x 12."""
    layers = [LayerKV(8, 128, chunk=None if i % 4 == 3 else 8192) for i in range(48)]

    groups = group_layers(layers)

    assert [(group.chunk, len(group.layers)) for group in groups] == [(None, 12)] + [(8192, 12)] * 3
    assert groups[0].reach is None and groups[1].reach == 8192


def test_a_latent_layer_has_no_values():
    """DeepSeek-V3: 576 numbers a position and layer instead of 2 x 128 x 128."""
    layers = [LayerKV(1, 576, latent=True)] * 61
    groups = group_layers(layers)

    assert tensor_widths(groups, layers) == ((576, 0),) * 61
    assert bytes_per_block(groups, layers, 64, 2) == 61 * 576 * 64 * 2


@pytest.mark.parametrize("group", [KVGroup(0, 5, (0,)), KVGroup(0, None, (0,), 6)])
def test_what_is_outgrown_is_what_nobody_sees(group):
    """outgrown(end) is the first position whose query sees nothing before `end`."""
    for end in range(1, 40):
        seen = [group.first_seen(position) for position in range(60)]

        assert group.outgrown(end) == next(position for position, first in enumerate(seen) if first >= end)
