"""Gemma 3 (text): norms before and after both sub-blocks, windows on five layers of six, a slower RoPE on the sixth.

Weights of norms are stored as differences from 1, the embedding is scaled by sqrt(hidden), q and k are normalised.

Before: models/config.py, layers/.  After: models/decoder.py runs it.

Source: arXiv:2503.19786 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from ..layers.attention import Attention, Batch, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import qwen3
from .config import FULL, HF, SLIDING, ModelConfig, activation, layer_kinds, rope_parameters, rope_spec, windows
from .decoder import Decoder

WEIGHTS = qwen3.WEIGHTS | {
    "layers.*.attn_post_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}


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


def ropes(hf: HF, head_dim: int, *, full: float = 1e6, local: float = 1e4) -> dict[str, Rope]:
    """Return the rotation of each kind of layer, from the nested form (transformers 5) or the flat one.

    Args: full, local: the family's theta of full and of window layers. In the flat form only full layers are stretched.
    """
    found = rope_parameters(hf)
    nested = found if found is not None and (FULL in found.raw or SLIDING in found.raw) else None
    local = hf.get("rope_local_base_freq", default=local)
    if nested is None:
        return {
            FULL: Rope(rope_spec(hf, head_dim, theta=full)),
            SLIDING: Rope(rope_spec(HF({}), head_dim, theta=local)),
        }
    parts = {FULL: nested.sub(FULL) or HF({}), SLIDING: nested.sub(SLIDING) or HF({})}
    return {
        FULL: Rope(rope_spec(hf, head_dim, rope=parts[FULL], theta=full)),
        SLIDING: Rope(rope_spec(HF({}), head_dim, rope=parts[SLIDING], theta=local)),
    }


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=True, stretched=True)
    kind = activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    hf.get("hidden_act", default=None)  # a leftover beside hidden_activation, which alone counts
    hf.expect("mlp_bias", False)
    hf.expect("use_bidirectional_attention", False)
    bias = hf.get("attention_bias", default=False)
    scale = hf.get("query_pre_attn_scalar", default=256) ** -0.5
    hf.expect("attn_logit_softcapping", None)
    pattern = hf.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = layer_kinds(hf, c.num_layers, every=pattern)
    window = windows(hf, kinds, 4096)
    rope = ropes(hf, c.head_dim)
    norm = partial(RMSNorm, eps=c.norm_eps, offset=1.0)

    def layer(index: int) -> Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope[kinds[index]],
            scores=Scores(scale, window[index]),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
        )
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind))

    return Decoder(
        c, layer, norm=norm, embed_scale=c.hidden**0.5, logit_cap=hf.get("final_logit_softcapping", default=None)
    )
