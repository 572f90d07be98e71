"""config.json, read with suspicion: what the checkpoint is, as a small frozen record.

A family's `build` asks the HF reader for what it understands (`get`), says which values it can run (`expect`), and the
reader remembers what was never asked for: a key that nobody read may be a feature that changes the numbers.

Before: checkpoint/source.py gives the dict.  After: models/<family>.py, models/decoder.py, engine/parts.py.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from ..errors import CheckpointError, UnsupportedModel, shown
from ..layers.rope import RopeSpec, longrope_amplitude, yarn_amplitude
from ..quant.detect import detect
from .hf import HF, LENGTH_KEYS

# Kinds whose max_position_embeddings already is the stretched length.
STRETCHED = frozenset(("yarn", "llama3", "longrope", "su", "deepseek_yarn"))
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
# Names in config.json -> kinds of kernels/activation.py. The tanh form of GELU has many names.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_tanh"), "gelu_tanh"),
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_LENGTH = 2048  # when a checkpoint names no length at all
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {"float": "float32", "half": "float16"}


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
    def from_hf(
        cls, hf: HF, *, tied: bool = False, stretched: bool = False, eps: float = 1e-6, inner: str = "intermediate_size"
    ) -> ModelConfig:
        """Read the keys that most families share, in any of their spellings.

        Args:
            tied: the family's default of tie_word_embeddings.
            stretched: max_position_embeddings already includes a RoPE factor, whatever the kind (Gemma 3).
            eps: the family's default of the norms' epsilon.
            inner: the key of the feed-forward size, which is four times the hidden size where another key is absent.

        Raises: CheckpointError: a key is missing or the sizes contradict each other.
        """
        check_quantization(hf)
        heads, hidden = hf.get("num_attention_heads", "n_head"), hf.get("hidden_size", "n_embd", "n_embed")
        kv_heads = hf.get("num_key_value_heads", default=heads)
        head_dim = hf.get("head_dim", default=None) or hidden // heads
        if heads % kv_heads or min(heads, kv_heads, head_dim) <= 0:
            raise CheckpointError(f"{hf.where}: {heads} heads cannot share {kv_heads} key/value heads of {head_dim}.")
        usual = {} if inner == "intermediate_size" else {"default": 4 * hidden}
        return cls(
            architecture=architecture(hf),
            dtype=stored_dtype(hf),
            vocab_size=hf.get("vocab_size"),
            hidden=hidden,
            inner=hf.get(inner, **usual),
            num_layers=hf.get("num_hidden_layers", "n_layer"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=hf.get(*EPSILONS, default=eps),
            max_model_len=context_length(hf, 1.0 if stretched else context_factor(hf)),
            tied_head=hf.get("tie_word_embeddings", default=tied),
            eos_ids=token_ids(hf, "eos_token_id"),
        )


def activation(hf: HF, key: str = "hidden_act", default: str = "silu") -> str:
    """Return the kind of activation (of kernels/activation.py) that config.json names. Raises: UnsupportedModel."""
    return ACTIVATIONS[hf.expect(key, default, *ACTIVATIONS)]


def windows(hf: HF, kinds: Sequence[str], default: int | None = None) -> list[int | None]:
    """Return the window of each layer, whose kind is FULL or SLIDING. Args: default: the family's window.

    A window as long as the longest context hides nothing, so it is none.
    """
    size = hf.get("sliding_window", default=default)
    if size is not None and size >= context_length(hf, context_factor(hf)):
        size = None
    return [size if kind == SLIDING else None for kind in kinds]


def layer_kinds(hf: HF, num_layers: int, every: int) -> list[str]:
    """Return FULL or SLIDING for each layer: as listed, or else every `every`-th is full.

    Raises: CheckpointError: the list has another length; UnsupportedModel: it names another kind.
    """
    kinds = hf.get("layer_types", default=None)
    if kinds is None:
        return [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"{hf.where}: layer_types must name a kind for each of {num_layers} layers.")
    if other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise UnsupportedModel(f"{hf.where} says layer_types has {shown(other[0])}; implemented: {FULL}, {SLIDING}.")
    return kinds


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
    """Refuse what quant/detect.py has no reader for, before anything is built. Raises: UnsupportedModel."""
    detect({"quantization_config": hf.get("quantization_config", default=None)})


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


def promised_length(config: Mapping[str, Any]) -> int:
    """Return the longest context of a config.json, before anything is built. Raises: CheckpointError: bad numbers."""
    hf = HF(config)
    return context_length(hf, context_factor(hf))


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


def rope_spec(
    hf: HF,
    head_dim: int,
    *,
    rope: HF | None = None,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
) -> RopeSpec:
    """Read a rotation.

    Args:
        hf: the whole config: lengths, and `rope_theta` where it stands outside.
        rope: the dict that describes it; found by `rope_parameters` when None.
        theta, partial: the family's defaults: base of the frequencies, and which part of each head turns.
        interleaved: the family turns pairs of neighbours.

    Raises: UnsupportedModel: a kind that is not implemented. CheckpointError: nothing, or more than the head, turns.
    """
    rope = rope or rope_parameters(hf) or HF({})
    for reader in (hf, rope):
        reader.get("original_max_position_embeddings", default=None)  # may stand in both, and beside kinds without it
    outer = hf.get("rope_theta", "rotary_emb_base", default=theta)
    outer_part = hf.get("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", default=partial)
    kind = rope.get("rope_type", "type", default="default")
    kind = SPELLINGS.get(kind, kind) if isinstance(kind, str) else kind
    read: Callable[[HF, HF], dict[str, Any]] | None = _SPECS.get(kind)
    if read is None:
        raise UnsupportedModel(f"RoPE of kind {kind!r} is not implemented; implemented are {', '.join(_SPECS)}.")
    part = rope.get("partial_rotary_factor", default=outer_part)
    theta = float(rope.get("rope_theta", default=outer))
    turning = int(head_dim * part)
    if not 0 < turning <= head_dim or turning % 2:
        raise CheckpointError(f"{hf.where}: partial_rotary_factor {part} turns {turning} of {head_dim} numbers.")
    own = read(hf, rope)
    if not all(2 * len(own.get(name, ())) in (0, turning) for name in ("short", "long")):
        raise CheckpointError(f"{rope.where}: short_factor and long_factor must have {turning // 2} numbers each.")
    if kind == "proportional":
        return RopeSpec(kind=kind, dim=head_dim, turning=turning, theta=theta, interleaved=interleaved, **own)
    if own.keys() == {"alpha"}:  # the base is stretched once and for all
        return RopeSpec(dim=turning, theta=theta * own["alpha"] ** (turning / (turning - 2)), interleaved=interleaved)
    return RopeSpec(kind=kind, dim=turning, theta=theta, interleaved=interleaved, **own)


def _original(hf: HF, rope: HF) -> int:
    trained = hf.get("original_max_position_embeddings", default=None)
    return trained or rope.get("original_max_position_embeddings", default=None) or hf.get("max_position_embeddings")


def _factor(hf: HF, rope: HF) -> dict[str, Any]:
    return {"factor": float(rope.get("factor"))}


def _dynamic(hf: HF, rope: HF) -> dict[str, Any]:
    if alpha := rope.get("alpha", default=None):
        for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            rope.get(key, default=None)  # written beside alpha, and without any effect there
        return {"alpha": float(alpha)}
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


def _longrope(hf: HF, rope: HF) -> dict[str, Any]:
    original = _original(hf, rope)
    factor = float(rope.get("factor", default=None) or hf.get("max_position_embeddings") / original)
    amplitude = rope.get("attention_factor", default=None)
    return {
        "factor": factor,
        "original": original,
        "amplitude": longrope_amplitude(factor, original) if amplitude is None else amplitude,
        "short": tuple(map(float, rope.get("short_factor"))),
        "long": tuple(map(float, rope.get("long_factor"))),
    }


def _proportional(hf: HF, rope: HF) -> dict[str, Any]:
    return {"factor": float(rope.get("factor", default=1.0))}


SPELLINGS = {"su": "longrope"}
_SPECS: dict[str, Callable[[HF, HF], dict[str, Any]]] = {
    "default": lambda hf, rope: {},
    "linear": _factor,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
