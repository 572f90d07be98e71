"""Tiny configs of the mixture-of-experts families, two for each, so that every switch of a family is on once.

Sizes are those of oracles.py. The vectors that choose experts are large enough for choices to differ between tokens.
"""

import transformers

from tests.oracles import SIZES, rope

SMALL = SIZES | {"moe_intermediate_size": 24}
# Equal factors: transformers 5.24 looks up Phi-3.5-MoE's without the length, and so always takes the short ones.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 32,
    **{key: [3.0 + 0.3 * index for index in range(6)] for key in ("short_factor", "long_factor")},
    "short_mscale": 1.1, "long_mscale": 1.3,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def make(kind: str, *, sizes=SMALL, **changes) -> transformers.PretrainedConfig:
    """A config of class transformers.<kind>Config."""
    return getattr(transformers, f"{kind}Config")(**sizes | changes)


CONFIGS = {
    "qwen3-moe": lambda: make(
        "Qwen3Moe", head_dim=24, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, tie_word_embeddings=True
    ),
    "qwen3-moe-mixed": lambda: make(
        "Qwen3Moe", head_dim=16, num_experts=5, num_experts_per_tok=2, mlp_only_layers=[1], attention_bias=True
    ),
    "mixtral": lambda: make("Mixtral", sizes=SIZES, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": lambda: make(
        "Mixtral", sizes=SIZES, num_local_experts=3, num_experts_per_tok=1, sliding_window=5, head_dim=16
    ),
    "qwen2-moe": lambda: make(
        "Qwen2Moe", num_experts=6, num_experts_per_tok=2, shared_expert_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen2-moe-mixed": lambda: make(
        "Qwen2Moe", num_experts=5, num_experts_per_tok=3, shared_expert_intermediate_size=20, decoder_sparse_step=2,
        qkv_bias=False, use_sliding_window=True, sliding_window=6, max_window_layers=1,
    ),
    "olmoe": lambda: make("Olmoe", sizes=SIZES, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True),
    "olmoe-biases": lambda: make(
        "Olmoe", sizes=SIZES, num_experts=5, num_experts_per_tok=3, attention_bias=True, hidden_act="gelu"
    ),
    "deepseek-v3": lambda: make(
        "DeepseekV3", **LATENT, q_lora_rank=28, n_routed_experts=12, n_group=4, topk_group=2, n_shared_experts=2,
        num_experts_per_tok=3, first_k_dense_replace=1, routed_scaling_factor=2.5,
        **rope("yarn", original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7),
    ),
    "deepseek-v3-plain": lambda: make(
        "DeepseekV3", **LATENT, q_lora_rank=20, n_routed_experts=6, n_group=1, topk_group=1, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=0, norm_topk_prob=False, attention_bias=True,
        rope_interleave=False,
    ),
    "deepseek-v2": lambda: make(
        "DeepseekV2", **LATENT, q_lora_rank=None, n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
    "deepseek-v2-groups": lambda: make(
        "DeepseekV2", **LATENT, q_lora_rank=24, n_routed_experts=12, n_group=4, topk_group=2, n_shared_experts=1,
        num_experts_per_tok=3, topk_method="group_limited_greedy", routed_scaling_factor=4.0,
        **rope("yarn", original_max_position_embeddings=32, mscale=0.8, mscale_all_dim=0.8),
    ),
    "gpt-oss": lambda: make(
        "GptOss", sizes=SIZES, head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=6,
        **rope("yarn", original_max_position_embeddings=32, truncate=False),
    ),
    "gpt-oss-plain": lambda: make(
        "GptOss", sizes=SIZES, head_dim=12, num_local_experts=4, num_experts_per_tok=3, sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], attention_bias=False,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "llama4": lambda: make(
        "Llama4Text", sizes=SIZES, num_hidden_layers=4, head_dim=16, intermediate_size_mlp=60, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=16, floor_scale=8, attn_scale=0.5,
    ),
    "llama4-plain": lambda: make(
        "Llama4Text", sizes=SIZES, head_dim=12, intermediate_size_mlp=60, num_local_experts=3, num_experts_per_tok=2,
        moe_layers=[0, 2], no_rope_layers=[1, 0, 1], attention_chunk_size=16, use_qk_norm=False, attention_bias=True,
        attn_temperature_tuning=False,
    ),
    "granite-moe": lambda: make(
        "GraniteMoe", sizes=SIZES, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0,
        attention_multiplier=0.4, residual_multiplier=0.6, logits_scaling=0.5,
    ),
    "granite-moe-biases": lambda: make(
        "GraniteMoe", sizes=SIZES, num_local_experts=4, num_experts_per_tok=3, attention_bias=True,
        attention_multiplier=0.2, tie_word_embeddings=True,
    ),
    "glm4-moe": lambda: make(
        "Glm4Moe", head_dim=24, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1, use_qk_norm=True,
        routed_scaling_factor=1.5, n_shared_experts=1,
    ),
    "glm4-moe-biases": lambda: make(
        "Glm4Moe", head_dim=16, n_routed_experts=6, num_experts_per_tok=2, attention_bias=True, norm_topk_prob=False,
        first_k_dense_replace=2, n_shared_experts=2,
    ),
    "phimoe": lambda: make("Phimoe", sizes=SIZES, num_local_experts=5, lm_head_bias=True),
    "phimoe-longrope": lambda: make(
        "Phimoe", sizes=SIZES, num_local_experts=4, sliding_window=9, attention_bias=True, tie_word_embeddings=True,
        original_max_position_embeddings=32, rope_parameters=LONGROPE,
    ),
    "ernie45-moe": lambda: make("Ernie4_5_Moe", moe_num_experts=6, moe_k=2, moe_num_shared_experts=2),
    "ernie45-moe-biases": lambda: make(
        "Ernie4_5_Moe", moe_num_experts=5, moe_k=3, moe_num_shared_experts=0, use_bias=True, moe_layer_interval=2,
        moe_layer_start_index=0, tie_word_embeddings=False,
    ),
    "dots1": lambda: make(
        "Dots1", n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=2,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    "dots1-window": lambda: make(
        "Dots1", n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=0,
        attention_bias=True, sliding_window=6, max_window_layers=1,
    ),
    "llama4-chunks": lambda: make(
        "Llama4Text", sizes=SIZES, head_dim=12, intermediate_size_mlp=60, num_local_experts=3, num_experts_per_tok=1,
        moe_layers=[1], no_rope_layers=[1, 1, 1], attention_chunk_size=8,
    ),
}  # fmt: skip
