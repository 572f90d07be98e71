"""Llama 4 (text): chunked attention with rotation on three layers of four, full attention without on the fourth.

An expert's input, not its output, is scaled by the sigmoid of its logit; a shared expert stands beside. Layers without
rotation sharpen the scores of late positions. Norms of q and k have no weights.

Before: models/llama.py (the layer), layers/chunk.py, layers/moe.py.  After: models/decoder.py runs it.

Source: the published reference code and model card of Llama 4; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from ..checkpoint.stacked import Stack
from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

BLOCK = "model.layers.*.feed_forward"
WEIGHTS = llama.WEIGHTS | {
    "layers.*.mlp.gate_up": (f"{BLOCK}.gate_proj", f"{BLOCK}.up_proj"),
    "layers.*.mlp.down": f"{BLOCK}.down_proj",
    "layers.*.mlp.router": f"{BLOCK}.router",
    "layers.*.mlp.experts.gate_up": (f"{BLOCK}.experts.#.gate_proj", f"{BLOCK}.experts.#.up_proj"),
    "layers.*.mlp.experts.down": f"{BLOCK}.experts.#.down_proj",
    "layers.*.mlp.shared.gate_up": (f"{BLOCK}.shared_expert.gate_proj", f"{BLOCK}.shared_expert.up_proj"),
    "layers.*.mlp.shared.down": f"{BLOCK}.shared_expert.down_proj",
}
STACKS = {
    f"{BLOCK}.experts.gate_up_proj": Stack(
        (f"{BLOCK}.experts.#.gate_proj.weight", f"{BLOCK}.experts.#.up_proj.weight"), transposed=True
    ),
    f"{BLOCK}.experts.down_proj": Stack((f"{BLOCK}.experts.#.down_proj.weight",), transposed=True),
}


def rotated(hf: HF, num_layers: int) -> list[bool]:
    """Return which layers rotate q and k, and see their own chunk only: listed, or all but every fourth."""
    every = hf.get("no_rope_layer_interval", default=4)
    listed = hf.get("no_rope_layers", default=None) or [(index + 1) % every for index in range(num_layers)]
    return [bool(one) for one in listed]


def sparse(hf: HF, num_layers: int) -> set[int]:
    """Return the layers that have experts: listed, or every interleave_moe_layer_step-th."""
    step = hf.get("interleave_moe_layer_step", default=1)
    return set(hf.get("moe_layers", default=None) or range(step - 1, num_layers, step))


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    bias = hf.get("attention_bias", default=False)
    chunk = hf.get("attention_chunk_size", default=None)
    turns = rotated(hf, c.num_layers)
    experts = sparse(hf, c.num_layers)
    dense = hf.get("intermediate_size_mlp")
    normed = hf.get("use_qk_norm", default=True)
    temper = hf.get("floor_scale", default=8192), hf.get("attn_scale", default=0.1)
    tempered = hf.get("attn_temperature_tuning", default=True)
    routing = Routing(experts=hf.get("num_local_experts"), top_k=hf.get("num_experts_per_tok"), kind="sigmoid")
    kinds = ["chunked_attention" if turn and chunk else "full_attention" for turn in turns]
    hf.expect("layer_types", kinds)
    rope = Rope(rope_spec(hf, c.head_dim, theta=500000.0, interleaved=True))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def mlp(index: int) -> nn.Module:
        if index not in experts:
            return GatedMLP(c.hidden, dense, kind)
        routed = Experts(routing.experts, c.hidden, c.inner, kind, scale_inputs=True)
        return MoE(c.hidden, routing, routed, shared=GatedMLP(c.hidden, c.inner, kind))

    def layer(index: int) -> llama.Layer:
        turn = turns[index]
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope if turn else None,
            scores=Scores(chunk=chunk if turn else None, temper=temper if tempered and not turn else None),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=partial(RMSNorm, eps=c.norm_eps, affine=False) if normed and turn else None,
        )
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm)
