"""From a checkpoint to a model that runs: find the family by the architecture's name, build, load.

A family's file is imported when its first checkpoint is opened, so a start-up pays for one family only. To add one,
write models/<family>.py (WEIGHTS, Layer, build) and a row here.

Before: checkpoint/source.py (the files), models/<family>.py.  After: engine/parts.py.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from types import ModuleType
from typing import Any

import torch

from ..checkpoint import cache_scales
from ..checkpoint.gguf_codes import too_large
from ..checkpoint.gguf_names import stored_tensors
from ..checkpoint.load import ChooseFormat, Progress, SchemeFor, load, load_dummy, takes_format, targets
from ..checkpoint.safetensors import open_safetensors
from ..checkpoint.source import Source
from ..checkpoint.stacked import unstack
from ..checkpoint.table import Weights, sources
from ..errors import CheckpointError, UnsupportedModel
from ..kernels.launch import use_kernel
from ..layers.linear import Linear
from ..quant.codes import Scheme
from ..quant.detect import detect, dummy_scheme, stacked_scheme
from ..quant.experts import PackedExperts
from ..quant.format import Stored
from ..quant.grouped import Grouped, grouped_formats
from ..quant.stored import Method, QuantizedTensor, wrap
from . import fallback
from .config import HF, architecture, choose_dtype
from .decoder import Decoder

log = logging.getLogger(__name__)

FAMILIES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "nemotron",
    "BloomForCausalLM": "bloom",
    "Cohere2ForCausalLM": "cohere",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie",
    "Ernie4_5_MoeForCausalLM": "ernie45_moe",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GlmForCausalLM": "glm4",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "HeliumForCausalLM": "ernie",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4",
    "LlamaForCausalLM": "llama",
    "MiniCPMForCausalLM": "granite",
    "MinistralForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
TIED = {"head": "embed"}


def family(name: str) -> ModuleType:
    """Return the module of an architecture. Raises: UnsupportedModel: there is none; names those that there are."""
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"Architecture {name!r} is not implemented; `serve` runs it through transformers, where that can "
            f"(pip install 'tinyserve[transformers]'). Implemented are {', '.join(sorted(FAMILIES))}."
        )
    return importlib.import_module(f".{FAMILIES[name]}", __package__)


def build_model(config: Mapping[str, Any]) -> Decoder:
    """Make the model that a config.json describes, without weights and without memory; enough to plan with.

    Raises: UnsupportedModel, CheckpointError: the config asks for something else than is implemented.
    """
    hf = HF(config)
    made = family(architecture(hf))
    try:
        model = made.build(hf)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        raise CheckpointError(f"config.json describes no model that can be built: {error}") from error
    if unread := hf.unread():
        log.warning("config.json keys that this version does not know and ignores: %s", ", ".join(unread))
    return model


def load_model(
    source: Source,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    format_for: ChooseFormat | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    """Build the model of a checkpoint and fill it.

    Args:
        source: where its files are.
        dtype: of activations and dense weights; "auto" by models/config.py::choose_dtype.
        device: where the parameters go.
        load_format: "auto" (GGUF if the source has one, else safetensors), "safetensors", "gguf" or "dummy".
        format_for: chooses the format of each linear layer from its path, the layer and its stored weights.
        overrides: keys that replace those of config.json.
        seed: of dummy weights.
        progress: told bytes done and bytes in all, from any thread.
    Raises: CheckpointError: files and config do not fit each other; UnsupportedModel: not implemented.
    """
    device = torch.device(device)
    config = {**source.config(), **(overrides or {})}
    if architecture(HF(config)) not in FAMILIES:
        return fallback.load(source, config, dtype=dtype, device=device, load_format=load_format)
    model = build_model(config)
    dtype = choose_dtype(dtype, model.config, device)
    if load_format == "dummy":
        method = detect(config, source.json("hf_quant_config.json"))
        options = {"dtype": dtype, "device": device, "format_for": format_for or grouped_formats()}
        options["scheme_for"] = config_schemes(config, method, family(model.config.architecture).WEIGHTS)
        load_dummy(model, seed=seed, tied=TIED if model.config.tied_head else {}, **options)
        report(model, method, [], device)
    else:
        cached, tensors = cache_scales.split(open_tensors(source, load_format, model))
        method = quantisation(source, config, load_format)
        if method is not None:
            tensors, format_for = wrap(tensors, method), format_for or grouped_formats()
        elif format_for is None and use_kernel(torch.empty(0, device=device)):
            format_for = grouped_formats(blocks=True, planes=too_large(tensors.values()))
        quantised = [one for one in tensors.values() if isinstance(one, QuantizedTensor)]
        options = {"dtype": dtype, "device": device, "format_for": format_for, "progress": progress}
        # A tied head may still have a tensor of its own in the file; then the file is right.
        made = family(model.config.architecture)
        tensors = unstack(as_saved(made, tensors, model.config.num_layers), getattr(made, "STACKS", {}))
        load(model, made.WEIGHTS, tensors, tied=TIED if model.config.tied_head else None, **options)
        cache_scales.load(model, made.WEIGHTS, as_saved(made, cached, model.config.num_layers))
        report(model, method, quantised, device)
    try:
        model.reach(model.config.max_model_len, device)
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"config.json promises {model.config.max_model_len} positions, whose table does not fit in memory: "
            "set a smaller max_position_embeddings with --hf-overrides."
        ) from error
    return model.eval()


def quantisation(source: Source, config: Mapping[str, Any], load_format: str) -> Method | None:
    """Return how a checkpoint's quantised matrices are read, None if there are none; GGUF blocks describe themselves.

    Raises: UnsupportedModel, CheckpointError.
    """
    if load_format == "dummy" or (source.gguf is not None and load_format != "safetensors"):
        return None
    return detect(config, source.json("hf_quant_config.json"))


def config_schemes(config: Mapping[str, Any], method: Method | None, weights: Weights) -> SchemeFor | None:
    """Return what says how a part of a layer would be quantised, as the config has it; None if it has none.

    Args:
        method: how the checkpoint's matrices are read; None if it describes itself, as gpt-oss's experts do.
        weights: the family's table, which knows the checkpoint's names.
    """
    stacked = stacked_scheme(config)
    if method is None and stacked is None:
        return None

    def scheme_for(path: str, layer: Linear, part: int) -> Scheme | None:
        if method is None:
            return stacked if hasattr(layer, "experts") else None
        names = sources(weights, path, len(layer.parts))
        return None if path == "head" else dummy_scheme(method, names[part], layer.parts[part], layer.inputs)

    return scheme_for


def weight_bytes(model: Decoder, dtype: torch.dtype, scheme_for: SchemeFor | None) -> int:
    """Return about how many bytes the weights of a model take, with what is quantised as codes; needs no weights."""
    total = 0
    tied = TIED if model.config.tied_head else {}
    for path, target in targets(model):
        for part in range(len(target.parts)) if path not in tied else ():
            for name in target.names:
                coded = scheme_for is not None and name == "weight" and takes_format(target)
                scheme = scheme_for(path, target, part) if coded else None
                shape = target.shape(name, part) or ()
                total += prod(shape) * dtype.itemsize if scheme is None else scheme.nbytes(*shape)
    return total


def report(model: Decoder, method: Method | None, quantised: list[QuantizedTensor], device: torch.device) -> None:
    """Log what became of quantised matrices: which are kept, which became plain numbers, and what is slow."""
    if method is not None and quantised:
        dense = sorted(set().union(*(one.made_dense for one in quantised)))
        kept = len(quantised) - len(dense)
        log.info("%s: %d quantised matrices, %d of them kept as they are", method.title, len(quantised), kept)
        if dense:
            log.warning(
                "%d matrices of %s were turned into plain numbers while loading, or packed anew for this CPU (%s ...)",
                len(dense), method.title, dense[0],
            )  # fmt: skip
    formats = [(layer, getattr(layer, "format", None)) for layer in model.modules()]
    layers = [layer for layer, own in formats if isinstance(own, Grouped | PackedExperts)]
    if layers and device.type == "cpu":
        log.warning(
            "%d products make their quantised matrix dense each time: they save memory, but are slower than plain "
            "numbers. --dtype auto without --quantization packs them for a CPU's fast products", len(layers),
        )  # fmt: skip
    slow = Counter(why for layer in layers if (why := layer.format.slower(layer)))
    for why, count in slow.items() if device.type != "cpu" else ():
        log.warning("%d quantised products may be slower than plain numbers: %s", count, why)


def as_saved(made: ModuleType, tensors: Mapping[str, Stored], num_layers: int) -> dict[str, Stored]:
    """Return a checkpoint's tensors under the names of the family's WEIGHTS.

    A family may say three things about checkpoints. LATER_LAYERS: where layers beyond the model's own are kept, which
    predict further tokens and are not run. PREFIX: what the names of all tensors but the head's begin with;
    a checkpoint saved from the bare model lacks it everywhere. COMPUTED: ends of names of tensors that the model
    computes itself, such as causal masks.
    """
    kept = {name: stored for name, stored in tensors.items() if not name.endswith(getattr(made, "COMPUTED", ()))}
    if hasattr(made, "LATER_LAYERS"):
        kept = {name: stored for name, stored in kept.items() if layer_number(name, made.LATER_LAYERS) < num_layers}
    prefix = getattr(made, "PREFIX", "")
    if any(name.startswith(prefix) for name in kept):
        return kept
    return {name if name.startswith("lm_head.") else prefix + name: stored for name, stored in kept.items()}


def layer_number(name: str, layers: str) -> int:
    """Return 7 for "model.layers.7.norm.weight" if `layers` is "model.layers"; -1 for what is in no layer."""
    found = re.match(rf"{re.escape(layers)}\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def open_tensors(source: Source, load_format: str, model: Decoder) -> dict[str, Stored]:
    """Return all tensors of the checkpoint by their Hugging Face names. Raises: CheckpointError."""
    if load_format not in ("auto", "safetensors", "gguf"):
        raise CheckpointError(f"load_format {load_format!r} is not one of auto, safetensors, gguf, dummy.")
    file = source.gguf_file if load_format != "safetensors" else None
    if file is not None:
        return stored_tensors(file, model.config.num_heads, model.config.num_kv_heads)
    if load_format == "gguf":
        raise CheckpointError(f"{source.name}: load_format is gguf, but there is no GGUF file.")
    return open_safetensors(source.folder)
