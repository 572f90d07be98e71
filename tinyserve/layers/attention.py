"""Self-attention over the paged cache: project, rotate and write the new keys and values, attend, project back.

A step mixes sequences that compute one token (decodes; they stand first in the batch) with sequences that compute many
(prefills). Both read the same cache; each kind has its kernel. All sequences of a step write their keys and values
before any of them attends, so a query finds its own key in the cache like every other.

Before: layers/{linear,norm,rope}.py, kernels/rope.py, kernels/attention_{decode,verify,prefill}.py.  After: models/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor, nn

from ..errors import UnsupportedModel
from ..kernels.attention_decode import attention_decode
from ..kernels.attention_prefill import attention_prefill
from ..kernels.attention_verify import attention_verify, is_short
from ..kernels.coded import CodedCache
from ..kernels.launch import once
from ..kernels.rope import qk_norm_rope_write
from ..kv.groups import LayerKV
from .chunk import Pieces, chunked, whole
from .fold import Normed, Product, handed_on
from .linear import Linear
from .norm import RMSNorm
from .part import Part
from .rope import Alibi, Rope
from .vector import Vector


class Batch(Protocol):
    """What a forward pass reads of a step (runner/batch.py makes it). G KV groups, S sequences, B blocks, T tokens.

    Args:
        tokens: [T] int32.
        positions: [T] int32, of each token in its sequence.
        query_start: [S+1] int32; sequence s has the tokens query_start[s] .. query_start[s+1]-1.
        seq_lens: [S] int32; length of each sequence after this step.
        block_tables: for each KV group [S, B] int32.
        slots_to_write: for each KV group [T] int64; block * block_size + offset of each token, -1 for padding.
        num_seqs: S.   num_decodes: leading sequences with exactly one token.
        max_query_len, max_seq_len: upper bounds over the sequences.
        max_cached_len: upper bound of what a sequence with several tokens had in the cache before this step.
        memo: empty when a computation of the step begins; what its layers share (kernels/launch.py::once).
    """

    tokens: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Sequence[Tensor]
    slots_to_write: Sequence[Tensor]
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    max_cached_len: int
    memo: dict


@frozen
class Heads:
    """Sizes of grouped-query attention: `queries` heads share `kv` key/value heads, each of `dim` numbers."""

    queries: int
    kv: int
    dim: int


@frozen
class Scores:
    """How a query weighs the keys that it sees.

    Args:
        scale: factor on the scores; 1/sqrt(D) when None.
        window: a query sees this many positions, itself included; None for all.
        softcap: scores become cap * tanh(scores / cap); 0 for none.
        chunk: a query sees the positions of its own chunk of this many only; None for all. Not with a window.
        sinks: each query head has a learned score that takes probability and gives no value.
        temper: (floor, weight): factor 1 + weight * log(1 + (p + 1) // floor) on the scores of a query at p; or None.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    chunk: int | None = None
    sinks: bool = False
    temper: tuple[int, float] | None = None


@frozen(eq=False)
class LayerCache:
    """Where one layer keeps its keys and values: two tensors [B, kv heads, block size, D], or codes of that shape, and
    the KV group that says which block table and which write slots of the batch apply."""

    k: Tensor | CodedCache
    v: Tensor | CodedCache
    group: int


class Attention(Part):
    """Grouped-query attention.

    Args:
        hidden: size of the stream.
        heads: the head counts and size.
        rope: the rotation of q and k or the bias by distance, shared by many layers; None for neither.
        scores: how queries weigh keys.
        qkv_bias, out_bias: whether the projections have biases.
        qk_norm: makes the norm over one head from its size; called once for q, once for k. None for no norm.
        adjust: a module that changes the product [T, (Hq + 2 Hkv) D] before all else: a norm that is none over one head
            (layers/norm.py::QKNorms), a clamp. None leaves it as it is.
    """

    def __init__(
        self,
        hidden: int,
        heads: Heads,
        *,
        rope: Rope | Alibi | None,
        scores: Scores = Scores(),
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[[int], RMSNorm] | None = None,
        adjust: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.rope = rope
        self.scale = heads.dim**-0.5 if scores.scale is None else scores.scale
        self.scores = scores
        self.qkv = Linear(
            hidden, (heads.queries * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim), bias=qkv_bias
        )
        self.out = Linear(heads.queries * heads.dim, (hidden,), bias=out_bias)
        self.q_norm = qk_norm(heads.dim) if qk_norm else None
        self.k_norm = qk_norm(heads.dim) if qk_norm else None
        self.adjust = adjust
        self.sinks = Vector("sinks", heads.queries) if scores.sinks else None
        self.cache: LayerCache | None = None
        self.kv_scales: tuple[float, float] | None = None  # of keys and values in fp8, if the checkpoint has them
        # A norm after the rotation: the rotation keeps the length, so the kernel may normalise first, by weights of 1.
        # Both weights then go to q, as only the product of q and k counts.
        self.late_weight: Tensor | None = None
        self.unit: Tensor | None = None
        self.invariant = False  # whether a row's numbers must have the same bits in every batch

    def layer_kv(self) -> LayerKV:
        """What this layer keeps of each token."""
        return LayerKV(self.heads.kv, self.heads.dim, self.scores.window, self.scores.chunk)

    def bind(self, cache: LayerCache) -> None:
        """Use these tensors from now on; must come before the first forward, and after the weights are loaded."""
        if self.kv_scales is not None and isinstance(cache.k, CodedCache):
            k_scale, v_scale = self.kv_scales
            cache = LayerCache(cache.k.scaled(k_scale), cache.v.scaled(v_scale), cache.group)
        self.cache, block_size = cache, cache.k.shape[2]
        if self.scores.chunk is not None and self.scores.chunk % block_size:
            raise UnsupportedModel(
                f"Attention in chunks of {self.scores.chunk} positions needs a --block-size that divides it, "
                f"not {block_size}."
            )
        if self.q_norm is not None and self.rope is not None and self.rope.before_norm:
            self.late_weight = (self.q_norm.weight + self.q_norm.offset) * (self.k_norm.weight + self.k_norm.offset)
            self.unit = torch.ones_like(self.late_weight)

    def forward(self, x: Tensor | Normed, batch: Batch) -> Tensor | Product:
        """[T, H] -> [T, H]"""
        cache, rope = self.cache, self.rope
        q_norm, late = self.q_norm, self.late_weight
        step = self._pieces(batch)  # before the product: attention reads lengths without waiting for what is in front
        qkv = self.qkv(x)
        q = qk_norm_rope_write(
            qkv if self.adjust is None else self.adjust(qkv),
            batch.positions,
            None if rope is None else rope.cos_sin,
            cache.k,
            cache.v,
            batch.slots_to_write[cache.group],
            num_heads=self.heads.queries,
            num_kv_heads=self.heads.kv,
            q_weight=None if q_norm is None else q_norm.weight if late is None else self.unit,
            k_weight=None if q_norm is None else self.k_norm.weight if late is None else self.unit,
            eps=1e-6 if q_norm is None else q_norm.eps,
            weight_offset=0.0 if q_norm is None or late is not None else q_norm.offset,
            interleaved=rope is not None and rope.interleaved,
            memo=batch.memo,
        )
        mixed = self._attend(self._tempered(q if late is None else q * late, batch), step, batch.memo)
        return handed_on(self.out, mixed.flatten(1), x)

    def _tempered(self, q: Tensor, batch: Batch) -> Tensor:
        """Let queries far from the beginning weigh their keys more sharply."""
        if self.scores.temper is None:
            return q
        floor, weight = self.scores.temper

        def growth() -> Tensor:
            return 1.0 + weight * torch.log1p((batch.positions + 1) // floor)[:, None, None]

        return (q * once(batch.memo, ("temper", floor, weight), growth)).to(q.dtype)

    def _attend(self, q: Tensor, step: Pieces, memo: dict) -> Tensor:
        """[T, Hq, D] -> [T, Hq, D]; decodes first, then the rest, each by its kernel."""
        cache, scores, rope = self.cache, self.scores, self.rope
        decodes, tables, lengths = step.num_decodes, step.tables, step.lengths
        options = {"scale": self.scale, "window": scores.window or 0, "softcap": scores.softcap}
        if rope is not None and rope.slopes is not None:
            options["alibi_slopes"] = rope.slopes
        if self.sinks is not None:
            options["sinks"] = self.sinks.value
        if self.invariant:
            options["batch_invariant"] = True
        if decodes == step.num_seqs:
            pages = (cache.k, cache.v, tables, lengths)
            return attention_decode(q, *pages, max_seq_len=step.max_seq_len, memo=memo, **options)
        out = torch.empty_like(q)
        if decodes:
            one_token = (q[:decodes], cache.k, cache.v, tables[:decodes], lengths[:decodes])
            attention_decode(*one_token, max_seq_len=step.max_seq_len, out=out[:decodes], memo=memo, **options)
        # query_start counts from the first row of q, so the prefills are addressed where they stand.
        rest = (q, cache.k, cache.v, tables[decodes:], step.query_start, lengths[decodes:])
        short = not self.invariant and is_short(step.max_query_len, step.num_seqs - decodes)
        if short:
            return attention_verify(*rest, max_query_len=step.max_query_len, out=out, memo=memo, **options)
        return attention_prefill(*rest, max_query_len=step.max_query_len, out=out, **options)

    def _pieces(self, batch: Batch) -> Pieces:
        """The step as this layer sees it: cut at the borders of chunks, once for all layers of the KV group."""
        group, chunk = self.cache.group, self.scores.chunk
        if chunk is None:
            return once(batch.memo, ("whole", group), lambda: whole(batch, group))
        block_size = self.cache.k.shape[2]
        return once(batch.memo, ("chunks", group), lambda: chunked(batch, group, chunk, block_size))
