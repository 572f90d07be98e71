"""All layers of a model of the commonest kind, written out for a few decodes on the CPU: operations and nothing else.

In a step of one sequence of a small model, half of the time that is not spent in products goes into asking: which
format, which device, which rotation, which part of the batch. All of that is settled when the model is bound. What is
left is two dozen operations a layer over buffers that stay:

    stream -> norm -> qkv -> rotate, write -> attend -> out -> + stream -> norm -> gate_up -> silu * -> down -> + stream

Between them stands no Python either: it is compiled by TorchScript, whose interpreter calls an operation in a
fraction of the instructions. That counts for more than it seems to: a product has just read its weights through the
core's cache, so the code of whatever follows comes from memory. And the event loop's thread is not kept waiting.

Keys and values are read in bf16, which is half of what a long answer makes a step read, and turned into float32 in a
small piece of memory that stays in the core's cache. torch's attention is faster from there than from the large one:
its products read in an order that no processor foresees.

A step is taken only if each of its sequences computes one token and can be read where it lies (kernels/pages.py); every
other one goes through the modules, which say what a block is.

Before: attention.py, mlp.py, norm.py, quant/cpu_int4.py.  After: models/decoder.py.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from attrs import astuple
from torch import Tensor, nn
from torch.nn.functional import silu

from ..kernels.launch import use_kernel
from ..kernels.pages import InPlace, all_by_head, layout
from ..kernels.rope import MATRIX_TOKENS, matrices, rotation_pattern
from ..quant.cpu import ByRows
from ..quant.cpu_dense import Dense
from ..quant.cpu_int4 import Int4
from .attention import Attention, Batch
from .embedding import Embedding
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm

UNSCRIPTED = (3, 14)  # the first Python of which torch says that TorchScript may break


class Room(NamedTuple):
    """The buffers of steps of T rows.

    Attributes:
        stream: [T, H].   long: [T, H + 1], the stream with one number more.   length: [T, 1].
        normed: [T, H], then `half`: the same in bf16, what products read.   mixed: [T, Hq D] bf16, what attention gave.
        qkv: [T, (Hq + 2 Hkv) D]; by heads: turning, [T, Hq + Hkv, D]; kept, [T, 2 Hkv, D], new keys and values;
        queries, [1, Hkv, M, D] of each sequence; mixed_by_heads: [1, Hkv, Hq / Hkv, D] of each.
        both: [T, 2 I]; gate and up, [T, I], are its halves.   inner: [T, I] bf16.
    """

    stream: Tensor
    long: Tensor
    length: Tensor
    normed: Tensor
    half: Tensor
    qkv: Tensor
    turning: Tensor
    kept: Tensor
    queries: list[Tensor]
    mixed: Tensor
    mixed_by_heads: list[Tensor]
    both: Tensor
    gate: Tensor
    up: Tensor
    inner: Tensor


def product(half: Tensor, weight: list[Tensor]) -> Tensor:
    """[T, K] bf16 times codes and their scales, or times one packed bf16 weight: [T, N] bf16."""
    if len(weight) == 2:
        return torch._weight_int4pack_mm_for_cpu(half, weight[0], 32, weight[1])
    return torch.ops.mkldnn._linear_pointwise(half, weight[0], None, "none", [], "")


class Stack(nn.Module):
    """All layers and the last norm, for `compiled`. TorchScript keeps these lists; it would copy what is passed.

    Args: lists, one entry a layer: attn_norm, mlp_norm, [H] sqrt(H) weight; qkv, out, gate_up, down, weights as of
        `product`.   caches: [layers, 2, Hkv, B P, D], bf16.
        table: [V, H], of the embedding.   last_norm: [H].   scale: of attention's scores.
        cos_sin, pattern: as of kernels/rope.py::matrices.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def forward(self, tokens: Tensor, room: Room, positions: Tensor, spans: list[list[int]], wide: Tensor) -> Tensor:
        """[T] -> [T, H], the norm behind the last layer.

        Args: spans: first and behind the last of the cache's tokens that each sequence sees; the last is its new one.
            wide: float32 room for what one sequence sees in a layer.
        """
        # Names of its own for what stands in tuples and attributes: the interpreter looks those up each time.
        stream, long, length, normed, half, qkv, turning, kept, queries, mixed, by_heads, both, gate, up, inner = room
        attn_norm, mlp_norm, scale, group = self.attn_norm, self.mlp_norm, self.scale, by_heads[0].shape[2]
        to_qkv, to_out, to_gate_up, to_down = self.qkv, self.out, self.gate_up, self.down
        stream.copy_(self.table.index_select(0, tokens))
        turn = matrices(self.cos_sin, positions, self.pattern)
        views: list[list[Tensor]] = []
        newest: list[list[Tensor]] = []
        seen: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for span in spans:  # one call makes the views of all layers
            views.append(self.caches[:, :, :, span[0] : span[1]].unbind())
            newest.append(self.caches[:, :, :, span[1] - 1].unbind())
            seen.append(wide[: views[-1][0].numel()].view(views[-1][0].shape))
            keys.append(seen[-1][0][None])
            values.append(seen[-1][1][None])
        new = kept.unflatten(1, (2, -1)).unbind()
        for i in range(len(attn_norm)):
            torch.norm(long, 2, [1], True, out=length)
            half.copy_(torch.mul(stream, attn_norm[i], out=normed).div_(length))
            qkv.copy_(product(half, to_qkv[i]))
            turning.copy_(torch.bmm(turning, turn))
            for row, of_layers in enumerate(views):
                newest[row][i].copy_(new[row])
                seen[row].copy_(of_layers[i])
                attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries[row], keys[row], values[row], 0.0, False, scale=scale
                )[0]
                by_heads[row].copy_(attended.narrow(2, 0, group))
            stream.add_(product(mixed, to_out[i]))
            torch.norm(long, 2, [1], True, out=length)
            half.copy_(torch.mul(stream, mlp_norm[i], out=normed).div_(length))
            both.copy_(product(half, to_gate_up[i]))
            inner.copy_(silu(gate).mul_(up))
            stream.add_(product(inner, to_down[i]))
        torch.norm(long, 2, [1], True, out=length)
        return (stream * self.last_norm).div_(length)


def compiled(stack: Stack) -> Callable[..., Tensor]:
    """The stack, by TorchScript; as it is where that is not promised to work any more, at 0.6 to 1 ms more a step."""
    if sys.version_info >= UNSCRIPTED:
        return stack
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will not be developed further
        return torch.jit.script(stack)


class FewRows:
    """A model from its tokens to the last norm. Make it by `of`, after the weights are loaded and the cache is bound.

    Args:
        layers: of the kind of models/llama.py.   caches: [2 layers, Hkv, B P, D], K and V of each, bf16.
    """

    def __init__(self, embed: Embedding, layers: Sequence[Any], last: RMSNorm, caches: Tensor) -> None:
        self.attn, self.mlp, self.eps = layers[0].attn, layers[0].mlp, last.eps
        self.vocab_size = len(embed.weight)
        self.linears = [linear for layer in layers for linear in _products(layer)]
        self.formats = [linear.format for linear in self.linears]
        self.most, rope = self.formats[0].most, self.attn.rope
        every = {
            "attn_norm": [layer.attn_norm.scaled for layer in layers],
            "mlp_norm": [layer.mlp_norm.scaled for layer in layers],
            "last_norm": last.scaled,
            "table": embed.weight.data,
            "caches": caches.unflatten(0, (-1, 2)),
            "scale": self.attn.scale,
            "cos_sin": rope.cos_sin,
            "pattern": rotation_pattern(self.attn.heads.dim, rope.cos_sin.shape[1], rope.interleaved, caches.device),
        }
        names = ("qkv", "out", "gate_up", "down")
        self.few, self.more = (
            compiled(
                Stack(**every, **{name: [weight(one) for one in self.linears[i::4]] for i, name in enumerate(names)})
            )
            for weight in (lambda linear: [linear.nibbles, linear.scales], lambda linear: [linear.dense])
        )
        self.rooms: dict[int, Room] = {}
        self.wide = torch.empty(0)
        self.last: tuple[Batch, list[list[int]]] | None = None  # what was computed last, if this class did it

    @classmethod
    def of(cls, embed: Embedding, layers: Sequence[Any], last: Any) -> FewRows | None:
        """None: these modules have something that is not written out here, or weights of another kind."""
        table = None if embed.packed is not None or embed.scale != 1.0 else embed.weight
        if table is None or table.dtype != torch.float32 or type(last) is not RMSNorm:
            return None
        if not all(getattr(layer, "plain", False) and _is_known(layer) for layer in layers):
            return None
        attentions = [layer.attn for layer in layers]
        alike = {(one.cache.group, one.heads, one.scores.window, one.scale, id(one.rope)) for one in attentions}
        sizes = {layer.mlp.down.inputs for layer in layers}
        epsilons = {last.eps, *(norm.eps for layer in layers for norm in _norms(layer))}
        caches = all_by_head([(one.cache.k, one.cache.v) for one in attentions])
        return (
            None if max(map(len, (alike, sizes, epsilons))) > 1 or caches is None else cls(embed, layers, last, caches)
        )

    def forward(self, batch: Batch) -> Tensor | None:
        """[T, H], what the head multiplies; None: the step is not for this class."""
        self.last = None
        tokens, rows = batch.tokens.tolist(), len(batch.tokens)
        if rows > MATRIX_TOKENS or rows != batch.num_decodes or min(tokens) < 0 or max(tokens) >= self.vocab_size:
            return None
        if [linear.format for linear in self.linears] != self.formats:  # an adapter is on them
            return None
        cache, lengths = self.attn.cache, batch.seq_lens.tolist()
        sequences = layout(batch.block_tables[cache.group], lengths, cache.k, cache.v, self.attn.scores.window or 0)
        if not min(lengths) or not all(isinstance(one, InPlace) for one in sequences):
            return None
        if rows not in self.rooms:
            self.rooms[rows] = _room(rows, self.attn, self.mlp, self.eps)
        return self._run(batch, [one.span for one in sequences])

    def further(self, batch: Batch) -> Tensor | None:
        """The same for the batch of the step before, all sequences of which are one token longer now."""
        if self.last is None or self.last[0] is not batch:
            return None
        spans, window = self.last[1], self.attn.scores.window
        for span in spans:
            span[1] += 1
            if window and span[1] - span[0] > window:
                span[0] += 1
        return self._run(batch, spans)

    def _run(self, batch: Batch, spans: list[list[int]]) -> Tensor:
        """spans: of the cache's tokens, as of Stack."""
        rows, heads = len(spans), self.attn.heads
        numbers = 2 * heads.kv * heads.dim * max([end - start for start, end in spans])
        if len(self.wide) < numbers:
            self.wide = torch.empty(2 * numbers)
        self.last = batch, spans
        run = self.few if rows <= self.most else self.more
        return run(batch.tokens, self.rooms[rows], batch.positions, spans, self.wide)


def _room(rows: int, attn: Attention, mlp: GatedMLP, eps: float) -> Room:
    """The buffers of steps of so many rows."""
    queries, kv, dim, hidden, inner = *astuple(attn.heads), attn.out.outputs, mlp.down.inputs
    every, group = queries + 2 * kv, queries // kv
    # With one number more a row, its length is sqrt(sum of squares + H eps), the divisor of a norm, at once.
    long = torch.full((rows, hidden + 1), (eps * hidden) ** 0.5)
    qkv, both, mixed = torch.zeros(rows, every * dim), torch.empty(rows, 2 * inner), torch.empty(rows, queries * dim)
    mixed, by_heads = mixed.bfloat16(), qkv.unflatten(1, (every, dim))
    # Products of 3 rows take a third longer than of 4. The fourth is the head that follows, of the next group or of the
    # keys; what it gives is dropped.
    asked = group + (group % 4 == 3)
    shape, strides = (1, kv, asked, dim), (0, group * dim, dim, 1)
    return Room(
        stream=long[:, :hidden],
        long=long,
        length=torch.empty(rows, 1),
        normed=torch.empty(rows, hidden),
        half=torch.empty(rows, hidden, dtype=torch.bfloat16),
        qkv=qkv,
        turning=by_heads[:, : queries + kv],
        kept=by_heads[:, queries:],
        queries=[qkv.as_strided(shape, strides, row * every * dim) for row in range(rows)],
        mixed=mixed,
        mixed_by_heads=list(mixed.view(rows, kv, group, dim).split(1)),
        both=both,
        gate=both[:, :inner],
        up=both[:, inner:],
        inner=torch.empty(rows, inner, dtype=torch.bfloat16),
    )


def _products(layer: Any) -> tuple[Linear, Linear, Linear, Linear]:
    return layer.attn.qkv, layer.attn.out, layer.mlp.gate_up, layer.mlp.down


def _norms(layer: Any) -> tuple[RMSNorm, RMSNorm]:
    return layer.attn_norm, layer.mlp_norm


def _is_known(layer: Any) -> bool:
    """Whether a layer is nothing but what is written out here, for numbers of these types."""
    attn, mlp = layer.attn, layer.mlp
    usual = type(attn) is Attention and type(mlp) is GatedMLP and all(type(norm) is RMSNorm for norm in _norms(layer))
    if not usual or mlp.kind != "silu" or attn.rope is None or attn.rope.slopes is not None:
        return False
    scores, keys = attn.scores, attn.cache.k
    unusual = (attn.q_norm, attn.adjust, attn.sinks, scores.chunk, scores.temper, scores.softcap or None)
    if any(part is not None for part in unusual) or not isinstance(keys, Tensor) or use_kernel(keys):
        return False
    return keys.dtype == torch.bfloat16 and all(_is_int4(linear) for linear in _products(layer))


def _is_int4(linear: Linear) -> bool:
    """Whether a few rows are multiplied by 4-bit blocks, more by a bf16 copy of them, and nothing is added."""
    both = linear.format
    known = type(both) is ByRows and type(both.few) is Int4 and type(both.many) is Dense
    return known and linear.bias is None and linear.dense.dtype == torch.bfloat16 and linear.dense.is_mkldnn
