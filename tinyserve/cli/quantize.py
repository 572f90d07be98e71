"""`tinyserve quantize`: a checkpoint of plain numbers, rounded to fp8, int8 or int4 and saved as compressed-tensors.

    python -m tinyserve quantize Qwen/Qwen3-8B qwen3-8b-fp8
    python -m tinyserve quantize Qwen/Qwen3-8B qwen3-8b-int4 --scheme int4 --group-size 64 --skip 'layers\\.0\\.'
    python -m tinyserve quantize Qwen/Qwen3-8B qwen3-8b-gptq --scheme int4 --calibrate text.txt

Matrices are read one by one, so it takes little memory. Which they are, the model's own table says: those of linear
layers and experts, but for the head, routers and what --skip names; experts that a file holds in one tensor stay as
they are. Everything else is copied, the tokenizer too. A line for each matrix says how far its numbers have moved, and
quantization_report.json says it again.

Rounding is to the nearest: right for 8 bits. 4 bits may lose less with `--calibrate`, a text of the kind that the model
will see, the longer the better (131072 tokens are read at most): rounding makes up for its own errors on what the
layers saw (quant/compensate.py). A few thousand tokens of another kind do not help. It needs memory for the model.
Experts are rounded to the nearest even then; the lines and the report say which matrices the text has rounded.

Before: checkpoint/source.py, models/registry.py, quant/encode.py.  After: `tinyserve serve`, or any other reader.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from ..config import hub_offline
from ..errors import CheckpointError, ConfigError
from ..options import format_bytes
from .parse import Parser

SHARD_BYTES = 4 << 30
WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
REPORT = "quantization_report.json"
_HELP = (
    "Save a checkpoint of plain numbers in fp8, int8 or int4, as compressed-tensors. A line for each matrix tells its "
    "name, its shape and its error: how far its numbers have moved, as a share of what they were."
)


def run(argv: Sequence[str]) -> int:
    """Quantise a checkpoint. Raises: ConfigError, CheckpointError."""
    options = _options(argv)
    from ..checkpoint.source import resolve

    source = resolve(options.model, offline=hub_offline())
    if source.gguf is not None:
        raise ConfigError(f"{options.model} is a GGUF file, which is quantised already; take the original checkpoint.")
    config = source.config()
    if config.get("quantization_config"):
        raise ConfigError(f"{options.model} is quantised already; take the original checkpoint.")
    from safetensors import SafetensorError

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        empty = not any(options.out.iterdir())
    except OSError as error:
        raise ConfigError(f"{options.out}: no folder can be made there ({error.strerror}).") from None
    if not empty:
        raise ConfigError(f"{options.out} is not empty; name a new folder.")
    try:
        with _nothing_left(options.out):
            report = _convert(source, config, options)
    except (OSError, SafetensorError) as error:  # a full disk
        rest = f" {options.out} is not whole; remove it before another try." if options.out.exists() else ""
        raise CheckpointError(f"stopped: {error}.{rest}") from None
    worst = max(report["matrices"], key=lambda one: one["error"])
    print(
        f"{len(report['matrices'])} matrices in {options.scheme}: {format_bytes(report['bytes_before'])} -> "
        f"{format_bytes(report['bytes_after'])}, mean error {report['mean_error']:.4f}, "
        f"largest {worst['error']:.4f} ({worst['module']}); all errors are in {options.out / REPORT}.\n"
        f"Serve it: python -m tinyserve {quote(str(options.out))}"
    )
    return 0


@contextlib.contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """An empty folder is removed when the body fails, so that the same command can be tried again."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # it holds something
            folder.rmdir()
        raise


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises: ConfigError."""
    parser = Parser(prog="tinyserve quantize", description=_HELP, allow_abbrev=False)
    parser.add_argument("model", help="folder or hub name of a checkpoint of plain numbers")
    parser.add_argument("out", type=Path, help="folder to write; made if it is not there")
    parser.add_argument("--scheme", choices=("fp8", "int8", "int4"), default="fp8", help="[%(default)s]")
    columns = "columns of int4 that share a scale [%(default)s]"
    parser.add_argument("--group-size", type=int, metavar="N", default=128, help=columns)
    text = "text for rounding to int4 that looks at data; takes up to half of the device's free memory, at most 8 GiB"
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help=text)
    parser.add_argument("--skip", default=None, metavar="REGEX", help="modules to leave as they are, searched for")
    try:
        found = parser.parse_args(list(argv))
        re.compile(found.skip or "")
    except (re.error, RecursionError) as error:
        raise ConfigError(f"quantize --skip {found.skip}: no regular expression ({error}).") from None
    if found.group_size < 16 or found.group_size % 16:
        raise ConfigError(f"--group-size {found.group_size} is no multiple of 16.")
    if found.calibrate is not None and found.scheme != "int4":
        raise ConfigError(f"--calibrate is for --scheme int4; {found.scheme} is rounded to the nearest.")
    return found


def _convert(source: Any, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Write the new checkpoint. Returns: the report."""

    from ..checkpoint.safetensors import open_safetensors
    from ..quant.encode import config_of, encode, fits, scheme_of

    tensors, scheme = open_safetensors(source.folder), scheme_of(options.scheme, options.group_size)
    linear, routers = _modules(config)
    if not linear & {name.removesuffix(".weight") for name in tensors}:
        raise CheckpointError(f"{options.model}: no linear layer of the model is among the checkpoint's tensors.")

    def rounded(name: str) -> bool:
        module, _, kind = name.rpartition(".")
        left = bool(options.skip) and re.search(options.skip, module) is not None
        return kind == "weight" and module in linear and not left and fits(tensors[name].shape, scheme)

    if not any(map(rounded, tensors)):
        raise CheckpointError(f"{options.model}: every linear layer is left out by --skip or --group-size.")
    calibrated = {} if options.calibrate is None else _calibrated(options, tensors, rounded, scheme)
    matrices, before = [], 0
    ignored = {"lm_head", *(name for name in routers if f"{name}.weight" in tensors)}
    shards = Shards(options.out)
    for name, stored in tensors.items():
        module, _, kind = name.rpartition(".")
        numbers = stored.file.get_tensor(name)
        before += stored.nbytes
        if rounded(name):
            by_text = calibrated.pop(name, None)
            made = by_text or encode(numbers, scheme, _scale_type(numbers))
            facts = {"module": module, "shape": list(stored.shape), "calibrated": by_text is not None}
            matrices.append(facts | {"error": made.error})
            print(f"{module:<60} {list(stored.shape)!s:<16} {made.error:.4f}{' by the text' if by_text else ''}")
            for own, tensor in made.tensors.items():
                shards.add(f"{module}.{own}", tensor)
            continue
        if kind == "weight" and module in linear:
            ignored.add(module)
        shards.add(name, numbers)
    shards.finish()
    config = config | {"quantization_config": config_of(options.scheme, scheme, ignored)}
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in source.folder.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHTS):
            shutil.copy(path, options.out / path.name)
    mean = sum(one["error"] for one in matrices) / len(matrices)
    report = {
        "scheme": options.scheme,
        "calibrated": bool(options.calibrate),
        "mean_error": mean,
        "bytes_before": before,
        "bytes_after": shards.total,
    }
    report["matrices"] = matrices
    (options.out / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _scale_type(numbers: Any) -> Any:
    """The type in which scales of groups are kept."""
    import torch

    return numbers.dtype if numbers.dtype != torch.float32 else torch.float16


def _calibrated(
    options: argparse.Namespace, tensors: Any, rounded: Callable[[str], bool], scheme: Any
) -> dict[str, Any]:
    """Round what a text calibrates. Returns: matrices as they are saved, by the name of the weight."""
    from ..quant.encode import encode
    from .calibrate import read_text, sums

    found = {}
    for module, inputs in sums(options.model, read_text(options.calibrate)):
        name = f"{module}.weight"
        if name in tensors and rounded(name) and tensors[name].shape[1] == len(inputs):
            numbers = tensors[name].file.get_tensor(name)
            found[name] = encode(numbers, scheme, _scale_type(numbers), inputs)
    return found


def _modules(config: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The checkpoint's names of all linear layers and experts but the head; and those of routers, which stay plain."""
    from ..checkpoint.load import takes_format, targets
    from ..checkpoint.table import sources
    from ..layers.routing import Router
    from ..models.registry import build_model, family

    model = build_model(config)
    weights = family(model.config.architecture).WEIGHTS
    linear, routers = set(), set()
    for path, layer in targets(model):
        if takes_format(layer) and path != "head":
            linear.update(sources(weights, path, len(layer.parts)))
        elif isinstance(layer, Router):
            routers.update(sources(weights, path, len(layer.parts)))
    return linear, routers


class Shards:
    """Safetensors files of a few GB, and the index that names them. Args: folder: where they go."""

    def __init__(self, folder: Path) -> None:
        self.total = 0
        self._folder = folder
        self._held: dict[str, Any] = {}
        self._bytes = 0
        self._names: list[list[str]] = []

    def add(self, name: str, tensor: Any) -> None:
        """Keep a tensor, and write what is held once that is enough for a file."""
        if self._held and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._held[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self.total += tensor.nbytes

    def finish(self) -> None:
        """Write the rest, give the files their names, and write the index if there are several."""
        self._write()
        count, where = len(self._names), {}
        for number, names in enumerate(self._names, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._folder / name)
            where |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": where}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

    def _write(self) -> None:
        from safetensors.torch import save_file

        if self._held:
            self._names.append(list(self._held))
            save_file(self._held, self._path(len(self._names)), metadata={"format": "pt"})
        self._held, self._bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
