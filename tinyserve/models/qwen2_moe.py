"""Qwen2-MoE (also Qwen1.5-MoE): Qwen2 with experts, and a shared expert behind a gate of its own.

Before: models/qwen3_moe.py (routing, and which layers are sparse).  After: models/decoder.py runs it.

Source: arXiv:2407.10671 sec. 2.2.2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder
from .qwen2 import windows
from .qwen3_moe import EXPERTS, is_sparse, softmax_routing

WEIGHTS = (
    llama.WEIGHTS
    | EXPERTS
    | {
        "layers.*.mlp.shared.gate_up": (
            "model.layers.*.mlp.shared_expert.gate_proj",
            "model.layers.*.mlp.shared_expert.up_proj",
        ),
        "layers.*.mlp.shared.down": "model.layers.*.mlp.shared_expert.down_proj",
        "layers.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate",
    }
)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    bias = hf.get("qkv_bias", default=True)
    window = windows(hf, c.num_layers)
    sparse = is_sparse(hf, c.num_layers)
    inner, shared = hf.get("moe_intermediate_size"), hf.get("shared_expert_intermediate_size")
    routing = softmax_routing(hf)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def mlp(index: int) -> nn.Module:
        if not sparse[index]:
            return GatedMLP(c.hidden, c.inner, kind)
        experts = Experts(routing.experts, c.hidden, inner, kind)
        return MoE(c.hidden, routing, experts, shared=GatedMLP(c.hidden, shared, kind), shared_gate=True)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]), qkv_bias=bias)
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm)
