"""Gemma 2: norms on both sides of each sub-block, windows on every other layer, soft-caps on scores and logits.

Before: models/gemma3.py (the layer).  After: models/decoder.py runs it.

Source: arXiv:2408.00118 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import gemma3, llama
from .config import HF, ModelConfig, activation, layer_kinds, rope_spec, windows
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attn_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True)
    kind = activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    hf.get("hidden_act", default=None)  # a leftover beside hidden_activation, which alone counts
    hf.expect("use_bidirectional_attention", False)
    bias = hf.get("attention_bias", default=False)
    scale = hf.get("query_pre_attn_scalar", default=256) ** -0.5
    softcap = hf.get("attn_logit_softcapping", default=50.0)
    window = windows(hf, layer_kinds(hf, c.num_layers, every=2), 4096)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps, offset=1.0)

    def layer(index: int) -> gemma3.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        scores = Scores(scale, window[index], softcap)
        attn = Attention(c.hidden, heads, rope=rope, scores=scores, qkv_bias=bias, out_bias=bias)
        return gemma3.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    cap = hf.get("final_logit_softcapping", default=30.0)
    return Decoder(c, layer, norm=norm, embed_scale=c.hidden**0.5, logit_cap=cap)
