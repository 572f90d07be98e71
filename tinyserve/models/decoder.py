"""The frame of every decoder-only model: embedding, layers, norm, head.

A family passes its layers in; the frame runs them over the batch, hands each attention its cache, and turns hidden
states into logits. The stream `x` and the last block's output `delta` travel apart, because the addition belongs to the
next norm's kernel.

Before: models/<family>.py builds it, models/registry.py loads it.  After: runner/runner.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from ..kv.groups import KVGroup, LayerKV
from ..kv.storage import Pair, layer_view
from ..layers.attention import Attention, Batch, LayerCache
from ..layers.embedding import Embedding
from ..layers.few import FewRows
from ..layers.linear import Linear
from ..layers.moe import ExpertLinear, Experts
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rope import Alibi, Rope
from ..layers.routing import Router
from ..quant.plain import Plain
from .alike import needed
from .config import ModelConfig


class Decoder(nn.Module):
    """A whole model.

    Args:
        config: its facts.
        layer: makes layer i; a module `forward(x, delta, batch) -> (x, delta)` whose attention is called `attn`.
        norm: makes the last norm from its size.
        embed_scale: factor on the embedded tokens.
        enter: a module `forward(x, positions) -> x` between the embedding and the first layer; None for nothing.
        head_bias: whether the head has a bias.
        logit_cap: logits become cap * tanh(logits / cap); None for none.
        logit_scale: factor on the logits, before the cap.
    """

    recordable = True  # a step may be replayed as a device graph

    def __init__(
        self,
        config: ModelConfig,
        layer: Callable[[int], nn.Module],
        *,
        norm: Callable[[int], RMSNorm | LayerNorm],
        embed_scale: float = 1.0,
        enter: nn.Module | None = None,
        head_bias: bool = False,
        logit_cap: float | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed = Embedding(config.vocab_size, config.hidden, scale=embed_scale)
        self.enter = enter
        self.layers = nn.ModuleList(layer(i) for i in range(config.num_layers))
        self.norm = norm(config.hidden)
        self.head = Linear(config.hidden, (config.vocab_size,), bias=head_bias)
        self.logit_cap = logit_cap
        self.logit_scale = logit_scale
        self.few: FewRows | None = None

    def attentions(self) -> list[Attention]:
        """The attention of each layer, in order."""
        return [layer.attn for layer in self.layers]

    def ropes(self) -> list[Rope | Alibi]:
        """The rotations and biases by distance that the layers share, each once."""
        return [module for module in self.modules() if isinstance(module, Rope | Alibi)]

    def reach(self, positions: int, device: torch.device) -> None:
        """Make the tables of positions for sequences of up to so many tokens; before `bind`.

        LongRoPE turns keys otherwise if no longer sequence than its original length is served.
        """
        for rope in self.ropes():
            rope.allocate(positions, device)

    def kv_layers(self) -> list[LayerKV]:
        """What each layer keeps of every token, in order of the layers."""
        return [attention.layer_kv() for attention in self.attentions()]

    def bind(self, groups: Sequence[KVGroup], storage: Sequence[Pair]) -> None:
        """Give each layer its cache: layer j of a group uses tensor pair j of the storage (kv/storage.py).

        The weights must be loaded: from now on they are not looked up anew (`settle`).
        """
        attentions = self.attentions()
        for group in groups:
            for layer, (k, v) in zip(group.layers, storage, strict=False):  # a group may have fewer layers than pairs
                kind = attentions[layer].layer_kv()
                attentions[layer].bind(LayerCache(layer_view(k, kind), layer_view(v, kind), group.index))
        settle(self)
        self.few = FewRows.of(self.embed, self.layers, self.norm) if self.enter is None else None

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, `forward` runs no more layers than it takes to launch every kernel that all of them launch."""
        every = self.layers
        few = [every[index] for index in needed(every)]
        try:
            vars(self)["layers"] = few  # found before the module of that name
            yield
        finally:
            vars(self)["layers"] = every

    def make_invariant(self) -> None:
        """From now on a row's numbers have the same bits whatever shares its batch; on a GPU, and slower.

        Raises: UnsupportedModel: it has products that cannot promise this: quantised ones, those of latent attention.
        """
        for name, module in self.named_modules():
            if isinstance(module, Attention | Experts):
                module.invariant = True
            plain = isinstance(module, Linear | Router) and type(module.format) is Plain
            if plain:
                module.format = Plain(invariant=True)
            if isinstance(module, Linear) and not plain:
                raise UnsupportedModel(f"--batch-invariant is not built for the quantised products of {name} yet.")
            matrices = [one for one in module.parameters(recurse=False) if one.dim() > 1]
            if matrices and not plain and not isinstance(module, Embedding | ExpertLinear):
                raise UnsupportedModel(f"--batch-invariant is not built for the products of {name} yet.")

    @property
    def narrows(self) -> bool:
        """Whether `forward` takes rows: with a last layer that can do without the others."""
        return getattr(self.layers[-1], "narrows", False)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Return the hidden state of each token after the last norm, [T, H]; writes the tokens' keys and values.

        rows: [R], the tokens whose hidden states are wanted, [R, H]. The last layer leaves the others out once it has
        their keys and values: of a prompt all tokens but the last, for whom it is most of that layer's work.
        """
        if rows is None and self.few is not None and (normed := self.few.forward(batch)) is not None:
            return normed
        x, delta = self.embed(batch.tokens), None
        if self.enter is not None:
            x = self.enter(x, batch.positions)
        *most, last = self.layers
        for layer in most:
            x, delta = layer(x, delta, batch)
        x, delta = last(x, delta, batch) if rows is None else last(x, delta, batch, rows)
        return self.norm.add(x, delta)[1]

    def further(self, batch: Batch) -> Tensor:
        """`forward`, for the batch that it was called with last, all sequences of which are one token longer now."""
        normed = None if self.few is None else self.few.further(batch)
        return self.forward(batch) if normed is None else normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, [L, H] -> [L, V]."""
        logits = self.head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        return logits


def settle(model: nn.Module) -> None:
    """Let Python find the parts of all modules itself, as plain attributes.

    Otherwise each `self.weight` calls nn.Module.__getattr__, a function in Python, 25 times a layer: 4 % of a step on
    the CPU. A buffer that is replaced afterwards needs another call.
    """
    for module in model.modules():
        for parts in (module._modules, module._parameters, module._buffers):
            vars(module).update(parts)
    for module in model.modules():
        if hasattr(module, "settle"):
            module.settle()
