"""Qwen2 and Qwen2.5 dense: Llama with biases on q, k and v, and windows on the upper layers if the config says so.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2407.10671 sec. 2.2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS


def windows(hf: HF, num_layers: int) -> list[int | None]:
    """Return the window of each layer: with use_sliding_window, layers from max_window_layers on have one."""
    if not hf.get("use_sliding_window", default=False):
        hf.read.update(("sliding_window", "max_window_layers", "layer_types"))  # a window of 0 stands there, too
        return [None] * num_layers
    size = hf.get("sliding_window", default=None)
    first = hf.get("max_window_layers", default=num_layers)
    kinds = hf.get("layer_types", default=None)
    if kinds is None:
        return [size if index >= first else None for index in range(num_layers)]
    return [size if kind == "sliding_attention" else None for kind in kinds]


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    hf.expect("attention_bias", True)
    hf.expect("mlp_bias", False)
    window = windows(hf, c.num_layers)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]), qkv_bias=True)
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
