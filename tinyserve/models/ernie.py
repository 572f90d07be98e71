"""Ernie 4.5 dense and Helium: Llama whose rotation turns pairs of neighbours.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: the Ernie 4.5 technical report, 2025; arXiv:2410.00037 app. A (Helium); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, architecture, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    helium = architecture(hf) == "HeliumForCausalLM"
    c = ModelConfig.from_hf(hf, tied=not helium, eps=1e-8 if helium else 1e-5)
    kind = activation(hf)
    bias = hf.get("use_bias", "attention_bias", default=False)
    mlp_bias = hf.get("use_bias", "mlp_bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim, theta=1e5 if helium else 5e5, interleaved=True))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias and not helium)
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind, bias=mlp_bias))

    return Decoder(c, layer, norm=norm)
