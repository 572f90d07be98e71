"""Phi-1, 1.5 and 2: attention and a plain feed-forward block side by side behind one layer norm, a part of
each head rotated, a head with a bias.

Before: models/cohere.py (the layer).  After: models/decoder.py runs it.

Source: arXiv:2306.11644 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.rope import Rope
from . import cohere, llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {
    "layers.*.norm": "model.layers.*.input_layernorm",
    "layers.*.attn.out": "model.layers.*.self_attn.dense",
    "layers.*.mlp.up": "model.layers.*.mlp.fc1",
    "layers.*.mlp.down": "model.layers.*.mlp.fc2",
    "norm": "model.final_layernorm",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf, default="gelu_new")
    hf.expect("qk_layernorm", False)
    hf.expect("tie_word_embeddings", False)
    rope = Rope(rope_spec(hf, c.head_dim, partial=0.5))
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> cohere.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=True, out_bias=True)
        return cohere.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=True))

    return Decoder(c, layer, norm=norm, head_bias=True)
