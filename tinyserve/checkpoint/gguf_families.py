"""What each GGUF architecture says beyond the metadata that all share, in the words of Hugging Face's config.json.

Several of these answers stand in no file and are known from the models themselves: how often a layer is a full one, the
scale of Gemma's queries, the groups of DeepSeek's experts in files from before they were written down.

Before: gguf.py.  After: gguf_config.py merges them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CheckpointError
from .gguf import GGUFFile

if TYPE_CHECKING:
    from .gguf_config import Facts

GEMMA3_FULL_EVERY = 6
GEMMA3_LOCAL_THETA = 10000.0
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # the one size whose query scale is hidden/heads, not the head size
OLMO3_FULL_EVERY = EXAONE4_FULL_EVERY = 4
FULL, SLIDING = "full_attention", "sliding_attention"
# Experts -> (groups, groups chosen) of DeepSeek-V3 and V2, in files that do not say.
DEEPSEEK_GROUPS = {256: (8, 4), 160: (8, 3)}


def _kinds(facts: Facts, layers: int, every: int) -> list[str]:
    """FULL or SLIDING for each layer: listed in the file as flags, or every so many layers is full."""
    pattern = facts.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise CheckpointError(f"{facts.file.path}: sliding_window_pattern lists {len(pattern)} of {layers} layers.")
        return [SLIDING if flag else FULL for flag in pattern.tolist()]
    every = facts.size("attention.sliding_window_pattern", every)
    return [FULL if number % every == every - 1 else SLIDING for number in range(layers)]


def _gemma(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(facts: Facts, config: dict[str, Any]) -> int:
    large = config["num_hidden_layers"] == GEMMA_27B_LAYERS[facts.prefix]
    return config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]


def _gemma2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(facts, config) | {
        "sliding_window": facts.size("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _query_scalar(facts, config),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(facts, config) | {
        "sliding_window": facts.size("attention.sliding_window"),
        "layer_types": _kinds(facts, config["num_hidden_layers"], GEMMA3_FULL_EVERY),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA),
        "query_pre_attn_scalar": _query_scalar(facts, config),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", None),
        "final_logit_softcapping": facts.number("final_logit_softcapping", None),
    }


def _phi3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    window = facts.get("attention.sliding_window", 0)
    found = {
        "sliding_window": facts.size("attention.sliding_window") if window else None,
        **_part(facts, config),
    }
    if "rope_factors_long.weight" not in facts.file.tensors:
        return found
    factors = {name: _numbers(facts.file, f"rope_factors_{name}.weight") for name in ("long", "short")}
    found["original_max_position_embeddings"] = facts.size("rope.scaling.original_context_length")
    found["rope_scaling"] = {"rope_type": "longrope", **{f"{name}_factor": list_ for name, list_ in factors.items()}}
    if (amplitude := facts.number("rope.scaling.attn_factor", None)) is not None:
        found["rope_scaling"]["attention_factor"] = amplitude
    return found


def _part(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    dim = config["head_dim"]
    return {"partial_rotary_factor": facts.size("rope.dimension_count", dim) / dim}


def _exaone4(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    own = {"attention_bias": None, "mlp_bias": None}
    if not facts.get("attention.sliding_window", 0):
        return own | {"sliding_window": None}
    kinds = _kinds(facts, config["num_hidden_layers"], EXAONE4_FULL_EVERY)
    return own | {"sliding_window": facts.size("attention.sliding_window"), "layer_types": kinds}


def _numbers(file: GGUFFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{file.path}: {name} must be a row of F32 numbers.")
    return tensor.data.view("<f4").tolist()


def _granite(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale", config["head_dim"] ** -0.5),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _olmo2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    if facts.get("attention.sliding_window") is None:
        return {}
    return {  # a file of OLMo 3 calls itself olmo2, too
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": facts.size("attention.sliding_window"),
        "layer_types": _kinds(facts, config["num_hidden_layers"], OLMO3_FULL_EVERY),
    }


def _cohere(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    own = {"logit_scale": facts.number("logit_scale", 0.0625)}
    if facts.prefix == "cohere2":
        return own | {"sliding_window": facts.size("attention.sliding_window")}
    return own | {"use_qk_norm": "blk.0.attn_q_norm.weight" in facts.file.tensors}


def _starcoder2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in facts.file.tensors
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": bias, "attention_bias": None, "mlp_bias": None}


def _experts(facts: Facts) -> dict[str, Any]:
    return {"num_experts": facts.size("expert_count"), "num_experts_per_tok": facts.size("expert_used_count")}


def _llama(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    if not facts.get("expert_count", 0):
        return {}
    experts = _experts(facts)  # a file of Mixtral calls itself llama, too
    own = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "mlp_bias": None, "attention_bias": None}
    return own | {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}


def _qwen3moe(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    inner = facts.size("expert_feed_forward_length")
    return _experts(facts) | {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _gpt_oss(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return _experts(facts) | {
        "intermediate_size": facts.size("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": facts.size("attention.sliding_window"),
        "rope_scaling": scaling and {**scaling, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        "mlp_bias": None,
    }


def _deepseek2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2, V3 and their relatives. Newer files describe attention with absorbed matrices (one key head)."""
    tensors, experts = facts.file.tensors, _experts(facts)
    rotary = facts.size("rope.dimension_count")
    layers, dense = config["num_hidden_layers"], facts.get("leading_dense_block_count", 0)
    third = any(f"blk.{layer}.exp_probs_b.bias" in tensors for layer in range(dense, layers))
    groups, chosen = DEEPSEEK_GROUPS.get(experts["num_experts"], (1, 1))
    found = {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "attention_bias": False,
        "q_lora_rank": facts.size("attention.q_lora_rank") if facts.get("attention.q_lora_rank") else None,
        "kv_lora_rank": facts.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": facts.size("attention.key_length_mla", facts.get("attention.key_length")) - rotary,
        "v_head_dim": facts.size("attention.value_length_mla", facts.get("attention.value_length")),
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "n_shared_experts": facts.get("expert_shared_count", 0),
        "moe_intermediate_size": facts.size("expert_feed_forward_length"),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "n_group": facts.size("expert_group_count", groups),
        "topk_group": facts.size("expert_group_used_count", chosen),
    }
    if not third:
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    if config["rope_scaling"] is not None:
        weight = round(10 * facts.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        found["rope_scaling"] = {**config["rope_scaling"], "mscale": weight, "mscale_all_dim": weight}
    return found


# What an architecture says beyond the common metadata, and how it differs from "silu" without windows.
OWN = {
    "deepseek2": _deepseek2,
    "llama": _llama,
    "qwen3moe": _qwen3moe,
    "olmoe": lambda facts, config: _experts(facts) | {"norm_topk_prob": False},
    "gpt-oss": _gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "command-r": _cohere,
    "cohere2": _cohere,
    "starcoder2": _starcoder2,
    "seed_oss": lambda facts, config: {"attention_out_bias": "blk.0.attn_output.bias" in facts.file.tensors},
    "glm4": lambda facts, config: _part(facts, config) | {"mlp_bias": None},
    "exaone4": _exaone4,
    "nemotron": lambda facts, config: _part(facts, config) | {"hidden_act": "relu2"},
    "arcee": lambda facts, config: {"hidden_act": "relu2"},
}
