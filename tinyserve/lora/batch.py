"""Adapters on the device: their weights, which token of a step wears which, and the products that add them.

    weights  [places, M]     one row holds all matrices of one adapter, so that one copy brings it
    worn     [T] int32       the place of each token of the step, -1 for none; gathered from the rows of the requests

Both are allocated once. So an adapter that comes, goes or is chosen changes numbers and no shapes, and a recorded
graph stays right. A linear layer gets a format around its own: `Worn` adds B A x to what the format below makes,
whatever that keeps its weights in. In a step without any adapter it does nothing, and lets the format below fold its
neighbours in; with one, norms and gates are kernels of their own. So graphs are recorded for both (Shape.adapted).

Before: kernels/lora.py, names.py.  After: runner/runner.py (which steps wear something), engine/assemble.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import evolve, frozen
from torch import Tensor

from ..errors import CheckpointError
from ..kernels.lora import lora_expand, lora_shrink
from ..quant.format import Fused
from .adapters import Move
from .names import Pair, Place

ALIGN = 16  # numbers: kernels are compiled anew for pointers that are not at a multiple of 16 bytes


class DeviceAdapters(Protocol):
    """What the runner asks."""

    places: int

    def reserve(self, tokens: int) -> None:
        """Make room for steps of so many tokens."""
        ...

    def apply(self, moves: Sequence[Move]) -> None:
        """Bring adapters to their places, behind all steps launched before."""
        ...

    def wear(self, adapted: bool, rows: Tensor | None, slots: Tensor) -> None:
        """Begin a step. adapted: some token wears an adapter.

        Args: rows: place + 1 of each row.   slots: [T] int32, the row of each token.
        """
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...


class NoDeviceAdapters:
    """There are none."""

    places = 0

    def reserve(self, tokens: int) -> None:
        """Nothing."""

    def apply(self, moves: Sequence[Move]) -> None:
        """Nothing moves."""

    def wear(self, adapted: bool, rows: Tensor | None, slots: Tensor) -> None:
        """No token wears anything."""

    def close(self) -> None:
        """Nothing was changed."""


@frozen(eq=False)
class _Span:
    """Where the matrices of one layer lie in a row of the weights."""

    place: Place
    a: int
    b: int


@frozen(eq=False)
class Packed:
    """One adapter on the host.

    Args:
        numbers: what it has, or a whole row of the weights: if it has more than half of one, one copy is quicker.
        pieces: where they belong in a row: (first place, distance of lines, (lines, numbers of a line)); () for a row.
    """

    numbers: Tensor
    pieces: tuple[tuple[int, int, tuple[int, int]], ...]

    def unpack(self, row: Tensor) -> None:
        """Fill a row of the weights, behind all that uses it now."""
        if not self.pieces:
            row.copy_(self.numbers, non_blocking=True)
            return
        row.zero_()
        start = 0
        for at, stride, shape in self.pieces:
            lines = self.numbers[start : start + shape[0] * shape[1]].view(shape)
            row.as_strided(shape, (stride, 1), row.storage_offset() + at).copy_(lines, non_blocking=True)
            start += lines.numel()


class Adapted:
    """The adapters of a model.

    Args:
        layers: those that can be adapted, loaded; they get another format until `close`.
        places: adapters that may run together.   rank: of all; smaller ones are padded with zeros.
        device: where the model is.

    Attributes:
        weights, worn: see the module's docstring.   active: some token of the step that runs wears an adapter.
    """

    def __init__(self, layers: Sequence[Place], places: int, rank: int, device: torch.device) -> None:
        self.layers = layers
        self.places = places
        self.rank = rank
        self.active = False
        self.memo: dict = {}  # of the step that runs; see kernels/launch.py::once
        self._spans: list[_Span] = []
        size = 0
        for place in layers:
            a = size
            b = _aligned(a + len(place.layer.parts) * rank * place.layer.inputs)
            size = _aligned(b + place.layer.outputs * rank)
            self._spans.append(_Span(place, a, b))
        self.dtype = layers[0].layer.dtype
        self.weights = torch.zeros(places, size, dtype=self.dtype, device=device)
        self.worn = torch.full((0,), -1, dtype=torch.int32, device=device)
        for span in self._spans:
            layer = span.place.layer
            layer.format = Worn(layer.format, self, *self._matrices(self.weights, span))

    def _matrices(self, weights: Tensor, span: _Span) -> tuple[Tensor, Tensor]:
        """A [places, parts * R, K] and B [places, N, R] of a layer: views."""
        layer, rank = span.place.layer, self.rank
        rows = len(layer.parts) * rank
        a = weights[:, span.a : span.a + rows * layer.inputs].view(-1, rows, layer.inputs)
        return a, weights[:, span.b : span.b + layer.outputs * rank].view(-1, layer.outputs, rank)

    def packed(self, found: Mapping[str, Pair]) -> Packed:
        """What an adapter has, on the host. found: by the base checkpoint's module.

        Raises: CheckpointError: its numbers are too large for the type that the model computes in.
        """
        parts: list[tuple[int, int, Tensor]] = []  # where in a row; how far lines are apart; the lines
        for span in self._spans:
            place, inputs = span.place, span.place.layer.inputs
            for part, module in enumerate(place.modules):
                if (pair := found.get(module)) is not None:
                    parts.append((span.a + part * self.rank * inputs, inputs, pair.a))
                    rows = place.layer.rows(part)
                    parts.append((span.b + rows.start * self.rank, self.rank, place.share(part, pair.b)))
        if 2 * sum(lines.numel() for *_, lines in parts) > self.weights.shape[1]:
            row = torch.zeros(self.weights.shape[1], dtype=self.dtype)
            for at, stride, lines in parts:
                row.as_strided(lines.shape, (stride, 1), at).copy_(lines)
            packed = Packed(row, ())
        else:
            numbers = torch.cat([lines.reshape(-1).to(self.dtype) for *_, lines in parts])
            packed = Packed(numbers, tuple((at, stride, tuple(lines.shape)) for at, stride, lines in parts))
        if not packed.numbers.isfinite().all():
            raise CheckpointError(f"Its numbers are too large for {str(self.dtype).removeprefix('torch.')}.")
        return packed if self.weights.is_cpu else evolve(packed, numbers=packed.numbers.pin_memory())

    def reserve(self, tokens: int) -> None:
        """Make room for steps of so many tokens."""
        self.worn = torch.full((tokens,), -1, dtype=torch.int32, device=self.weights.device)

    def apply(self, moves: Sequence[Move]) -> None:
        """Bring adapters to their places, behind all steps launched before."""
        for move in moves:
            move.adapter.weights.unpack(self.weights[move.place])

    def wear(self, adapted: bool, rows: Tensor | None, slots: Tensor) -> None:
        """Begin a step; see DeviceAdapters."""
        self.active = adapted
        self.memo = {}
        if adapted:
            torch.index_select(rows, 0, slots, out=self.worn[: len(slots)])
            self.worn[: len(slots)].sub_(1)

    def close(self) -> None:
        """Leave the model as it was."""
        for place in self.layers:
            if isinstance(place.layer.format, Worn):
                place.layer.format = place.layer.format.below
        self.active = False


class Worn:
    """The weight format of a layer whose product some tokens add their adapter's to.

    Args:
        below: the format that keeps the layer's own weights.
        adapted: tells which token wears what.
        a, b: [places, parts * R, K] and [places, N, R]; see kernels/lora.py.
    """

    def __init__(self, below: Any, adapted: Adapted, a: Tensor, b: Tensor) -> None:
        self.below = below
        self._adapted = adapted
        self._a = a
        self._b = b

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["below"], name)  # names, create, load, product ...: the layer's own weights

    @property
    def folds(self) -> bool:
        """Whether the product takes in what stands around it; B A x must be added first."""
        return not self._adapted.active and getattr(self.below, "folds", False)

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return the layer's own product, and B A x of each token that wears an adapter: [T, outputs]."""
        y = self.below.matmul(x, layer)
        if not self._adapted.active:
            return y
        worn, memo = self._adapted.worn[: len(x)], self._adapted.memo
        return lora_expand(lora_shrink(x, self._a, worn, memo=memo), self._b, worn, layer.parts, y, memo=memo)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
