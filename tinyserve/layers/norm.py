"""Norms, alone or together with the addition to the residual stream that stands before nearly every one.

RMSNorm and LayerNorm have the same face, so a model's frame takes either. `QKNorms` is for models whose norm of q and k
is none that the kernel of the rotation can do on its way: over all heads at once, or with weights for each head.

Before: kernels/norm.py, kernels/layer_norm.py.  After: layers/attention.py, the Layer of every model file.

Source: "Root Mean Square Layer Normalization", arXiv:1910.07467; "Layer Normalization", arXiv:1607.06450.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.launch import use_kernel
from ..kernels.layer_norm import add_layer_norm, layer_norm
from ..kernels.norm import add_rms_norm, rms_norm, scaled_weight
from ..quant.format import Stored
from .fold import Normed, Pending


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), computed in fp32.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: 0, or 1 for Gemma, whose weights are stored as differences from 1.
        affine: whether there is a weight at all; without one, nothing is read from the checkpoint.
    """

    names = ("weight",)

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, affine: bool = True) -> None:
        super().__init__()
        self.parts = (size,) if affine else ()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, device="meta"), False)
        self.scaled: Tensor | None = None

    @property
    def neutral(self) -> float:
        """The stored weight that multiplies by one; dummy weights scatter around it."""
        return 1.0 - self.offset

    def settle(self) -> None:
        """The weight is final: make of it what the reference would make in every call."""
        self.scaled = None if use_kernel(self.weight) else scaled_weight(self.weight, self.offset)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored weight must have."""
        return self.parts

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the weight, uninitialised."""
        make = torch.empty if self.parts else torch.ones
        self.weight = nn.Parameter(make(self.weight.shape, dtype=dtype, device=device), False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the weight."""
        self.weight.copy_(stored.read(self.weight.dtype))

    def finish(self) -> None:
        """Nothing to pack."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return rms_norm(x, self.weight, self.eps, offset=self.offset, scaled=self.scaled)

    def add(self, x: Tensor, delta: Tensor | Pending | None) -> tuple[Tensor, Tensor]:
        """Return the stream x + delta, and its norm. delta: what the last block computed; None before the first."""
        if isinstance(delta, Pending):
            x, delta = (delta.onto(x), None) if x.shape[0] == 1 else (x, delta.parts())
        if delta is None:
            return x, self(x)
        return add_rms_norm(x, delta, self.weight, self.eps, offset=self.offset, scaled=self.scaled)

    def fold(self, x: Tensor, delta: Tensor | Pending | None) -> tuple[Tensor, Tensor | Normed]:
        """As `add`, for a block that can take the norm into its products: on a GPU the norm comes as a Normed."""
        if not use_kernel(x):
            if delta is None:
                return x, self(x)
            return add_rms_norm(x, delta, self.weight, self.eps, offset=self.offset, scaled=self.scaled)
        if x.shape[0] == 1 and not isinstance(delta, Tensor):
            x = x if delta is None else delta.onto(x)
            return x, Normed(x, self.weight, self.eps, self.offset)
        x, normed = self.add(x, delta)
        return x, Normed(x, self.weight, self.eps, self.offset, normed)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * (weight + offset) + bias, computed in fp32.

    Args:
        size: of the last dimension.
        eps: added to the variance.
        bias: whether there is one.
        offset: 1 for Nemotron, whose weights are stored as differences from 1. It is added when the weight is loaded.
        affine: whether there is a weight at all; without one, nothing is read from the checkpoint.
    """

    def __init__(self, size: int, eps: float, *, bias: bool = True, offset: float = 0.0, affine: bool = True) -> None:
        super().__init__()
        self.size = size
        self.parts = (size,) if affine else ()
        self.names = ("weight", "bias") if bias else ("weight",)
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, device="meta"), False)
        self.register_parameter("bias", nn.Parameter(torch.empty(size, device="meta"), False) if bias else None)

    @property
    def neutral(self) -> float:
        """The stored weight that multiplies by one; dummy weights scatter around it."""
        return 1.0 - self.offset

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored weight or bias must have."""
        return self.parts

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make weight and bias; ones for a weight that no checkpoint has."""
        make = torch.empty if self.parts else torch.ones
        self.weight = nn.Parameter(make(self.size, dtype=dtype, device=device), False)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.size, dtype=dtype, device=device), False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the weight or the bias."""
        if name == "bias":
            self.bias.copy_(stored.read(self.bias.dtype))
        else:
            self.weight.copy_(stored.read(self.weight.dtype) + self.offset)

    def finish(self) -> None:
        """Nothing to pack."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream x + delta, and its norm. delta: what the last block computed; None before the first."""
        if delta is None:
            return x, self(x)
        return add_layer_norm(x, delta, self.weight, self.bias, self.eps)

    def fold(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `add`: no product takes a layer norm in."""
        return self.add(x, delta)


class HeadNorms(nn.Module):
    """A layer norm over each head, with a weight of its own for each head and without biases.

    Args:
        heads, dim: how many, and the size of each.
        eps: added to the variance.
        single: the checkpoint keeps a vector for each head (StableLM), not one matrix (Cohere).
    """

    names = ("weight",)
    neutral = 1.0

    def __init__(self, heads: int, dim: int, eps: float, *, single: bool = False) -> None:
        super().__init__()
        self.parts = (1,) * heads if single else (heads,)
        self.single = single
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(heads, dim, device="meta"), False)
        self.unit = nn.Buffer(torch.empty(dim, device="meta"), persistent=False)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored weight must have."""
        return tuple(self.weight.shape[1:] if self.single else self.weight.shape)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the weights, uninitialised."""
        self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=dtype, device=device), False)
        self.unit = nn.Buffer(torch.ones(self.weight.shape[1], dtype=dtype, device=device), persistent=False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the weights, or those of one head."""
        (self.weight[part] if self.single else self.weight).copy_(stored.read(self.weight.dtype))

    def finish(self) -> None:
        """Nothing to pack."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, heads * dim] -> [T, heads * dim]"""
        heads, dim = self.weight.shape
        normed = layer_norm(x.reshape(-1, dim), self.unit, None, self.eps)
        return (normed.view(-1, heads, dim) * self.weight).flatten(1)


class QKNorms(nn.Module):
    """Two norms, one over all of q and one over all of k, on their product with v: [T, q + k + v].

    Args: q, k: the norms.  widths: numbers of q and of k in a row.
    """

    def __init__(self, q: nn.Module, k: nn.Module, widths: tuple[int, int]) -> None:
        super().__init__()
        self.q = q
        self.k = k
        self.widths = widths

    def forward(self, qkv: Tensor) -> Tensor:
        """[T, q + k + v] -> the same, normalised where q and k are."""
        q, k, v = qkv.split((*self.widths, qkv.shape[1] - sum(self.widths)), dim=1)
        return torch.cat((self.q(q), self.k(k), v), dim=1)
