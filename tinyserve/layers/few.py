"""A block of the commonest kind for a few decodes on the CPU, written out: the same operations, nothing between them.

In a step of one sequence of a small model, half of the time that is not spent in products goes into asking: which
format, which device, which rotation, which part of the batch. All of that is settled when the model is bound. What is
left is two dozen operations a layer, in an order that spares conversions: a norm ends in the bf16 of the product, and
what a block puts out stays bf16 until it is added to the stream. No number changes by it.

    x + delta -> norm -> qkv -> rotate, write -> attend -> out -> x + it -> norm -> gate_up -> silu * -> down -> delta

A step is taken only if each of its sequences computes one token and can be read where it lies (kernels/pages.py); every
other one goes through the modules, which say what a block is.

Before: attention.py, mlp.py, norm.py, quant/cpu_int4.py.  After: models/llama.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from ..kernels.coded import CodedCache
from ..kernels.launch import once, use_kernel
from ..kernels.norm import length_of
from ..kernels.pages import InPlace, by_head, layout
from ..kernels.rope import MATRIX_TOKENS, rotation_matrices
from ..quant.cpu import ByRows
from ..quant.cpu_dense import Dense
from ..quant.cpu_int4 import Int4
from .attention import Attention, Batch
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm


class FewRows:
    """The block of these modules. Make it by `of`, after the weights are loaded and the cache is bound."""

    def __init__(self, norms: tuple[RMSNorm, RMSNorm], attn: Attention, mlp: GatedMLP) -> None:
        self.norms = norms
        self.attn = attn
        self.products = (attn.qkv, attn.out, mlp.gate_up, mlp.down)
        self.formats = tuple(linear.format for linear in self.products)
        self.most = self.formats[0].most
        self.places = _places(attn.cache.k, attn.cache.v)

    @classmethod
    def of(cls, norms: tuple[Any, Any], attn: Any, mlp: Any) -> FewRows | None:
        """None: these modules have something that is not written out here, or weights of another kind."""
        plain = type(attn) is Attention and type(mlp) is GatedMLP and all(type(norm) is RMSNorm for norm in norms)
        if not plain or mlp.kind != "silu" or attn.rope is None or attn.rope.slopes is not None:
            return None
        scores = attn.scores
        unusual = (attn.q_norm, attn.adjust, attn.sinks, scores.chunk, scores.temper, scores.softcap or None)
        caches = (attn.cache.k, attn.cache.v)
        if any(part is not None for part in unusual) or any(isinstance(cache, CodedCache) for cache in caches):
            return None
        if use_kernel(caches[0]) or caches[0].dtype != torch.float32 or len(by_head(*caches)) > 1:
            return None
        products = (attn.qkv, attn.out, mlp.gate_up, mlp.down)
        return cls(norms, attn, mlp) if all(_is_known(linear) for linear in products) else None

    def plan(self, x: Tensor, batch: Batch) -> _Plan | None:
        """What the layers of a step share; None: the step is not for this class."""
        rows = x.shape[0]
        if rows > MATRIX_TOKENS or rows != batch.num_decodes or x.dtype != torch.float32:
            return None
        if tuple(linear.format for linear in self.products) != self.formats:  # an adapter is on them
            return None
        attn = self.attn
        key = ("few", attn.cache.group, attn.scores.window, id(attn.rope))
        plan = once(batch.memo, key, lambda: _Plan(attn, x, batch))
        return plan if plan.in_place else None

    def __call__(self, plan: _Plan, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """[T, H] stream and what is not added to it yet -> the same behind this block; the latter in bf16."""
        multiply = Int4.multiply if x.shape[0] <= self.most else Dense.multiply
        half, (first, second), (qkv, out, gate_up, down) = plan.half, self.norms, self.products
        if delta is not None:
            x = x + delta
        torch.div(x * first.scaled, length_of(x, first.eps), out=half)
        plan.qkv.copy_(multiply(half, qkv))
        plan.turning.copy_(torch.bmm(plan.turning, plan.turn))
        self.places.index_copy_(0, plan.slots, plan.kept)
        mixed = plan.attend(self.attn.cache.k, self.attn.cache.v, self.attn.scale)
        x = x + multiply(mixed.bfloat16(), out)
        torch.div(x * second.scaled, length_of(x, second.eps), out=half)
        gate, up = multiply(half, gate_up).float().chunk(2, -1)
        return x, multiply(silu(gate).mul_(up).bfloat16(), down)


class _Plan:
    """Buffers of a step, its rotation, and where its sequences lie in every layer of a KV group.

    Attributes:
        half: [T, H] bf16, what products read.   qkv: [T, (Hq + 2 Hkv) D] fp32; by heads: turning, [T, Hq + Hkv, D];
        kept, [T, 2 Hkv, D], new keys and values; queries, [1, Hkv, Hq / Hkv, D] of each sequence.
        turn: [T, D, D].   slots: [T], where keys and values go.   in_place: whether all of it can be used.
    """

    def __init__(self, attn: Attention, x: Tensor, batch: Batch) -> None:
        cache, heads, rows = attn.cache, attn.heads, x.shape[0]
        self.half = torch.empty(x.shape, dtype=torch.bfloat16)
        self.qkv = torch.empty(rows, (heads.queries + 2 * heads.kv) * heads.dim)
        by_heads = self.qkv.unflatten(1, (-1, heads.dim))
        self.turning, self.kept = by_heads[:, : heads.queries + heads.kv], by_heads[:, heads.queries :]
        self.queries = by_heads[:, : heads.queries].unflatten(1, (heads.kv, -1)).split(1)
        self.turn = rotation_matrices(attn.rope.cos_sin, batch.positions, attn.rope.interleaved, heads.dim)
        self.slots = batch.slots_to_write[cache.group]
        lengths, table = batch.seq_lens.tolist(), batch.block_tables[cache.group]
        self.sequences = layout(table, lengths, cache.k, cache.v, attn.scores.window or 0)
        self.in_place = min(lengths) > 0 and all(isinstance(one, InPlace) for one in self.sequences)

    def attend(self, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[T, Hq D]"""
        mixed = [
            scaled_dot_product_attention(q, sequence.view(k), sequence.view(v), scale=scale)
            for q, sequence in zip(self.queries, self.sequences, strict=True)
        ]
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view(len(mixed), -1)


def _places(k: Tensor, v: Tensor) -> Tensor:
    """Both caches [B, Hkv, P, D] as one of places, [B P, 2 Hkv, D]."""
    (both,) = by_head(k, v)
    return both.flatten(1, 2).transpose(0, 1)


def _is_known(linear: Linear) -> bool:
    """Whether a few rows are multiplied by 4-bit blocks, more by a bf16 copy of them, and nothing is added."""
    both = linear.format
    known = type(both) is ByRows and type(both.few) is Int4 and type(both.many) is Dense
    return known and linear.bias is None and linear.dense.dtype == torch.bfloat16 and linear.dense.is_mkldnn
