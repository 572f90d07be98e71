"""Safetensors files as stored tensors: mapped into memory, read one by one.

Before: source.py (which folder).  After: load.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@frozen(eq=False)
class SafetensorsTensor:
    """One tensor of an open file (a `Stored` of quant/format.py)."""

    file: Any
    name: str
    shape: tuple[int, ...]
    nbytes: int
    qtype: str | None = None
    dtype: str = ""  # as safetensors names it
    notes: Mapping[str, str] = field(factory=dict)  # of the file's header; one for all tensors of a file

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor in `dtype`; a view of the mapped file when it already is."""
        return self.file.get_tensor(self.name).to(dtype)

    def item(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return tensor[index] in `dtype`, without reading the rest."""
        return self.file.get_slice(self.name)[index].to(dtype)

    def some(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return some rows in `dtype`; nothing else is read."""
        return self.file.get_slice(self.name)[rows].to(dtype)

    def blocks(self) -> Tensor:
        """Safetensors hold no GGUF blocks. Raises: CheckpointError: always."""
        raise CheckpointError(f"{self.name}: a safetensors tensor has no GGUF blocks.")


def files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: those that the index names, else model.safetensors, else all in the folder.

    Raises: CheckpointError: there are none, or the index names one that is not there.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()), key=str)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors files: {error!r}") from error
        if not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{index}: not an index of safetensors files: its weight_map holds other than names.")
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {INDEX} names files that are not there: {', '.join(map(str, missing))}.")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{folder}: no *.safetensors files.{pickled(folder)}")
    return found


def pickled(folder: Path) -> str:
    """Return what to say about the pickle files of a folder: why they are not read, and the way out; "" without any."""
    found = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not found:
        return ""
    return (
        f" {found[0]} is a pickle, which may run any code when it is opened, so it is not. If you trust it: "
        f'python -c \'from transformers import AutoModelForCausalLM as M; M.from_pretrained("{folder}")'
        f'.save_pretrained("{folder}")\''
    )


def open_safetensors(folder: Path) -> dict[str, SafetensorsTensor]:
    """Return every tensor of a checkpoint by name, none of them read yet.

    Raises: CheckpointError: a file is missing or damaged, or two files hold the same tensor.
    """
    found: dict[str, SafetensorsTensor] = {}
    for path in files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")
            notes = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  a safetensors file, not a dict
                if name in found:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in another file of {folder}.")
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                kind = part.get_dtype()
                nbytes = prod(shape) * ITEM_BYTES.get(kind, 1)
                found[name] = SafetensorsTensor(file, name, shape, nbytes, dtype=kind, notes=notes)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a safetensors file, or damaged: {error}. Fetch it again.") from error
    return found
