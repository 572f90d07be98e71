"""What a block leaves to the kernel of its neighbour, so that a step has fewer kernels.

A decoder layer is a chain: norm, product, attention, product, addition, norm, product, gate, product, addition. On a
GPU a step of one token spends a third of a small model's time on starting and draining kernels, and the products can do
their neighbours' work on the side (kernels/gemv.py). So a norm hands on a `Normed`, which the next product works out
itself, and a block hands on a `Product`, which the next norm launches because only it knows the stream to add to:

    x, h = norm.fold(x, delta)     delta: Pending     launches delta's product, with x added in its kernel
                                   h: Normed          not computed yet if the step has one token
    block(h) -> Pending            Normed in, Pending out; a tensor in, a tensor out

With more tokens the norm is a kernel of its own, h holds its value, and a Pending may be left in parts that the norm
adds up. On the CPU, and for formats that cannot fold (`Linear.folds`), `fold` is `add`: tensors everywhere.

Before: linear.py.  After: norm.py, attention.py, mlp.py, and the layers of models that call `fold`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

from ..kernels.norm import rms_norm

if TYPE_CHECKING:
    from .linear import Linear


@frozen(eq=False)
class Normed:
    """An RMS norm on its way into a product.

    Args:
        x: [T, H], what is normalised.   weight, eps, offset: as in kernels/norm.py.
        done: [T, H], the result if it has been computed, else None.
    """

    x: Tensor
    weight: Tensor
    eps: float
    offset: float
    done: Tensor | None = None

    def value(self) -> Tensor:
        """[T, H]"""
        return rms_norm(self.x, self.weight, self.eps, offset=self.offset) if self.done is None else self.done


class Pending(ABC):
    """The last kernel of a block, not launched yet."""

    @abstractmethod
    def onto(self, stream: Tensor) -> Tensor:
        """stream + result, [1, outputs], in one kernel; for one row."""

    @abstractmethod
    def parts(self) -> Tensor:
        """[T, outputs], or parts [P, T, outputs] float32 that add up to it."""


@frozen(eq=False)
class Product(Pending):
    """`layer` times x [T, inputs]. The layer's format folds."""

    layer: Linear
    x: Tensor

    def onto(self, stream: Tensor) -> Tensor:
        """stream + product, [1, outputs]"""
        return self.layer.format.product(self.x, self.layer, residual=stream)

    def parts(self) -> Tensor:
        """[T, outputs], or parts."""
        return self.layer.format.product(self.x, self.layer, parts=True)


Delta = (
    Tensor | Pending | None
)  # what a layer hands to the next one: not added to the stream yet; None before the first


def handed_on(layer: Linear, x: Tensor, given: Tensor | Normed) -> Tensor | Product:
    """The last product of a block, whose input was `given`: launched now, or left to the next norm."""
    return Product(layer, x) if isinstance(given, Normed) and layer.folds else layer(x)


def narrowed(x: Tensor, delta: Tensor | Product, rows: Tensor | None) -> tuple[Tensor, Tensor | Product]:
    """The stream x and what is to be added to it, at some rows [R] only; None: as they are.

    Behind the last attention nothing but the tokens that are followed by a chosen one is ever looked at.
    """
    if rows is None:
        return x, delta
    if isinstance(delta, Product):
        return x.index_select(0, rows), Product(delta.layer, delta.x.index_select(0, rows))
    return x.index_select(0, rows), delta.index_select(0, rows)
