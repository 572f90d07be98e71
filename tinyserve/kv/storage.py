"""The tensors under the block ids: one pair (K, V) for each layer of a group, shared by all groups.

    storage[j] = K [B, kv heads, block size, D],  V likewise       block 0 is the null block: never read as data

That is the shape. In memory, the heads of a block follow each other on a device with kernels. On the CPU a token's keys
and values follow each other, [B, block size, 2, kv heads, D] seen as two such tensors: a step is spent on copying whole
blocks there, and one copy brings both. (Where layers of different shape share a pair, it is as on other devices.)

A latent layer has a K only: its V is an empty tensor.

Layer j of every group lives in pair j. A block id handed to a group stands for that block in the pairs of the group's
layers, so the memory of a block is the same whichever group holds it.

Before: kv/groups.py says how layers are grouped.  After: models/decoder.py binds them, kernels read and write them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.launch import use_kernel
from .groups import KVGroup, LayerKV, tensor_widths


def allocate(
    groups: Sequence[KVGroup],
    layers: Sequence[LayerKV],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs, zeroed, so that no garbage bits can be read as NaN.

    Args:
        groups, layers: as `group_layers` made them of the model's layers.
        num_blocks: all block ids, the null block included.
        block_size: positions of a block.
        dtype: of the cached numbers.
    Returns: one pair per layer of the longest group; pair j has the shape of groups[0]'s layer j, or, when layers of
        different shape share it, one wide head [B, 1, block size, width].
    """
    pairs = []
    for j, widths in enumerate(tensor_widths(groups, layers)):
        sharing = [layers[group.layers[j]] for group in groups if j < len(group.layers)]
        kinds = {(layer.kv_heads, layer.head_dim) for layer in sharing}
        heads, dim = next(iter(kinds)) if len(kinds) == 1 else (1, widths[0])
        if len(kinds) > 1 or widths[0] != widths[1] or use_kernel(torch.empty(0, device=device)):
            k, v = (_zeros((num_blocks, heads, block_size, dim if width else 0), dtype, device) for width in widths)
        else:
            both = _zeros((num_blocks, block_size, 2, heads, dim), dtype, device)
            k, v = (one.transpose(1, 2) for one in both.unbind(2))
        pairs.append((k, v))
    return pairs


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this shape. On the CPU the system's own zero pages, which take memory and time when first written:
    filling a cache of 6 GiB takes 20 s at start, most of it for blocks that a laptop never uses.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def layer_view(tensor: Tensor, layer: LayerKV) -> Tensor:
    """Return a storage tensor as one layer sees it: [B, kv heads, block size, D], the front of each block if narrow.

    The V of a latent layer is empty.
    """
    if not tensor.numel():
        return tensor
    if tensor.shape[1:] == (layer.kv_heads, tensor.shape[2], layer.head_dim):
        return tensor
    block_size = tensor.shape[2]
    numbers = layer.kv_heads * block_size * layer.head_dim
    return tensor.flatten(1)[:, :numbers].unflatten(1, (layer.kv_heads, block_size, layer.head_dim))
