"""Qwen3-MoE: Qwen3 whose feed-forward blocks are mixtures of many small experts, on all layers or on some.

Before: models/qwen3.py, layers/moe.py.  After: models/decoder.py runs it.

Source: arXiv:2505.09388 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama, qwen3
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder
from .qwen2 import windows

EXPERTS = {
    "layers.*.mlp.router": "model.layers.*.mlp.gate",
    "layers.*.mlp.experts.gate_up": (
        "model.layers.*.mlp.experts.#.gate_proj",
        "model.layers.*.mlp.experts.#.up_proj",
    ),
    "layers.*.mlp.experts.down": "model.layers.*.mlp.experts.#.down_proj",
}
WEIGHTS = qwen3.WEIGHTS | EXPERTS


def is_sparse(hf: HF, num_layers: int) -> list[bool]:
    """Return which layers have experts: every decoder_sparse_step-th, but for mlp_only_layers."""
    step, dense = hf.get("decoder_sparse_step", default=1), hf.get("mlp_only_layers", default=())
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def softmax_routing(hf: HF) -> Routing:
    """Return the routing: softmax scores over all experts, of those that are chosen perhaps renormalised."""
    return Routing(
        experts=hf.get("num_experts", "num_local_experts"),
        top_k=hf.get("num_experts_per_tok"),
        renormalise=hf.get("norm_topk_prob", default=False),
    )


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    hf.expect("mlp_bias", False)
    bias = hf.get("attention_bias", default=False)
    window = windows(hf, c.num_layers)
    sparse = is_sparse(hf, c.num_layers)
    inner = hf.get("moe_intermediate_size")
    routing = softmax_routing(hf)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def mlp(index: int) -> nn.Module:
        if not sparse[index]:
            return GatedMLP(c.hidden, c.inner, kind)
        return MoE(c.hidden, routing, Experts(routing.experts, c.hidden, inner, kind))

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        biases = {"qkv_bias": bias, "out_bias": bias}
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]), qk_norm=norm, **biases)
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm)
