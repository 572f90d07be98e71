"""The config.json of models that people use, as published: understood to the last key, and what it says is built.

Keys are those of the files on the hub, in the spelling of their time; keys that cannot matter here are left out.
"""

import pytest

from tinyserve.models.registry import build_model

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3", "type": "llama3",
}  # fmt: skip


def sizes(hidden, inner, layers, heads, kv_heads, vocab, length):
    """The seven numbers in their usual spelling."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    return dict(zip(names, (hidden, inner, layers, heads, kv_heads, vocab, length), strict=True))


# (architecture, config, facts): layers, kv heads, head size, windows of the first layers, rotated numbers, context
PUBLISHED = {
    "gpt2": ("GPT2LMHeadModel", {
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    }, (12, 12, 64, [None], 0, 1024)),
    "pythia-160m": ("GPTNeoXForCausalLM", {
        "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
    }, (12, 12, 64, [None], 16, 2048)),
    "opt-125m": ("OPTForCausalLM", {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
        "attention_dropout": 0.0, "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 3072, "hidden_size": 768,
        "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "num_attention_heads": 12,
        "num_hidden_layers": 12, "prefix": "</s>", "word_embed_proj_dim": 768, "vocab_size": 50272,
    }, (12, 12, 64, [None], 0, 2048)),
    "bloom-560m": ("BloomForCausalLM", {
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True, "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16,
        "offset_alibi": 100, "pretraining_tp": 1, "skip_bias_add": True, "skip_bias_add_qkv": False,
        "slow_but_exact": False, "unk_token_id": 0, "vocab_size": 250880,
    }, (24, 16, 64, [None], 0, 2048)),
    "falcon-7b": ("FalconForCausalLM", {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False,
        "hidden_dropout": 0.0, "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
        "vocab_size": 65024,
    }, (32, 1, 64, [None], 64, 2048)),
    "falcon-40b": ("FalconForCausalLM", {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False,
        "hidden_dropout": 0.0, "hidden_size": 8192, "layer_norm_epsilon": 1e-05, "multi_query": True, "n_head": 128,
        "n_head_kv": 8, "n_layer": 60, "new_decoder_architecture": True, "parallel_attn": True, "vocab_size": 65024,
    }, (60, 8, 64, [None], 64, 2048)),
    "phi-2": ("PhiForCausalLM", sizes(2560, 10240, 32, 32, 32, 51200, 2048) | {
        "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "gelu_new", "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    }, (32, 32, 80, [None], 32, 2048)),
    "phi-3-mini-4k": ("Phi3ForCausalLM", sizes(3072, 8192, 32, 32, 32, 32064, 4096) | {
        "attention_bias": False, "hidden_act": "silu", "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    }, (32, 32, 96, [2047], 96, 4096)),
    "phi-4-mini": ("Phi3ForCausalLM", sizes(3072, 8192, 32, 24, 8, 200064, 131072) | {
        "attention_bias": False, "full_attn_mod": 1, "hidden_act": "silu", "interpolate_factor": 1,
        "lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
        "tie_word_embeddings": True,
    }, (32, 8, 128, [None], 96, 131072)),
    "gemma-2-9b": ("Gemma2ForCausalLM", sizes(3584, 14336, 42, 16, 8, 256000, 8192) | {
        "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "head_dim": 256,
        "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    }, (42, 8, 256, [4096, None, 4096], 256, 8192)),
    "olmo-3-7b": ("Olmo3ForCausalLM", sizes(4096, 11008, 32, 32, 32, 100278, 65536) | {
        "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 500000,
        "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "tie_word_embeddings": False,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    }, (32, 32, 128, [4096, 4096, 4096, None], 128, 65536)),
    "smollm3-3b": ("SmolLM3ForCausalLM", sizes(2048, 11008, 36, 16, 4, 128256, 65536) | {
        "attention_bias": False, "hidden_act": "silu", "layer_types": ["full_attention"] * 36, "max_window_layers": 28,
        "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pretraining_tp": 2,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False,
    }, (36, 4, 128, [None], 128, 65536)),
    "granite-3.3-8b": ("GraniteForCausalLM", sizes(4096, 12800, 40, 32, 8, 49159, 131072) | {
        "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "hidden_act": "silu",
        "logits_scaling": 16.0, "mlp_bias": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
    }, (40, 8, 128, [None], 128, 131072)),
    "minicpm-2b": ("MiniCPMForCausalLM", sizes(2304, 5760, 40, 36, 36, 122753, 4096) | {
        "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_scaling": None, "scale_emb": 12, "dim_model_base": 256,
        "scale_depth": 1.4,
    }, (40, 36, 64, [None], 64, 4096)),
    "command-r7b": ("Cohere2ForCausalLM", sizes(4096, 14336, 32, 32, 8, 256000, 8192) | {
        "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu",
        "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False, "use_qk_norm": False,
    }, (32, 8, 128, [4096, 4096, 4096, None], 128, 8192)),
    "exaone-4.0-32b": ("Exaone4ForCausalLM", sizes(5120, 27392, 64, 40, 8, 102400, 131072) | {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"factor": 16.0}, "rope_theta": 1000000, "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16, "sliding_window_pattern": "LLLG",
    }, (64, 8, 128, [4096, 4096, 4096, None], 128, 131072)),
    "exaone-4.0-1.2b": ("Exaone4ForCausalLM", sizes(2048, 4096, 30, 32, 8, 102400, 65536) | {
        "head_dim": 64, "hidden_act": "silu", "layer_types": ["full_attention"] * 30, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"factor": 16.0}, "rope_theta": 1000000, "sliding_window": None,
        "sliding_window_pattern": None, "tie_word_embeddings": True,
    }, (30, 8, 64, [None], 64, 65536)),
    "glm-4-9b-0414": ("Glm4ForCausalLM", sizes(4096, 13696, 40, 32, 2, 151552, 32768) | {
        "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "hidden_act": "silu", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }, (40, 2, 128, [None], 64, 32768)),
    "stablelm-2-1.6b": ("StableLmForCausalLM", sizes(2048, 5632, 24, 32, 32, 100352, 4096) | {
        "hidden_act": "silu", "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.25, "rope_theta": 10000,
        "tie_word_embeddings": False, "use_qkv_bias": True,
    }, (24, 32, 64, [None], 16, 4096)),
    "starcoder2-3b": ("Starcoder2ForCausalLM", sizes(3072, 12288, 30, 24, 2, 49152, 16384) | {
        "attention_dropout": 0.1, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "mlp_type": "default",
        "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
        "sliding_window": 4096, "use_bias": True,
    }, (30, 2, 128, [4096], 128, 16384)),
    "hunyuan-7b": ("HunYuanDenseV1ForCausalLM", sizes(4096, 14336, 32, 32, 8, 128167, 262144) | {
        "add_classification_head": False, "attention_bias": False, "attention_dropout": 0.1, "attention_head_dim": 128,
        "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0], "head_dim": 128, "hidden_act": "silu",
        "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "mlp_bias": False,
        "norm_type": "rms",
        "org_vocab_size": 128167, "pad_id": 127961, "pool_type": "last", "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "use_cla": False, "use_qk_norm": True, "tie_word_embeddings": True,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    }, (32, 8, 128, [None], 128, 262144)),
    "apertus-8b": ("ApertusForCausalLM", sizes(4096, 21504, 32, 32, 8, 131072, 65536) | {
        "attention_bias": False, "hidden_act": "xielu", "hidden_dropout": 0.0, "mlp_bias": False, "post_norm": False,
        "qk_norm": True, "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 12000000,
        "tie_word_embeddings": False,
    }, (32, 8, 128, [None], 128, 65536)),
    "seed-oss-36b": ("SeedOssForCausalLM", sizes(5120, 27648, 64, 80, 8, 155136, 524288) | {
        "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False, "head_dim": 128,
        "hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
    }, (64, 8, 128, [None], 128, 524288)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_understood(name, caplog):
    """Keys that nobody read: 0. Layers, key/value heads, head size, windows, rotation and context as documented."""
    architecture, config, (layers, kv_heads, head_dim, windows, rotated, context) = PUBLISHED[name]
    model = build_model({"architectures": [architecture], **TOKENS, **config})
    kept = model.kv_layers()
    turned = {rope.spec.dim for rope in model.ropes() if hasattr(rope, "spec")} or {0}

    assert caplog.messages == []
    assert (len(kept), kept[0].kv_heads, kept[0].head_dim) == (layers, kv_heads, head_dim)
    assert [layer.window for layer in kept[: len(windows)]] == windows
    assert turned == {rotated}
    assert model.config.max_model_len == context
