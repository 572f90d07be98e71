"""Tensors that hold all experts of a layer at once, seen as one tensor for each expert and part.

Most checkpoints store an expert like any linear layer, and weight tables name them so (`#` in table.py). Some families
stack them, in a layout of their own. STACKS in a model file says how, and the rest of the loader never knows:

    "model.layers.*.mlp.experts.gate_up_proj": Stack(("...experts.#.gate_proj.weight", "...experts.#.up_proj.weight"),
                                                     transposed=True, interleaved=True)

Nothing is read here; an expert is cut out of the mapped file when its turn comes.

Before: safetensors.py.  After: load.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError
from ..quant.format import Stored


@frozen
class Stack:
    """How one stored tensor [E, ...] holds the experts.

    Args:
        parts: names of the tensors that each expert's rows are, in order; `*` is the layer, `#` the expert.
        transposed: an expert is stored [inputs, outputs].
        interleaved: rows of the parts alternate instead of following each other.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False


@frozen(eq=False)
class Slice:
    """Some rows of one expert (a `Stored` of quant/format.py). Args: part: of `stack.parts`."""

    whole: Stored
    stack: Stack
    expert: int
    part: int
    qtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.whole.shape[1:]
        inner = inner[::-1] if self.stack.transposed else inner
        return (inner[0] // len(self.stack.parts), *inner[1:])

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * prod(self.shape) // max(prod(self.whole.shape), 1)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers; see Stored."""
        rows = self.whole.item(self.expert, dtype)
        rows = rows.T if self.stack.transposed else rows
        if self.stack.interleaved:
            return rows[self.part :: len(self.stack.parts)]
        return rows.chunk(len(self.stack.parts))[self.part]

    def blocks(self) -> Tensor:
        """Stacked experts of plain numbers have no blocks. Raises: CheckpointError: always."""
        raise CheckpointError("Stacked experts hold no GGUF blocks.")


def unstack(tensors: Mapping[str, Stored], stacks: Mapping[str, Stack]) -> dict[str, Stored]:
    """Return the tensors with each stacked one replaced by its slices.

    Args: stacks: by name of the stored tensor, with `*` for the layer's number.
    Raises: CheckpointError: a stacked tensor's rows do not divide into its parts.
    """
    if not stacks:
        return dict(tensors)
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if number is None else name.replace(f".{number[0]}.", ".*.", 1)
        stack = stacks.get(pattern)
        if stack is None:
            found[name] = stored
            continue
        rows = stored.shape[-1 if stack.transposed else 1]
        if rows % len(stack.parts):
            raise CheckpointError(f"{name} has {rows} rows an expert, which {len(stack.parts)} parts cannot share.")
        for expert in range(stored.shape[0]):
            for part, target in enumerate(stack.parts):
                named = target.replace("*", number[0], 1).replace("#", str(expert), 1)
                found[named] = Slice(stored, stack, expert, part)
    return found
