"""The matrices of all experts of a layer: plain numbers, or the codes of a checkpoint, packed as the kernels read them.

    PlainExperts    weight [E, outputs, inputs]
    PackedExperts   one kernels/packed.py::Packed of E * outputs rows: fp8 (a scale for a row, for 128 or fewer columns
                    of it), integers of 2 to 8 bits in groups, with or without zero points, and MXFP4

A checkpoint's reader says the scheme of every expert's matrix, as of any other (detect.py). A layer whose parts agree
on one that the kernels read keeps its codes; any other becomes plain numbers while it is loaded, which the log tells.
So does one whose columns were quantised out of order (act-order): all experts share one input, which cannot stand in
the order of each. Plain experts are rounded while they are loaded (`--quantization`), as other matrices are.

Codes go where they belong as soon as they are read, so a layer never takes more than its packed bytes and one matrix.
Activations are not rounded, also where a checkpoint says how.

Before: codes.py, format.py, kernels/moe_*.py.  After: grouped.py and cpu.py choose; layers/moe.py multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..kernels.launch import facts, tuned_rows
from ..kernels.moe_decode import moe_decode_down, moe_decode_gate_up
from ..kernels.moe_gemm import moe_down, moe_gate_up
from ..kernels.moe_packed_decode import moe_packed_decode_down, moe_packed_decode_gate_up
from ..kernels.moe_packed_gemm import moe_packed_down, moe_packed_gate_up
from ..kernels.packed import LONGEST_TILE, Packed, can_pack, tile_of, tiled
from .codes import FP4, Codes, Scheme, compact, one_value, quantise
from .format import Stored, place

MX_WIDTH = 32  # columns of MXFP4 that share an exponent


class Stacked(Protocol):
    """What a format may know of the matrices that it serves (layers/moe.py::ExpertLinear has all of this).

    Args:
        experts: E.   inputs: columns.   pieces: rows of the fused parts of one expert.
        bias: [E, outputs] or None.
        dtype, device: of the activations.
    """

    experts: int
    inputs: int
    pieces: tuple[int, ...]
    bias: nn.Parameter | None
    dtype: torch.dtype
    device: torch.device

    def rows(self, part: int) -> slice:
        """Return the rows of one part, in the matrices of all experts on top of each other."""
        ...


class ExpertFormat(Protocol):
    """Makes, fills and multiplies the matrices of experts; a WeightFormat (format.py) with other products.

    `few` for slots that are not sorted, the others after kernels/moe_align.py; options as of the kernels.
    """

    names: tuple[str, ...]

    def create(self, layer: Stacked) -> None: ...
    def load(self, layer: Stacked, name: str, part: int, stored: Stored) -> None: ...
    def finish(self, layer: Stacked) -> None: ...
    def few_gate_up(self, x: Tensor, layer: Stacked, ids: Tensor, **options: Any) -> Tensor: ...
    def few_down(self, h: Tensor, layer: Stacked, ids: Tensor, **options: Any) -> Tensor: ...
    def gate_up(self, x: Tensor, layer: Stacked, order: Tensor, starts: Tensor, **options: Any) -> Tensor: ...
    def down(self, h: Tensor, layer: Stacked, order: Tensor, starts: Tensor, **options: Any) -> Tensor: ...


class PlainExperts:
    """Dense weights. Args: narrow: their type, if it is not that of the activations."""

    names = ("weight",)

    def __init__(self, narrow: torch.dtype | None = None) -> None:
        self.narrow = narrow

    def create(self, layer: Stacked) -> None:
        """Register `weight`, uninitialised."""
        shape = (layer.experts, sum(layer.pieces), layer.inputs)
        weight = torch.empty(shape, dtype=self.narrow or layer.dtype, device=layer.device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))

    def load(self, layer: Stacked, name: str, part: int, stored: Stored) -> None:
        """Copy one matrix into its rows, casting on the way."""
        place(layer.weight.view(-1, layer.inputs)[layer.rows(part)], stored)

    def finish(self, layer: Stacked) -> None:
        """Nothing to pack."""

    def few_gate_up(self, x: Tensor, layer: Stacked, ids: Tensor, **options: Any) -> Tensor:
        """[T·K, I]; see kernels/moe_decode.py."""
        return moe_decode_gate_up(x, layer.weight, ids, bias=layer.bias, **options)

    def few_down(self, h: Tensor, layer: Stacked, ids: Tensor, **options: Any) -> Tensor:
        """[T, H]; see kernels/moe_decode.py."""
        return moe_decode_down(h, layer.weight, ids, bias=layer.bias, **options)

    def gate_up(self, x: Tensor, layer: Stacked, order: Tensor, starts: Tensor, **options: Any) -> Tensor:
        """[N, I], sorted; see kernels/moe_gemm.py."""
        return moe_gate_up(x, layer.weight, order, starts, bias=layer.bias, **options)

    def down(self, h: Tensor, layer: Stacked, order: Tensor, starts: Tensor, **options: Any) -> Tensor:
        """[T, K, H], or parts; see kernels/moe_gemm.py."""
        return moe_down(h, layer.weight, order, starts, bias=layer.bias, **options)


class PackedExperts:
    """Codes of one scheme. Args: scheme: of all experts and parts; `takes` says whether it can be packed."""

    names = ("weight",)

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def create(self, layer: Stacked) -> None:
        """Register the codes and scales of all rows; the scales wide, as it is not known yet what they need."""
        rows, bits, device = layer.experts * sum(layer.pieces), self.scheme.bits, layer.device
        tile = self._tile(layer)
        tiles, width = -(-layer.inputs // tile), self._width(layer)
        shape = (rows, layer.inputs) if bits == 8 else (rows, tiles * tile * bits // 16)
        codes = torch.empty(shape, dtype=torch.uint8 if bits == 8 else torch.int16, device=device)
        if self.scheme.table is not None:
            scales = torch.zeros((rows, 4 * tiles), dtype=torch.uint8, device=device)
        else:
            groups = -(-layer.inputs // width) if width else 1
            scales = torch.empty((rows, groups), dtype=torch.float32, device=device)
        layer.register_parameter("weight", None)
        layer.register_buffer("codes", codes)
        layer.register_buffer("scales", scales)
        layer.loaded = {}

    def load(self, layer: Stacked, name: str, part: int, stored: Stored) -> None:
        """Put one matrix where it belongs, or round it first if its numbers are plain.

        Raises: CheckpointError: its columns are out of order, or its scales are no powers of two in MXFP4.
        """
        if getattr(stored, "scheme", None) == self.scheme:
            codes = stored.codes().scaled_for(layer.dtype)
        else:
            codes = quantise(stored.read(torch.float32).to(layer.device), self.scheme)
        if codes.groups is not None:
            raise CheckpointError(
                f"Expert matrices in {self.scheme.name}: some columns are out of order (act-order), others are not; "
                "this version reads a checkpoint in which all are, or none."
            )
        rows, own = layer.rows(part), codes.codes.to(layer.device)
        layer.codes[rows] = own.view(torch.uint8) if self.scheme.bits == 8 else self._tiled(own, layer)
        if self.scheme.table is None:
            layer.scales[rows] = codes.scales.to(layer.device)
        else:
            layer.scales[rows, : codes.scales.shape[1]] = exponents(codes).to(layer.device)
        zeros = None if codes.zeros is None else codes.zeros.contiguous().to(layer.device)
        layer.loaded[part] = (own.dtype, zeros)

    def finish(self, layer: Stacked) -> None:
        """Choose the type of the scales and zero points, and make one matrix of all. Raises: CheckpointError."""
        kinds = {kind for kind, _ in layer.loaded.values()}
        if len(kinds) > 1:
            raise CheckpointError(
                f"Expert matrices in {self.scheme.name} hold codes of {kinds}, which must be one type."
            )
        zeros = self._zeros(layer)
        del layer.loaded
        codes, scales = layer.codes, layer.scales
        fp4, middle = self.scheme.table is not None, None
        if fp4:
            scales = scales.view(torch.int32)
        elif scales.shape[1] > 1:
            scales = compact(scales) if scales.shape[1] % 2 == 0 else scales  # kernels read two halves at a time
        if not self.scheme.added:
            middle = one_value(zeros)
        zeros = None if zeros is None or middle is not None else zeros.to(scales.dtype)
        codes = codes.view(kinds.pop()) if self.scheme.bits == 8 else codes
        kind = "e2m1" if fp4 else "e4m3" if codes.is_floating_point() else "int"
        width = self._width(layer)
        own = (codes, scales, zeros, layer.inputs, self.scheme.bits, width, kind, middle or 0, self.scheme.added)
        layer.packed = Packed(*own)
        for name, tensor in (("codes", codes), ("scales", scales), ("zeros", zeros)):
            layer.register_buffer(name, tensor)

    def slower(self, layer: Stacked) -> str:
        """Why the products may take longer than plain numbers would; "" if there is no reason to think so."""
        known = tuned_rows(facts(layer.codes.device).name).get("moe_packed_gate_up")
        return "" if known else "no tiles of quantised experts were measured on this device"

    def few_gate_up(self, x: Tensor, layer: Stacked, ids: Tensor, **options: Any) -> Tensor:
        """[T·K, I]; see kernels/moe_packed_decode.py."""
        return moe_packed_decode_gate_up(x, layer.packed, ids, layer.experts, bias=layer.bias, **options)

    def few_down(self, h: Tensor, layer: Stacked, ids: Tensor, **options: Any) -> Tensor:
        """[T, H]; see kernels/moe_packed_decode.py."""
        return moe_packed_decode_down(h, layer.packed, ids, layer.experts, bias=layer.bias, **options)

    def gate_up(self, x: Tensor, layer: Stacked, order: Tensor, starts: Tensor, **options: Any) -> Tensor:
        """[N, I], sorted; see kernels/moe_packed_gemm.py."""
        return moe_packed_gate_up(x, layer.packed, order, starts, bias=layer.bias, **options)

    def down(self, h: Tensor, layer: Stacked, order: Tensor, starts: Tensor, **options: Any) -> Tensor:
        """[T, K, H], or parts; see kernels/moe_packed_gemm.py."""
        return moe_packed_down(h, layer.packed, order, starts, bias=layer.bias, **options)

    def _width(self, layer: Stacked) -> int:
        """Columns that share a scale; 0 where all of a row do, unless numbers are added, which only groups have."""
        grouped = self.scheme.table is not None or self.scheme.added or self.scheme.width < layer.inputs
        return self.scheme.width if grouped else 0

    def _tile(self, layer: Stacked) -> int:
        """Columns of a tile of codes."""
        return LONGEST_TILE if self.scheme.table is not None else tile_of(self._width(layer))

    def _tiled(self, codes: Tensor, layer: Stacked) -> Tensor:
        """Codes [n, K] in the order of kernels/packed.py."""
        return tiled(codes, self.scheme.bits, self._tile(layer))

    def _zeros(self, layer: Stacked) -> Tensor | None:
        """Zero points of all rows [E * outputs, G], or None if no part has any."""
        given = [layer.loaded[part][1] for part in range(len(layer.parts))]
        if all(one is None for one in given):
            return None
        groups = layer.scales.shape[1]
        rows = [
            torch.zeros(layer.parts[part], groups, device=layer.device) if one is None else one.expand(-1, groups)
            for part, one in enumerate(given)
        ]
        return torch.cat(rows)


def exponents(codes: Codes) -> Tensor:
    """Return the bytes of MXFP4's scales, uint8 [N, G]: 2 ** (byte - 127). Raises: CheckpointError: other scales."""
    bits = codes.scales.float().contiguous().view(torch.int32)
    bytes_of = bits >> 23
    odd = ((bits & 0x7FFFFF) != 0) & (bytes_of != 0) & (bytes_of != 255)  # 2 ** -127 and NaN have other bits too
    if bool(((bits < 0) | odd).any()):
        raise CheckpointError(f"{codes.scheme.name}: a scale is no power of two.")
    return bytes_of.to(torch.uint8)


def takes(scheme: Scheme | None) -> bool:
    """Whether the kernels of packed experts read such codes."""
    if scheme is None:
        return False
    if scheme.table is not None:
        return scheme.table == FP4 and scheme.width == MX_WIDTH
    return can_pack(scheme.bits, scheme.width, "int")


def in_order(stored: Stored) -> bool:
    """Whether the columns of a matrix stand in the order of their groups; reads its index, if it has one."""
    tensors = getattr(stored, "tensors", {})
    name = next((name for name in ("g_idx", "weight_g_idx") if name in tensors), None)
    width = stored.scheme.width
    if name is None or width == 0:
        return True
    found = tensors[name].read(torch.int64)
    return bool((found < 0).any()) or torch.equal(found, torch.arange(len(found)) // width)


def expert_format(schemes: Sequence[Scheme | None], stored: Sequence[Stored]) -> ExpertFormat:
    """Return the format of all experts of a layer. Args: schemes: of each part, None for plain numbers."""
    if len(set(schemes)) > 1 or not takes(schemes[0]):
        return PlainExperts()
    coded = next((one for one in stored if getattr(one, "scheme", None) is not None), None)
    return PackedExperts(schemes[0]) if coded is None or in_order(coded) else PlainExperts()
