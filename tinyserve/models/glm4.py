"""GLM 4: half of each head is rotated, in pairs of neighbours; the 0414 models have norms after the sub-blocks, too.

Before: models/llama.py, models/gemma3.py (the layers).  After: models/decoder.py runs it.

Source: arXiv:2406.12793 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from ..checkpoint.table import From
from ..layers.attention import Attention, Heads
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import gemma3, llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

# attn_post_norm and mlp_post_norm are in the layers of Glm4ForCausalLM only.
WEIGHTS = llama.WEIGHTS | {
    "layers.*.mlp.gate_up": From("model.layers.*.mlp.gate_up_proj"),
    "layers.*.attn_post_norm": "model.layers.*.post_self_attn_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_mlp_layernorm",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1.5625e-7)
    kind = activation(hf)
    bias = hf.get("attention_bias", default=True)
    rope = Rope(rope_spec(hf, c.head_dim, partial=0.5, interleaved=True))
    norm = partial(RMSNorm, eps=c.norm_eps)
    block = gemma3.Layer if c.architecture == "Glm4ForCausalLM" else llama.Layer

    def layer(index: int) -> nn.Module:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias)
        return block(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
