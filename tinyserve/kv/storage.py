"""The tensors under the block ids: one pair (K, V) for each layer of a group, shared by all groups.

    storage[j] = K [B, kv heads, block size, D],  V likewise       block 0 is the null block: never read as data

That is the shape. In memory, the heads of a block follow each other on a device with kernels. On the CPU the blocks of
a head do, [2, kv heads, B, block size, D] seen as two such tensors: what a head keeps of a sequence whose blocks follow
each other is one piece, which a core reads a third faster than pieces of one token each. (Where layers of different
shape share a pair, it is as on other devices.) Pair follows pair there, so layers/few.py finds a sequence's keys in all
layers at once.

A latent layer has a K only: its V is an empty tensor.

Keys and values may be kept in one byte a number (`--kv-cache-dtype`): as fp8, with a scale for each layer, or as int8,
with a float32 scale for each token and head in tensors [B, kv heads, block size] of their own (kernels/coded.py).

Layer j of every group lives in pair j. A block id handed to a group stands for that block in the pairs of the group's
layers, so the memory of a block is the same whichever group holds it.

Before: kv/groups.py says how layers are grouped.  After: models/decoder.py binds them, kernels read and write them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.coded import KINDS, CodedCache
from ..kernels.launch import use_kernel
from .groups import KVGroup, LayerKV, bytes_per_block, most_heads, tensor_widths

# Names of --kv-cache-dtype that torch has no type of the same name for.
DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
}
SCALE_BYTES = 4

Pair = tuple[Tensor, Tensor] | tuple[CodedCache, CodedCache]


def cache_dtype(asked: str, own: torch.dtype, layers: Sequence[LayerKV]) -> torch.dtype:
    """Return the type of cached numbers; float8 and int8 mean codes.

    Args: asked: `--kv-cache-dtype`.   own: of the model's activations, for "auto".
    Raises: ConfigError: these layers cannot be cached in it.
    """
    dtype = own if asked == "auto" else DTYPES.get(asked) or getattr(torch, asked)
    if dtype in KINDS and any(layer.latent for layer in layers):
        raise ConfigError(
            f"--kv-cache-dtype {asked} is not built for latent attention (MLA), whose cache is small already. "
            "Leave the option out."
        )
    if dtype in KINDS and any(layer.head_dim % 2 for layer in layers):
        raise ConfigError(f"--kv-cache-dtype {asked} needs heads of an even size. Leave the option out.")
    return dtype


def block_bytes(groups: Sequence[KVGroup], layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block id costs in this type of `cache_dtype`, scales included."""
    return bytes_per_block(groups, layers, block_size, dtype.itemsize, SCALE_BYTES if dtype == torch.int8 else 0)


def token_bytes(layer: LayerKV, dtype: torch.dtype) -> int:
    """Return the bytes that a layer keeps of one token."""
    scales = 2 * layer.kv_heads * SCALE_BYTES if dtype == torch.int8 else 0
    return (layer.width + layer.value_width) * dtype.itemsize + scales


def allocate(
    groups: Sequence[KVGroup],
    layers: Sequence[LayerKV],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Pair]:
    """Return the pairs, zeroed, so that no garbage bits can be read as NaN.

    Args:
        groups, layers: as `group_layers` made them of the model's layers.
        num_blocks: all block ids, the null block included.
        block_size: positions of a block.
        dtype: of the cached numbers, from `cache_dtype`.
    Returns: one pair per layer of the longest group; pair j has the shape of groups[0]'s layer j, or, when layers of
        different shape share it, one wide head [B, 1, block size, width].
    """
    pairs, most = [], most_heads(groups, layers)
    every = tensor_widths(groups, layers)
    pieces = iter(() if dtype in KINDS else _pieces(every, num_blocks * block_size, dtype, device))
    for j, widths in enumerate(every):
        sharing = [layers[group.layers[j]] for group in groups if j < len(group.layers)]
        kinds = {(layer.kv_heads, layer.head_dim) for layer in sharing}
        heads, dim = next(iter(kinds)) if len(kinds) == 1 else (1, widths[0])
        if dtype in KINDS:
            shape = (num_blocks, heads, block_size, dim)
            pairs.append(tuple(_coded(shape, most[j], dtype, device) for _ in range(2)))
            continue
        both = [(width, next(pieces)) for width in widths]
        if len(kinds) > 1 or widths[0] != widths[1] or use_kernel(torch.empty(0, device=device)):
            k, v = (one.view(num_blocks, heads, block_size, dim if width else 0) for width, one in both)
        else:
            k, v = (one.view(heads, num_blocks, block_size, dim).transpose(0, 1) for _, one in both)
        pairs.append((k, v))
    return pairs


def _pieces(
    every: Sequence[tuple[int, int]], positions: int, dtype: torch.dtype, device: torch.device
) -> Sequence[Tensor]:
    """Zeros for K and V of each pair, flat. every: how wide they are. On the CPU one follows the other in memory."""
    sizes = [positions * width for widths in every for width in widths]
    if device.type == "cpu":
        return _zeros((sum(sizes),), dtype, device).split(sizes)
    return [_zeros((size,), dtype, device) for size in sizes]


def _coded(shape: tuple[int, ...], heads: int, dtype: torch.dtype, device: torch.device) -> CodedCache:
    """Zeros of this shape as codes. heads: that have scales, with int8."""
    if dtype == torch.int8:
        scales = _zeros((shape[0], heads, shape[2]), torch.float32, device)
        return CodedCache(_zeros(shape, torch.int8, device), scales, KINDS[dtype])
    return CodedCache(_zeros(shape, torch.uint8, device), 1.0, KINDS[dtype])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this shape. On the CPU the system's own zero pages, which take memory and time when first written:
    filling a cache of 6 GiB takes 20 s at start, most of it for blocks that a laptop never uses. And small ones: a
    sequence writes a few KB for each head and layer, and a huge page for each would be most of the cache.
    """
    if device.type != "cpu" or 0 in shape or sys.platform == "win32":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as its tensor
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The system gives no {size >> 20} MB for the KV cache: {error}. Set a lower --kv-cache-memory-bytes."
        ) from error
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or one without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def layer_view(tensor: Tensor | CodedCache, layer: LayerKV) -> Tensor | CodedCache:
    """Return a storage tensor as one layer sees it: [B, kv heads, block size, D], the front of each block if narrow.

    The V of a latent layer is empty.
    """
    if isinstance(tensor, CodedCache):
        scales = tensor.scales[:, : layer.kv_heads] if tensor.each else tensor.scales
        return CodedCache(layer_view(tensor.codes, layer), scales, tensor.kind)
    if not tensor.numel():
        return tensor
    if tensor.shape[1:] == (layer.kv_heads, tensor.shape[2], layer.head_dim):
        return tensor
    block_size = tensor.shape[2]
    numbers = layer.kv_heads * block_size * layer.head_dim
    return tensor.flatten(1)[:, :numbers].unflatten(1, (layer.kv_heads, block_size, layer.head_dim))
