"""Llama: pre-norm, grouped-query attention with RoPE, SiLU-gated feed-forward; also the frame of Mistral and SmolLM.

Before: models/config.py, layers/.  After: models/decoder.py runs it.

Source: arXiv:2302.13971; arXiv:2407.21783 sec. 3.2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..layers.attention import Attention, Batch, Heads
from ..layers.fold import Delta
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from .config import HF, ModelConfig, rope_spec
from .decoder import Decoder

WEIGHTS = {
    "embed": "model.embed_tokens",
    "layers.*.attn_norm": "model.layers.*.input_layernorm",
    "layers.*.attn.qkv": (
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
    ),
    "layers.*.attn.out": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


class Layer(nn.Module):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    def __init__(self, hidden: int, norm: partial[RMSNorm], attn: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.attn_norm = norm(hidden)
        self.attn = attn
        self.mlp_norm = norm(hidden)
        self.mlp = mlp

    def forward(self, x: Tensor, delta: Delta, batch: Batch) -> tuple[Tensor, Delta]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x, h = self.attn_norm.fold(x, delta)
        x, h = self.mlp_norm.fold(x, self.attn(h, batch))
        return x, self.mlp(h)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    hf.expect("hidden_act", "silu")
    window = hf.get("sliding_window", default=None) if c.architecture == "MistralForCausalLM" else None
    bias = hf.get("attention_bias", default=False)
    mlp_bias = hf.get("mlp_bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, window=window, qkv_bias=bias, out_bias=bias)
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, "silu", bias=mlp_bias))

    return Decoder(c, layer, norm=norm)
