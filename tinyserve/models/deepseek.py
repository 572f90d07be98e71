"""DeepSeek-V2, V2-Lite, V3, R1 and Kimi-K2: latent attention, and many small experts beside shared ones.

V2 chooses by softmax, V3 by sigmoid scores with a correction bias; both may choose among groups of experts first. The
first layers are dense.

Before: layers/latent.py, layers/moe.py, models/llama.py (the layer).  After: models/decoder.py runs it.

Source: arXiv:2405.04434 sec. 2; arXiv:2412.19437 sec. 2.1; keys of config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import nn

from ..layers.latent import LatentAttention, LatentSizes
from ..layers.mlp import GatedMLP
from ..layers.moe import Experts, MoE
from ..layers.norm import RMSNorm
from ..layers.rope import Rope
from ..layers.routing import Routing
from . import llama
from .config import HF, ModelConfig, activation, rope_parameters, rope_spec
from .decoder import Decoder
from .qwen3_moe import EXPERTS

SHARED = {
    "layers.*.mlp.router.correction": "model.layers.*.mlp.gate",
    "layers.*.mlp.shared.gate_up": (
        "model.layers.*.mlp.shared_experts.gate_proj",
        "model.layers.*.mlp.shared_experts.up_proj",
    ),
    "layers.*.mlp.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
}
ATTENTION = {
    "layers.*.attn.compress": (
        "model.layers.*.self_attn.q_a_proj",
        "model.layers.*.self_attn.kv_a_proj_with_mqa",
    ),
    "layers.*.attn.direct": ("model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.kv_a_proj_with_mqa"),
    "layers.*.attn.q_norm": "model.layers.*.self_attn.q_a_layernorm",
    "layers.*.attn.q_up": "model.layers.*.self_attn.q_b_proj",
    "layers.*.attn.kv_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "layers.*.attn.kv_up": "model.layers.*.self_attn.kv_b_proj",
}
LATER_LAYERS = "model.layers"
WEIGHTS = llama.WEIGHTS | EXPERTS | SHARED | ATTENTION


def sigmoid_routing(hf: HF) -> Routing:
    """Return the routing of V3 and of the families that took it over: sigmoid scores, a correction bias, groups."""
    hf.expect("scoring_func", "sigmoid", "noaux_tc")
    hf.expect("topk_method", "noaux_tc")
    experts = hf.get("n_routed_experts", "num_experts", "num_local_experts")
    return Routing(
        experts=experts,
        top_k=hf.get("num_experts_per_tok"),
        kind="sigmoid",
        renormalise=hf.get("norm_topk_prob", default=True),
        groups=hf.get("n_group", default=1),
        top_groups=hf.get("topk_group", default=1),
        group_best=2,
        scale=hf.get("routed_scaling_factor", default=1.0),
        precise=True,
        corrected=(experts,),
    )


def softmax_routing(hf: HF) -> Routing:
    """Return the routing of V2: softmax scores, by groups or not."""
    hf.expect("scoring_func", "softmax")
    hf.expect("norm_topk_prob", False)
    limited = hf.expect("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups, top_groups = hf.get("n_group", default=1), hf.get("topk_group", default=1)
    return Routing(
        experts=hf.get("n_routed_experts"),
        top_k=hf.get("num_experts_per_tok"),
        groups=groups if limited else 1,
        top_groups=top_groups if limited else 1,
        scale=hf.get("routed_scaling_factor", default=1.0),
        precise=True,
    )


def feed_forwards(hf: HF, c: ModelConfig, routing: Routing, *, dense: int = 0) -> Callable[[int], nn.Module]:
    """Return what makes the block of layer i: experts and shared ones, which are one block n times as wide.

    The first layers are dense: as many as the config says, else `dense`.
    """
    kind = activation(hf)
    dense = hf.get("first_k_dense_replace", default=dense)
    inner, shared = hf.get("moe_intermediate_size"), hf.get("n_shared_experts", default=0)

    def mlp(index: int) -> nn.Module:
        if index < dense:
            return GatedMLP(c.hidden, c.inner, kind)
        beside = GatedMLP(c.hidden, inner * shared, kind) if shared else None
        return MoE(c.hidden, routing, Experts(routing.experts, c.hidden, inner, kind), shared=beside)

    return mlp


def score_scale(hf: HF, sizes: LatentSizes) -> float:
    """Return the factor on the scores: YaRN sharpens them by the square of its amplitude over all dimensions."""
    scale = (sizes.nope + sizes.rotary) ** -0.5
    rope = rope_parameters(hf)
    if rope is None or rope.get("rope_type", "type", default="default") == "default":
        return scale
    weight, factor = rope.get("mscale_all_dim", default=0), rope.get("factor")
    return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else scale


def build(hf: HF) -> Decoder:
    """Make the model that config.json describes, without memory."""
    hf.get("qk_head_dim", default=None)  # nope and rope together
    c = ModelConfig.from_hf(hf)
    hf.expect("mlp_bias", False)
    hf.expect("moe_layer_freq", 1)
    query = hf.get("q_lora_rank", default=None)
    bias = hf.get("attention_bias", default=False) if query else hf.expect("attention_bias", False)
    sizes = LatentSizes(
        heads=c.num_heads,
        latent=hf.get("kv_lora_rank"),
        query=query,
        nope=hf.get("qk_nope_head_dim"),
        rotary=hf.get("qk_rope_head_dim"),
        value=hf.get("v_head_dim"),
    )
    routing = softmax_routing(hf) if c.architecture == "DeepseekV2ForCausalLM" else sigmoid_routing(hf)
    rope = Rope(rope_spec(hf, sizes.rotary, interleaved=hf.get("rope_interleave", default=True)))
    scale = score_scale(hf, sizes)
    norm = partial(RMSNorm, eps=c.norm_eps)
    mlp = feed_forwards(hf, c, routing)

    def layer(index: int) -> llama.Layer:
        attn = LatentAttention(c.hidden, sizes, rope=rope, scale=scale, bias=bias)
        return llama.Layer(c.hidden, norm, attn, mlp(index))

    return Decoder(c, layer, norm=norm)
