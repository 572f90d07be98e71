"""Plain numbers: one dense parameter `weight` [outputs, inputs] in the dtype of the activations.

The format that does nothing: quantised tensors of a GGUF file are turned into numbers when they are read. On the CPU
the product is torch's (oneDNN). On a GPU it is whichever was measured to be fastest for the number of rows:

    1 row           kernels/gemv.py, which takes in the norm before, the gate and the residual after
    2 .. about 64   kernels/skinny_gemm.py, which takes in the gate, and may leave its splits to the next norm
    more            torch (cuBLAS, hipBLASLt, oneDNN), and the activation in a kernel of its own

`invariant` (--batch-invariant) uses one kernel with one tile for all of them, so that a row's numbers do not depend on
how many rows stand beside it.

Before: quant/format.py, kernels/{gemv,skinny_gemm,activation}.py.  After: layers/linear.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.activation import gated_activation
from ..kernels.gemv import gemv
from ..kernels.launch import choose, use_kernel
from ..kernels.norm import rms_norm
from ..kernels.skinny_gemm import skinny_gemm
from .format import Fused, Stored, place


class Plain:
    """Dense weights.

    Args:
        invariant: whether a row's numbers must be the same to the bit in every batch.
    """

    names = ("weight",)

    def __init__(self, *, invariant: bool = False) -> None:
        self.invariant = invariant

    @property
    def folds(self) -> bool:
        """Whether `product` takes a norm in and leaves parts; other formats have no such method."""
        return not self.invariant

    def create(self, layer: Fused) -> None:
        """Register `weight`, uninitialised."""
        weight = torch.empty(layer.outputs, layer.inputs, dtype=layer.dtype, device=layer.device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Copy one tensor into its rows, casting on the way."""
        place(layer.weight[layer.rows(part)], stored)

    def finish(self, layer: Fused) -> None:
        """Nothing to pack."""

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs]."""
        if use_kernel(x):
            return self.product(x, layer)
        return F.linear(x, layer.weight, layer.bias)

    def product(
        self,
        x: Tensor,
        layer: Fused,
        *,
        norm: tuple[Tensor, float, float] | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
        parts: bool = False,
    ) -> Tensor:
        """The product on a GPU, with what stands around it.

        Args:
            x: [T, inputs].
            norm: (weight, eps, offset) of an RMS norm of x that comes first.
            gate: act(first half) * (second half) of the product; a kind of kernels/activation.py.
            residual: [1, outputs], added to a product of one row.
            parts: the result may be [P, T, outputs] float32, to be added up by the next norm.
        """
        tokens, given = x.shape[0], (layer.weight, layer.bias)
        if tokens == 1 and not self.invariant:
            weight, eps, offset = norm or (None, 0.0, 0.0)
            return gemv(x, *given, norm=weight, eps=eps, offset=offset, gate=gate, residual=residual)
        if norm is not None:
            x = rms_norm(x, norm[0], norm[1], offset=norm[2])
        if self.invariant or tokens <= most_rows(x.device, x.dtype, *layer.weight.shape, gate is not None):
            y = skinny_gemm(x, *given, gate=gate, parts=parts and not self.invariant, invariant=self.invariant)
        else:
            y = F.linear(x, *given)
            y = y if gate is None else gated_activation(y, gate)
        return y if residual is None else y + residual


@cache
def most_rows(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, gated: bool) -> int:
    """The largest number of rows for which skinny_gemm beats torch. In float32 there is no matrix unit to win with."""
    if dtype == torch.float32:
        return 1
    probe, outputs = torch.empty(0, device=device), outputs // (1 + gated)
    shape = {"inputs": inputs, "outputs": outputs, "gated": int(gated)}
    return choose("product", probe, {"SKINNY_ROWS": 64}, **shape)["SKINNY_ROWS"]
