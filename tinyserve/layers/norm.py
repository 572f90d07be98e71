"""RMSNorm, alone or together with the addition to the residual stream that stands before nearly every norm.

Before: kernels/norm.py.  After: layers/attention.py (norms over heads), the Layer of every model file.

Source: "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.launch import use_kernel
from ..kernels.norm import add_rms_norm, rms_norm
from ..quant.format import Stored
from .fold import Normed, Product


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), computed in fp32.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: 0, or 1 for Gemma, whose weights are stored as differences from 1.
    """

    names = ("weight",)

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.parts = (size,)
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size, device="meta"), False)

    @property
    def neutral(self) -> float:
        """The stored weight that multiplies by one; dummy weights scatter around it."""
        return 1.0 - self.offset

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored weight must have."""
        return self.parts

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the weight, uninitialised."""
        self.weight = nn.Parameter(torch.empty(self.parts, dtype=dtype, device=device), False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the weight."""
        self.weight.copy_(stored.read(self.weight.dtype))

    def finish(self) -> None:
        """Nothing to pack."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: Tensor, delta: Tensor | Product | None) -> tuple[Tensor, Tensor]:
        """Return the stream x + delta, and its norm. delta: what the last block computed; None before the first."""
        if isinstance(delta, Product):
            x, delta = (delta.onto(x), None) if x.shape[0] == 1 else (x, delta.parts())
        if delta is None:
            return x, rms_norm(x, self.weight, self.eps, offset=self.offset)
        return add_rms_norm(x, delta, self.weight, self.eps, offset=self.offset)

    def fold(self, x: Tensor, delta: Tensor | Product | None) -> tuple[Tensor, Tensor | Normed]:
        """As `add`, for a block that can take the norm into its products: on a GPU the norm comes as a Normed."""
        if not use_kernel(x):
            return self.add(x, delta)
        if x.shape[0] == 1 and not isinstance(delta, Tensor):
            x = x if delta is None else delta.onto(x)
            return x, Normed(x, self.weight, self.eps, self.offset)
        x, normed = self.add(x, delta)
        return x, Normed(x, self.weight, self.eps, self.offset, normed)
