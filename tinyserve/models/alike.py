"""Which layers of a model launch other kernels than the layers before them; most are alike.

A start runs a hundred steps whose only purpose is to name kernels, and 28 layers that are alike name each of them 28
times. Two layers are alike if everything that can choose a kernel or a variant of one is equal: their modules, the
plain values that these hold, and shape, type, strides and alignment of their tensors. What is not understood counts as
different. A layer also chooses by what the one before it handed on (layers/fold.py), so every pair of kinds that stand
side by side is kept, and so is the pair of the last layer and the norm.

Before: torch.  After: decoder.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn


def needed(layers: Sequence[nn.Module]) -> list[int]:
    """Numbers of layers, ascending, that side by side make every pair of kinds which all of them make."""
    kinds = [kind(layer) for layer in layers]
    pairs = list(zip(kinds, [*kinds[1:], None], strict=True))
    first = {pair: index for index, pair in reversed(list(enumerate(pairs)))}
    return sorted({0, *first.values(), *(index + 1 for index in first.values() if index + 1 < len(kinds))})


def kind(layer: nn.Module) -> Hashable:
    """Equal for two layers only if they launch the same variants of the same kernels for the same step."""
    return tuple((name, type(module), _held(vars(module))) for name, module in layer.named_modules())


def _held(values: Mapping[str, Any]) -> Hashable:
    """What a module or a record holds, but for other modules."""
    return tuple((name, _of(value)) for name, value in sorted(values.items()) if not isinstance(value, nn.Module))


def _of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        aligned = value.device.type == "meta" or value.data_ptr() % 16 == 0
        return value.shape, value.dtype, value.stride(), value.device, aligned
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device, type)):
        return type(value), value
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(_of(one) for one in value)
    if isinstance(value, Mapping):
        return type(value), tuple((name, _of(one)) for name, one in value.items() if not isinstance(one, nn.Module))
    if attrs.has(type(value)):
        return type(value), _held({one.name: getattr(value, one.name) for one in attrs.fields(type(value))})
    state = getattr(value, "__dict__", None)  # a weight format, a shard: objects of a few plain values
    if state is not None and not callable(value):
        return type(value), _held(state)
    return id(value)
