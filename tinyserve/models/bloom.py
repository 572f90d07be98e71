"""BLOOM: no positions but a bias that grows with the distance (ALiBi), layer norms, one of them behind the embedding.

Before: models/llama.py (the layer).  After: models/decoder.py runs it.

Source: arXiv:2211.05100 sec. 3.2; arXiv:2108.12409 (ALiBi); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..checkpoint.table import From
from ..layers.attention import Attention, Heads
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.rope import Alibi
from . import llama
from .config import HF, ModelConfig
from .decoder import Decoder

PREFIX = "transformer."
COMPUTED = (".self_attention.bias", ".self_attention.masked_bias")
WEIGHTS = {
    "embed": "transformer.word_embeddings",
    "enter.norm": "transformer.word_embeddings_layernorm",
    "layers.*.attn_norm": "transformer.h.*.input_layernorm",
    "layers.*.attn.qkv": From("transformer.h.*.self_attention.query_key_value", grouped=True),
    "layers.*.attn.out": "transformer.h.*.self_attention.dense",
    "layers.*.mlp_norm": "transformer.h.*.post_attention_layernorm",
    "layers.*.mlp.up": "transformer.h.*.mlp.dense_h_to_4h",
    "layers.*.mlp.down": "transformer.h.*.mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


class Enter(nn.Module):
    """The norm of the embedded tokens."""

    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        return self.norm(x)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5, inner="n_inner")
    hf.expect("apply_residual_connection_post_layernorm", False)
    hf.get("slow_but_exact", "offset_alibi", default=None)  # ways to compute the same numbers
    alibi = Alibi(c.num_heads)
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=alibi, qkv_bias=True, out_bias=True)
        return llama.Layer(c.hidden, norm, attn, MLP(c.hidden, c.inner, "gelu_tanh", bias=True))

    return Decoder(c, layer, norm=norm, enter=Enter(norm(c.hidden)))
