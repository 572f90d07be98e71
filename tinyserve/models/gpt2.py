"""GPT-2: learned positions, layer norms, biases everywhere, weights stored [inputs, outputs].

Before: models/llama.py (the layer).  After: models/decoder.py runs it.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..checkpoint.table import From
from ..layers.attention import Attention, Heads, Scores
from ..layers.embedding import Positions
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from . import llama
from .config import HF, ModelConfig, activation
from .decoder import Decoder

PREFIX = "transformer."
COMPUTED = (".attn.bias", ".attn.masked_bias")
WEIGHTS = {
    "embed": "transformer.wte",
    "enter.table": "transformer.wpe",
    "layers.*.attn_norm": "transformer.h.*.ln_1",
    "layers.*.attn.qkv": From("transformer.h.*.attn.c_attn", transposed=True),
    "layers.*.attn.out": From("transformer.h.*.attn.c_proj", transposed=True),
    "layers.*.mlp_norm": "transformer.h.*.ln_2",
    "layers.*.mlp.up": From("transformer.h.*.mlp.c_fc", transposed=True),
    "layers.*.mlp.down": From("transformer.h.*.mlp.c_proj", transposed=True),
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5, inner="n_inner")
    kind = activation(hf, "activation_function", "gelu_new")
    hf.expect("add_cross_attention", False)
    hf.get("reorder_and_upcast_attn", default=False)  # scores are fp32 here in any case
    plain = c.head_dim**-0.5 if hf.get("scale_attn_weights", default=True) else 1.0
    by_layer = hf.get("scale_attn_by_inverse_layer_idx", default=False)
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_heads, c.head_dim)
        scores = Scores(plain / (index + 1) if by_layer else plain)
        attn = Attention(c.hidden, heads, rope=None, scores=scores, qkv_bias=True, out_bias=True)
        return llama.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=True))

    return Decoder(c, layer, norm=norm, enter=Positions(c.max_model_len, c.hidden))
