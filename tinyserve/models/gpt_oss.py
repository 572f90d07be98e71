"""gpt-oss: attention sinks, windows on every other layer, and experts with biases and a clamped gate.

Published checkpoints keep the experts in MXFP4, and on a GPU they stay so (quant/experts.py).

Before: models/llama.py (the layer), layers/moe.py, checkpoint/stacked.py.  After: models/decoder.py runs it.

Source: arXiv:2508.10925 sec. 2 and the published reference code; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..checkpoint.stacked import Stack
from ..layers.attention import Attention, Heads, Scores
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama
from .config import HF, ModelConfig, layer_kinds, rope_spec, windows
from .decoder import Decoder
from .qwen3_moe import EXPERTS

WEIGHTS = (
    llama.WEIGHTS
    | EXPERTS
    | {"layers.*.mlp.router": "model.layers.*.mlp.router", "layers.*.attn.sinks": "model.layers.*.self_attn"}
)


def stacks(name: str, *parts: str) -> dict[str, Stack]:
    """Return how one product of all experts is stored: plain, or in MXFP4, and with its biases."""
    stored = f"model.layers.*.mlp.experts.{name}"
    weights, biases = (
        tuple(f"model.layers.*.mlp.experts.#.{part}.{kind}" for part in parts) for kind in ("weight", "bias")
    )
    return {
        stored: Stack(weights, transposed=True, interleaved=True),
        f"{stored}_blocks": Stack(weights, interleaved=True, scales=f"{stored}_scales"),
        f"{stored}_bias": Stack(biases, interleaved=True),
    }


STACKS = stacks("gate_up_proj", "gate_proj", "up_proj") | stacks("down_proj", "down_proj")


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    hf.expect("hidden_act", "silu")
    hf.expect("swiglu_alpha", 1.702)
    hf.expect("swiglu_limit", 7.0)
    hf.get("initial_context_length", default=None)  # of the training, said again in the RoPE's parameters
    hf.get("experts_per_token", default=None)
    bias = hf.get("attention_bias", default=True)
    window = windows(hf, layer_kinds(hf, c.num_layers, every=2), 128)
    routing = Routing(
        experts=hf.get("num_local_experts", "num_experts"),
        top_k=hf.get("num_experts_per_tok"),
        renormalise=True,
        bias=True,
    )
    rope = Rope(rope_spec(hf, c.head_dim, theta=150000.0))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        scores = Scores(window=window[index], sinks=True)
        attn = Attention(c.hidden, heads, rope=rope, scores=scores, qkv_bias=bias, out_bias=bias)
        experts = Experts(routing.experts, c.hidden, c.inner, "clamped_swiglu", bias=True)
        return llama.Layer(c.hidden, norm, attn, MoE(c.hidden, routing, experts))

    return Decoder(c, layer, norm=norm)
