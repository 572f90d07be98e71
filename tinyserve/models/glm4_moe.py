"""GLM-4.5 and 4.6: DeepSeek-V3's routing around grouped-query attention, of which half of each head is rotated.

Before: models/deepseek.py (routing, shared experts), models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2508.06471 sec. 2.1; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama, qwen3
from .config import HF, ModelConfig, rope_spec
from .decoder import Decoder
from .deepseek import LATER_LAYERS as LATER_LAYERS
from .deepseek import SHARED, feed_forwards, sigmoid_routing
from .qwen3_moe import EXPERTS

WEIGHTS = qwen3.WEIGHTS | EXPERTS | SHARED


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    bias = hf.get("attention_bias", default=False)
    routing = sigmoid_routing(hf)
    rope = Rope(rope_spec(hf, c.head_dim, partial=0.5))
    norm = partial(RMSNorm, eps=c.norm_eps)
    head_norm = norm if hf.get("use_qk_norm", default=False) else None
    mlp = feed_forwards(hf, c, routing, dense=1)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, qk_norm=head_norm)
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm)
