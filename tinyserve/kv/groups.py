"""What each layer keeps of a sequence, and how layers of different kinds share one pool of blocks.

A full-attention layer keeps every position; a sliding-window layer only the last W. Layers that keep the same things
form a *group*, and a group has its own block table per sequence. All groups draw block ids from ONE pool, so an id must
cost the same bytes whichever group holds it. That is why groups have equally many layers: layer j of every group
lives in storage tensor j.

    gemma3-270m: 18 layers, of which 5, 11, 17 are full and the others see 512 positions

        tensor 0   tensor 1   tensor 2
         layer 5   layer 11   layer 17      group 0, full
         layer 0   layer  1   layer  2      group 1, window 512
         layer 3   layer  4   layer  6      group 2, window 512   ... 5 such groups

    Block 7 given to group 0 holds B positions of layers 5, 11, 17; given to group 1, of layers 0, 1, 2.

Before: pool.py.  After: cache.py (tables of each group), storage.py (the tensors), models (bind layers to tensors).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from attrs import field, frozen

from ..errors import UnsupportedModel


@frozen
class LayerKV:
    """What one attention layer stores per position: K and V of `kv_heads * head_dim` numbers each.

    window: query i sees positions j with i - window < j <= i; None sees all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def width(self) -> int:
        """Numbers per position in K (as many again in V)."""
        return self.kv_heads * self.head_dim


@frozen
class KVGroup:
    """Layers that share block tables.

    layers: numbers of the layers; layers[j] lives in storage tensor j. The last group of a kind may be shorter than
    the others (its missing tensors stay unused in its blocks); groups[0] is never shorter than another group.
    """

    index: int
    window: int | None
    layers: tuple[int, ...] = field(converter=tuple)


def group_layers(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Split a model's layers into groups of one kind each, all as long as the rarest kind is frequent.

    Args:
        layers: one per layer, in order of the layers.
    Returns: full groups first, then windows from wide to narrow; by layer number inside a kind.
    Raises: UnsupportedModel for a window below 1 or a layer without numbers.
    """
    kinds: dict[tuple[int | None, int, int], list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        if layer.width < 1 or (layer.window is not None and layer.window < 1):
            raise UnsupportedModel(f"Layer {number} cannot be cached: {layer}.")
        kinds[layer.window, layer.kv_heads, layer.head_dim].append(number)
    size = min(map(len, kinds.values()), default=0)

    pieces = []
    for kind in sorted(kinds, key=lambda kind: (kind[0] is not None, -(kind[0] or 0), kinds[kind][0])):
        numbers = kinds[kind]
        pieces += [(kind[0], numbers[at : at + size]) for at in range(0, len(numbers), size)]
    return tuple(KVGroup(index, window, numbers) for index, (window, numbers) in enumerate(pieces))


def tensor_widths(groups: Sequence[KVGroup], layers: Sequence[LayerKV]) -> tuple[int, ...]:
    """Numbers per position that storage tensor j must hold in K: of the widest layer that lives there.

    Narrower layers leave the rest of each block unused, which is the price of one pool for unequal layers.
    """
    tensors = max((len(group.layers) for group in groups), default=0)
    return tuple(
        max(layers[group.layers[j]].width for group in groups if j < len(group.layers)) for j in range(tensors)
    )


def bytes_per_block(groups: Sequence[KVGroup], layers: Sequence[LayerKV], block_size: int, dtype_bytes: float) -> int:
    """Bytes that one block id costs, K and V of all tensors together."""
    return int(sum(tensor_widths(groups, layers)) * 2 * block_size * dtype_bytes)
