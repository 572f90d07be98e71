"""GPT-NeoX and Pythia: attention and feed-forward side by side, each behind a layer norm of its own.

Before: models/llama.py (the layer of models without use_parallel_residual).  After: models/decoder.py runs it.

Source: arXiv:2204.06745 sec. 2.1; arXiv:2304.01373 (Pythia); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..checkpoint.table import From
from ..layers.attention import Attention, Batch, Heads
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

COMPUTED = (".attention.bias", ".attention.masked_bias")
WEIGHTS = {
    "embed": "gpt_neox.embed_in",
    "layers.*.attn_norm": "gpt_neox.layers.*.input_layernorm",
    "layers.*.attn.qkv": From("gpt_neox.layers.*.attention.query_key_value", grouped=True),
    "layers.*.attn.out": "gpt_neox.layers.*.attention.dense",
    "layers.*.mlp_norm": "gpt_neox.layers.*.post_attention_layernorm",
    "layers.*.mlp.up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
    "layers.*.mlp.down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}


class Parallel(nn.Module):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    def __init__(self, hidden: int, norm: partial[LayerNorm], attn: Attention, mlp: MLP) -> None:
        super().__init__()
        self.attn_norm = norm(hidden)
        self.attn = attn
        self.mlp_norm = norm(hidden)
        self.mlp = mlp

    def forward(self, x: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x, h = self.attn_norm.add(x, delta)
        return x, self.attn(h, batch) + self.mlp(self.mlp_norm(x))


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf, default="gelu")
    bias = hf.get("attention_bias", default=True)
    block = Parallel if hf.get("use_parallel_residual", default=True) else llama.Layer
    rope = Rope(rope_spec(hf, c.head_dim, partial=0.25))
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> nn.Module:
        heads = Heads(c.num_heads, c.num_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, qkv_bias=bias, out_bias=bias)
        return block(c.hidden, norm, attn, MLP(c.hidden, c.inner, kind, bias=True))

    return Decoder(c, layer, norm=norm)
