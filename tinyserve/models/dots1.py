"""dots.llm1: DeepSeek-V3's routing around Qwen3's attention, with windows on the upper layers if the config says so.

Before: models/deepseek.py (routing, shared experts), models/qwen3.py.  After: models/decoder.py runs it.

Source: arXiv:2506.05767 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama, qwen3
from .config import FULL, HF, SLIDING, ModelConfig, layer_kinds, rope_spec, windows
from .decoder import Decoder
from .deepseek import SHARED, feed_forwards, sigmoid_routing
from .qwen3_moe import EXPERTS

WEIGHTS = qwen3.WEIGHTS | EXPERTS | SHARED


def kinds_of_layers(hf: HF, num_layers: int) -> list[str]:
    """Return the kind of each layer: listed, or with a window from max_window_layers on if there is one at all."""
    first = hf.get("max_window_layers", default=num_layers)
    if hf.get("layer_types", default=None) is not None:
        return layer_kinds(hf, num_layers, every=1)
    has_window = hf.get("sliding_window", default=None) is not None
    return [SLIDING if has_window and index >= first else FULL for index in range(num_layers)]


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    hf.get("use_sliding_window", default=None)  # says what layer_types and max_window_layers say
    hf.expect("moe_layer_freq", 1)
    hf.expect("qk_norm", True)
    bias = hf.get("attention_bias", default=False)
    window = windows(hf, kinds_of_layers(hf, c.num_layers), 4096)
    routing = sigmoid_routing(hf)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)
    mlp = feed_forwards(hf, c, routing)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        biases = {"qkv_bias": bias, "out_bias": bias}
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]), qk_norm=norm, **biases)
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm)
