"""What each layer keeps of a sequence, and how layers of different kinds share one pool of blocks.

A full-attention layer keeps every position; a sliding-window layer only the last W; a chunked layer only those of the
chunk of C positions that the newest one stands in. A latent layer keeps one short vector that is key and value at once
(MLA). Layers that keep the same things form a *group*, and a group has its own block table per sequence. All groups
draw block ids from ONE pool, so an id must cost the same bytes whichever group holds it. That is why groups have
equally many layers: layer j of every group lives in storage tensor j.

    gemma3-270m: 18 layers, of which 5, 11, 17 are full and the others see 512 positions

        tensor 0   tensor 1   tensor 2
         layer 5   layer 11   layer 17      group 0, full
         layer 0   layer  1   layer  2      group 1, window 512
         layer 3   layer  4   layer  6      group 2, window 512   ... 5 such groups

    Block 7 given to group 0 holds B positions of layers 5, 11, 17; given to group 1, of layers 0, 1, 2.

Where layers of unequal width share a tensor, its blocks are as wide as the widest of them and the others leave the rest
unused: pages of one size for all groups.

    query at i sees      full 0 .. i        window W: i-W+1 .. i        chunk C: (i // C) * C .. i

Before: pool.py.  After: cache.py (tables of each group), storage.py (the tensors), models (bind layers to tensors).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from attrs import field, frozen

from ..errors import UnsupportedModel


@frozen
class LayerKV:
    """What one attention layer stores per position: K and V of `kv_heads * head_dim` numbers each.

    window: query i sees positions j with i - window < j <= i; None sees all.
    chunk: query i sees positions of its own chunk only, j // chunk == i // chunk; None: no chunks. Not with a window.
    latent: there is no V; K is read as both.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    latent: bool = False

    @property
    def width(self) -> int:
        """Numbers per position in K."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers per position in V."""
        return 0 if self.latent else self.width


@frozen
class KVGroup:
    """Layers that share block tables.

    layers: numbers of the layers; layers[j] lives in storage tensor j. The last group of a kind may be shorter than
    the others (its missing tensors stay unused in its blocks); groups[0] is never shorter than another group.
    """

    index: int
    window: int | None
    layers: tuple[int, ...] = field(converter=tuple)
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """Most positions that a query sees; None: all."""
        return self.window or self.chunk

    def first_seen(self, position: int) -> int:
        """The first position that a query at `position` sees; it never falls when `position` rises."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def outgrown(self, end: int) -> int:
        """The first position whose query, and all after it, see nothing before `end`, with `reach` not None."""
        if self.chunk is not None:
            return -(-end // self.chunk) * self.chunk
        return end + self.window - 1


def group_layers(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """Split a model's layers into groups of one kind each, all as long as the rarest kind is frequent.

    Args:
        layers: one per layer, in order of the layers.
    Returns: full groups first, then by reach from wide to narrow; by layer number inside a kind.
    Raises: UnsupportedModel for a window or chunk below 1, both at once, or a layer without numbers.
    """
    kinds: dict[LayerKV, list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        limits = [limit for limit in (layer.window, layer.chunk) if limit is not None]
        if layer.width < 1 or len(limits) > 1 or min(limits, default=1) < 1:
            raise UnsupportedModel(f"Layer {number} cannot be cached: {layer}.")
        kinds[layer].append(number)
    size = min(map(len, kinds.values()), default=0)

    pieces = []
    for kind in sorted(kinds, key=lambda kind: (-(kind.window or kind.chunk or inf), kinds[kind][0])):
        numbers = kinds[kind]
        pieces += [(kind, numbers[at : at + size]) for at in range(0, len(numbers), size)]
    return tuple(KVGroup(index, kind.window, numbers, kind.chunk) for index, (kind, numbers) in enumerate(pieces))


def tensor_widths(groups: Sequence[KVGroup], layers: Sequence[LayerKV]) -> tuple[tuple[int, int], ...]:
    """Numbers per position that storage pair j must hold in K and in V: of the widest layer that lives there.

    Narrower layers leave the rest of each block unused, which is the price of one pool for unequal layers.
    """
    tensors = max((len(group.layers) for group in groups), default=0)
    sharing = [[layers[group.layers[j]] for group in groups if j < len(group.layers)] for j in range(tensors)]
    return tuple((max(one.width for one in found), max(one.value_width for one in found)) for found in sharing)


def most_heads(groups: Sequence[KVGroup], layers: Sequence[LayerKV]) -> tuple[int, ...]:
    """kv heads of the layer that has most of them, of those that live in storage pair j."""
    tensors = len(tensor_widths(groups, layers))
    return tuple(
        max(layers[group.layers[j]].kv_heads for group in groups if j < len(group.layers)) for j in range(tensors)
    )


def bytes_per_block(
    groups: Sequence[KVGroup], layers: Sequence[LayerKV], block_size: int, dtype_bytes: float, scale_bytes: int = 0
) -> int:
    """Bytes that one block id costs, K and V of all tensors together.

    Args: dtype_bytes: of a number.   scale_bytes: of what K, and V, keep besides for each head of a position.
    """
    numbers, heads = sum(map(sum, tensor_widths(groups, layers))), sum(most_heads(groups, layers))
    return int((numbers * dtype_bytes + 2 * heads * scale_bytes) * block_size)
