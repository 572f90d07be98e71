"""Fill a model from a checkpoint's tensors: strictly, tensor by tensor, on several threads.

Strict both ways: every part of every layer is filled, and every tensor of the checkpoint is read. What does not fit is
found before the first byte is read, and all of it stands in one error. A tensor goes from the mapped file straight into
its rows of a parameter, so beside the model itself memory is needed for a few tensors only. On its way to a GPU it
passes pinned memory (lanes.py).

Before: table.py (which tensor where); safetensors.py, gguf_names.py, dummy.py (what there is).
After: models/registry.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Protocol

import torch
from attrs import field, frozen
from torch import nn

from ..errors import CheckpointError
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..options import format_bytes
from ..quant.codes import Scheme
from ..quant.format import Stored, WeightFormat
from ..quant.grouped import Grouped
from ..quant.plain import Plain
from .dummy import NoiseCodes, noise, scaled
from .lanes import Carried, Lanes
from .table import Piece, Row, Weights, find, pieces, sources

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # bytes done, bytes in all; may be called from any thread, one call at a time
ChooseFormat = Callable[[str, Linear, tuple[Stored, ...]], WeightFormat]  # path, layer, the weight of each part
SchemeFor = Callable[[str, Linear, int], Scheme | None]  # path, layer, part
SHOWN = 8  # names in an error
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # computed from config.json; old checkpoints saved it all the same
MAX_THREADS = 8


class Target(Protocol):
    """A layer that wants tensors: Linear, Embedding, a norm."""

    parts: tuple[int, ...]
    names: tuple[str, ...]

    def shape(self, name: str, part: int) -> tuple[int, ...] | None: ...
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None: ...
    def load(self, name: str, part: int, stored: Stored) -> None: ...
    def finish(self) -> None: ...


@frozen(eq=False)
class Job:
    """One tensor to read into one part of one layer."""

    target: Target
    name: str
    part: int
    stored: Stored


@frozen(eq=False)
class Plan:
    """What goes where, and what does not fit.

    Args:
        jobs: in any order.
        shared: (head, owner): layers that use the owner's weight instead of one of their own.
        read: names of the checkpoint's tensors that some job reads.
        missing, wrong: names that are not there; tensors of another shape than the model's.
    """

    jobs: list[Job] = field(factory=list)
    shared: list[tuple[Linear, nn.Module]] = field(factory=list)
    read: set[str] = field(factory=set)
    missing: list[str] = field(factory=list)
    wrong: list[str] = field(factory=list)


def targets(model: nn.Module) -> Iterator[tuple[str, Target]]:
    """Yield the path and module of every layer that wants tensors."""
    for path, module in model.named_modules():
        if hasattr(module, "names") and hasattr(module, "parts"):
            yield path, module


def takes_format(target: Target) -> bool:
    """Whether the format of a layer is chosen by its tensors: a Linear's, and that of the matrices of experts."""
    return isinstance(target, Linear) or hasattr(target, "experts")


def parameter_count(model: nn.Module) -> int:
    """Return how many numbers a checkpoint of this model holds (a tied head counts too); needs no loaded weights."""
    return sum(
        prod(target.shape(name, part) or ())
        for _, target in targets(model)
        for part in range(len(target.parts))
        for name in target.names
    )


def plan_load(
    model: nn.Module,
    weights: Weights,
    tensors: Mapping[str, Stored],
    *,
    format_for: ChooseFormat | None = None,
    tied: Mapping[str, str] | None = None,
) -> Plan:
    """Match the model's layers with the checkpoint's tensors, choosing formats on the way; reads nothing.

    Args: as of `load`.
    """
    plan = Plan()
    modules = dict(targets(model))
    kv_heads = getattr(getattr(model, "config", None), "num_kv_heads", 1)
    for path, target in modules.items():
        if not target.parts:  # a norm without weights
            continue
        names = sources(weights, path, len(target.parts))
        owner = (tied or {}).get(path)
        if owner is not None and not any(f"{name}.weight" in tensors for name in names):
            row, names = find(weights, owner), sources(weights, owner)
        else:
            row, owner = find(weights, path), None
        if len(names) != len(target.parts):
            raise CheckpointError(f"{path}: {len(target.parts)} parts, but the family's table names {len(names)}.")
        jobs, wrong = match(target, row, names, tensors, kv_heads)
        stored = tuple(job.stored for job in jobs if job.name == "weight")
        if takes_format(target) and format_for is not None and not wrong and len(stored) == len(names):
            target.format = format_for(path, target, stored)
            jobs, wrong = match(target, row, names, tensors, kv_heads)
        blocks = bool(stored) and getattr(getattr(stored[0], "scheme", None), "blocks", False)
        if isinstance(target, Embedding) and format_for is not None and not wrong and blocks:
            target.keep(format_for(path, target, stored))
        # Any other format than the table's packs a copy of its own.
        if owner is not None and (type(target.format) is Plain or same_scheme(target.format, modules[owner].kept)):
            plan.shared.append((target, modules[owner]))
            continue
        wanted = [f"{module}.{name}" for module in dict.fromkeys(names) for name in target.names]
        plan.jobs.extend(jobs)
        plan.wrong.extend(wrong)
        plan.missing.extend(name for name in wanted if name not in tensors)
        plan.read.update(name for name in wanted if name in tensors)
    return plan


def same_scheme(format: WeightFormat, kept: Grouped | None) -> bool:
    """Whether a format keeps its weight in the codes that the table is kept in."""
    return isinstance(format, Grouped) and kept is not None and format.scheme == kept.scheme


def match(
    target: Target, row: Row, modules: tuple[str, ...], tensors: Mapping[str, Stored], kv_heads: int
) -> tuple[list[Job], list[str]]:
    """Return a job for each tensor of one layer that is there, and a line about each that has another shape.

    Args: row: of the table; modules: the checkpoint's, one per part.
    """
    jobs, wrong = [], []
    for part, module in enumerate(modules):
        for name in target.names:
            full, wanted = f"{module}.{name}", target.shape(name, part)
            if full not in tensors:
                continue
            parts = pieces(row, tensors[full], target.parts, kv_heads)
            stored = tensors[full] if parts is None else parts[part]
            if wanted is not None and stored.shape != wanted:
                wrong.append(f"{full} is {list(stored.shape)}, the model needs {list(wanted)}")
            jobs.append(Job(target, name, part, stored))
    return jobs, wrong


def check(plan: Plan, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError with all that does not fit: missing, unread and misshapen tensors."""
    unread = [name for name in tensors if name not in plan.read and not name.endswith(IGNORED_SUFFIXES)]
    faults = [("missing from the checkpoint", plan.missing), ("in the checkpoint, but unknown to the model", unread)]
    faults.append(("of another shape", plan.wrong))
    lines = [
        f"  {len(names)} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for what, names in faults
        if names
    ]
    if lines:
        raise CheckpointError("\n".join(["The checkpoint does not fit the model that its config describes:", *lines]))


def load(
    model: nn.Module,
    weights: Weights,
    tensors: Mapping[str, Stored],
    *,
    dtype: torch.dtype,
    device: torch.device,
    format_for: ChooseFormat | None = None,
    tied: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill `model`.

    Args:
        weights: the family's table.
        tensors: all tensors of the checkpoint by name.
        dtype, device: of the parameters.
        format_for: chooses the format of a linear layer; None: dense numbers everywhere.
        tied: {layer: owner}: a layer whose tensors are not in the checkpoint uses those of the owner.
        progress: told the bytes read so far and in all.
    Raises: CheckpointError: tensors are missing, left over, or of the wrong shape; nothing has been read then.
    """
    plan = plan_load(model, weights, tensors, format_for=format_for, tied=tied)
    check(plan, tensors)
    shared = {id(head) for head, _ in plan.shared}
    for _, target in targets(model):
        if id(target) not in shared:
            target.allocate(dtype, device)
    place = {id(stored): number for number, stored in enumerate(tensors.values())}
    began = time.perf_counter()
    run(sorted(plan.jobs, key=lambda job: place[id(origin(job.stored))]), progress, device)
    seconds, size = time.perf_counter() - began, sum(job.stored.nbytes for job in plan.jobs)
    log.info("weights: %s read in %.2f s, %s/s", format_bytes(size), seconds, format_bytes(size / seconds))
    for head, owner in plan.shared:
        owner.lend(head)


def origin(stored: Stored) -> Stored:
    """Return the tensor of the file that `stored` is, or is a piece of."""
    return stored.whole if isinstance(stored, Piece) else stored


def load_dummy(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    tied: Mapping[str, str],
    format_for: ChooseFormat | None = None,
    scheme_for: SchemeFor | None = None,
) -> None:
    """Fill `model` with noise that is the same for the same seed.

    Args:
        tied: {head: owner} that share a weight.
        format_for: as of `load`.
        scheme_for: the scheme that the config gives a part of a linear layer; None: plain numbers.
    """
    jobs = []
    modules = dict(targets(model))
    for path, target in modules.items():
        if path in tied:
            continue
        neutral, kind = getattr(target, "neutral", None), takes_format(target)
        stored: dict[tuple[str, int], Stored] = {}
        for part in range(len(target.parts)):
            for name in target.names:
                shape = target.shape(name, part)
                scheme = scheme_for(path, target, part) if scheme_for and kind and name == "weight" else None
                full = f"{path}.{name}.{part}"
                plain = scheme is None
                stored[name, part] = (
                    noise(full, shape, seed, neutral, device) if plain else NoiseCodes(full, shape, seed, scheme)
                )
        if kind and format_for is not None:
            target.format = format_for(
                path, target, tuple(one for (name, _), one in stored.items() if name == "weight")
            )
        target.allocate(dtype, device)
        jobs += [Job(target, name, part, one) for (name, part), one in stored.items()]
    run(jobs, None, device)
    scaled.cache_clear()
    for head, owner in tied.items():
        modules[head].share(modules[owner].weight)


def run(jobs: list[Job], progress: Progress | None, device: torch.device) -> None:
    """Read every tensor, in the order of the files, and finish each layer as soon as its last one is there."""
    lanes = None if device.type in ("cpu", "meta") else Lanes(device)
    left = Counter(id(job.target) for job in jobs)
    total, done = sum(job.stored.nbytes for job in jobs), 0
    lock = threading.Lock()

    def one(job: Job) -> None:
        nonlocal done
        job.target.load(job.name, job.part, job.stored if lanes is None else Carried(job.stored, lanes))
        with lock:
            left[id(job.target)] -= 1
            last = not left[id(job.target)]
            done += job.stored.nbytes
            if progress is not None:
                progress(done, total)
        if last:
            job.target.finish()

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "load") as threads:
        futures = [threads.submit(one, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
