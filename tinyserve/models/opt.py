"""OPT: learned positions with two unused rows before the first, layer norms, biases, ReLU.

Before: models/llama.py (the layer).  After: models/decoder.py runs it.

Source: arXiv:2205.01068 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.embedding import Positions
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from . import llama
from .config import HF, ModelConfig, activation
from .decoder import Decoder

PREFIX = "model."
UNUSED = 2  # rows of the position table before that of position 0
WEIGHTS = {
    "embed": "model.decoder.embed_tokens",
    "enter.table": "model.decoder.embed_positions",
    "layers.*.attn_norm": "model.decoder.layers.*.self_attn_layer_norm",
    "layers.*.attn.qkv": (
        "model.decoder.layers.*.self_attn.q_proj",
        "model.decoder.layers.*.self_attn.k_proj",
        "model.decoder.layers.*.self_attn.v_proj",
    ),
    "layers.*.attn.out": "model.decoder.layers.*.self_attn.out_proj",
    "layers.*.mlp_norm": "model.decoder.layers.*.final_layer_norm",
    "layers.*.mlp.up": "model.decoder.layers.*.fc1",
    "layers.*.mlp.down": "model.decoder.layers.*.fc2",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5, inner="ffn_dim")
    kind = activation(hf, "activation_function", "relu")
    hf.expect("do_layer_norm_before", True)  # opt-350m norms afterwards, and has no norm at the end
    hf.expect("word_embed_proj_dim", c.hidden)
    hf.expect("_remove_final_layer_norm", False)
    bias = hf.get("enable_bias", default=True)
    affine = hf.get("layer_norm_elementwise_affine", default=True)
    norm = partial(LayerNorm, eps=c.norm_eps, bias=affine, affine=affine)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=None, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=bias))

    return Decoder(c, layer, norm=norm, enter=Positions(c.max_model_len, c.hidden, unused=UNUSED))
