"""StarCoder 2: Llama's frame with layer norms, biases and a plain feed-forward block.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2402.19173 sec. 6; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, SLIDING, ModelConfig, activation, rope_spec, windows
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | {
    "layers.*.mlp.up": "model.layers.*.mlp.c_fc",
    "layers.*.mlp.down": "model.layers.*.mlp.c_proj",
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5)
    kind = activation(hf, default="gelu_pytorch_tanh")
    hf.expect("norm_type", "layer_norm")
    hf.expect("mlp_type", "default")
    bias = hf.get("use_bias", default=True)
    window = windows(hf, [SLIDING] * c.num_layers)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        scores = Scores(window=window[index])
        attn = Attention(c.hidden, heads, rope=rope, scores=scores, qkv_bias=bias, out_bias=bias)
        return llama.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=bias))

    return Decoder(c, layer, norm=norm)
