"""Which module of a checkpoint fills which module of the model.

A family's WEIGHTS maps module paths to checkpoint modules; `*` stands for the layer's number on both sides, and a tuple
fuses several checkpoint modules, in order, into the parts of one linear layer:

    "layers.*.attn.qkv": ("model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.k_proj", "...v_proj")

`#` stands for the number of an expert or a head. A layer that holds all of them takes its row once for each, in order:

    "layers.*.mlp.experts.gate_up": ("model.layers.*.mlp.experts.#.gate_proj", "model.layers.*.mlp.experts.#.up_proj")

Modules are mapped, not tensors: weights, biases, scales and adapters of one module follow the same row. Where a
checkpoint keeps the same numbers in another layout, the row says so with a `From`.

Before: models/<family>.py declares.  After: load.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError
from ..quant.codes import Codes, Scheme
from ..quant.format import Stored


@frozen
class From:
    """One checkpoint module that fills all parts of a layer.

    Args:
        name: of the module.
        grouped: its rows are not all q, then all k, then all v, but for each key/value head the queries that share it,
            its key, its value (GPT-NeoX, BLOOM, Falcon).
        transposed: weights are stored [inputs, outputs] (GPT-2).
    """

    name: str
    grouped: bool = False
    transposed: bool = False


Row = str | From | tuple[str, ...]
Weights = Mapping[str, Row]


@frozen(eq=False)
class Piece:
    """Some rows of a stored tensor (a `Stored` of quant/format.py).

    Args:
        whole: the tensor of the checkpoint.
        rows: which rows, a slice or int64 indices; of the transposed tensor if `transposed`.
        count: how many they are.
    """

    whole: Stored
    rows: slice | Tensor
    count: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.whole.shape[::-1] if self.transposed else self.whole.shape
        return (self.count, *shape[1:])

    @property
    def qtype(self) -> str | None:
        return self.whole.qtype

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * self.count // max(self.whole.shape[-1 if self.transposed else 0], 1)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers; see Stored."""
        if isinstance(self.rows, slice) and not self.transposed and hasattr(self.whole, "some"):
            return self.whole.some(self.rows, dtype)  # the parts of a large matrix, without converting it once for each
        whole = self.whole.read(dtype)
        return (whole.t() if self.transposed and whole.dim() == 2 else whole)[self.rows]

    @property
    def scheme(self) -> Scheme | None:
        """Of a quantised tensor (quant/stored.py), whose codes can be cut by rows; else None."""
        return None if self.transposed else getattr(self.whole, "scheme", None)

    def codes(self) -> Codes:
        """Return the codes of these rows."""
        return self.whole.codes().rows(self.rows)

    def blocks(self) -> Tensor:
        """Return the raw blocks, uint8 [rows, bytes of a row]."""
        if self.transposed:
            raise CheckpointError("Blocks of a transposed weight hold numbers of different rows.")
        return self.whole.blocks()[self.rows]


def find(weights: Weights, path: str) -> Row:
    """Return the row that fills the module at `path`, its numbers filled in; () when no row maps it.

    Args: path: a module path such as "layers.3.attn.qkv". Its number becomes the row's `*`, a second one its `#`.
    """
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", path)
    pattern = path
    for mark, number in zip("*#", numbers, strict=False):
        pattern = re.sub(rf"(?<=\.){number}(?=\.|$)", mark, pattern, count=1)

    def filled(name: str) -> str:
        for mark, number in zip("*#", numbers, strict=False):
            name = name.replace(mark, number, 1)
        return name

    row = weights.get(pattern, ())
    if isinstance(row, From):
        return From(filled(row.name), row.grouped, row.transposed)
    return filled(row) if isinstance(row, str) else tuple(filled(name) for name in row)


def sources(weights: Weights, path: str, parts: int = 1) -> tuple[str, ...]:
    """Return the checkpoint modules that fill the module at `path`, one for each of its parts; () when no row maps it.

    Args: parts: how many the layer has; needed by `From` rows, and by those of experts.
    """
    row = find(weights, path)
    if isinstance(row, From):
        return (row.name,) * parts
    names = (row,) if isinstance(row, str) else row
    if any("#" in name for name in names):
        return tuple(name.replace("#", str(expert)) for expert in range(parts // len(names)) for name in names)
    return names


def pieces(row: Row, stored: Stored, parts: Sequence[int], kv_heads: int) -> list[Stored] | None:
    """Return what of one stored tensor fills each part of its layer; None when its size is not that of all parts.

    Args:
        row: of the table.
        stored: a weight or a bias of the module that it names.
        parts: rows of each part.
        kv_heads: of the model, for rows in groups.
    """
    if not isinstance(row, From):
        return [stored] * len(parts)
    transposed = row.transposed and len(stored.shape) == 2
    if stored.shape[-1 if transposed else 0] != sum(parts):
        return None
    if not row.grouped:
        starts = [sum(parts[:part]) for part in range(len(parts))]
        rows = [slice(start, start + part) for start, part in zip(starts, parts, strict=True)]
    else:
        groups = torch.arange(sum(parts)).view(kv_heads, -1).split([part // kv_heads for part in parts], dim=1)
        rows = [group.flatten() for group in groups]
    return [Piece(stored, which, part, transposed) for which, part in zip(rows, parts, strict=True)]
