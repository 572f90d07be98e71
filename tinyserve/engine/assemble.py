"""From parts to a machine: how much cache there is, and who stands where.

    Parts.model --kv_layers--> groups --size_cache--> blocks --> storage --bind--> model
                                                            '--> KVCache --> Scheduler        Sampler, model --> Runner

This is the one place where scheduler and runner are built together; afterwards only `StepInput`s pass between them.

Before: parts.py, runner/memory.py.  After: engine.py, whose loop drives the machine.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from ..config import CacheOptions, EngineConfig, usable_cores
from ..errors import ConfigError, TinyserveError
from ..options import format_bytes
from ..scheduling.budget import ANY, Crowd
from .adapters import Desk, NoDesk
from .pace import MANY
from .parts import Parts, Phases

if TYPE_CHECKING:
    from ..runner.foundry import Compilers

_log = logging.getLogger(__name__)
DEVICE_FILES = {"/dev/nvidiactl": "cuda", "/dev/dxg": "cuda", "/dev/kfd": "hip"}  # file of a driver: Triton's name
FEWEST_CORES = 4  # with fewer, what the foundry's processes import costs more than they save


@define(kw_only=True)
class Machine:
    """What the loop drives.

    Args:
        scheduler, runner, cache: see scheduling/scheduler.py, runner/runner.py, kv/cache.py.
        vocab_size: ids that the model knows.   max_model_len: context, fitted to the memory.
        depth: steps in flight.
        crowd: what prompts may take of a step that many share.
        max_running: sequences at the same time, 0 if unknown.   report: one line that says where the memory goes.
        grammars, masks: see grammar/compile.py, grammar/mask.py.   adapters: see adapters.py.
    """

    scheduler: Any
    runner: Any
    cache: Any
    grammars: Any = None
    masks: Any = None
    adapters: NoDesk = field(factory=NoDesk)
    vocab_size: int
    max_model_len: int
    depth: int = 1
    crowd: Crowd = ANY
    max_running: int = 0
    report: str = ""

    def for_prompts(self, streams: int) -> Crowd:
        """What prompts may take of a step that so many streams share."""
        return self.crowd if streams >= MANY else ANY

    def cache_facts(self, options: CacheOptions) -> dict[str, Any]:
        """The cache as it was built, for people: its options and its size in blocks."""
        size = {"block_size": self.cache.block_size, "num_gpu_blocks": self.cache.num_blocks}
        return asdict(options) | size

    def close(self) -> None:
        """Wait for the steps under way and let go of everything; blocks, so call it off the loop."""
        runner, self.runner = self.runner, None
        for threads in (self.grammars, self.masks):
            if threads is not None:
                threads.close()
        self.scheduler = self.cache = self.grammars = self.masks = None
        self.adapters = NoDesk()  # which reads for the layers that it knows
        if runner is not None:
            runner.close()
        gc.collect()


def open_foundry(config: EngineConfig) -> Compilers:
    """Processes that compile kernels, begun before torch is imported, with what the model's config lets expect.

    The context of the device is made meanwhile. Returns: NoFoundry where there is no GPU that Triton compiles for, or
    no cores to spare.
    """
    from ..checkpoint.source import resolve
    from ..runner.early import look
    from ..runner.foundry import Foundry, NoFoundry

    cores = usable_cores()
    found = [backend for file, backend in DEVICE_FILES.items() if Path(file).exists()]
    kind, _, number = config.model.device.partition(":")
    if kind == "cpu" or not found or cores < FEWEST_CORES:
        return NoFoundry()
    try:
        foundry = Foundry(cores - 1, found[0])
    except (OSError, TypeError) as error:  # Python inside another program does not know its own interpreter
        _log.warning("kernels are compiled by threads, which takes longer: no process could be started: %s", error)
        return NoFoundry()
    gpu = look(int(number) if number.isdigit() else 0) if found[0] == "cuda" else None
    if gpu is None:
        return foundry
    with contextlib.suppress(TinyserveError, OSError, ValueError):  # not there yet, or no good: said when it is loaded
        where = {"revision": config.model.revision, "cache_dir": config.load.download_dir}
        source = resolve(config.model.model, **where, load_format=config.load.load_format, offline=True, progress=False)
        page = config.resolve("cuda").cache.block_size
        foundry.expect(gpu, {**source.config(), **config.model.hf_overrides}, config.model.dtype, page)
    return foundry


def assemble(
    config: EngineConfig, parts: Parts, phases: Phases, foundry: Compilers | None = None, offline: bool = False
) -> Machine:
    """Size the cache for the device's memory and build storage, scheduler, sampler and runner.

    Args: foundry: as of `open_foundry`; None: kernels are compiled by threads.   offline: see EngineConfig.resolve.
    Raises: ConfigError: the cache cannot hold what is asked.
    """
    with phases("import"):
        from ..device import Device
        from ..kv.groups import group_layers
        from ..kv.storage import allocate
        from ..runner.memory import Needs
        from ..runner.warmup import warm_up

    device = parts.device or Device.pick(config.model.device)
    config = config.resolve(device.kind, device.memory().total_bytes, offline=offline)
    options, layers = config.scheduler, parts.model.kv_layers()
    groups = group_layers(layers)
    with phases("runner"):
        desk, adapted = _adapters(config, parts, device)
        runner = _runner(config, parts, device, len(groups), adapted)
    dtype = _cache_dtype(config, parts)

    def storage(blocks: int) -> Any:
        return allocate(groups, layers, blocks, config.cache.block_size, dtype, device.torch)

    needs = Needs()
    if not device.is_cpu:
        parts.model.bind(groups, storage(1))  # every table points at the null block
        needs = _prepare(runner, phases, foundry)
    with phases("cache"):
        plan = _plan(config, parts, device, dtype, needs)
        parts.model.bind(groups, storage(plan.num_blocks))
    if not device.is_cpu:
        with phases("warm-up and graphs"):
            warm_up(runner)
    _log.info("%s", plan.report())
    if plan.max_model_len < 2:
        _log.warning("a context of one token has no room for an answer: --max-model-len must be larger to get any")
    with phases("scheduler"):
        words = _words(parts, device, runner.limits.max_seqs, offline, config.runner.cpu_threads)
        cache, scheduler = _scheduler(config, plan, groups, words, desk.known, runner.limits.rows)
    for module in config.lora.lora_modules:
        with phases("adapters"):
            desk.load_now(module)
    return Machine(
        **words,
        adapters=desk,
        scheduler=scheduler,
        runner=runner,
        cache=cache,
        vocab_size=parts.model.vocab_size,
        max_model_len=min(plan.max_model_len, scheduler.max_length),
        depth=options.depth,
        crowd=_crowd(runner.graphs),
        max_running=options.max_num_seqs,
        report=plan.report(),
    )


def _prepare(runner: Any, phases: Phases, foundry: Compilers | None) -> Any:
    """Compile the kernels of a runner on a GPU; returns what its steps and graphs need: a runner.memory.Needs."""
    from ..runner.foundry import NoFoundry
    from ..runner.memory import Needs, step_bytes
    from ..runner.warmup import compile_kernels, graph_bytes, rehearse

    with phases("kernels"):
        compile_kernels(runner, usable_cores(), foundry or NoFoundry())
    runner.launch_aside()  # not before: kernels are named by this thread
    with phases("rehearsal"):
        step = step_bytes(runner.device, lambda: rehearse(runner))
        return Needs(step=step, graphs=graph_bytes(runner))


def _words(parts: Parts, device: Any, most: int, offline: bool, cores: int | None) -> dict[str, Any]:
    """What holds up to `most` answers of a step to grammars, each with threads of its own: grammars, masks.

    cores: for processes that compute masks beside a GPU; None: all.
    """
    import torch

    from ..grammar.compile import Grammars
    from ..grammar.crew import Facts
    from ..grammar.mask import MaskPool
    from ..grammar.replicas import Replicas, usual_workers
    from ..grammar.trial import PARENT_STACK
    from ..runner.workers import Workers

    ends = parts.eos_ids | parts.extra_eos_ids
    quick, slow = (Workers(name, stack=PARENT_STACK) for name in ("tinyserve-grammar", "tinyserve-slow-grammar"))
    tokenizer, size = parts.tokenizer, parts.model.vocab_size
    grammars = Grammars(tokenizer, size, ends, quick=quick, slow=slow, patient=offline)

    def memory(rows: int, width: int) -> Any:
        return device.host_buffer(rows, width, dtype=torch.int32).numpy()

    count = usual_workers(0 if device.is_cpu else cores or usable_cores())
    facts = Facts(tokenizer=tokenizer, size=size, words=lambda: grammars.words, most=most, share=device.share)
    replicas = Replicas(count, facts) if count else None
    return {"grammars": grammars, "masks": MaskPool(Workers("tinyserve-mask"), memory, most, replicas)}


def _scheduler(
    config: EngineConfig, plan: Any, groups: Any, words: dict[str, Any], adapters: Any, rows: int
) -> tuple[Any, Any]:
    """The cache of blocks, and the scheduler that fills it."""
    from ..kv.cache import KVCache
    from ..scheduling.scheduler import Scheduler

    prefixes = config.cache.enable_prefix_caching
    cache = KVCache(groups, plan.num_blocks, plan.block_size, enable_prefix_caching=prefixes)
    scheduler = Scheduler(
        config.scheduler,
        cache,
        max_model_len=plan.max_model_len,
        slots=rows,
        adapters=adapters,
        constrain=words["grammars"].constrain,
        make_masks=words["masks"].masks,
    )
    return cache, scheduler


def _adapters(config: EngineConfig, parts: Parts, device: Any) -> tuple[Any, Any]:
    """The desk of adapters, and their places on the device, which come before the cache: None if they are off.

    Raises: ConfigError: this model cannot have any.
    """
    if not config.lora.enable_lora:
        return NoDesk(), None
    from ..lora.adapters import LoadedAdapters
    from ..lora.batch import Adapted
    from ..lora.names import places, read_adapter
    from ..models.decoder import Decoder
    from ..models.registry import family

    model, most = parts.model, config.lora.max_lora_rank
    layers = places(model, family(model.config.architecture).WEIGHTS) if isinstance(model, Decoder) else []
    if not layers:
        raise ConfigError("--enable-lora is not built for this model, which runs through transformers or has no file.")
    adapted = Adapted(layers, config.lora.max_loras, most, device.torch)
    size = format_bytes(adapted.weights.nbytes)
    _log.info("adapters: %d places for rank %d take %s", config.lora.max_loras, most, size)

    def read(path: str) -> tuple[int, Any]:
        rank, found = read_adapter(path, layers, most)
        return rank, adapted.packed(found)

    known = LoadedAdapters(config.lora.max_loras)
    return Desk(known, read, parts.served_names, config.lora.max_cpu_loras), adapted


def _runner(config: EngineConfig, parts: Parts, device: Any, groups: int, adapted: Any) -> Any:
    """The runner. It comes before the cache: its buffers count as taken."""
    from ..grammar.bits import width
    from ..runner.graphs import SMALL_BYTES, Recorded, Wanted
    from ..runner.runner import Limits, Runner
    from ..sampling.sampler import Sampler

    options, length = config.scheduler, parts.max_model_len
    rows = options.max_num_seqs + options.depth  # a row that ended is held until its last flight has landed
    mode = config.model.logprobs_mode
    sampler = Sampler(rows, parts.model.vocab_size, length, device.torch, logprobs_mode=mode)
    limits = Limits(
        rows=rows,
        max_seqs=options.max_num_seqs,
        max_tokens=options.max_num_batched_tokens,
        max_model_len=length,
        block_size=config.cache.block_size,
        groups=groups,
        depth=options.depth,
        words=width(min(parts.tokenizer.vocab_size, parts.model.vocab_size), parts.eos_ids | parts.extra_eos_ids),
    )
    graphs: Any = None
    if device.has_graphs and not config.runner.enforce_eager and getattr(parts.model, "recordable", True):
        sizes = config.runner.cudagraph_capture_sizes
        kinds = {"adapted": adapted is not None, "small": parts.weight_bytes <= SMALL_BYTES}
        wanted = Wanted.usual(limits.max_seqs, limits.max_tokens, sizes, **kinds)
        graphs = Recorded(device, wanted)
    return Runner(parts.model, sampler, limits, device, graphs, adapted)


def _crowd(graphs: Any) -> Crowd:
    """The largest graph of prompts, where prompts that come in crowds have any: of a small model on a GPU."""
    from ..runner.graphs import CROWD_PROMPTS, MIXED_TOKENS

    tokens = max((shape.tokens - shape.decodes for shape in graphs.shapes()), default=0)
    return Crowd(tokens, CROWD_PROMPTS) if tokens > MIXED_TOKENS else ANY


def _cache_dtype(config: EngineConfig, parts: Parts) -> Any:
    """torch.dtype of cached keys and values."""
    import torch

    from ..kv.storage import cache_dtype

    asked = config.cache.kv_cache_dtype
    dtype = cache_dtype(asked, parts.dtype or torch.float32, parts.model.kv_layers())
    modules = getattr(parts.model, "modules", list)()
    if asked.startswith("fp8") and not any(getattr(module, "kv_scales", None) for module in modules):
        _log.warning("--kv-cache-dtype %s: the checkpoint has no k_scale and v_scale, so 1.0 is used", asked)
    return dtype


def _plan(config: EngineConfig, parts: Parts, device: Any, dtype: Any, needs: Any) -> Any:
    """The sizes of the cache: a runner.memory.CachePlan."""
    from ..kv.groups import group_layers
    from ..kv.storage import block_bytes
    from ..runner.memory import CacheRequest, size_cache

    layers = parts.model.kv_layers()
    groups = group_layers(layers)
    length = config.model.max_model_len
    request = CacheRequest(
        groups=groups,
        block_size=config.cache.block_size,
        block_bytes=block_bytes(groups, layers, config.cache.block_size, dtype),
        max_model_len=parts.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
        utilization=config.cache.gpu_memory_utilization,
        cache_bytes=config.cache.kv_cache_memory_bytes,
        num_blocks=config.cache.num_gpu_blocks_override,
        fit=length is None or length == -1,
        cpu=device.is_cpu,
    )
    return size_cache(request, device, parts.weight_bytes, needs)
