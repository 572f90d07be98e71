"""Ernie 4.5 MoE: softmax routing with a correction bias, shared experts, and a rotation of neighbouring pairs.

Before: models/ernie.py (dense), models/deepseek.py (shared experts).  After: models/decoder.py runs it.

Source: the Ernie 4.5 technical report, 2025; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from ..layers.attention import Attention, Heads
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder
from .deepseek import SHARED
from .qwen3_moe import EXPERTS

WEIGHTS = llama.WEIGHTS | EXPERTS | SHARED | {"layers.*.mlp.router.correction": "model.layers.*.mlp.moe_statics"}


def is_sparse(hf: HF, num_layers: int) -> list[bool]:
    """Return which layers have experts: every moe_layer_interval-th from the start index to the end index."""
    interval, start = hf.get("moe_layer_interval", default=1), hf.get("moe_layer_start_index", default=1)
    end = hf.get("moe_layer_end_index", default=-1)
    end = num_layers - 1 if end == -1 else end
    return [start <= index <= end and (index + 1) % interval == 0 for index in range(num_layers)]


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5)
    kind = activation(hf)
    for key in ("moe_norm_min", "moe_capacity"):  # a guard against dividing by zero; limits of the training
        hf.get(key, default=None)
    hf.expect("moe_gate", "topk")
    hf.expect("moe_use_aux_free", True)
    bias = hf.get("use_bias", default=False)
    sparse = is_sparse(hf, c.num_layers)
    inner, shared = hf.get("moe_intermediate_size"), hf.get("moe_num_shared_experts", default=0)
    number = hf.get("moe_num_experts", "num_experts")
    routing = Routing(
        experts=number,
        top_k=hf.get("moe_k", "num_experts_per_tok"),
        renormalise=True,
        precise=True,
        corrected=(1, number),
    )
    rope = Rope(rope_spec(hf, c.head_dim, theta=5e5, interleaved=True))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def mlp(index: int) -> nn.Module:
        if not sparse[index]:
            return GatedMLP(c.hidden, c.inner, kind, bias=bias)
        beside = GatedMLP(c.hidden, inner * shared, kind, bias=bias) if shared else None
        return MoE(c.hidden, routing, Experts(number, c.hidden, inner, kind), shared=beside)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm, head_bias=bias)
