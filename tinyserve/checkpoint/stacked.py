"""Tensors that hold all experts of a layer at once, seen as one tensor for each expert and part.

Most checkpoints store an expert like any linear layer, and weight tables name them so (`#` in table.py). Some families
stack them, in a layout of their own. STACKS in a model file says how, and the rest of the loader never knows:

    "model.layers.*.mlp.experts.gate_up_proj": Stack(("...experts.#.gate_proj.weight", "...experts.#.up_proj.weight"),
                                                     transposed=True, interleaved=True)

Nothing is read here; an expert is cut out of the mapped file when its turn comes. Experts in MXFP4 (gpt-oss) are codes
then, as any quantised matrix (quant/codes.py), or plain numbers for whoever asks for those: each byte of `_blocks`
holds two numbers of four bits, each byte of `_scales` the exponent of 32.

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
from ..kernels.grouped_gemm import unpack
from ..quant.codes import Codes, Scheme
from ..quant.format import Stored
from ..quant.fp4 import MXFP4, powers


@frozen
class Stack:
    """How one stored tensor [E, ...] holds the experts.

    Args:
        parts: names of the tensors that each expert's rows are, in order; `*` is the layer, `#` the expert.
        transposed: an expert is stored [inputs, outputs].
        interleaved: rows of the parts alternate instead of following each other.
        scales: name of the exponents [E, rows, blocks], if the numbers are MXFP4: [E, rows, blocks, 16] bytes.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    scales: str = ""


@frozen(eq=False)
class Slice:
    """Some rows of one expert (a `Stored` of quant/format.py). Args: part: of `stack.parts`."""

    whole: Stored
    stack: Stack
    expert: int
    part: int
    scales: Stored | None = None
    qtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.whole.shape[1:]
        if self.scales is not None:
            inner = (inner[0], inner[1] * 2 * inner[2])
        inner = inner[::-1] if self.stack.transposed else inner  # the bias of an expert is one row of numbers
        return (inner[0] // len(self.stack.parts), *inner[1:])

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes * prod(self.shape) // max(prod(self.whole.shape), 1)

    @property
    def scheme(self) -> Scheme | None:
        """Of MXFP4 codes; None for plain numbers."""
        return None if self.scales is None else MXFP4

    def codes(self) -> Codes:
        """Return the codes of these rows; only when `scheme` is set."""
        blocks, exponents = (self._mine(one.item(self.expert, torch.uint8)) for one in (self.whole, self.scales))
        return mxfp4(blocks, exponents)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers; see Stored."""
        if self.scales is not None:
            return self.codes().dense(dtype)
        rows = self.whole.item(self.expert, dtype)
        return self._mine(rows.T if self.stack.transposed and rows.dim() == 2 else rows)

    def _mine(self, rows: Tensor) -> Tensor:
        """Those of an expert's rows that belong to the part."""
        if self.stack.interleaved:
            return rows[self.part :: len(self.stack.parts)]
        return rows.chunk(len(self.stack.parts))[self.part]

    def blocks(self) -> Tensor:
        """Stacked experts of plain numbers have no blocks. Raises: CheckpointError: always."""
        raise CheckpointError("Stacked experts hold no GGUF blocks.")


def mxfp4(blocks: Tensor, exponents: Tensor) -> Codes:
    """Return the codes of blocks uint8 [rows, B, 16], low half first, and exponents uint8 [rows, B]: [rows, B * 32].

    Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 5.4.1.
    """
    return Codes(MXFP4, unpack(blocks.flatten(1), 4, 32 * blocks.shape[1]), powers(exponents))


def unstack(tensors: Mapping[str, Stored], stacks: Mapping[str, Stack]) -> dict[str, Stored]:
    """Return the tensors with each stacked one replaced by its slices.

    Args: stacks: by name of the stored tensor, with `*` for the layer's number.
    Raises: CheckpointError: a stacked tensor's rows do not divide into its parts.
    """
    if not stacks:
        return dict(tensors)
    found: dict[str, Stored] = {}
    exponents: set[str] = set()
    for name, stored in tensors.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if number is None else name.replace(f".{number[0]}.", ".*.", 1)
        stack = stacks.get(pattern)
        if stack is None:
            found[name] = stored
            continue
        scales = stack.scales.replace("*", number[0], 1)
        exponents.add(scales)
        if scales and scales not in tensors:
            raise CheckpointError(f"{name} is MXFP4, but {scales} is missing.")
        rows = stored.shape[-1 if stack.transposed else 1]
        if rows % len(stack.parts):
            raise CheckpointError(f"{name} has {rows} rows an expert, which {len(stack.parts)} parts cannot share.")
        for expert in range(stored.shape[0]):
            for part, target in enumerate(stack.parts):
                named = target.replace("*", number[0], 1).replace("#", str(expert), 1)
                found[named] = Slice(stored, stack, expert, part, tensors.get(scales))
    return {name: stored for name, stored in found.items() if name not in exponents}
