"""Nemotron and Arcee: Llama with a plain feed-forward block and squared ReLU.

Nemotron has layer norms, whose weights are stored as differences from 1, and rotates half of each head.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2402.16819 sec. 2 (Nemotron); arXiv:2109.08668 (squared ReLU); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {"layers.*.mlp.up": "model.layers.*.mlp.up_proj"}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf, default="relu2")
    hf.expect("kv_channels", c.head_dim)
    bias, mlp_bias = hf.get("attention_bias", default=False), hf.get("mlp_bias", default=False)
    nemotron = c.architecture == "NemotronForCausalLM"
    rope = Rope(rope_spec(hf, c.head_dim, partial=0.5 if nemotron else 1.0))
    norm = partial(LayerNorm, eps=c.norm_eps, offset=1.0) if nemotron else partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=mlp_bias))

    return Decoder(c, layer, norm=norm)
