"""How fast torch's own operators could decode on a CPU at all: a step of the default model written out by hand.

No engine, no sampler, no modules, no pages: the weights as tinyserve packs them, the fastest operator of torch's for
each product, one call of attention a sequence over keys that lie in one piece, buffers that are made once, operations
in place, and everything left out that can be folded into weights or into what is made before the first step. What it
computes is a decode step by its amount of work, not by its numbers: positions stand still, and the rotation is one
multiplication of complex numbers. An engine that calls torch from Python can come near this, never below;
layers/few.py, which leaves Python out, pays for the rest of an engine with it. `bench/cpu.py --engines floor` measures
it beside the others.
"""

from pathlib import Path

import torch
from torch.nn import functional as F

LENGTH = 217  # keys a sequence: of bench/cpu.py's prompt, and half of what is decoded
ROOM = 256
FEW = 4  # rows that torch's int4 product is the fastest for


class Floor:
    """`generate` runs steps of as many sequences as there are prompts; what is in these does not matter."""

    def __init__(self, path: Path, threads: int) -> None:
        from tinyserve.config import build
        from tinyserve.engine.parts import Phases, load_parts

        options = {"model": str(path), "cpu_threads": threads, "use_tqdm_on_load": False}
        self.model = load_parts(build(options), Phases()).model
        torch.set_num_threads(threads)
        attention, config = self.model.layers[0].attn, self.model.config
        self.heads, self.hidden, self.eps = attention.heads, config.hidden, config.norm_eps
        self.prepared: dict[int, tuple] = {}

    def generate(self, prompts: list[list[int]], count: int) -> None:
        """`count` steps."""
        rows = len(prompts)
        with torch.inference_mode():
            if rows not in self.prepared:
                self.prepared[rows] = self.prepare(rows)
            for _ in range(count):
                self.step(*self.prepared[rows])

    def prepare(self, rows: int) -> tuple:
        """Weights, caches, and buffers for steps of so many sequences."""
        heads, hidden = self.heads, self.hidden
        layers, every, few = [], heads.queries + 2 * heads.kv, rows <= FEW
        caches = torch.zeros(len(self.model.layers), 2 * heads.kv, rows * ROOM, heads.dim)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            products = [
                (one.nibbles, one.scales) if few else (one.dense,)
                for one in (layer.attn.qkv, layer.attn.out, layer.mlp.gate_up, layer.mlp.down)
            ]
            norms = [norm.weight * hidden**0.5 for norm in (layer.attn_norm, layer.mlp_norm)]
            places = [cache[:, row * ROOM : row * ROOM + LENGTH][None].chunk(2, 1) for row in range(rows)]
            layers.append((products, norms, cache, places))
        stream = torch.randn(rows, hidden + 1)
        stream[:, hidden] = (self.eps * hidden) ** 0.5  # so that the length of a row has the epsilon in it
        qkv = torch.empty(rows, every, heads.dim)
        turn = torch.polar(torch.ones(rows, every, heads.dim // 2), torch.rand(rows, every, heads.dim // 2))
        queries = qkv[:, : heads.queries].unflatten(1, (heads.kv, -1)).split(1)
        new = qkv[:, heads.queries :].transpose(0, 1)
        slots = torch.arange(rows) * ROOM + LENGTH - 1
        return layers, stream, qkv, torch.view_as_complex(qkv.unflatten(2, (-1, 2))), turn, queries, new, slots

    def step(self, layers, stream, qkv, pairs, turn, queries, new, slots) -> torch.Tensor:
        """One token of each sequence."""
        x, scale = stream[:, : self.hidden], self.heads.dim**-0.5
        half, length = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(len(x), 1)
        flat, multiply = qkv.flatten(1), few_rows if len(x) <= FEW else more_rows
        for products, norms, cache, places in layers:
            torch.linalg.vector_norm(stream, dim=-1, keepdim=True, out=length)
            torch.div(x * norms[0], length, out=half)
            flat.copy_(multiply(half, *products[0]))
            pairs.mul_(turn)
            cache.index_copy_(1, slots, new)
            mixed = [
                F.scaled_dot_product_attention(q, k, v, scale=scale) for q, (k, v) in zip(queries, places, strict=True)
            ]
            mixed = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
            x.add_(multiply(mixed.view(len(x), -1).bfloat16(), *products[1]))
            torch.linalg.vector_norm(stream, dim=-1, keepdim=True, out=length)
            torch.div(x * norms[1], length, out=half)
            gate, up = multiply(half, *products[2]).chunk(2, -1)
            x.add_(multiply(F.silu(gate).mul_(up), *products[3]))
        return self.model.logits(x / length).argmax(-1)


def few_rows(x: torch.Tensor, nibbles: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x times int4 weights in groups of 32."""
    return torch._weight_int4pack_mm_for_cpu(x, nibbles, 32, scales)


def more_rows(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x times bf16 weights, packed for oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
