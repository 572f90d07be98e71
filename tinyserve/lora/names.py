"""A PEFT checkpoint: which module it adapts by how much, or why it cannot be used.

    adapter_config.json         r, lora_alpha, use_rslora, rank_pattern, alpha_pattern ...
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, K], ...lora_B.weight [N, r]

The modules are those of the base checkpoint, so the family's own table (WEIGHTS) says where they are in the model:
q_proj is a part of the fused `attn.qkv`, and a module that fills all parts at once (Phi-3's qkv_proj) gives each of
them the same A. Which modules are adapted is read from the tensors; the config must agree with them (config.py).

An adapter that asks for more than W + factor * B A is refused by the name of what it asks for, because its answers
would be wrong without it; so is one with a single tensor that has no place here. The base model must not answer
instead.

Before: checkpoint/table.py, models/registry.py (the table), config.py.  After: batch.py (brings it to the device).

Source: Hu et al., arXiv:2106.09685 (factor alpha / r); Kalajdzievski, arXiv:2312.03732 (alpha / sqrt(r)).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..checkpoint.table import From, Weights, find, pieces, sources
from ..errors import CheckpointError, shown
from ..kernels.lora import MOST_PARTS
from ..layers.linear import Linear
from .config import Alphas, check_agrees, rank_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
CONFIG_BYTES = 1 << 20
HEADER_BYTES = 8 << 20  # of the tensors' names: 2,000 take 0.3 MB; one of 76 MB stopped the interpreter for 2 s
FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")
# Keys that say how it was trained, or that are read here. Any other one, if it is set, changes what modules compute.
HARMLESS = {
    *("r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "init_lora_weights", "peft_type"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout"),
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("megatron_core", "eva_config", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
}
# Other ways to begin training change the base weights as well, which the adapter alone does not tell.
BEGUN = (True, False, None, "gaussian", "eva", "orthogonal")
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")


@frozen(eq=False)
class Place:
    """Where the parts of a linear layer come from. modules: of the base checkpoint, one for each part."""

    path: str
    layer: Linear
    modules: tuple[str, ...]
    row: Any
    kv_heads: int

    def share(self, part: int, b: Tensor) -> Tensor:
        """The rows of a module's B [N, r] that make this part."""
        row = From(self.row.name, self.row.grouped) if isinstance(self.row, From) else self.row
        found = pieces(row, _Rows(b), self.layer.parts, self.kv_heads)
        return b if found is None else found[part].read(b.dtype)

    def rows(self, part: int) -> int:
        """Rows of the B of this part's module."""
        return self.layer.outputs if isinstance(self.row, From) else self.layer.parts[part]


@frozen(eq=False)
class _Rows:
    """A matrix as checkpoint/table.py sees stored ones."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, dtype: torch.dtype) -> Tensor:
        """All of it."""
        return self.tensor.to(dtype)


@frozen(eq=False)
class Pair:
    """How one module is changed: W + b a. a: [r, K]; b: [N, r], multiplied by the factor; both float32."""

    a: Tensor
    b: Tensor


def places(model: nn.Module, weights: Weights) -> list[Place]:
    """The linear layers of a model that can be adapted: all but the head and the experts."""
    found = []
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and path != "head" and len(layer.parts) <= MOST_PARTS:
            modules = sources(weights, path, len(layer.parts))
            if modules:
                found.append(Place(path, layer, modules, find(weights, path), model.config.num_kv_heads))
    return found


def check_adapter(path: str, max_rank: int) -> None:
    """What can be said of an adapter before there is a model: its config, and the names and shapes of its tensors.

    Raises: CheckpointError: as read_adapter.
    """
    with _opened(path, max_rank):
        pass


def read_adapter(path: str, layers: list[Place], max_rank: int) -> tuple[int, dict[str, Pair]]:
    """Read an adapter for these layers. Returns: its largest rank, and what changes by the base checkpoint's module.

    Raises: CheckpointError: it is not there, damaged, of too large a rank, or not for this model; says which.
    """
    widths = {module: (place.layer.inputs, place.rows(part)) for place in layers
              for part, module in enumerate(place.modules)}  # fmt: skip
    found = {}
    with _opened(path, max_rank) as (alphas, pairs):
        _check_names(pairs, widths, path)
        _check_sizes(pairs, widths, path)
        for module, (a, b) in pairs.items():
            pair = Pair(a.read(), b.read() * alphas.factor(module, a.shape[0]))
            if not (pair.a.isfinite().all() and pair.b.isfinite().all()):
                raise CheckpointError(f"{path}: {module} holds, or is multiplied by, numbers that are not finite.")
            found[module] = pair
    return max(a.shape[0] for a, _ in pairs.values()), found


@contextmanager
def _opened(path: str, max_rank: int) -> Iterator[tuple[Alphas, dict[str, tuple[_Half, _Half]]]]:
    """The factors of an adapter and its halves A and B by module, none of them read; they agree with its config."""
    folder = Path(path)
    config = _config(folder)
    _check(config, path)
    alphas = Alphas(config, path)
    with _stored(folder, path) as tensors:
        pairs = _paired(tensors, path)
        ranks = _ranks(pairs, path)
        if (rank := max(ranks.values())) > max_rank:
            raise CheckpointError(f"{path}: its rank is {rank}, above the limit of {max_rank} (--max-lora-rank).")
        check_agrees(config, ranks, path)
        yield alphas, pairs


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    try:
        here, there = folder.is_dir(), file.is_file()
    except (OSError, ValueError):  # no name that a folder could have
        here = there = False
    if not there:
        what = f"there is no {CONFIG} in it" if here else "there is no such folder"
        raise CheckpointError(f"{str(folder)[:1000]!r}: {what}. An adapter is a folder with {CONFIG} and {TENSORS}.")
    try:
        if file.stat().st_size > CONFIG_BYTES:
            raise ValueError(f"it has more than {CONFIG_BYTES} bytes")
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: must hold an object.")
    return config


def _check(config: Mapping[str, Any], path: str) -> None:
    """Refuse what is more than a low-rank addition."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {shown(kind)}; only LORA is built.")
    for key, value in config.items():
        if value and key not in HARMLESS and not (key == "bias" and value == "none"):
            raise CheckpointError(
                f"{path}: {shown(key)} = {shown(value)} is more than a low-rank addition, and is not built."
            )
    if config.get("r") is not None:
        rank_of(path, "r", config["r"])
    began = config.get("init_lora_weights", True)
    if began not in BEGUN:
        raise CheckpointError(
            f"{path}: init_lora_weights = {shown(began)} changed the base weights as well. Convert it to a plain "
            "adapter when saving (path_initial_model_for_weight_conversion)."
        )


@contextmanager
def _stored(folder: Path, path: str) -> Iterator[dict[str, _Half]]:
    """The tensors of an adapter by name, none of them read."""
    file = folder / TENSORS
    if not file.is_file():
        pickle = " adapter_model.bin is a pickle, which may run any code when it is opened, so it is not read."
        raise CheckpointError(
            f"{path}: there is no {TENSORS}.{pickle if (folder / 'adapter_model.bin').exists() else ''}"
        )
    try:
        with file.open("rb") as begin:
            header = int.from_bytes(begin.read(8), "little")
        if HEADER_BYTES < header < file.stat().st_size:
            raise CheckpointError(f"{file}: its header has {header} bytes; at most {HEADER_BYTES} are read.")
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = opened.keys()
            yield {name: _Half.of(name, opened) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a safetensors file, or damaged: {error}.") from error


@frozen(eq=False)
class _Half:
    """An A or a B as it is stored."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, opened: Any) -> _Half:
        piece = opened.get_slice(name)
        return cls(tuple(piece.get_shape()), piece.get_dtype(), lambda: opened.get_tensor(name).float())


def _paired(tensors: Mapping[str, _Half], path: str) -> dict[str, tuple[_Half, _Half]]:
    """A and B by the module's name in the base checkpoint."""
    halves: dict[str, dict[str, _Half]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(f"{path}: {key!r} is no part of a low-rank adapter of a linear layer.")
        module, half = _text_only(match[1]), match[2]
        if half in halves.setdefault(module, {}):
            raise CheckpointError(f"{path}: {TENSORS} holds lora_{half} of {module} twice.")
        halves[module][half] = tensor
    for module, pair in halves.items():
        if len(pair) < 2:
            raise CheckpointError(f"{path}: {module} has only lora_{min(pair)}.")
        if other := {half.dtype for half in pair.values()}.difference(FLOATS):
            raise CheckpointError(f"{path}: {module} has matrices of {min(other)}; read are {', '.join(FLOATS)}.")
    if not halves:
        raise CheckpointError(f"{path}: {TENSORS} holds no tensors.")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def _text_only(module: str) -> str:
    """The name in the text model alone, for adapters trained inside a model that also sees."""
    return module.replace("language_model.", "", 1)


def _ranks(pairs: Mapping[str, tuple[_Half, _Half]], path: str) -> dict[str, int]:
    """The rank of each module, which both of its halves have."""
    for module, (a, b) in pairs.items():
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise CheckpointError(
                f"{path}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, which are no [r, inputs] and "
                "[outputs, r]."
            )
    return {module: a.shape[0] for module, (a, _) in pairs.items()}


def _check_names(found: Mapping[str, Any], known: Mapping[str, Any], path: str) -> None:
    """Refuse modules that the model does not have, or that cannot be adapted here."""
    strange = sorted(found.keys() - known.keys())
    if not strange:
        return
    which = "none of its modules is" if len(strange) == len(found) else f"{len(strange)} of its modules are not"
    raise CheckpointError(
        f"{path}: {which} one that can be adapted in this model. Found: {', '.join(strange[:3])}"
        f"{' ...' if len(strange) > 3 else ''}. Expected: {', '.join(sorted(known)[:3])} ... (no embeddings, heads and "
        "experts)."
    )


def _check_sizes(pairs: Mapping[str, tuple[_Half, _Half]], widths: Mapping[str, tuple[int, int]], path: str) -> None:
    """Refuse an adapter whose matrices are not of the model's sizes."""
    for module, (a, b) in pairs.items():
        inputs, outputs = widths[module]
        if (a.shape[1], b.shape[0]) != (inputs, outputs):
            raise CheckpointError(
                f"{path}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but this model needs "
                f"[r, {inputs}] and [{outputs}, r]: it was made for another model."
            )
