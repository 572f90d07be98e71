"""OLMo 1: Llama with layer norms that have neither weights nor biases, and q, k, v clamped if the config says so.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2402.00838 sec. 2.1; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..layers.attention import Attention, Heads
from ..layers.mlp import GatedMLP
from ..layers.norm import LayerNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS


class Clamp(nn.Module):
    """Bounds every number to -limit .. limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.clamp(-self.limit, self.limit)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    bias, limit = hf.get("attention_bias", default=False), hf.get("clip_qkv", default=None)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(LayerNorm, eps=1e-5, bias=False, affine=False)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        adjust = None if limit is None else Clamp(limit)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias, adjust=adjust)
        return llama.Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(c, layer, norm=norm)
