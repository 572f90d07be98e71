"""The router of a mixture of experts: a small product, and a rule that turns its logits into experts and weights.

Families differ in the rule only, and each rule is a value of `Routing`. The product is never quantised: an expert that
is chosen wrongly costs more than its few weights weigh.

Before: kernels/moe_router.py.  After: layers/moe.py.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor, nn

from ..kernels.moe_router import moe_router
from ..quant.format import Stored
from ..quant.plain import Plain
from .vector import Vector


@frozen(kw_only=True)
class Routing:
    """How a token's experts are chosen and weighed; see kernels/moe_router.py for the words.

    Args:
        experts, top_k: how many there are, and how many a token visits.
        kind: "softmax", "sigmoid" or "sparsemixer".
        renormalise: the weights of a token sum to `scale`.
        groups, top_groups, group_best: choice among groups of experts first.
        scale: factor on the weights.
        precise: the product is made in float32, whatever the activations are.
        bias: the product has a bias.
        corrected: shape in which the checkpoint holds a bias on the scores for the choice; None: there is none.
    """

    experts: int
    top_k: int
    kind: str = "softmax"
    renormalise: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    scale: float = 1.0
    precise: bool = False
    bias: bool = False
    corrected: tuple[int, ...] | None = None


class Router(nn.Module):
    """Experts and weights of each token.

    Args:
        hidden: size of the stream.
        routing: the rule.
    """

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.format = Plain()
        self.inputs = hidden
        self.parts = (routing.experts,)
        self.names = ("weight", "bias") if routing.bias else ("weight",)
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden, device="meta"), False)
        self.register_parameter("bias", None)
        corrected = routing.corrected
        name = "e_score_correction_bias"
        self.correction = corrected and Vector(name, routing.experts, dtype=torch.float32, stored=corrected)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored tensor must have."""
        return self.parts if name == "bias" else (*self.parts, self.inputs)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make weight and bias, uninitialised."""
        dtype = torch.float32 if self.routing.precise else dtype
        for name in self.names:
            value = torch.empty(self.shape(name, 0), dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(value, False))

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill weight or bias."""
        tensor = getattr(self, name)
        tensor.copy_(stored.read(tensor.dtype))

    def finish(self) -> None:
        """Nothing to pack."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights [T, K] float32, ids [T, K] int32"""
        rule, correction = self.routing, self.correction
        return moe_router(
            self.format.matmul(x.to(self.weight.dtype), self),
            top_k=rule.top_k,
            kind=rule.kind,
            bias=None if correction is None else correction.value,
            groups=rule.groups,
            top_groups=rule.top_groups,
            group_best=rule.group_best,
            renormalise=rule.renormalise,
            scale=rule.scale,
        )

    def extra_repr(self) -> str:
        return f"{self.routing}"
