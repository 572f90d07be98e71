"""A mixture of experts in place of the feed-forward block: each token visits K of E experts, and perhaps a shared one.

    router -> weights, ids --> few tokens:  moe_decode_gate_up -> moe_decode_down                          3 launches
                           '-> many tokens: moe_align -> moe_gate_up -> moe_down -> moe_reduce             4 launches

The last sum is left to the next norm where that saves a launch (fold.py): of few tokens the addition to the stream,
of up to MOST_PARTS tokens without a shared expert the sum over choices.

All experts of a layer lie in one tensor, so that one launch reaches any of them. A checkpoint stores them one by one;
the loader sees an `ExpertLinear` as a fused layer with E times as many parts. Its format (quant/experts.py) keeps plain
numbers or codes, and multiplies by them; the four launches are the same.

Before: layers/routing.py, quant/experts.py, kernels/moe_*.py.  After: models/<family>.py.

Source: arXiv:1701.06538; arXiv:2401.06066 (shared experts).
"""

from __future__ import annotations

from functools import partial

import torch
from attrs import frozen
from torch import Tensor, nn

from ..kernels.launch import use_kernel
from ..kernels.moe_align import moe_align
from ..kernels.moe_decode import MOST_SLOTS
from ..kernels.moe_reduce import moe_reduce
from ..quant.experts import ExpertFormat, PlainExperts
from ..quant.format import Stored, place
from .fold import Normed, Pending
from .linear import Linear
from .mlp import GatedMLP
from .routing import Router, Routing

MOST_PARTS = 512  # tokens; above, the float32 parts are more to write and read than a launch costs


class ExpertLinear(nn.Module):
    """The matrices of all experts for one product, [E, outputs, inputs].

    Args:
        experts: E.
        inputs: columns of each matrix.
        pieces: rows of the fused parts of one expert.
        bias: whether there are biases, [E, outputs].

    Attributes:
        format: keeps and multiplies the matrices; may be replaced until `allocate`.
        parts: `pieces` of expert 0, then of expert 1 and so on: the order in which a weight table names them.
        dtype, device: of the activations; set by `allocate`.
    """

    def __init__(self, experts: int, inputs: int, pieces: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.inputs = inputs
        self.pieces = pieces
        self.parts = pieces * experts
        self.format: ExpertFormat = PlainExperts()
        self.dtype = torch.float32
        self.device = torch.device("meta")
        self.register_parameter("bias", nn.Parameter(torch.empty(0, device="meta"), False) if bias else None)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that each part needs from a checkpoint."""
        return (*self.format.names, "bias") if self.bias is not None else self.format.names

    def rows(self, part: int) -> slice:
        """Return the rows of one part, in the matrices of all experts on top of each other."""
        expert, piece = divmod(part, len(self.pieces))
        start = expert * sum(self.pieces) + sum(self.pieces[:piece])
        return slice(start, start + self.pieces[piece])

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored tensor of a part must have."""
        return (self.parts[part], self.inputs) if name == "weight" else (self.parts[part],)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters, uninitialised."""
        self.dtype, self.device = dtype, device
        self.format.create(self)
        if self.bias is not None:
            bias = torch.empty((self.experts, sum(self.pieces)), dtype=dtype, device=device)
            self.bias = nn.Parameter(bias, requires_grad=False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill one part of one expert."""
        if name == "bias":
            place(self.bias.view(-1)[self.rows(part)], stored)
        else:
            self.format.load(self, name, part, stored)

    def finish(self) -> None:
        """All experts are loaded."""
        self.format.finish(self)

    def extra_repr(self) -> str:
        return f"{self.experts} x ({self.inputs} -> {'+'.join(map(str, self.pieces))}), {type(self.format).__name__}"


@frozen(eq=False)
class Choices(Pending):
    """The products of the experts of a few tokens, added up. last: `few_down` of a format, without a residual."""

    last: partial[Tensor]

    def onto(self, stream: Tensor) -> Tensor:
        """stream + sum, [1, H]"""
        return self.last(residual=stream)

    def parts(self) -> Tensor:
        """[T, H]"""
        return self.last()


class Experts(nn.Module):
    """down(act(gate(x)) * up(x)) of E experts.

    Args:
        experts: E.   hidden: size of the stream.   inner: size between the two products.
        kind: the activation, of kernels/moe_gemm.py::GATED.
        bias: whether gate, up and down have biases.
        scale_inputs: the routing weight multiplies what goes into an expert, not what comes out (Llama 4).

    Attributes:
        invariant: a token's numbers have the same bits whatever shares its batch.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        inner: int,
        kind: str = "silu",
        *,
        bias: bool = False,
        scale_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.scale_inputs = scale_inputs
        self.invariant = False
        self.gate_up = ExpertLinear(experts, hidden, (inner, inner), bias=bias)
        self.down = ExpertLinear(experts, inner, (hidden,), bias=bias)

    def forward(
        self,
        x: Tensor,
        routed: tuple[Tensor, Tensor],
        *,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
        folds: bool = False,
    ) -> Tensor | Choices:
        """Run the experts.

        Args:
            x: [T, H].   routed: weights and ids, [T, K] each.
            shared: [T, H], the shared expert's output, or None.   gate: [T, 1] before its sigmoid, or None.
            folds: whether the next norm takes what is Pending, or in parts.

        Returns:
            [T, H], or float32 parts [K, T, H] that add up to it.
        """
        weights, ids = routed
        up, down = self.gate_up, self.down
        before = {"kind": self.kind, "scales": weights if self.scale_inputs else None}
        after = {"scales": None if self.scale_inputs else weights}
        if use_kernel(x) and ids.numel() <= MOST_SLOTS and not self.invariant:
            h = up.format.few_gate_up(x, up, ids, **before)
            last = partial(down.format.few_down, h, down, ids, shared=shared, gate=gate, **after)
            return Choices(last) if folds else last()
        order, starts = moe_align(ids, up.experts)
        given = {"top_k": ids.shape[1], "invariant": self.invariant}
        parts = folds and shared is None and len(ids) <= MOST_PARTS and not self.invariant
        h = up.format.gate_up(x, up, order, starts, **before, **given)
        out = down.format.down(h, down, order, starts, parts=parts, **after, **given)
        return out if parts else moe_reduce(out, shared, gate)


class MoE(nn.Module):
    """Router, experts, and what every token visits beside them.

    Args:
        hidden: size of the stream.
        routing: how experts are chosen.
        experts: the experts.
        shared: the shared expert, or None.
        shared_gate: whether a sigmoid of one product opens the shared expert (Qwen2-MoE).
    """

    def __init__(
        self,
        hidden: int,
        routing: Routing,
        experts: Experts,
        *,
        shared: GatedMLP | None = None,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        self.router = Router(hidden, routing)
        self.experts = experts
        self.shared = shared
        self.shared_gate = Linear(hidden, (1,)) if shared_gate else None

    def forward(self, given: Tensor | Normed) -> Tensor | Choices:
        """[T, H] -> [T, H]; for a Normed perhaps float32 parts [K, T, H], which the next norm adds up."""
        folds = isinstance(given, Normed)
        x = given.value() if folds else given
        shared = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        return self.experts(x, self.router(x), shared=shared, gate=gate, folds=folds)
