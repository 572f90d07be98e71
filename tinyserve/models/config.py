"""config.json, read with suspicion: what the checkpoint is, as a small frozen record.

A family's `build` asks the HF reader for what it understands (`get`), says which values it can run (`expect`), and the
reader remembers what was never asked for: a key that nobody read may be a feature that changes the numbers.

Before: checkpoint/source.py gives the dict.  After: models/<family>.py, models/decoder.py, engine/parts.py.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from ..errors import CheckpointError, UnsupportedModel, shown
from ..layers.rope import RopeSpec, yarn_amplitude

_MISSING = object()

# Keys that say nothing about the numbers of a forward pass, or are read elsewhere (ids by text/, dtype by the loader).
HARMLESS_WORDS = """
    _name_or_path transformers_version use_cache initializer_range attention_dropout hidden_dropout resid_pdrop
    embd_pdrop pretraining_tp bos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    cache_implementation architectures model_type auto_map return_dict output_hidden_states output_attentions
    chunk_size_feed_forward problem_type id2label label2id task_specific_params torchscript use_bfloat16 is_decoder
    is_encoder_decoder _attn_implementation_autoset name language custom_pipelines
"""
HARMLESS = frozenset(HARMLESS_WORDS.split())
LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
# Largest values that can be meant: what is above them is a damaged file, and would fill the memory instead of failing.
SIZES = {
    "hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 2**12, "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14, "head_dim": 2**14, "vocab_size": 2**26,
    **dict.fromkeys((*LENGTH_KEYS, "original_max_position_embeddings"), 2**31 - 1),
}  # fmt: skip
POSITIVE = frozenset(
    ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "factor", "low_freq_factor", "high_freq_factor",
     "query_pre_attn_scalar", "attention_factor", "final_logit_softcapping")
)  # fmt: skip
FLAGS = frozenset(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "truncate"))
# Kinds whose max_position_embeddings already is the stretched length.
STRETCHED = frozenset(("yarn", "llama3", "longrope", "su", "deepseek_yarn"))
DEFAULT_LENGTH = 2048  # when a checkpoint names no length at all
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {"float": "float32", "half": "float16"}


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


@frozen(kw_only=True)
class ModelConfig:
    """The facts of a checkpoint that several parts need. A family's own facts stay in its `build`.

    Args:
        architecture: as config.json names it.
        dtype: of the stored weights; None when the checkpoint does not say (GGUF).
        vocab_size: rows of the embedding, and logits of a token.
        max_model_len: the longest context that the checkpoint promises, by its config alone.
        tied_head: the head multiplies by the embedding, unless the file holds a head of its own.
        eos_ids: end ids named by config.json; generation_config.json may name more.
    """

    architecture: str
    dtype: torch.dtype | None
    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_model_len: int
    tied_head: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, hf: HF, *, tied: bool = False, stretched: bool = False) -> ModelConfig:
        """Read the keys that most families share.

        Args:
            tied: the family's default of tie_word_embeddings.
            stretched: max_position_embeddings already includes a RoPE factor, whatever the kind (Gemma 3).

        Raises: CheckpointError: a key is missing or the sizes contradict each other.
        """
        check_quantization(hf)
        heads, hidden = hf.get("num_attention_heads"), hf.get("hidden_size")
        kv_heads = hf.get("num_key_value_heads", default=heads)
        head_dim = hf.get("head_dim", default=None) or hidden // heads
        if heads % kv_heads or min(heads, kv_heads, head_dim) <= 0:
            raise CheckpointError(f"{hf.where}: {heads} heads cannot share {kv_heads} key/value heads of {head_dim}.")
        return cls(
            architecture=architecture(hf),
            dtype=stored_dtype(hf),
            vocab_size=hf.get("vocab_size"),
            hidden=hidden,
            inner=hf.get("intermediate_size"),
            num_layers=hf.get("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=hf.get("rms_norm_eps", default=1e-6),
            max_model_len=context_length(hf, 1.0 if stretched else context_factor(hf)),
            tied_head=hf.get("tie_word_embeddings", default=tied),
            eos_ids=token_ids(hf, "eos_token_id"),
        )


def token_ids(hf: HF, key: str) -> tuple[int, ...]:
    """Return the ids under a key: none, one or a list. Raises: CheckpointError: it holds something else."""
    value = hf.get(key, default=())
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(token, numbers.Integral) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"{hf.where}: {key} is {shown(value)}, expected a token id or a list of them.")
    return ids


def architecture(hf: HF) -> str:
    """Return the first entry of `architectures`, the class that the checkpoint was saved from."""
    names = hf.get("architectures", default=[])
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise CheckpointError(f'{hf.where} names no architecture; it needs one, like ["LlamaForCausalLM"].')
    return names[0]


def check_quantization(hf: HF) -> None:
    """Refuse quantised checkpoints other than GGUF, whose blocks carry their own types.

    Raises: UnsupportedModel: always for another method, with its name.
    """
    method = (hf.get("quantization_config", default=None) or {}).get("quant_method")
    if method not in (None, "gguf"):
        raise UnsupportedModel(
            f"The checkpoint is quantised with {method!r}; this version reads plain numbers (safetensors) and GGUF."
        )


def stored_dtype(hf: HF) -> torch.dtype | None:
    """Return the dtype that the checkpoint says its weights have."""
    name = hf.get("dtype", "torch_dtype", default=None)
    return None if name is None else parse_dtype(str(name))


def parse_dtype(name: str) -> torch.dtype:
    """Return a torch dtype for "bfloat16", "float16", "half", "float32", "float". Raises: UnsupportedModel: others."""
    name = name.removeprefix("torch.")
    name = DTYPE_NAMES.get(name, name)
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def choose_dtype(asked: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and dense weights.

    "auto" takes the checkpoint's. On an accelerator float32 (and GGUF, which has none) becomes bfloat16; on the CPU
    float16 becomes float32, because CPUs multiply halves slowly, and GGUF becomes float32.
    """
    if isinstance(asked, torch.dtype):
        return asked
    if asked != "auto":
        return parse_dtype(asked)
    if device.type == "cpu":
        return torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float32
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


def context_length(hf: HF, factor: float) -> int:
    """Return the longest context: the least of the length keys, times the RoPE factor where they do not include it."""
    lengths = [hf.get(key, default=None) for key in LENGTH_KEYS]
    known = [length for length in lengths if length is not None]
    return int(min(known) * factor) if known else DEFAULT_LENGTH


def rope_parameters(hf: HF) -> HF | None:
    """Return the dict that describes the rotation: `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    found = [reader for key in ("rope_parameters", "rope_scaling") if (reader := hf.sub(key)) is not None]
    return found[0] if found else None


def context_factor(hf: HF) -> float:
    """Return by how much RoPE stretches max_position_embeddings; 1 for kinds whose length is the stretched one."""
    rope = rope_parameters(hf)
    if rope is None or rope.get("rope_type", "type", default="default") in STRETCHED:
        return 1.0
    return rope.get("factor", default=1.0)


def rope_spec(hf: HF, head_dim: int, *, rope: HF | None = None, theta: float = 10000.0) -> RopeSpec:
    """Read a rotation.

    Args:
        hf: the whole config: lengths, and `rope_theta` where it stands outside.
        rope: the dict that describes it; found by `rope_parameters` when None.
        theta: the family's default.

    Raises: UnsupportedModel: a kind that is not implemented, or rotation of a part of the head.
    """
    rope = rope or rope_parameters(hf) or HF({})
    outer = hf.get("rope_theta", default=theta)
    kind = rope.get("rope_type", "type", default="default")
    reader: Callable[[HF, HF], dict[str, Any]] | None = _SPECS.get(kind)
    if reader is None:
        raise UnsupportedModel(f"RoPE of kind {kind!r} is not implemented; implemented are {', '.join(_SPECS)}.")
    for where in (rope, hf):
        where.expect("partial_rotary_factor", 1.0, 1)
    return RopeSpec(kind=kind, dim=head_dim, theta=float(rope.get("rope_theta", default=outer)), **reader(hf, rope))


def _original(hf: HF, rope: HF) -> int:
    trained = hf.get("original_max_position_embeddings", default=None)
    return trained or rope.get("original_max_position_embeddings", default=None) or hf.get("max_position_embeddings")


def _factor(hf: HF, rope: HF) -> dict[str, Any]:
    return {"factor": float(rope.get("factor"))}


def _dynamic(hf: HF, rope: HF) -> dict[str, Any]:
    return {"factor": float(rope.get("factor")), "original": hf.get("max_position_embeddings")}


def _llama3(hf: HF, rope: HF) -> dict[str, Any]:
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    return {"factor": float(rope.get("factor")), "original": _original(hf, rope), "low": low, "high": high}


def _yarn(hf: HF, rope: HF) -> dict[str, Any]:
    original = _original(hf, rope)
    factor = float(rope.get("factor", default=None) or hf.get("max_position_embeddings") / original)
    scales = rope.get("mscale", default=None), rope.get("mscale_all_dim", default=None)
    amplitude = rope.get("attention_factor", default=None)
    return {
        "factor": factor,
        "original": original,
        "low": rope.get("beta_slow", default=None) or 1,
        "high": rope.get("beta_fast", default=None) or 32,
        "amplitude": yarn_amplitude(factor, *scales) if amplitude is None else amplitude,
        "truncate": rope.get("truncate", default=True),
    }


_SPECS: dict[str, Callable[[HF, HF], dict[str, Any]]] = {
    "default": lambda hf, rope: {},
    "linear": _factor,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
