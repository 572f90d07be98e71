"""Granite-MoE: Granite's factors around experts in every layer.

Before: models/granite.py (the layer, the factors), layers/moe.py.  After: models/decoder.py runs it.

Source: the Granite 3.0 language models report, 2024; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..checkpoint.stacked import Stack
from ..layers.attention import Attention, Heads, Scores
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import granite, llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder

BLOCK = "model.layers.*.block_sparse_moe"
WEIGHTS = llama.WEIGHTS | {
    "layers.*.mlp.router": f"{BLOCK}.router.layer",
    "layers.*.mlp.experts.gate_up": (f"{BLOCK}.experts.#.gate", f"{BLOCK}.experts.#.up"),
    "layers.*.mlp.experts.down": f"{BLOCK}.experts.#.down",
}
STACKS = {
    f"{BLOCK}.input_linear.weight": Stack((f"{BLOCK}.experts.#.gate.weight", f"{BLOCK}.experts.#.up.weight")),
    f"{BLOCK}.output_linear.weight": Stack((f"{BLOCK}.experts.#.down.weight",)),
}


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf)
    kind = activation(hf)
    factor = granite.factors(hf, c)
    bias = hf.get("attention_bias", default=False)
    routing = Routing(
        experts=hf.get("num_local_experts", "num_experts"), top_k=hf.get("num_experts_per_tok"), renormalise=True
    )
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)

    def layer(index: int) -> granite.Layer:
        heads = Heads(c.num_heads, c.num_kv_heads, c.head_dim)
        attn = Attention(c.hidden, heads, rope=rope, scores=Scores(factor.scores), qkv_bias=bias, out_bias=bias)
        experts = Experts(routing.experts, c.hidden, c.inner, kind)
        return granite.Layer(c.hidden, norm, attn, MoE(c.hidden, routing, experts), factor.residual)

    return Decoder(c, layer, norm=norm, embed_scale=factor.embed, logit_scale=factor.logits)
