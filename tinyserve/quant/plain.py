"""Plain numbers: one dense parameter `weight` [outputs, inputs] in the dtype of the activations.

The format that does nothing: quantised tensors of a GGUF file are turned into numbers when they are read, and the
product is torch's (cuBLAS, hipBLASLt or oneDNN).

Before: quant/format.py.  After: layers/linear.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .format import Fused, Stored


class Plain:
    """Dense weights."""

    names = ("weight",)

    def create(self, layer: Fused) -> None:
        """Register `weight`, uninitialised."""
        weight = torch.empty(layer.outputs, layer.inputs, dtype=layer.dtype, device=layer.device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Copy one tensor into its rows, casting on the way."""
        layer.weight[layer.rows(part)].copy_(stored.read(layer.dtype))

    def finish(self, layer: Fused) -> None:
        """Nothing to pack."""

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs]."""
        return F.linear(x, layer.weight, layer.bias)
