"""Gemma 1: Llama with a scaled embedding, norms stored as differences from 1, and a GELU gate.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2403.08295 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True)
    # The first checkpoints say hidden_act "gelu" and mean the tanh form; hidden_activation, if there, is right.
    old = activation(hf, "hidden_act", "gelu_pytorch_tanh")
    kind = activation(hf, "hidden_activation", "gelu_pytorch_tanh" if old == "gelu" else old)
    hf.expect("use_bidirectional_attention", False)
    bias = hf.get("attention_bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps, offset=1.0)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm, embed_scale=c.hidden**0.5)
