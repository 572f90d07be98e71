"""Apertus: Llama with a plain feed-forward block whose activation has learned curvatures, and norms over q and k heads.

Before: models/qwen3.py.  After: models/decoder.py runs it.

Source: arXiv:2509.14233 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.mlp import MLP, XIELU
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama, qwen3
from .config import HF, ModelConfig, rope_spec
from .decoder import Decoder

WEIGHTS = qwen3.WEIGHTS | {
    "layers.*.attn_norm": "model.layers.*.attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.feedforward_layernorm",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.act": "model.layers.*.mlp.act_fn",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    hf.expect("hidden_act", "xielu")
    hf.expect("mlp_bias", False)
    hf.expect("post_norm", False)
    hf.expect("qk_norm", True)
    bias = hf.get("attention_bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim, theta=1.2e7))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qk_norm=norm, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, XIELU()))

    return Decoder(c, layer, norm=norm)
