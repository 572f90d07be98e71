"""Phi-3.5-MoE: layer norms, LongRoPE with amplitudes of its own, and sparsemixer routing.

Before: models/mixtral.py (names of the experts), layers/moe.py.  After: models/decoder.py runs it.

Source: arXiv:2404.14219 sec. 2; arXiv:2409.12136 (sparsemixer); keys of config.json.
"""

from __future__ import annotations

from functools import partial

from attrs import evolve

from ..layers.attention import Attention, Heads, Scores
from ..layers.moe import Experts, MoE
from ..layers.norm import LayerNorm
from ..layers.rope import Rope, RopeSpec
from ..layers.routing import Routing
from . import llama, mixtral
from .config import HF, ModelConfig, activation, rope_parameters, rope_spec
from .decoder import Decoder

WEIGHTS = llama.WEIGHTS | mixtral.EXPERTS


def rotation(hf: HF, c: ModelConfig) -> RopeSpec:
    """Return LongRoPE with the amplitude that the config states for the length that is served, or plain RoPE."""
    spec = rope_spec(hf, c.head_dim, theta=1e6)
    rope = rope_parameters(hf)
    if spec.kind != "longrope" or rope is None:
        return spec
    short, long = (rope.get(key, default=spec.amplitude) for key in ("short_mscale", "long_mscale"))
    return evolve(spec, amplitude=float(long if c.max_model_len > spec.original else short))


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    window = hf.get("sliding_window", default=None)
    bias = hf.get("attention_bias", default=False)
    routing = Routing(
        experts=hf.get("num_local_experts", default=16),
        top_k=hf.expect("num_experts_per_tok", 2),
        kind="sparsemixer",
    )
    hf.expect("router_jitter_noise", 0.01)  # in spite of its name a part of the rule: JITTER of kernels/moe_router.py
    rope = Rope(rotation(hf, c))
    norm = partial(LayerNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        scores = Scores(window=window)
        attn = Attention(c.hidden, heads, rope=rope, scores=scores, qkv_bias=bias, out_bias=bias)
        experts = Experts(routing.experts, c.hidden, c.inner, kind)
        return llama.Layer(c.hidden, norm, attn, MoE(c.hidden, routing, experts))

    return Decoder(c, layer, norm=norm, head_bias=hf.get("lm_head_bias", default=False))
