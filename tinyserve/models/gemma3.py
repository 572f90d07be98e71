"""Gemma 3 (text): norms before and after both sub-blocks, windows on five layers of six, a slower RoPE on the sixth.

Weights of norms are stored as differences from 1, the embedding is scaled by sqrt(hidden), q and k are normalised.

Before: models/config.py, layers/.  After: models/decoder.py runs it.

Source: arXiv:2503.19786 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..errors import CheckpointError
from ..layers.attention import Attention, Batch, Heads
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import qwen3
from .config import HF, ModelConfig, rope_parameters, rope_spec
from .decoder import Decoder

WEIGHTS = qwen3.WEIGHTS | {
    "layers.*.attn_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


class Layer(nn.Module):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks."""

    def __init__(self, hidden: int, norm: partial[RMSNorm], attn: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.attn_norm = norm(hidden)
        self.attn = attn
        self.attn_post_norm = norm(hidden)
        self.mlp_norm = norm(hidden)
        self.mlp = mlp
        self.mlp_post_norm = norm(hidden)

    def forward(self, x: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x, h = self.attn_norm.add(x, delta)
        x, h = self.mlp_norm.add(x, self.attn_post_norm(self.attn(h, batch)))
        return x, self.mlp_post_norm(self.mlp(h))


def layer_kinds(hf: HF, num_layers: int) -> list[str]:
    """Return FULL or SLIDING for each layer: listed, or every sliding_window_pattern-th is full."""
    pattern = hf.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = hf.get("layer_types", default=None)
    if kinds is None:
        return [SLIDING if (index + 1) % pattern else FULL for index in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise CheckpointError(f"layer_types must name {FULL} or {SLIDING} for each of {num_layers} layers: {kinds}")
    return kinds


def ropes(hf: HF, head_dim: int) -> dict[str, Rope]:
    """Return the rotation of each kind of layer, from the nested form (transformers 5) or the flat one."""
    found = rope_parameters(hf)
    nested = found if found is not None and (FULL in found.raw or SLIDING in found.raw) else None
    local = hf.get("rope_local_base_freq", default=10_000.0)
    if nested is None:
        full = rope_spec(hf, head_dim, theta=1e6)
        return {FULL: Rope(full), SLIDING: Rope(rope_spec(HF({}), head_dim, theta=local))}
    parts = {FULL: nested.sub(FULL) or HF({}), SLIDING: nested.sub(SLIDING) or HF({})}
    return {
        FULL: Rope(rope_spec(hf, head_dim, rope=parts[FULL], theta=1e6)),
        SLIDING: Rope(rope_spec(HF({}), head_dim, rope=parts[SLIDING], theta=local)),
    }


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, stretched=True)
    activation = ACTIVATIONS[hf.expect("hidden_activation", *ACTIVATIONS)]
    hf.get("hidden_act", default=None)  # a leftover beside hidden_activation, which alone counts
    hf.expect("mlp_bias", False)
    hf.expect("attn_logit_softcapping", None)
    hf.expect("use_bidirectional_attention", False)
    bias = hf.get("attention_bias", default=False)
    scale = hf.get("query_pre_attn_scalar", default=256) ** -0.5
    window = hf.get("sliding_window", default=4096)
    kinds = layer_kinds(hf, c.num_layers)
    rope = ropes(hf, c.head_dim)
    norm = partial(RMSNorm, eps=c.norm_eps, offset=1.0)

    def layer(index: int) -> Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope[kinds[index]],
            scale=scale,
            window=window if kinds[index] == SLIDING else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
        )
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, activation))

    return Decoder(
        c, layer, norm=norm, embed_scale=c.hidden**0.5, logit_cap=hf.get("final_logit_softcapping", default=None)
    )
