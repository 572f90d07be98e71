"""Quantised weights as they are kept in memory and multiplied, whatever file they came from.

    codes     [N, K * bits / 8]  packed         scales  [N, G]        zeros  [N, G] or none       (codes.py)

`Grouped` serves a layer whose parts share a scheme, each with scales of its own; `ByPart` one whose parts do not, as in
a checkpoint that keeps k and v in more bits than q. `Grouped` also rounds plain numbers while they are loaded
(`--quantization`): a layer's dense weight lives only as long as its rounding takes.

On a GPU the codes go into kernels/grouped_gemm.py, and beyond MOST_ROWS rows the matrix is made dense for one product.
Kernels multiply in 16 bits, so activations are not rounded there, even where a checkpoint was made for that: rounding
would only add error. On a CPU products are the readable ones: inputs rounded as the checkpoint says, the matrix made
dense, torch multiplies. That is slower than plain numbers; `--dtype auto` does not come here on a CPU (quant/cpu.py).

Before: codes.py, stored.py, kernels/grouped_gemm.py.  After: models/registry.py chooses it, layers/linear.py calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.grouped_gemm import grouped_dense, grouped_gemm, unpack
from ..kernels.launch import choose, use_kernel
from .codes import FP4, Codes, Inputs, Scheme, compact, pack, quantise, rounded
from .format import Fused, Stored, WeightFormat
from .plain import Plain

# --quantization of plain checkpoints: rounded to the nearest, one scale a row, or for each 128 columns of 4 bits.
ONLINE = {
    "fp8": Scheme("fp8, one scale a row", 8, inputs=Inputs("fp8")),
    "int8": Scheme("int8, one scale a row", 8, inputs=Inputs("int8")),
    "int4": Scheme("int4 in groups of 128", 4, width=128),
}


MOST_ROWS = 64  # above, a product takes longer than the reading of its codes


class Grouped:
    """Codes and scales of one scheme. Args: scheme: of all parts."""

    names = ("weight",)

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def create(self, layer: Fused) -> None:
        """Nothing yet: sizes are known once a part has been read."""
        layer.loaded = {}

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Take one matrix over, or round it if its numbers are plain; packed, on the layer's device."""
        scheme = getattr(stored, "scheme", None)
        codes = quantise(stored.read(torch.float32), self.scheme) if scheme is None else stored.codes()
        packed = {"codes": pack(codes.codes, self.scheme.bits), "scales": compact(codes.scales), "zeros": codes.zeros}
        packed |= {"groups": codes.groups, "input_scale": codes.input_scale, "input_zero": codes.input_zero}
        layer.loaded[part] = {
            what: None if tensor is None else tensor.contiguous().to(layer.device, copy=True)
            for what, tensor in packed.items()
        }

    def finish(self, layer: Fused) -> None:
        """Put the parts on top of each other."""
        parts = [layer.loaded[part] for part in range(len(layer.parts))]
        del layer.loaded
        for what in ("codes", "scales", "zeros"):
            tensors = [part[what] for part in parts]
            given = [tensor for tensor in tensors if tensor is not None]
            if given and len(given) < len(tensors):  # one part has zero points, another none
                tensors = [
                    torch.zeros_like(part["scales"]) if tensor is None else tensor.to(part["scales"].dtype)
                    for tensor, part in zip(tensors, parts, strict=True)
                ]
            layer.register_buffer(what, stacked(tensors) if given else None)
        groups = [part["groups"] for part in parts]
        same = all(g is None for g in groups) or all(g is not None and torch.equal(g, groups[0]) for g in groups)
        layer.register_buffer("groups", groups[0] if same else self._all_groups(layer, groups))
        table = self.scheme.table
        layer.register_buffer("table", None if table is None else torch.tensor(table, device=layer.device))
        # One input feeds all parts, so it is rounded once; where calibration disagreed, by the widest.
        for what in ("input_scale", "input_zero"):
            scales = [part[what].reshape(-1) for part in parts if part[what] is not None]
            layer.register_buffer(what, torch.cat(scales).amax() if scales else None)

    def _all_groups(self, layer: Fused, groups: list[Tensor | None]) -> Tensor:
        """Groups [parts, K], for parts that order their columns each in a way of its own."""
        usual = torch.arange(layer.inputs, device=layer.device) // (self.scheme.width or layer.inputs)
        return torch.stack([usual if one is None else one for one in groups])

    def codes(self, layer: Fused) -> list[Codes]:
        """Return what the layer holds: one matrix, or one per part where parts have groups of their own."""
        numbers = unpack(layer.codes, self.scheme.bits, layer.inputs)
        whole = Codes(self.scheme, numbers, layer.scales, layer.zeros, layer.groups)
        if layer.groups is None or layer.groups.dim() == 1:
            return [whole]
        own = [whole.rows(layer.rows(part)) for part in range(len(layer.parts))]
        return [Codes(self.scheme, c.codes, c.scales, c.zeros, g) for c, g in zip(own, layer.groups, strict=True)]

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs] in x.dtype."""
        if use_kernel(x):
            return self._product(x, layer)
        if self.scheme.inputs is not None:
            x = rounded(x, self.scheme.inputs, layer.input_scale, layer.input_zero)
        weight = torch.cat([codes.dense(x.dtype) for codes in self.codes(layer)])
        return F.linear(x, weight, layer.bias)

    def _product(self, x: Tensor, layer: Fused) -> Tensor:
        """The product by kernels; one for each part where parts have groups of their own."""
        if layer.groups is not None and layer.groups.dim() > 1:
            rows = [layer.rows(part) for part in range(len(layer.parts))]
            y = torch.cat([self._rows(x, layer, r, g) for r, g in zip(rows, layer.groups, strict=True)], dim=1)
            return y if layer.bias is None else y + layer.bias
        return self._rows(x, layer, slice(None), layer.groups, layer.bias)

    def _rows(self, x: Tensor, layer: Fused, rows: slice, groups: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """The product with some rows of the weight."""
        given = (layer.codes[rows], layer.scales[rows], None if layer.zeros is None else layer.zeros[rows])
        kind = "e4m3" if layer.codes.is_floating_point() else "int"
        if layer.table is not None:
            kind = "e2m1" if self.scheme.table == FP4 else "table"
        layout = {"bits": self.scheme.bits, "width": self.scheme.width, "kind": kind}
        layout |= {"table": layer.table, "groups": groups}
        shape = {"inputs": layer.inputs, "outputs": given[0].shape[0], "bits": self.scheme.bits}
        if x.shape[0] <= choose("grouped_product", x, {"GROUPED_ROWS": MOST_ROWS}, **shape)["GROUPED_ROWS"]:
            return grouped_gemm(x, *given, bias, **layout)
        return F.linear(x, grouped_dense(*given, columns=layer.inputs, dtype=x.dtype, **layout), bias)


def stacked(tensors: list[Tensor]) -> Tensor:
    """Return tensors [n, G] on top of each other; one scale a row and several in one layer become several."""
    groups = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([tensor.expand(-1, groups) if tensor.shape[1] == 1 else tensor for tensor in tensors])


class PartLayer(nn.Module):
    """One part of a layer, on its own (a `Fused` of format.py)."""

    def __init__(self, layer: Fused, part: int) -> None:
        super().__init__()
        self.inputs, self.parts = layer.inputs, (layer.parts[part],)
        self.dtype, self.device = layer.dtype, layer.device
        self.bias = None

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.parts[0]

    def rows(self, part: int) -> slice:
        """All of them."""
        return slice(0, self.outputs)


class ByPart:
    """Each part in a format of its own. Args: formats: of the parts, in order."""

    names = ("weight",)

    def __init__(self, formats: list[WeightFormat]) -> None:
        self.formats = formats

    def create(self, layer: Fused) -> None:
        """Make a layer of each part."""
        layer.pieces = nn.ModuleList([PartLayer(layer, part) for part in range(len(layer.parts))])
        for own, piece in zip(self.formats, layer.pieces, strict=True):
            own.create(piece)

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Hand the tensor to its part."""
        self.formats[part].load(layer.pieces[part], name, 0, stored)

    def finish(self, layer: Fused) -> None:
        """Finish every part."""
        for own, piece in zip(self.formats, layer.pieces, strict=True):
            own.finish(piece)

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs] in x.dtype."""
        y = torch.cat([own.matmul(x, piece) for own, piece in zip(self.formats, layer.pieces, strict=True)], dim=1)
        return y if layer.bias is None else y + layer.bias


def grouped_formats(online: Scheme | None = None) -> Callable[[str, Fused, tuple[Stored, ...]], WeightFormat]:
    """Return the choice per layer: (path, layer, stored parts) -> format.

    Args: online: what plain numbers are rounded to, except those of the head; None: they stay plain.
    """

    def choose(path: str, layer: Fused, stored: tuple[Stored, ...]) -> WeightFormat:
        schemes = [getattr(tensor, "scheme", None) for tensor in stored]
        if path != "head":
            schemes = [online if scheme is None else scheme for scheme in schemes]
        if len(set(schemes)) == 1:
            return one_format(schemes[0])
        return ByPart([one_format(scheme) for scheme in schemes])

    return choose


def one_format(scheme: Scheme | None) -> WeightFormat:
    """Return the format of a scheme; plain numbers for None."""
    return Plain() if scheme is None else Grouped(scheme)
