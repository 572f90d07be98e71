"""The gated feed-forward block: two products, one activation between them.

Before: kernels/activation.py, layers/linear.py, layers/fold.py.  After: the Layer of every dense model.

Source: "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

from __future__ import annotations

from torch import Tensor, nn

from .fold import Normed, Product, handed_on
from .linear import Linear


class GatedMLP(nn.Module):
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
