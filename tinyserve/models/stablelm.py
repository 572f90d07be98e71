"""StableLM: Llama with layer norms, a quarter of each head rotated; StableLM 2 12B has norms over single heads of q and
k, and attention and feed-forward side by side.

Before: models/llama.py, models/cohere.py (the layers).  After: models/decoder.py runs it.

Source: arXiv:2402.17834 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from ..layers.attention import Attention, Heads
from ..layers.mlp import GatedMLP
from ..layers.norm import LayerNorm
from ..layers.rope import Rope
from . import cohere, llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {
    "layers.*.norm": "model.layers.*.input_layernorm",  # of the parallel layers
    "layers.*.attn.adjust.q": "model.layers.*.self_attn.q_layernorm.norms.#",
    "layers.*.attn.adjust.k": "model.layers.*.self_attn.k_layernorm.norms.#",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    bias = hf.get("use_qkv_bias", default=False)
    qk_norm = hf.get("qk_layernorm", default=False)
    block = cohere.Layer if hf.get("use_parallel_residual", default=False) else llama.Layer
    rope = Rope(rope_spec(hf, c.head_dim, partial=0.25))
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> nn.Module:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        adjust = cohere.head_norms(c, single=True) if qk_norm else None
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, adjust=adjust)
        return block(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
