"""Mixtral: Mistral whose feed-forward blocks are mixtures of eight large experts, two for each token.

Before: models/llama.py, layers/moe.py.  After: models/decoder.py runs it.

Source: arXiv:2401.04088 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads, Scores
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

EXPERTS = {
    "layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
    "layers.*.mlp.experts.gate_up": (
        "model.layers.*.block_sparse_moe.experts.#.w1",
        "model.layers.*.block_sparse_moe.experts.#.w3",
    ),
    "layers.*.mlp.experts.down": "model.layers.*.block_sparse_moe.experts.#.w2",
}
WEIGHTS = llama.WEIGHTS | EXPERTS


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    window = hf.get("sliding_window", default=None)
    routing = Routing(
        experts=hf.get("num_local_experts", default=8),
        top_k=hf.get("num_experts_per_tok", default=2),
        renormalise=True,
    )
    rope = Rope(rope_spec(hf, c.head_dim, theta=1e6))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> llama.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(window=window))
        experts = Experts(routing.experts, c.hidden, c.inner, kind)
        return llama.Layer(c.hidden, norm, attn, MoE(c.hidden, routing, experts))

    return Decoder(c, layer, norm=norm)
