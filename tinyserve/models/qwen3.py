"""Qwen3 dense: Llama plus an RMSNorm over each head of q and k.

Before: models/llama.py, models/qwen2.py (windows).  After: models/decoder.py runs it.

Source: arXiv:2505.09388 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder
from .qwen2 import windows

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attn.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attn.k_norm": "model.layers.*.self_attn.k_norm",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    hf.expect("mlp_bias", False)
    bias = hf.get("attention_bias", default=False)
    window = windows(hf, c.num_layers)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        biases = {"qkv_bias": bias, "out_bias": bias}
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]), qk_norm=norm, **biases)
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
