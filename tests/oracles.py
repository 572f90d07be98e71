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
CONFIGS = {
    "llama": llama,
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-linear": lambda: llama(**rope("linear")),
    "llama-llama3": lambda: llama(**rope("llama3", **LLAMA3)),
    "llama-yarn": lambda: llama(**rope("yarn", original_max_position_embeddings=32)),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": qwen3,
    "gemma3": gemma3,
}


def save(name: str, folder: Path, *, seed: int = 0, shard_size: str = "5GB") -> Path:
    """Save a random checkpoint of CONFIGS[name] into `folder`, in float32 and in shards of at most `shard_size`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def open_reference(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint as transformers runs it: float32, its plainest attention."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
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


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Random tokens without special ids."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
