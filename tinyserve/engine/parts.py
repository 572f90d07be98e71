"""Everything that is read from a checkpoint: model, tokenizer, template, defaults. No cache, no loop yet.

`load_parts` goes from the name that the user typed to a `Parts`, and notes how long each phase took, because a start
that is slow must say where. Tests and notebooks make a Parts by hand, with a model of their own.

Before: checkpoint/, models/, text/.  After: assemble.py, which puts a cache, a runner and a scheduler around it.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from ..config import EngineConfig, c_compiler, hub_offline, prepare_cpu_environment
from ..errors import ConfigError, EngineError, RequestError
from ..text.parsers.registry import Parsing, choose
from .adapters import check_modules

_log = logging.getLogger(__name__)
DEVICES = ("auto", "cpu", "cuda", "xpu")


class Phases:
    """The steps of starting up, with their seconds, in order; and a way to end a start that nobody wants any more."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self._stopped = threading.Event()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the body of a `with` as phase `name`. Raises: EngineError: `stop` was called."""
        self.check()
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def stop(self) -> None:
        """Make the thread that loads give up at its next phase, or its next tensor."""
        self._stopped.set()

    def check(self) -> None:
        """Raises: EngineError: `stop` was called."""
        if self._stopped.is_set():
            raise EngineError("Loading was stopped.")

    def report(self) -> str:
        """One line: each phase, the sum, and the time that has passed in all, so that nothing slow goes unnamed."""
        parts = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        return ", ".join(
            [*parts, f"together {sum(self.seconds.values()):.2f} of {time.perf_counter() - self._began:.2f} s"]
        )


@define(kw_only=True)
class Parts:
    """What a checkpoint gives.

    Args:
        model: models/decoder.Decoder, or anything with its face; None once the engine has closed.
        tokenizer: text/tokenizer.Tokenizer.
        template: text/template.ChatTemplate, or None when the model has none.
        parsing: how thoughts and tool calls are found in answers.
        served_names: names in the API, the first is written in answers.
        max_model_len: the longest context that the checkpoint (and the user) allow, before memory is looked at.
        eos_ids: the tokenizer's end token.   extra_eos_ids: those that the configs name besides.
        default_sampling: fields of SamplingParams from generation_config.
        max_new_tokens: upper bound for max_tokens that the operator set, or None.
        device: device.Device that the model is on.   weight_bytes: what it holds there.
        dtype: torch.dtype of cached keys and values, unless the user says otherwise.
    """

    model: Any
    tokenizer: Any
    template: Any = None
    parsing: Parsing = field(factory=Parsing)
    served_names: tuple[str, ...] = ("model",)
    max_model_len: int
    eos_ids: frozenset[int] = field(default=frozenset(), converter=frozenset)
    extra_eos_ids: frozenset[int] = field(default=frozenset(), converter=frozenset)
    default_sampling: Mapping[str, Any] = field(factory=dict)
    max_new_tokens: int | None = None
    device: Any = None
    weight_bytes: int = 0
    dtype: Any = None


def load_parts(config: EngineConfig, phases: Phases) -> Parts:
    """Find, read and check everything that `config.model` names. Takes seconds: call it off the loop.

    Raises: ConfigError, CheckpointError.
    """
    prepare_cpu_environment(config.runner.cpu_threads)
    with phases("import"), _uncollected():
        from ..device import Device
    with phases("device"):
        device = _device(config, Device)
    with phases("import"), _uncollected():
        from ..models.config import choose_dtype
        from ..models.registry import load_model
        from ..quant.cpu import cached_dtype, packed_bytes
        from ..text.generation import GenerationDefaults

    with phases("files"):
        source = _resolve(config, config.model.model, phases.check)
        words = source if config.model.tokenizer is None else _resolve(config, config.model.tokenizer, phases.check)
        served = config.model.served_model_name or (config.model.model,)
        check_early(config, source, served)
    with phases("tokenizer"):
        tokenizer = _tokenizer(config, words)
        chat = {"template": _template(config, tokenizer), "parsing": choose_parsing(config, tokenizer)}
        defaults = GenerationDefaults.load(
            source,
            tokenizer,
            generation_config=config.model.generation_config,
            overrides=config.model.override_generation_config,
        )
    dtype, format_for = _formats(config, source, device)
    with phases("weights"), _bar(config.load.use_tqdm_on_load, phases.check) as progress:
        model = load_model(
            source,
            dtype=dtype,
            device=device.torch,
            load_format=config.load.load_format,
            format_for=format_for,
            overrides=config.model.hf_overrides,
            seed=config.model.seed,
            progress=progress,
        )
        _choose_products(model, config.runner.batch_invariant)
        device.settle()
    return Parts(
        model=model,
        tokenizer=tokenizer,
        **chat,
        served_names=served,
        max_model_len=_served(model, config.model.max_model_len, tokenizer.model_max_length, device),
        eos_ids=defaults.eos_ids,
        extra_eos_ids=defaults.extra_eos_ids,
        default_sampling=defaults.as_fields(),
        max_new_tokens=defaults.max_new_tokens if defaults.bounds_answers else None,
        device=device,
        weight_bytes=packed_bytes(model) + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        dtype=cached_dtype(model, choose_dtype(dtype, model.config, device.torch)),
    )


def check_names(config: EngineConfig) -> None:
    """Refuse what is wrong with any model, on any machine, before anything heavy is imported. Raises: ConfigError."""
    device, server = config.model.device, config.server
    if device.partition(":")[0] not in DEVICES:
        raise ConfigError(f"--device {device}: there is no such device; it may be {', '.join(DEVICES)}, or cuda:1.")
    choose("", tool_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser)
    if (text := _own_template(config)) is not None:
        _compiled(config, text, {})


def check_early(config: EngineConfig, source: Any, served: Sequence[str]) -> None:
    """Refuse what can be known to be wrong before minutes of reading weights. Raises: ConfigError."""
    from ..models.config import promised_length

    promised = promised_length({**source.config(), **config.model.hf_overrides})
    context(config.model.max_model_len, promised, None)
    check_modules(config.lora.lora_modules, served, config.lora.max_lora_rank)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make a million objects and no garbage; looking for it takes a tenth of their time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _device(config: EngineConfig, devices: Any) -> Any:
    """The device, a GPU with its context made: else that counts for whatever phase touches it first."""
    device = devices.pick(config.model.device, config.runner.cpu_threads)
    check_device(config, device)
    check_compiler(device)
    device.synchronize()
    return device


def check_device(config: EngineConfig, device: Any) -> None:
    """Raises: ConfigError: an option is for another kind of device."""
    if config.runner.batch_invariant and device.is_cpu:
        raise ConfigError("--batch-invariant needs a GPU; on a CPU, --dtype float32 comes closest.")


def check_compiler(device: Any) -> None:
    """Raises: ConfigError: this is a GPU, and there is no C compiler for Triton's launchers."""
    if not device.is_cpu and c_compiler() is None:
        raise ConfigError(
            "No C compiler was found; Triton needs one to launch kernels on a GPU. Install gcc or clang, or set CC to "
            "the path of one."
        )


def _formats(config: EngineConfig, source: Any, device: Any) -> tuple[str, Any]:
    """Return the type of the activations, and what chooses the format of each product; None: as the checkpoint says.

    Raises: ConfigError: --quantization contradicts the checkpoint.
    """
    from ..models.registry import quantisation
    from ..quant.cpu import cpu_formats
    from ..quant.detect import check_asked, online
    from ..quant.grouped import grouped_formats

    asked, load_format = config.model.quantization, config.load.load_format
    check_asked(asked, quantisation(source, {**source.config(), **config.model.hf_overrides}, load_format))
    # On a CPU, 8 bits are what --dtype auto packs anyway, for the fast products of quant/cpu.py.
    pack = device.is_cpu and config.model.dtype == "auto" and load_format != "dummy"
    if pack and (asked == "int8" or online(asked) is None):
        return "float32", cpu_formats()
    if config.runner.batch_invariant and source.gguf is not None and online(asked) is None:
        return config.model.dtype, grouped_formats()  # blocks become numbers: no product of codes promises equal bits
    return config.model.dtype, online(asked)


def _choose_products(model: Any, invariant: bool) -> None:
    """invariant: an answer's bits shall not depend on what shares its batch. Raises: ConfigError, UnsupportedModel."""
    if not invariant:
        return
    if not hasattr(model, "make_invariant"):
        raise ConfigError("--batch-invariant is not built for models that run through transformers.")
    model.make_invariant()


def _served(model: Any, asked: int | None, tokenizer_limit: int | None, device: Any) -> int:
    """The context in tokens, as of `context`; the model's tables are made for no longer one."""
    longest = context(asked, model.config.max_model_len, tokenizer_limit)
    if longest < model.config.max_model_len:
        model.reach(longest, device.torch)
    return longest


def context(asked: int | None, promised: int, tokenizer_limit: int | None) -> int:
    """The context in tokens: what the checkpoint promises, or less if asked; -1 and None ask for all of it.

    Raises: ConfigError: more is asked than the model was made for.
    """
    longest = min(promised, tokenizer_limit or promised)
    if asked is None or asked == -1:
        return longest
    if asked > promised:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {promised} tokens that the model was made for; its answers "
            f"would be noise. Use at most {promised}, or change the model's length with --hf-overrides."
        )
    return asked


def drawable(bar: type) -> bool:
    """Whether a progress bar of this class can be drawn: in a notebook, or on a terminal; not into a log file."""
    notebook = any(base.__module__ == "tqdm.notebook" for base in bar.__mro__)
    return notebook or sys.stderr.isatty()


def _resolve(config: EngineConfig, name: str, check: Callable[[], None] = lambda: None) -> Any:
    from ..checkpoint.source import resolve

    return resolve(
        name,
        revision=config.model.revision,
        cache_dir=config.load.download_dir,
        offline=hub_offline(),
        progress=config.load.use_tqdm_on_load,
        load_format=config.load.load_format,
        check=check,
    )


def _tokenizer(config: EngineConfig, words: Any) -> Any:
    """The tokenizer of a Source; where it has none and weights are dummies, one of bytes."""
    from ..text.tokenizer import Tokenizer

    if config.load.load_format != "dummy" or words.gguf or words.file("tokenizer.json"):
        return Tokenizer.load(words)
    _log.warning("%s has no tokenizer; with dummy weights, bytes stand in for one", words.name)
    return Tokenizer.stand_in()


def _template_text(config: EngineConfig, tokenizer: Any) -> Any:
    """The chat template's text, or its named texts: the user's, else the model's."""
    own = _own_template(config)
    return tokenizer.chat_template if own is None else own


def _own_template(config: EngineConfig) -> str | None:
    """The text of --chat-template, which is a file or the text itself. Raises: ConfigError: it is neither."""
    asked = config.server.chat_template
    if asked is None or "{" in asked:
        return asked
    path = Path(asked)
    if not path.is_file():
        raise ConfigError(f"--chat-template {asked}: no such file, and not a template either.")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {asked}: cannot be read: {error}.") from None


def _template(config: EngineConfig, tokenizer: Any) -> Any:
    """The chat template, or None.

    A model whose own template cannot be used still completes texts; a template that the user named must work.
    """
    text = _template_text(config, tokenizer)
    return None if text is None else _compiled(config, text, tokenizer.facts.special_tokens)


def _compiled(config: EngineConfig, text: Any, special_tokens: Mapping[str, str]) -> Any:
    from ..text.template import ChatTemplate

    try:
        form = config.server.chat_template_content_format
        return ChatTemplate(text, special_tokens=special_tokens, content_format=form)
    except RequestError as error:
        if config.server.chat_template is not None:
            raise ConfigError(f"--chat-template: {error}") from error
        _log.warning("the model's chat template cannot be used, so chat is off: %s", error)
        return None


def choose_parsing(config: EngineConfig, tokenizer: Any) -> Parsing:
    """How answers are read: as the options say, else as the chat template tells.

    Raises: ConfigError: an option names no parser.
    """
    text = _template_text(config, tokenizer)
    if isinstance(text, Mapping):
        text = "\n".join(text.values())
    server = config.server
    parsing = choose(
        text,
        tool_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
        special=tuple(sorted(filter(None, map(tokenizer.token_text, tokenizer.special_ids)))),
    )
    for what, family in (("tool calls", parsing.tools), ("thoughts", parsing.thoughts)):
        if family is not None:
            _log.info("%s are read as %s writes them", what, family.name)
    return parsing


@contextmanager
def _bar(show: bool, check: Callable[[], None]) -> Iterator[Callable[[int, int], None]]:
    """What is told of each tensor that was read: draws a progress bar if that is wanted, and calls `check`."""
    from ..checkpoint.bars import bar_class

    tqdm = bar_class()
    if not show or not drawable(tqdm):
        yield lambda _done, _total: check()
        return
    with tqdm(desc="Weights", unit="B", unit_scale=True, unit_divisor=1024, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            check()
            bar.total = total
            bar.update(done - bar.n)

        yield progress
