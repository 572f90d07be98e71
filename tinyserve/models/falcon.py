"""Falcon: attention and feed-forward side by side, few key/value heads, no biases.

Three generations: 7B (one key/value head, one norm for both sub-blocks), 40B and 180B (several key/value heads, a norm
each), Falcon-RW (one after the other, ALiBi instead of rotation, biases). Falcon 3 uses Llama's name.

Before: models/cohere.py, models/llama.py (the other layers).  After: models/decoder.py runs it.

Source: arXiv:2311.16867 sec. 4; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from attrs import evolve
from torch import Tensor, nn

from ..checkpoint.table import From
from ..layers.attention import Attention, Batch, Heads
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.rope import Alibi, Rope
from . import cohere, llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

PREFIX = "transformer."
WEIGHTS = {
    "embed": "transformer.word_embeddings",
    "layers.*.norm": "transformer.h.*.input_layernorm",  # 7B
    "layers.*.ln_attn": "transformer.h.*.ln_attn",  # 40B
    "layers.*.ln_mlp": "transformer.h.*.ln_mlp",
    "layers.*.attn_norm": "transformer.h.*.input_layernorm",  # RW
    "layers.*.mlp_norm": "transformer.h.*.post_attention_layernorm",
    "layers.*.attn.qkv": From("transformer.h.*.self_attention.query_key_value", grouped=True),
    "layers.*.attn.out": "transformer.h.*.self_attention.dense",
    "layers.*.mlp.up": "transformer.h.*.mlp.dense_h_to_4h",
    "layers.*.mlp.down": "transformer.h.*.mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


class TwoNorms(nn.Module):
    """A block of 40B. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    def __init__(self, hidden: int, norm: partial[LayerNorm], attn: Attention, mlp: MLP) -> None:
        super().__init__()
        self.ln_attn = norm(hidden)
        self.attn = attn
        self.ln_mlp = norm(hidden)
        self.mlp = mlp

    def forward(self, x: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x, h = self.ln_attn.add(x, delta)
        return x, self.attn(h, batch) + self.mlp(self.ln_mlp(x))


def key_value_heads(hf: HF, num_heads: int) -> int:
    """Return the number of key/value heads, which generations say in different ways."""
    stated = hf.get("num_kv_heads", "n_head_kv", default=num_heads)
    one = hf.get("multi_query", default=True)
    if hf.get("new_decoder_architecture", default=False):
        return stated
    return 1 if one else num_heads


def block(hf: HF) -> type[nn.Module]:
    """Return the layer of the generation that config.json describes."""
    new, parallel = hf.get("new_decoder_architecture", default=False), hf.get("parallel_attn", default=True)
    norms = hf.get("num_ln_in_parallel_attn", default=2 if new else 1)
    if new and parallel and norms == 2:
        return TwoNorms
    hf.expect("num_ln_in_parallel_attn", norms if norms == 1 else 1)
    if new:
        hf.expect("parallel_attn", True)
    return cohere.Layer if parallel else llama.Layer


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, eps=1e-5, inner="ffn_hidden_size")
    c = evolve(c, num_kv_heads=key_value_heads(hf, c.num_heads))
    kind = activation(hf, "activation", "gelu")
    hf.expect("apply_residual_connection_post_layernorm", False)
    bias = hf.get("bias", default=False)
    made = block(hf)
    position = Rope(rope_spec(hf, c.head_dim))
    if hf.get("alibi", default=False):
        position = Alibi(c.num_heads, factor=c.head_dim**-0.5)  # added before the scores are scaled
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> nn.Module:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=position, qkv_bias=bias, out_bias=bias)
        return made(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=bias))

    return Decoder(c, layer, norm=norm)
