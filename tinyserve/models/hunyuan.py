"""HunYuan dense: Llama with norms over the heads of q and k that come after the rotation.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: keys of config.json; its rotation with a fixed `alpha` is NTK-aware scaling, arXiv:2309.00071 sec. 3.1.
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

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attn.q_norm": "model.layers.*.self_attn.query_layernorm",
    "layers.*.attn.k_norm": "model.layers.*.self_attn.key_layernorm",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    hf.get("attention_head_dim", default=None)
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    hf.expect("use_qk_norm", True)
    hf.expect("use_cla", False)
    hf.expect("norm_type", "rms")
    hf.expect("mlp_bias", False)
    bias = hf.get("attention_bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim), before_norm=True)
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qk_norm=norm, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
