"""`tinyserve plan`: how the memory would be divided, from the checkpoint's headers alone. No weight is read.

Before: parse.py, models/registry.py, kv/groups.py, runner/memory.py.  After: a shell, and whoever buys the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from ..config import EngineConfig, hub_offline
from ..errors import ConfigError
from ..options import format_bytes
from . import log
from .parse import read_config


@frozen(kw_only=True)
class Facts:
    """What is known of a model without its weights.

    Args: weight_bytes: what it will hold.   kept: how: in words.   cached: type of keys and values, unless told.
    """

    name: str
    architecture: str
    cached: Any
    parameters: int
    file_bytes: int
    weight_bytes: int
    kept: str
    layers: Sequence[Any]
    max_model_len: int


def run(argv: Sequence[str]) -> int:
    """Print the plan. Returns the exit code: 1 when it does not fit."""
    config = read_config(
        argv, "tinyserve plan", "Print the memory plan of `serve` with the same options; loads no weight."
    )
    log.set_up(config.log)
    from ..device import Device
    from ..engine.parts import check_device, check_names

    check_names(config)
    device = Device.pick(config.model.device)
    check_device(config, device)
    memory = device.memory()
    config = config.resolve(device.kind, memory.total_bytes)
    facts = read_facts(config, device)
    for name, value in _model_lines(facts, config):
        print(f"{name:<18}{value}")
    try:
        for name, value in _cache_lines(facts, config, device, memory):
            print(f"{name:<18}{value}")
    except ConfigError as error:
        print(f"does not fit: {error}")
        return 1
    return 0


def read_facts(config: EngineConfig, device: Any) -> Facts:
    """Find the checkpoint and read its headers. Raises: CheckpointError, ConfigError."""
    from ..checkpoint.load import parameter_count
    from ..checkpoint.source import resolve
    from ..engine.parts import check_early, context
    from ..models.config import choose_dtype
    from ..models.registry import build_model, weight_bytes

    options = config.model
    source = resolve(
        options.model,
        revision=options.revision,
        cache_dir=config.load.download_dir,
        offline=hub_offline(),
        load_format=config.load.load_format,
    )
    check_early(config, source, options.served_model_name or (options.model,))
    model = build_model({**source.config(), **options.hf_overrides})
    dtype = choose_dtype(options.dtype, model.config, device.torch)
    shared = model.config.vocab_size * model.config.hidden if model.config.tied_head else 0
    parameters = parameter_count(model) - shared
    scheme_for, kept = _schemes(config, source, model, device)
    files = [source.gguf] if source.gguf else source.folder.glob("*.safetensors")
    return Facts(
        name=options.model,
        architecture=model.config.architecture,
        cached=_cached(config, model, device, dtype),
        parameters=parameters,
        file_bytes=sum(path.stat().st_size for path in files),
        weight_bytes=weight_bytes(model, dtype, scheme_for),
        kept=kept or f"as dense {str(dtype).removeprefix('torch.')}; less if they stay packed",
        layers=model.kv_layers(),
        max_model_len=context(options.max_model_len, model.config.max_model_len, None),
    )


def _cached(config: EngineConfig, model: Any, device: Any, dtype: Any) -> Any:
    """The type of keys and values: a CPU left to choose rounds them where it rounds weights (quant/cpu.py)."""
    import torch

    packs = device.is_cpu and config.model.dtype == "auto" and config.model.quantization in (None, "int8")
    return torch.bfloat16 if packs and model.config.dtype != torch.float32 else dtype


def _schemes(config: EngineConfig, source: Any, model: Any, device: Any) -> tuple[Any, str]:
    """Return what says in which codes a matrix is kept, None for dense numbers, and how to say it.

    A CPU left to choose (`--dtype auto`) packs in ways of its own; GGUF blocks are counted as dense too.
    """
    from ..models.registry import config_schemes, family, quantisation
    from ..quant.detect import check_asked, online_scheme

    asked, described = config.model.quantization, {**source.config(), **config.model.hf_overrides}
    method = quantisation(source, described, config.load.load_format)
    check_asked(asked, method)
    gguf = source.gguf is not None and config.load.load_format != "safetensors"
    if gguf or (device.is_cpu and config.model.dtype == "auto"):
        return None, ""
    method = quantisation(source, described, "auto")
    scheme = online_scheme(asked)
    if scheme is not None:
        return lambda path, layer, part: None if path == "head" else scheme, f"as {scheme.name}"
    found = config_schemes(described, method, family(model.config.architecture).WEIGHTS)
    return found, "" if found is None else "as the checkpoint's codes"


def _model_lines(facts: Facts, config: EngineConfig) -> Iterator[tuple[str, str]]:
    yield "model", f"{facts.name} ({facts.architecture})"
    files = f"in files of {format_bytes(facts.file_bytes)}" if facts.file_bytes else "by its config; no weight files"
    yield "parameters", f"{facts.parameters / 1e6:,.1f} M {files}"
    yield "weights", f"{format_bytes(facts.weight_bytes)} {facts.kept}"
    yield "step", f"{config.scheduler.max_num_batched_tokens} tokens, {config.scheduler.max_num_seqs} sequences"


def _cache_lines(facts: Facts, config: EngineConfig, device: Any, memory: Any) -> Iterator[tuple[str, str]]:
    from ..kv.groups import group_layers
    from ..kv.storage import block_bytes, cache_dtype, token_bytes
    from ..runner.memory import CacheRequest, blocks_per_sequence, plan_cache, room

    options = config.cache
    groups = group_layers(facts.layers)
    dtype = cache_dtype(options.kv_cache_dtype, facts.cached, facts.layers)
    a_block = block_bytes(groups, facts.layers, options.block_size, dtype)
    a_token = sum(token_bytes(layer, dtype) for layer in facts.layers)  # while every layer still sees it
    length = config.model.max_model_len
    request = CacheRequest(
        groups=groups,
        block_size=options.block_size,
        block_bytes=a_block,
        max_model_len=facts.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
        utilization=options.gpu_memory_utilization,
        cache_bytes=options.kv_cache_memory_bytes,
        num_blocks=options.num_gpu_blocks_override,
        fit=length is None or length == -1,
        cpu=device.is_cpu,
    )
    yield "device", f"{device.kind}: {format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free"
    full = sum(group.reach is None for group in groups)
    yield (
        "KV groups",
        f"{full} full, {len(groups) - full} with a window or chunk; blocks of {options.block_size} tokens",
    )
    yield "KV block", f"{format_bytes(a_block)}; a token costs {format_bytes(a_token)}"
    plan = plan_cache(request, room(request, memory, 0, facts.weight_bytes))
    tokens = (plan.num_blocks - 1) * plan.block_size // max(len(groups), 1)
    cut = f" (cut from {facts.max_model_len})" if plan.fitted else ""
    yield "KV cache", f"{format_bytes(plan.cache_bytes)}: {plan.num_blocks} blocks, at least {tokens} tokens"
    length = plan.max_model_len
    yield "context", f"{length} tokens{cut}" if length > 1 else "1 token, which leaves no room for an answer"
    each = max(blocks_per_sequence(request, plan.max_model_len), 1)
    yield "at full context", f"{(plan.num_blocks - 1) / each:.1f} requests at the same time"
    yield "not counted", "activations of the largest step and device graphs, which only a run can measure"
