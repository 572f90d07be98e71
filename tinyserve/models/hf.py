"""A config.json that remembers which of its keys were read, and holds the numbers in it to what they can be.

Before: checkpoint/source.py gives the dict.  After: config.py, models/<family>.py.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedModel, shown

_MISSING = object()

# Keys that say nothing about the numbers of a forward pass, or are read elsewhere (ids by text/, dtype by the loader).
HARMLESS_WORDS = """
    _name_or_path transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_pdrop
    embd_pdrop pretraining_tp bos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    cache_implementation architectures model_type auto_map return_dict output_hidden_states output_attentions
    chunk_size_feed_forward problem_type id2label label2id task_specific_params torchscript use_bfloat16 is_decoder
    is_encoder_decoder _attn_implementation_autoset name language custom_pipelines
    attn_pdrop emb_pdrop residual_dropout embedding_dropout classifier_dropout dropout activation_dropout layerdrop
    init_std summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout prefix
    gradient_checkpointing skip_bias_add use_flash_attn _flash_attn_2_enabled attention_softmax_in_fp32 n_ctx
    bias_dropout_fusion masked_softmax_fusion add_classification_head class_num dense_list im_end_id im_newline_id
    im_start_id mask_init_id org_vocab_size pad_id pool_type cla_share_factor text_end_id text_start_id
    scale_attention_softmax_in_fp32 eod_token_id sep_id mask_token_id _remove_final_layer_norm attn_implementation
    router_aux_loss_coef router_jitter_noise input_jitter_noise output_router_logits aux_loss_alpha seq_aux ep_size
    num_nextn_predict_layers
"""
HARMLESS = frozenset(HARMLESS_WORDS.split())
LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
# Largest values that can be meant: what is above them is a damaged file, and would fill the memory instead of failing.
SIZES = {
    "vocab_size": 2**26, "head_dim": 2**14,
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "word_embed_proj_dim", "dim_model_base"), 2**20),
    "sliding_window": 2**31 - 1,
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 2**22),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "no_rope_layer_interval", "sliding_window_pattern"), 2**12),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_head_kv"), 2**14),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 2**22),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2**14),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "decoder_sparse_step", "n_group", "topk_group"), 2**12),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys((*LENGTH_KEYS, "original_max_position_embeddings"), 2**31 - 1),
}  # fmt: skip
POSITIVE = frozenset(
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta",
     "rotary_emb_base", "rope_local_base_freq", "factor", "low_freq_factor", "high_freq_factor", "alpha",
     "query_pre_attn_scalar", "attention_factor", "final_logit_softcapping", "attn_logit_softcapping", "logit_scale",
     "logits_scaling", "attention_multiplier", "residual_multiplier", "embedding_multiplier", "scale_emb",
     "scale_depth", "partial_rotary_factor", "rotary_pct", "rope_pct", "clip_qkv")
)  # fmt: skip
FLAGS = frozenset(
    ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "truncate", "attention_out_bias",
     "use_bias", "bias", "use_qkv_bias", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "alibi",
     "parallel_attn", "new_decoder_architecture", "multi_query", "enable_bias",
     "norm_topk_prob", "rope_interleave", "attn_temperature_tuning", "lm_head_bias", "qkv_bias")
)  # fmt: skip


class HF:
    """A config.json (or a dict inside one) that remembers which of its keys were read.

    Args:
        raw: the parsed JSON.
        where: how messages call it.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = dict(raw)
        self.where = where
        self.read: set[str] = set()
        self.inner: dict[str, HF] = {}

    def get(self, *spellings: str, default: Any = _MISSING) -> Any:
        """Return the first of the spellings that is there and not null, else `default`.

        Raises: CheckpointError: none is there, and there is no default; or the value is none that this key can have.
        """
        self.read.update(spellings)
        for key in spellings:
            if self.raw.get(key) is not None:
                return self._checked(key, self.raw[key])
        if default is _MISSING:
            raise CheckpointError(f"{self.where} has no {' or '.join(map(repr, spellings))}, which this model needs.")
        return default

    def _checked(self, key: str, value: Any) -> Any:
        """Hold the numbers that sizes are made of to what they can be; `1e999` and NaN are JSON for Python, too."""
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if key in SIZES and not (number and isinstance(value, numbers.Integral) and 1 <= value <= SIZES[key]):
            raise CheckpointError(f"{self.where}: {key} is {shown(value)}, expected an integer from 1 to {SIZES[key]}.")
        if key in POSITIVE and not (number and 0 < value < math.inf):
            raise CheckpointError(f"{self.where}: {key} is {shown(value)}, expected a number above 0.")
        if key in FLAGS and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {shown(value)}, expected true or false.")
        return value

    def expect(self, key: str, *allowed: Any) -> Any:
        """Return a value that must be one of `allowed`; the first stands for an absent or null key.

        Raises: UnsupportedModel: the value is another one, which this version cannot run faithfully.
        """
        value = self.get(key, default=allowed[0])
        if value not in allowed:
            names = ", ".join(repr(choice) for choice in allowed)
            raise UnsupportedModel(f"{self.where} says {key}={shown(value)}; implemented for this family: {names}.")
        return value

    def sub(self, *spellings: str) -> HF | None:
        """Return the dict under one of the spellings as a reader of its own, or None."""
        raw = self.get(*spellings, default=None)
        if raw is None:
            return None
        if not isinstance(raw, Mapping):
            raise CheckpointError(f"{self.where}: {spellings[0]!r} is {shown(raw)}, expected an object.")
        return self.inner.setdefault(spellings[0], HF(raw, f"{self.where}: {spellings[0]}"))

    def unread(self) -> list[str]:
        """Return the keys that nobody read and that could change the numbers. Null and false mean off."""
        keys = [
            key
            for key, value in self.raw.items()
            if key not in self.read and key not in HARMLESS and value is not None and value is not False
        ]
        return sorted(keys) + [f"{name}.{key}" for name, inner in self.inner.items() for key in inner.unread()]
