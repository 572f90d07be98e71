"""A matrix product, of one or several fused parts, in whatever format its weights are kept.

`qkv` and `gate_up` are one product each although a checkpoint stores three and two matrices: the layer knows its
parts, so the weight table of a model file stays a list of names, and a format (quant/) fills ranges of rows. A layer
that holds only its share of a larger one (tensor parallelism) has a `shard` that cuts the stored tensors; by default
it is whole.

Before: quant/, fold.py.  After: layers/attention.py, layers/mlp.py, models/decoder.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ..kernels.activation import gated_activation
from ..kernels.launch import use_kernel
from ..quant.format import Stored, WeightFormat
from ..quant.plain import Plain
from .fold import Normed
from .part import Part


class Shard(Protocol):
    """Cuts what this rank owns out of a stored tensor."""

    def take(self, name: str, part: int, stored: Stored) -> Stored:
        """Return the rows or columns of `stored` that belong to this layer."""
        ...


class Whole:
    """The shard of a layer that is not divided."""

    def take(self, name: str, part: int, stored: Stored) -> Stored:
        """Return all of it."""
        return stored


class Linear(Part):
    """y = x W^T (+ b), W being `parts` on top of each other.

    Args:
        inputs: columns of W.
        parts: rows of each part, in order.
        bias: whether every part has a bias.
        shard: what this rank owns of the stored tensors.

    Attributes:
        format: keeps and multiplies W; may be replaced until `allocate`.
        dtype, device: of the activations; set by `allocate`.
    """

    def __init__(self, inputs: int, parts: tuple[int, ...], *, bias: bool = False, shard: Shard | None = None) -> None:
        super().__init__()
        self.inputs = inputs
        self.parts = parts
        self.shard = shard or Whole()
        self.format: WeightFormat = Plain()
        self.dtype = torch.float32
        self.device = torch.device("meta")
        self.register_parameter("bias", nn.Parameter(torch.empty(0, device="meta"), False) if bias else None)

    @property
    def outputs(self) -> int:
        """Rows of W."""
        return sum(self.parts)

    def rows(self, part: int) -> slice:
        """Return the rows of W, and the columns of y, that belong to one part."""
        start = sum(self.parts[:part])
        return slice(start, start + self.parts[part])

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that each part needs from a checkpoint."""
        return (*self.format.names, "bias") if self.bias is not None else self.format.names

    def shape(self, name: str, part: int) -> tuple[int, ...] | None:
        """Return the shape that the stored tensor must have, or None when only the format can tell."""
        if name == "bias":
            return (self.parts[part],)
        return (self.parts[part], self.inputs) if name == "weight" else None

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters, uninitialised."""
        self.dtype, self.device = dtype, device
        self.format.create(self)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty(self.outputs, dtype=dtype, device=device), False)

    def share(self, weight: nn.Parameter) -> None:
        """Use the weight of another layer (a tied head) instead of `allocate` and `load`; for dense weights."""
        self.dtype, self.device = weight.dtype, weight.device
        self.register_parameter("weight", weight)

    def borrow(self, format: WeightFormat, owner: nn.Module) -> None:
        """Use the codes of another layer (a tied head), which `format` has packed, instead of `allocate` and `load`."""
        self.format, self.dtype, self.device = format, owner.dtype, owner.device
        self.packed = owner.packed
        for name in (
            "codes",
            "high",
            "outer",
            "scales",
            "zeros",
            "order",
            "groups",
            "table",
            "input_scale",
            "input_zero",
        ):
            self.register_buffer(name, getattr(owner, name))

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill one tensor of one part."""
        stored = self.shard.take(name, part, stored)
        if name == "bias":
            self.bias[self.rows(part)].copy_(stored.read(self.dtype))
        else:
            self.format.load(self, name, part, stored)

    def finish(self) -> None:
        """All parts are loaded."""
        self.format.finish(self)

    @property
    def folds(self) -> bool:
        """Whether the format's kernels take in what stands around the product (fold.py)."""
        return getattr(self.format, "folds", False)

    def forward(self, x: Tensor | Normed) -> Tensor:
        """[T, inputs] -> [T, outputs]"""
        if isinstance(x, Normed):
            x, norm = self._taken(x)
            if norm is not None:
                return self.format.product(x, self, norm=norm)
        return self.format.matmul(x, self)

    def gated(self, x: Tensor | Normed, kind: str) -> Tensor:
        """act(first half) * (second half) of the product: [T, inputs] -> [T, outputs / 2]. kind: the activation."""
        x, norm = self._taken(x) if isinstance(x, Normed) else (x, None)
        if use_kernel(x) and self.folds:
            return self.format.product(x, self, norm=norm, gate=kind)
        return gated_activation(self.format.matmul(x, self), kind)

    def _taken(self, x: Normed) -> tuple[Tensor, tuple[Tensor, float, float] | None]:
        """The input of the product, and the norm that the product is to take in."""
        if self.folds and x.done is None:
            return x.x, (x.weight, x.eps, x.offset)
        return x.value(), None

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {'+'.join(map(str, self.parts))}, {type(self.format).__name__}"
