"""config.json of published mixtures of experts, as they were published: understood whole, and as large as they say."""

import logging

import pytest

from tinyserve.checkpoint.load import parameter_count
from tinyserve.models.registry import build_model

USUAL = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V3 = USUAL | LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "ep_size": 1,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_key_value_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "max_position_embeddings": 163840, "vocab_size": 129280, "first_k_dense_replace": 3,
}  # fmt: skip
PUBLISHED = {  # name: (config, parameters in units of 10^9, kinds of cached layers)
    "DeepSeek-V3": (V3, 671.03, 1),
    "Kimi-K2": (
        V3 | {
            "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840,
            "num_nextn_predict_layers": 0, "aux_loss_alpha": 0.001, "seq_aux": True,
        },
        1026.41,
        1,
    ),
    "DeepSeek-V2-Lite": (
        USUAL | LATENT | {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "q_lora_rank": None, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0,
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "scoring_func": "softmax",
            "topk_method": "greedy", "max_position_embeddings": 163840, "vocab_size": 102400,
            "first_k_dense_replace": 1, "aux_loss_alpha": 0.001, "seq_aux": True,
        },
        15.71,
        1,
    ),
    "gpt-oss-20b": (
        USUAL | {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
            "intermediate_size": 2880, "head_dim": 64, "attention_bias": True, "experts_per_token": 4,
            "num_experts_per_tok": 4, "num_local_experts": 32, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "initial_context_length": 4096, "max_position_embeddings": 131072,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-5, "rope_theta": 150000,
            "rope_scaling": YARN | {"factor": 32.0, "truncate": False}, "vocab_size": 201088,
        },
        20.91,
        2,
    ),
    "GLM-4.5-Air": (
        USUAL | {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096, "head_dim": 128,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "attention_bias": True, "n_group": 1,
            "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "first_k_dense_replace": 1,
            "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000, "use_qk_norm": False,
            "num_nextn_predict_layers": 1, "max_position_embeddings": 131072, "vocab_size": 151552,
        },
        106.85,
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name, caplog):
    """Breaks with the key that nobody read, or with a count of parameters that is not the published one."""
    config, billions, kinds = PUBLISHED[name]
    with caplog.at_level(logging.WARNING, "tinyserve"):
        model = build_model(config)

    assert caplog.messages == []
    assert parameter_count(model) / 1e9 == pytest.approx(billions, abs=0.01)
    assert len(set(model.kv_layers())) == kinds
