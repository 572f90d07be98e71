"""Phi-3, 3.5 and 4: Llama whose checkpoint has q, k, v and gate, up as one matrix each; LongRoPE for long contexts.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2404.14219 sec. 2; arXiv:2412.08905; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..checkpoint.table import From
from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, SLIDING, ModelConfig, activation, rope_spec, windows
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {
    "layers.*.attn.qkv": From("model.layers.*.self_attn.qkv_proj"),
    "layers.*.mlp.gate_up": From("model.layers.*.mlp.gate_up_proj"),
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        hf.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        hf.expect(key, 1)
    window = windows(hf, [SLIDING] * c.num_layers)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]))
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
