"""The seam between a checkpoint's tensors and a linear layer: Stored on one side, WeightFormat on the other.

A fused layer (q, k and v in one product) is several *parts* on top of each other, each a range of output rows that one
checkpoint tensor fills:

    parts = (576, 192, 192)      rows    0 ..  575   part 0   q_proj.weight
                                 rows  576 ..  767   part 1   k_proj.weight
                                 rows  768 ..  959   part 2   v_proj.weight

The loader knows, before it reads a byte, which tensor fills which part, so a format is chosen with its tensors in view
(Q4_1 blocks map onto int4, bf16 numbers do not). Then, for one layer:

    format.create(layer)  ->  format.load(layer, name, part, stored) for every name and part  ->  format.finish(layer)

`load` calls of one layer may come in any order and from several threads at once, but never twice for the same
(name, part). `finish` comes once, straight after the layer's last `load`, so that a format that packs needs memory for
one unpacked layer, not for the whole model.

Before: a checkpoint's tensors, wrapped by checkpoint/load.py.  After: quant/plain.py, layers/linear.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class Stored(Protocol):
    """One tensor of a checkpoint that is known but not read yet: a safetensors slice, GGUF blocks, or random numbers.

    Rows are already in the order of the model (rotary un-permutation of q and k has been applied); the shape is
    torch's: rows (outputs) first.

    Args:
        shape: of the dense tensor.
        qtype: None for plain numbers, else the GGUF block type, such as "Q4_1".
        nbytes: bytes that reading it takes from the file; drives progress bars.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def qtype(self) -> str | None: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the dense tensor in `dtype` on the CPU; it may alias a read-only memory map: copy, never write."""
        ...

    def blocks(self) -> Tensor:
        """Return the raw blocks, uint8 [rows, bytes of a row]. Only when `qtype` is set; may alias a memory map."""
        ...


def place(into: Tensor, stored: Stored) -> None:
    """Copy a stored tensor where it belongs, casting on the way; in a lane, if the loader lent one (lanes.py)."""
    carry = getattr(stored, "carry_to", None)
    if carry is None:
        into.copy_(stored.read(into.dtype))
    else:
        carry(into)


class Fused(Protocol):
    """What a format may know of the linear layer that it serves (layers/linear.py::Linear has all of this).

    Args:
        inputs: columns of the weight.
        parts: output rows of each fused part.
        outputs: their sum.
        bias: [outputs] or None; loaded by the layer itself, added by `matmul`.
        dtype, device: of the activations that `matmul` receives and returns.
    """

    inputs: int
    parts: tuple[int, ...]
    bias: nn.Parameter | None
    dtype: torch.dtype
    device: torch.device

    @property
    def outputs(self) -> int: ...

    def rows(self, part: int) -> slice:
        """Return the output rows of one part."""
        ...

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """nn.Module's."""
        ...

    def register_buffer(self, name: str, tensor: Tensor | None) -> None:
        """nn.Module's; for packed integers, which nn.Parameter refuses less readably."""
        ...


class WeightFormat(Protocol):
    """Makes, fills, packs and multiplies the weights of linear layers. One object may serve many layers.

    All state of a layer lives on the layer (parameters and buffers, also what is only needed until `finish`), so a
    format is free to keep two packed copies and choose in `matmul` by the number of rows.

    Args:
        names: the tensors that it wants for every part, such as ("weight",) or ("qweight", "scales", "qzeros"); each is
            looked up in the checkpoint as "<module>.<name>", and a missing one is an error.
    """

    names: tuple[str, ...]

    def create(self, layer: Fused) -> None:
        """Register the layer's parameters, uninitialised, on `layer.device`."""
        ...

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Read one tensor into rows `layer.rows(part)`. The shape has been checked for name "weight"."""
        ...

    def finish(self, layer: Fused) -> None:
        """Everything has been loaded: pack, and drop what is needed no more."""
        ...

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] times the weight, plus `layer.bias` when there is one: [T, outputs] in x.dtype."""
        ...
