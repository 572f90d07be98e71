"""Llama: pre-norm, grouped-query attention with RoPE, SiLU-gated feed-forward; also the frame of its many relatives.

Mistral and Ministral have windows, InternLM 3 and Seed-OSS biases of their own; the rest (Yi, Vicuna, TinyLlama,
SmolLM 2, ...) use Llama's name.

Before: models/config.py, layers/.  After: models/decoder.py runs it.

Source: arXiv:2302.13971; arXiv:2407.21783 sec. 3.2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..layers.attention import Attention, Batch, Heads, Scores
from ..layers.fold import Delta, narrowed
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.part import Part
from ..layers.rope import Rope
from .config import HF, SLIDING, ModelConfig, activation, layer_kinds, rope_spec, windows
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


class Layer(Part):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    narrows = True  # as the last one it can leave out the tokens that nobody looks at
    plain = True  # it is what layers/few.py writes out, if its parts are

    def __init__(self, hidden: int, norm: partial[RMSNorm], attn: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.attn_norm = norm(hidden)
        self.attn = attn
        self.mlp_norm = norm(hidden)
        self.mlp = mlp

    def forward(self, x: Tensor, delta: Delta, batch: Batch, rows: Tensor | None = None) -> tuple[Tensor, Delta]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet.   rows: see Decoder.forward."""
        x, h = self.attn_norm.fold(x, delta)
        x, h = self.mlp_norm.fold(*narrowed(x, self.attn(h, batch), rows))
        return x, self.mlp(h)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    window = [None] * c.num_layers
    if c.architecture == "MistralForCausalLM":
        window = windows(hf, [SLIDING] * c.num_layers)
    elif c.architecture == "MinistralForCausalLM":
        window = windows(hf, layer_kinds(hf, c.num_layers, every=c.num_layers + 1), 4096)
    biases = {"qkv_bias": hf.get("qkv_bias", "attention_bias", default=False)}
    biases["out_bias"] = hf.get("attention_out_bias", "bias", "attention_bias", default=False)
    mlp_bias = hf.get("mlp_bias", "bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window[index]), **biases)
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind, bias=mlp_bias))

    return Decoder(c, layer, norm=norm)
