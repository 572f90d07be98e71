"""The facts of a GGUF file's metadata, said in the words of Hugging Face's config.json.

models/ reads one dialect only. Whatever a GGUF file does not say in metadata but in its tensors (tied head, biases,
Llama 3's rotary stretch) is looked up there and checked, so that nothing is guessed silently: an architecture or a
setting that is not in these tables is refused.

Before: gguf.py.  After: models/config.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedModel
from .gguf import GGUFFile
from .gguf_families import OWN

# GGUF architecture -> (model_type, class name) of config.json.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "arcee": ("arcee", "ArceeForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "nemotron": ("nemotron", "NemotronForCausalLM"),
}
# Metadata key without the architecture's prefix -> key of config.json. All are single whole numbers.
SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
# Metadata that would change the numbers, with the value that means "off": refused unless an architecture is in READ.
MUST_BE_OFF = {
    "expert_count": 0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "attention.scale": 0.0,
}
READ = {
    **dict.fromkeys(("llama", "qwen3moe", "olmoe", "gpt-oss", "deepseek2"), ("expert_count",)),
    "granite": ("logit_scale", "residual_scale", "embedding_scale", "attention.scale"),
    "command-r": ("logit_scale",),
    "cohere2": ("logit_scale",),
}
PARTIAL = ("phi3", "glm4", "nemotron")  # rotation of a part of each head
LATENT = ("deepseek2",)  # heads of several parts, of which OWN tells the sizes
# Llama 3.1 and later stretch long wavelengths by these fixed numbers; the file holds only the resulting factors.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say about this file.

    Args: file: a GGUF file of an architecture in ARCHITECTURES.
    Returns: a dict as json.load of a config.json gives it, with the classic rope_theta / rope_scaling keys.
    Raises: UnsupportedModel: unknown architecture or a setting no model here has; CheckpointError: a size is missing.
    """
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {architecture!r}; known: {', '.join(sorted(ARCHITECTURES))}."
        )
    facts = Facts(file)
    for key, off in MUST_BE_OFF.items():
        value = off if key in READ.get(architecture, ()) else facts.get(key, off)
        if isinstance(value, np.ndarray) or value != off:
            raise UnsupportedModel(
                f"{file.path}: {architecture}.{key} = {value} is not implemented for {architecture}."
            )
    config: dict[str, Any] = {name: facts.size(key) for key, name in SIZES.items()}
    model_type, class_name = ARCHITECTURES[architecture]
    config |= {
        "model_type": model_type,
        "architectures": [class_name],
        "num_key_value_heads": facts.size("attention.head_count_kv", config["num_attention_heads"]),
        "head_dim": _head_dim(facts, config),
        **_epsilon(facts),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    for name in ("bos", "eos", "padding"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config["pad_token_id" if name == "padding" else f"{name}_token_id"] = value if isinstance(value, int) else None
    if architecture in OWN:
        config |= OWN[architecture](facts, config)
    if facts.get("rope.scaling.type") is None and "rope_freqs.weight" in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    return config


class Facts:
    """The metadata of one architecture, read without its prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.file.path}: {self.prefix}.{key} differs between layers: {value.tolist()}.")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{key} must be a number above 0, but is {value!r}.")
        return value

    def number(self, key: str, default: float | None) -> float | None:
        value = self.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{key} must be a number, but is {value!r}.")
        return value if value is None else float(value)


def _head_dim(facts: Facts, config: dict[str, Any]) -> int:
    if facts.prefix in LATENT:
        return 0
    evenly = config["hidden_size"] // config["num_attention_heads"]
    dim = facts.size("attention.key_length", evenly)
    if facts.size("attention.value_length", dim) != dim:
        raise UnsupportedModel(f"{facts.file.path}: keys and values of different lengths are not implemented.")
    rotary = facts.size("rope.dimension_count", dim)
    if rotary != dim and facts.prefix not in PARTIAL:
        raise UnsupportedModel(f"{facts.file.path}: rotation of {rotary} of {dim} dimensions is not implemented.")
    return dim


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing.")


def _rope_scaling(facts: Facts) -> dict[str, Any] | None:
    kind = facts.get("rope.scaling.type")
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind in (None, "linear") and factor in (0.0, 1.0)):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        if facts.get("rope.scaling.original_context_length") is not None:
            scaling["original_max_position_embeddings"] = facts.size("rope.scaling.original_context_length")
        return scaling
    raise UnsupportedModel(f"{facts.file.path}: rope scaling {kind!r} is not implemented; known: linear, yarn.")


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's rope_scaling entry, if its formula really gives the factors that the file holds."""
    tensor = file.tensors["rope_freqs.weight"]
    half = config["head_dim"] // 2
    if tensor.type != "F32" or tensor.shape != (half,):
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight is {tensor.type} {list(tensor.shape)}, not F32 [{half}]."
        )
    held = tensor.data.view("<f4")
    factor = float(held.max())
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    smooth = (LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = smooth.clip(0, 1)
    formula = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(held, formula, rtol=1e-3):
        raise UnsupportedModel(f"{file.path}: rope_freqs.weight holds factors that are not Llama 3's; not implemented.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }


def _epsilon(facts: Facts) -> dict[str, float | None]:
    """The norms' epsilon under the key of the norm that the file names."""
    if (centred := facts.number("attention.layer_norm_epsilon", None)) is not None:
        return {"layer_norm_eps": centred}
    return {"rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-6)}
