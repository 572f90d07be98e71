"""Tiny random checkpoints, saved by transformers, and what transformers computes with them.

They are the judge of every model family: sizes are odd on purpose, weights are large enough for logits of 5 to 20, and
every vector (norms, biases) differs from its neutral value, so that nothing can be skipped unnoticed.
"""

from pathlib import Path

import torch
import transformers
from torch import Tensor

VOCAB = 131
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SIZES | {"head_dim": 20, "tie_word_embeddings": False} | changes)


def mistral(**changes) -> transformers.PretrainedConfig:
    return transformers.MistralConfig(**SIZES | {"head_dim": 16, "sliding_window": 5} | changes)


def qwen2(**changes) -> transformers.PretrainedConfig:
    return transformers.Qwen2Config(**SIZES | changes)


def qwen3(**changes) -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(**SIZES | {"head_dim": 24, "tie_word_embeddings": True} | changes)


def gemma3(**changes) -> transformers.PretrainedConfig:
    own = {
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 8.0,
    }
    return transformers.Gemma3TextConfig(**SIZES | own | changes)


def rope(kind: str, **more) -> dict:
    """`rope_parameters` of a kind whose stretch is visible within SIZES' 128 positions."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **more}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def make(name: str, **changes) -> transformers.PretrainedConfig:
    """A small config of the class `name`Config. A change to `...` leaves the key out."""
    sizes = SIZES | changes
    return getattr(transformers, f"{name}Config")(**{key: value for key, value in sizes.items() if value is not ...})


def longrope(dim: int, original: int) -> dict:
    """LongRoPE over `dim` numbers, trained on `original` positions of SIZES' 128."""
    steps = [1.0 + 0.1 * index for index in range(dim // 2)]
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": steps,
            "long_factor": [3 * step for step in steps],
        },
    }


def old(name: str, **changes) -> transformers.PretrainedConfig:
    """A small config of a class from before grouped queries, which spells its sizes in its own way."""
    return make(name, intermediate_size=..., num_key_value_heads=..., **changes)


KINDS3 = ["sliding_attention", "full_attention", "sliding_attention"]
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
# Two of each family, so that each switch of the family is on in one and off in another.
CONFIGS = {
    "llama": llama,
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"),
    "llama-linear": lambda: llama(**rope("linear")),
    "llama-llama3": lambda: llama(**rope("llama3", **LLAMA3)),
    "llama-yarn": lambda: llama(**rope("yarn", original_max_position_embeddings=32)),
    "llama-longrope": lambda: llama(**longrope(20, 32)),
    "mistral": mistral,
    "mistral-full": lambda: mistral(sliding_window=None, head_dim=12, tie_word_embeddings=True, **rope("linear")),
    "ministral": lambda: make("Ministral", head_dim=16, sliding_window=5, layer_types=KINDS3),
    "ministral-full": lambda: make(
        "Ministral", head_dim=12, sliding_window=4, layer_types=["full_attention"] * 2 + KINDS3[:1], hidden_act="gelu",
        tie_word_embeddings=True,
    ),
    "seed-oss": lambda: make("SeedOss", head_dim=20, attention_bias=True, attention_out_bias=False),
    "seed-oss-biases": lambda: make(
        "SeedOss", head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "qwen2": qwen2,
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": qwen3,
    "qwen3-biases": lambda: qwen3(attention_bias=True, tie_word_embeddings=False, head_dim=12),
    "gemma3": gemma3,
    "gemma3-biases": lambda: gemma3(final_logit_softcapping=None, attention_bias=True),
    "smollm3": lambda: make("SmolLM3", num_hidden_layers=4, no_rope_layer_interval=2),
    "smollm3-window": lambda: make(
        "SmolLM3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=5, attention_bias=True,
        mlp_bias=True,
    ),
    "gemma": lambda: make("Gemma", head_dim=20),
    "gemma-biases": lambda: make("Gemma", head_dim=16, attention_bias=True, num_key_value_heads=1),
    "gemma2": lambda: make("Gemma2", head_dim=20, query_pre_attn_scalar=30, sliding_window=6),
    "gemma2-plain": lambda: make(
        "Gemma2", head_dim=16, attn_logit_softcapping=3.0, final_logit_softcapping=7.0, layer_types=KINDS3[::-1],
        sliding_window=4, attention_bias=True,
    ),
    "phi3": lambda: make("Phi3", sliding_window=7),
    "phi3-longrope": lambda: make("Phi3", **longrope(12, 32)),
    "phi3-short": lambda: make("Phi3", tie_word_embeddings=True, **longrope(12, 128)),
    "olmo2": lambda: make("Olmo2"),
    "olmo2-biases": lambda: make("Olmo2", attention_bias=True, **rope("yarn", original_max_position_embeddings=32)),
    "olmo3": lambda: make("Olmo3", num_hidden_layers=4, sliding_window=5),
    "olmo3-yarn": lambda: make("Olmo3", sliding_window=6, layer_types=KINDS3, rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": rope("yarn", original_max_position_embeddings=32)["rope_parameters"],
    }),
    "granite": lambda: make(
        "Granite", embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.6, logits_scaling=0.5
    ),
    "granite-biases": lambda: make(
        "Granite", attention_bias=True, mlp_bias=True, attention_multiplier=0.2, tie_word_embeddings=True
    ),
    "glm": lambda: make("Glm", head_dim=16),
    "glm-biases": lambda: make("Glm", head_dim=20, attention_bias=True, tie_word_embeddings=True, **PARTIAL),
    "glm4": lambda: make("Glm4", head_dim=16),
    "glm4-plain": lambda: make("Glm4", head_dim=20, attention_bias=False, **PARTIAL),
    "cohere": lambda: make("Cohere", logit_scale=2.0),
    "cohere-norms": lambda: make("Cohere", logit_scale=0.7, use_qk_norm=True, attention_bias=True),
    "cohere2": lambda: make("Cohere2", head_dim=16, num_hidden_layers=4, sliding_window=5, logit_scale=1.5),
    "cohere2-listed": lambda: make("Cohere2", head_dim=12, layer_types=KINDS3, sliding_window=4, logit_scale=1.0),
    "exaone4": lambda: make("Exaone4", head_dim=16, sliding_window=5, sliding_window_pattern=3),
    "helium": lambda: make("Helium", head_dim=12, num_key_value_heads=4),
    "helium-biases": lambda: make("Helium", head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "ernie": lambda: make("Ernie4_5", head_dim=16),
    "ernie-biases": lambda: make("Ernie4_5", head_dim=12, use_bias=True, tie_word_embeddings=False),
    "nemotron": lambda: make("Nemotron", head_dim=16),
    "nemotron-biases": lambda: make("Nemotron", head_dim=12, attention_bias=True, mlp_bias=True),
    "arcee": lambda: make("Arcee", head_dim=16),
    "arcee-biases": lambda: make("Arcee", head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "apertus": lambda: make("Apertus", **rope("llama3", **LLAMA3)),
    "apertus-biases": lambda: make("Apertus", attention_bias=True, **rope("linear")),
    "hunyuan": lambda: make("HunYuanDenseV1", head_dim=16, **rope("dynamic", alpha=30.0)),
    "hunyuan-biases": lambda: make("HunYuanDenseV1", head_dim=12, attention_bias=True),
    "stablelm": lambda: make("StableLm", num_attention_heads=3, num_key_value_heads=3),
    "stablelm-2": lambda: make(
        "StableLm", use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True, **PARTIAL
    ),
    "starcoder2": lambda: make("Starcoder2"),
    "starcoder2-window": lambda: make("Starcoder2", use_bias=False, sliding_window=5, tie_word_embeddings=False),
    "olmo": lambda: make("Olmo", num_key_value_heads=4),
    "olmo-clamped": lambda: make("Olmo", clip_qkv=0.7, attention_bias=True, tie_word_embeddings=True),
    "phi": lambda: make("Phi"),
    "phi-gelu": lambda: make("Phi", hidden_act="gelu", num_key_value_heads=4, rope_parameters={
        "rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.4,
    }),
    "gpt2": lambda: old("GPT2", n_positions=128),
    "gpt2-scales": lambda: old(
        "GPT2", n_positions=64, n_inner=70, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False,
        activation_function="gelu", tie_word_embeddings=False,
    ),
    "gpt-neox": lambda: make("GPTNeoX", num_attention_heads=3, num_key_value_heads=...),
    "gpt-neox-serial": lambda: make(
        "GPTNeoX", num_key_value_heads=..., use_parallel_residual=False, attention_bias=False, **PARTIAL
    ),
    "opt": lambda: old("OPT", ffn_dim=90, word_embed_proj_dim=48),
    "opt-plain": lambda: old(
        "OPT", ffn_dim=60, word_embed_proj_dim=48, enable_bias=False, layer_norm_elementwise_affine=False,
        activation_function="gelu",
    ),
    "bloom": lambda: old("Bloom", n_layer=3, n_head=4),
    "bloom-6": lambda: old("Bloom", n_layer=2, n_head=6, tie_word_embeddings=False),
    "falcon-rw": lambda: old("Falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "falcon": lambda: old("Falcon", ffn_hidden_size=100),
    "falcon-40b": lambda: old("Falcon", new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
    "falcon-11b": lambda: old("Falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "exaone4-full": lambda: make("Exaone4", head_dim=20, sliding_window=None, layer_types=["full_attention"] * 3),
}  # fmt: skip


def families(configs: dict) -> dict[str, list[str]]:
    """Names of configs by family, which is the first name of each class of config."""
    found = {}
    for name, config in configs.items():
        found.setdefault(type(config()), []).append(name)
    return {names[0]: names for names in found.values()}


def pairs(configs: dict) -> list[str]:
    """Names of the first two configs of each family."""
    return [name for names in families(configs).values() for name in names[:2]]


def save(name: str, folder: Path, *, seed: int = 0, shard_size: str = "5GB") -> Path:
    """Save a random checkpoint of CONFIGS[name] into `folder`, in float32 and in shards of at most `shard_size`."""
    return save_config(CONFIGS[name](), folder, seed=seed, shard_size=shard_size)


def save_config(
    config: transformers.PretrainedConfig,
    folder: Path,
    *,
    seed: int = 0,
    shard_size: str = "5GB",
    untouched: bool = False,
) -> Path:
    """Save a random checkpoint of a config. untouched: exactly as transformers draws it, also norms and biases."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if untouched:
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        for tensor_name, tensor in model.state_dict(keep_vars=True).items():
            if tensor_name.endswith("e_score_correction_bias"):  # zeros; it chooses experts
                tensor += 0.3 * torch.randn_like(tensor)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def open_reference(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint as transformers runs it: float32, its plainest attention (which in Falcon adds ALiBi twice)."""
    alibi = getattr(transformers.AutoConfig.from_pretrained(folder), "alibi", False)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa" if alibi else "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    """Logits after each token of one sequence, [T, V]."""
    with torch.inference_mode():
        return open_reference(folder)(torch.tensor([tokens])).logits[0]


def reference_greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    """The `count` most likely next tokens, one after the other; end ids do not stop it."""
    with torch.inference_mode():
        done = open_reference(folder).generate(
            torch.tensor([tokens]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return done[0, len(tokens) :].tolist()


def reference_choices(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """The most likely token at each place of each answer, given what stands before it there.

    Answers that equal their choices are what `reference_greedy` gives, found in one forward each.
    """
    model = open_reference(folder)
    found = []
    for tokens, ids in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens + ids[:-1]])).logits[0]
        found.append(logits[len(tokens) - 1 :].argmax(-1).tolist())
    return found


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Random tokens without special ids."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
