"""The feed-forward block: two products, one activation between them; gated or plain.

Before: kernels/activation.py, layers/linear.py, layers/fold.py.  After: the Layer of every dense model.

Source: "GLU Variants Improve Transformer", arXiv:2002.05202; xIELU, arXiv:2411.13010.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.activation import activation, xielu
from ..quant.format import Stored
from .fold import Normed, Product, handed_on
from .linear import Linear
from .part import Part


class GatedMLP(Part):
    """down(act(gate(x)) * up(x)).

    Args:
        hidden: size of the stream.
        inner: size between the two products.
        kind: the activation, a kind of kernels/activation.py ("silu", "gelu_tanh", ...).
        bias: whether gate, up and down have biases.
    """

    def __init__(self, hidden: int, inner: int, kind: str, *, bias: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.gate_up = Linear(hidden, (inner, inner), bias=bias)
        self.down = Linear(inner, (hidden,), bias=bias)

    def forward(self, x: Tensor | Normed) -> Tensor | Product:
        """[T, H] -> [T, H]"""
        return handed_on(self.down, self.gate_up.gated(x, self.kind), x)


class MLP(nn.Module):
    """down(act(up(x))).

    Args:
        hidden: size of the stream.
        inner: size between the two products.
        act: the activation: a kind of kernels/activation.py, or a module.
        bias: whether up and down have biases.
    """

    def __init__(self, hidden: int, inner: int, act: str | nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.kind = act if isinstance(act, str) else None
        self.act = None if isinstance(act, str) else act
        self.up = Linear(hidden, (inner,), bias=bias)
        self.down = Linear(inner, (hidden,), bias=bias)

    def forward(self, x: Tensor | Normed) -> Tensor | Product:
        """[T, H] -> [T, H]"""
        h = self.up(x)
        return handed_on(self.down, self.act(h) if self.kind is None else activation(h, self.kind), x)


class XIELU(nn.Module):
    """An activation with learned curvatures, one on each side of zero, that the checkpoint stores before a softplus."""

    names = ("alpha_p", "alpha_n", "beta", "eps")
    parts = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.values = dict.fromkeys(self.names, 0.0)
        self.alphas = (0.0, 0.0)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored number must have."""
        return (1,) if name.startswith("alpha") else ()

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing: the four numbers go to the kernel as arguments."""

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Take one number."""
        self.values[name] = stored.read(torch.float32).item()

    def finish(self) -> None:
        """Compute the curvatures."""
        positive, negative = (
            torch.nn.functional.softplus(torch.tensor(self.values[name])).item() for name in ("alpha_p", "alpha_n")
        )
        self.alphas = (positive, self.values["beta"] + negative)

    def forward(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, I]"""
        return xielu(x, *self.alphas, beta=self.values["beta"], eps=self.values["eps"])
