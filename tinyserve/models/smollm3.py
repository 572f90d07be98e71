"""SmolLM3: Llama that leaves the rotation out in every fourth layer, where position is known from the others (NoPE).

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2501.18795 (NoPE layers); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import FULL, HF, SLIDING, ModelConfig, activation, layer_kinds, rope_spec, windows
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS


def rotated(hf: HF, num_layers: int) -> list[bool]:
    """Return which layers rotate: listed, or all but every no_rope_layer_interval-th."""
    every = hf.get("no_rope_layer_interval", default=4)
    listed = hf.get("no_rope_layers", default=None)  # despite its name, 1 where a layer does rotate
    return [bool((index + 1) % every) if listed is None else bool(listed[index]) for index in range(num_layers)]


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True)
    kind = activation(hf)
    bias, mlp_bias = hf.get("attention_bias", default=False), hf.get("mlp_bias", default=False)
    turns = rotated(hf, c.num_layers)
    kinds = layer_kinds(hf, c.num_layers, every=1)
    if hf.get("use_sliding_window", default=False):
        if hf.get("layer_types", default=None) is None:
            kinds = [FULL if turn else SLIDING for turn in turns]
        window = windows(hf, kinds)
    else:
        hf.read.update(("sliding_window", "max_window_layers"))
        window = [None] * c.num_layers
    rope = Rope(rope_spec(hf, c.head_dim, theta=2e6))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope if turns[index] else None,
            scores=Scores(window=window[index]),
            qkv_bias=bias,
            out_bias=bias,
        )
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind, bias=mlp_bias))

    return Decoder(c, layer, norm=norm)
