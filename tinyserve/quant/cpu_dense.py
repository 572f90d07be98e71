"""Dense weights on the CPU, packed for oneDNN: for prompts and larger batches; bf16 where the processor multiplies it.

oneDNN likes a weight in tiles of its own. Packed once at load instead of in every product, a bf16 weight is multiplied
up to twice as fast for small batches.

Before: quant/format.py.  After: quant/cpu.py chooses it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .format import Fused, Stored

_multiply = torch.ops.mkldnn._linear_pointwise.default if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None


def dense_dtype() -> torch.dtype:
    """bf16 where the processor multiplies it, else fp32 (emulated bf16 is slower than fp32)."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def pack(weight: Tensor) -> Tensor:
    """Return weight [N, K] in oneDNN's layout, or as it is where this torch cannot pack its dtype."""
    if weight.dtype == torch.bfloat16 and _multiply is not None:
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return weight


def product(x: Tensor, packed: Tensor) -> Tensor:
    """Return x [T, K] times a packed weight, computed in the weight's dtype: [T, N] in x.dtype."""
    inputs = cast(x, packed.dtype)
    y = _multiply(inputs, packed, None, "none", [], "") if packed.is_mkldnn else F.linear(inputs, packed)
    return cast(y, x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), by the way that costs least: for a few rows looking up what `to` means takes as long as the work."""
    if x.dtype == dtype:
        return x
    if dtype == torch.bfloat16:
        return x.bfloat16()
    return x.float() if dtype == torch.float32 else x.to(dtype)


class Dense:
    """The weight in `dense_dtype`, packed."""

    names = ("weight",)

    def create(self, layer: Fused) -> None:
        """Register `dense` [N, K]."""
        layer.register_buffer("dense", torch.empty(layer.outputs, layer.inputs, dtype=dense_dtype()))

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Round the rows of one tensor."""
        layer.dense[layer.rows(part)] = stored.read(layer.dense.dtype)

    def finish(self, layer: Fused) -> None:
        """Pack into tiles."""
        layer.dense = pack(layer.dense)

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs] in x.dtype, computed in the weight's type."""
        y = product(x, layer.dense)
        return y if layer.bias is None else y.add_(layer.bias)

    @staticmethod
    def multiply(half: Tensor, layer: Fused) -> Tensor:
        """The product alone, of a packed weight: bf16 [T, inputs] to bf16 [T, outputs]."""
        return _multiply(half, layer.dense, None, "none", [], "")
