"""OLMoE: experts in every layer, and one norm over all heads of q, one over all of k.

Before: models/olmo2.py (those norms), layers/moe.py.  After: models/decoder.py runs it.

Source: arXiv:2409.02060 sec. 2; keys of config.json.
"""

from __future__ import annotations

from functools import partial

from ..layers.attention import Attention, Heads
from ..layers.moe import Experts, MoE
from ..layers.norm import QKNorms, RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama
from .config import HF, ModelConfig, activation, rope_spec
from .decoder import Decoder
from .qwen3_moe import EXPERTS

WEIGHTS = (
    llama.WEIGHTS
    | EXPERTS
    | {
        "layers.*.attn.adjust.q": "model.layers.*.self_attn.q_norm",
        "layers.*.attn.adjust.k": "model.layers.*.self_attn.k_norm",
    }
)


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    c = ModelConfig.from_hf(hf, eps=1e-5)
    kind = activation(hf)
    hf.expect("clip_qkv", None)
    bias = hf.get("attention_bias", default=False)
    routing = Routing(
        experts=hf.get("num_experts", "num_local_experts", default=64),
        top_k=hf.get("num_experts_per_tok", default=8),
        renormalise=hf.get("norm_topk_prob", default=False),
    )
    rope = Rope(rope_spec(hf, c.head_dim))
    norm = partial(RMSNorm, eps=c.norm_eps)
    widths = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def layer(index: int) -> llama.Layer:
        attn = Attention(
            c.hidden,
            Heads(c.num_heads, c.num_kv_heads, c.head_dim),
            rope=rope,
            qkv_bias=bias,
            out_bias=bias,
            adjust=QKNorms(norm(widths[0]), norm(widths[1]), widths),
        )
        experts = Experts(routing.experts, c.hidden, c.inner, kind)
        return llama.Layer(c.hidden, norm, attn, MoE(c.hidden, routing, experts))

    return Decoder(c, layer, norm=norm)
