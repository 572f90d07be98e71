"""Tiny configs of the mixture-of-experts families, two for each, so that every switch of a family is on once.

Sizes are those of oracles.py. The vectors that choose experts are large enough for choices to differ between tokens.
"""

import transformers

from tests.oracles import SIZES, rope

SMALL = SIZES | {"moe_intermediate_size": 24}
YARN = rope("yarn", original_max_position_embeddings=32)


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
}  # fmt: skip
