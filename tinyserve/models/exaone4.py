"""EXAONE 4: norms after the sub-blocks, norms over the heads of q and k, and no rotation where there is no window.

Before: models/olmo2.py (the layer).  After: models/decoder.py runs it.

Source: arXiv:2507.11407 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..errors import UnsupportedModel, shown
from ..layers.attention import Attention, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import olmo2, qwen3
from .config import FULL, HF, SLIDING, ModelConfig, activation, layer_kinds, rope_spec, windows
from .decoder import Decoder

WEIGHTS = qwen3.WEIGHTS | olmo2.POST_NORM


def kinds_of_layers(hf: HF, num_layers: int) -> list[str]:
    """Return the kind of each layer; the pattern is a number (every n-th is full) or letters such as "LLLG"."""
    pattern = hf.raw.get("sliding_window_pattern", 4)
    hf.read.add("sliding_window_pattern")
    if hf.get("sliding_window", default=None) is None:
        hf.get("layer_types", default=None)
        return [FULL] * num_layers
    if isinstance(pattern, str) and not set(pattern) - {"L", "G"} and pattern:
        letters = [FULL if pattern[index % len(pattern)] == "G" else SLIDING for index in range(num_layers)]
        return letters if hf.get("layer_types", default=None) is None else layer_kinds(hf, num_layers, every=1)
    if not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedModel(
            f"{hf.where} says sliding_window_pattern={shown(pattern)}; a number or L and G is known."
        )
    return layer_kinds(hf, num_layers, every=pattern)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    kinds = kinds_of_layers(hf, c.num_layers)
    window = windows(hf, kinds)
    hybrid = hf.get("sliding_window", default=None) is not None
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> olmo2.Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=None if hybrid and kinds[index] == FULL else rope,
            scores=Scores(window=window[index]),
            qk_norm=norm,
        )
        return olmo2.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
