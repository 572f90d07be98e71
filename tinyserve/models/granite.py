"""Granite and MiniCPM: Llama with a factor on the embedding, on what each sub-block adds, and on the logits.

Granite states the four factors (the fourth is the scale of the scores); MiniCPM derives them from its depth and from
the size of a small model that it was tuned on.

Before: models/llama.py.  After: models/decoder.py runs it.

Source: arXiv:2404.06395 sec. 3 and app. A (MiniCPM); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from attrs import frozen
from torch import Tensor, nn

from ..layers.attention import Attention, Batch, Heads, Scores
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from . import llama
from .config import HF, ModelConfig, activation, architecture, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS


@frozen
class Factors:
    """On the embedded tokens, on the scores, on what a sub-block adds to the stream, on the logits."""

    embed: float
    scores: float
    residual: float
    logits: float


class Layer(nn.Module):
    """One block. Args: norm: makes a norm of the stream; attn, mlp: the two sub-blocks; factor: on what they add."""

    def __init__(self, hidden: int, norm: partial[RMSNorm], attn: Attention, mlp: nn.Module, factor: float) -> None:
        super().__init__()
        self.attn_norm = norm(hidden)
        self.attn = attn
        self.mlp_norm = norm(hidden)
        self.mlp = mlp
        self.factor = factor

    def forward(self, x: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """x: [T, H] stream; delta: [T, H] output of the last block, not added yet."""
        x, h = self.attn_norm.add(x, delta)
        x, h = self.mlp_norm.add(x, self.attn(h, batch) * self.factor)
        return x, self.mlp(h) * self.factor


def factors(hf: HF, c: ModelConfig) -> Factors:
    """Read the four factors, stated or derived."""
    if c.architecture == "MiniCPMForCausalLM":
        embed, depth = hf.get("scale_emb", default=1), hf.get("scale_depth", default=c.num_layers**0.5)
        logits = hf.get("dim_model_base", default=c.hidden) / c.hidden
        return Factors(embed, c.head_dim**-0.5, depth / c.num_layers**0.5, logits)
    return Factors(
        hf.get("embedding_multiplier", default=1.0),
        hf.get("attention_multiplier", default=1.0),
        hf.get("residual_multiplier", default=1.0),
        1.0 / hf.get("logits_scaling", default=1.0),
    )


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, tied=architecture(hf) == "MiniCPMForCausalLM")
    kind = activation(hf)
    factor = factors(hf, c)
    bias, mlp_bias = hf.get("attention_bias", default=False), hf.get("mlp_bias", default=False)
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(factor.scores), qkv_bias=bias, out_bias=bias)
        return Layer(c.hidden, norm, attn, GatedMLP(c.hidden, c.inner, kind, bias=mlp_bias), factor.residual)

    return Decoder(c, layer, norm=norm, embed_scale=factor.embed, logit_scale=factor.logits)
