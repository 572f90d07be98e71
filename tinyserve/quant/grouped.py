"""Quantised weights as they are kept in memory and multiplied, whatever file they came from.

    codes     [N, K * bits / 8]  packed         scales  [N, G]        zeros  [N, G] or none       (codes.py)

`Grouped` serves a layer whose parts share a scheme, each with scales of its own; `ByPart` one whose parts do not, as in
a checkpoint that keeps k and v in more bits than q. `Grouped` also rounds plain numbers while they are loaded
(`--quantization`): a layer's dense weight lives only as long as its rounding takes.

On a GPU integers and fp8 are kept in the order of kernels/packed.py, and multiplied as plain numbers are (plain.py):

    1 row           kernels/packed_gemv.py, which takes in the norm before, the gate and the residual after
    2 .. about 64   kernels/packed_gemm.py, which takes in the gate, and may leave its splits to the next norm;
                    kernels/scaled_gemm.py if the checkpoint says that activations are rounded to fp8
    2 .. 16         of four bits in groups of 32 or more: kernels/packed_strips.py, where packed_gemm.py goes, as
                    packed_gemv.py does with one row in groups of 128; large ones kernels/packed_limbs.py, on Hopper
    more            fp8 with one scale a row: x is rounded to fp8 too, and torch multiplies; else the matrix is made
                    dense for one product of torch

Columns that were quantised out of order (act-order) are put in order, and x is, at each product. What the packed
kernels do not read (tables, groups narrower than 16) goes into kernels/grouped_gemm.py, which is slower; codes of a
GGUF file that are to take no more bits than there, into kernels/packed_planes.py.

Activations are rounded to few bits on a GPU only where that makes products of fp8 with fp8. On a CPU inputs are rounded
as the checkpoint says, the matrix is made dense, and torch multiplies; `--dtype auto` goes elsewhere (quant/cpu.py).

Before: codes.py, stored.py, kernels/packed.py, kernels/grouped_gemm.py.
After: models/registry.py chooses it, layers/linear.py calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.activation import gated_activation
from ..kernels.grouped_gemm import grouped_dense, grouped_gemm, unpack
from ..kernels.launch import choose, facts, speaks_ptx, tuned_rows, use_kernel
from ..kernels.norm import rms_norm
from ..kernels.packed import Packed, can_pack, packed_dense, tile_of, tiled
from ..kernels.packed_gemm import packed_gemm
from ..kernels.packed_gemv import packed_gemv
from ..kernels.packed_limbs import with_limbs
from ..kernels.packed_planes import Planes
from ..kernels.round_rows import round_rows
from ..kernels.scaled_gemm import scaled_gemm
from .codes import FP4, Codes, Inputs, Scheme, compact, one_value, pack, quantise, rounded
from .experts import expert_format
from .format import Fused, Stored, WeightFormat
from .plain import Plain
from .planes import MOST_ROWS, to_planes
from .planes import product as planes_product

# --quantization of plain checkpoints: rounded to the nearest, one scale a row, or for each 128 columns of 4 bits.
ONLINE = {
    "fp8": Scheme("fp8, one scale a row", 8, inputs=Inputs("fp8")),
    "int8": Scheme("int8, one scale a row", 8, inputs=Inputs("int8")),
    "int4": Scheme("int4 in groups of 128", 4, width=128),
}

NESTED = ("inner", "outer")  # of Codes
PLANES = ("high", "outer")  # of Planes, beside codes, scales and zeros


class Grouped:
    """Codes and scales of one scheme. Args: scheme: of all parts; planes: keep codes in the bits that they have."""

    names = ("weight",)
    folds = True  # `product` takes a norm in and leaves parts

    def __init__(self, scheme: Scheme, *, planes: bool = False) -> None:
        self.scheme = scheme
        self.planes = planes and scheme.fine > 0

    def create(self, layer: Fused) -> None:
        """Nothing yet: sizes are known once a part has been read."""
        layer.loaded = {}

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Take one matrix over, or round it if its numbers are plain; on the layer's device, packed by `finish`."""
        if getattr(stored, "scheme", None) == self.scheme:
            codes = stored.codes().scaled_for(layer.dtype)
        else:
            codes = quantise(stored.read(torch.float32).to(layer.device), self.scheme)
        # One scale a row is little, and torch's product of fp8 wants it in float32.
        scales = compact(codes.scales) if codes.scales.shape[1] > 1 else codes.scales.float()
        found = {"codes": codes.codes, "scales": scales, "zeros": codes.zeros, "groups": codes.groups}
        found |= {"input_scale": codes.input_scale, "input_zero": codes.input_zero}
        found |= {what: getattr(codes, what) if self.planes else None for what in NESTED}
        layer.loaded[part] = {
            what: None if tensor is None else tensor.contiguous().to(layer.device, copy=True)
            for what, tensor in found.items()
        }

    def finish(self, layer: Fused) -> None:
        """Put the parts on top of each other, and pack them."""
        parts = [layer.loaded[part] for part in range(len(layer.parts))]
        del layer.loaded
        groups = [part["groups"] for part in parts]
        same = all(g is None for g in groups) or all(g is not None and torch.equal(g, groups[0]) for g in groups)
        layer.register_buffer("groups", groups[0] if same else self._all_groups(layer, groups))
        table = self.scheme.table
        layer.register_buffer("table", None if table is None else torch.tensor(table, device=layer.device))
        # One input feeds all parts, so it is rounded once; where calibration disagreed, by the widest.
        for what in ("input_scale", "input_zero"):
            scales = [part[what].reshape(-1) for part in parts if part[what] is not None]
            layer.register_buffer(what, torch.cat(scales).amax() if scales else None)
        scales = stacked([part["scales"] for part in parts])
        zeros = all_zeros([part["zeros"] for part in parts], [part["scales"] for part in parts])
        width = 0 if scales.shape[1] == 1 else self.scheme.width
        codes = [part.pop("codes") for part in parts]
        order = self._order(layer, codes[0], scales.shape[1], width)
        layer.packed = None
        layer.register_buffer("order", None if order is None or layer.groups is None else order)
        for what in PLANES:
            layer.register_buffer(what, None)
        if order is None:
            codes = torch.cat([pack(one, self.scheme.bits) for one in codes])
        elif self.planes and layer.inputs == scales.shape[1] * width:
            nested = [None if parts[0][what] is None else torch.cat([part[what] for part in parts]) for what in NESTED]
            layer.packed = to_planes(codes, self.scheme, scales, zeros, *nested)
            codes, scales, zeros, *others = (
                getattr(layer.packed, what) for what in ("low", "scales", "added", *PLANES)
            )
            for what, tensor in zip(PLANES, others, strict=True):
                layer.register_buffer(what, tensor)
        else:
            layer.register_buffer("groups", None)
            codes = torch.cat([self._tiled(one, layer.order, width) for one in codes])
            middle = None if self.scheme.added else one_value(zeros)
            scales = scales if scales.shape[1] % 2 == 0 else scales.float()  # kernels read two halves at a time
            zeros = zeros.to(scales.dtype) if middle is None else None
            own = (layer.inputs, self.scheme.bits, width, kind_of(codes), middle or 0, self.scheme.added)
            layer.packed = with_limbs(Packed(codes, scales, zeros, *own))
            for number, tensor in enumerate(layer.packed.beside or ()):  # listed with the layer's weights
                layer.register_buffer(f"beside_{number}", tensor)
        layer.register_buffer("codes", codes)
        layer.register_buffer("scales", scales)
        layer.register_buffer("zeros", zeros)

    def _order(self, layer: Fused, codes: Tensor, count: int, width: int) -> Tensor | None:
        """Columns in the order of their groups [K], if the layer can be packed; else None."""
        if not use_kernel(codes) or self.scheme.table is not None or not can_pack(self.scheme.bits, width, "int"):
            return None
        if layer.groups is None:
            return torch.empty(0, device=layer.device)  # they are in order
        if layer.groups.dim() > 1 or layer.inputs != count * width:
            return None
        full = torch.equal(layer.groups.bincount(minlength=count), torch.full_like(layer.groups[:count], width))
        return layer.groups.argsort(stable=True) if full else None

    def _tiled(self, codes: Tensor, order: Tensor | None, width: int) -> Tensor:
        """Codes [N, K] of one part in the order of kernels/packed.py."""
        codes = codes if order is None else codes[:, order]
        return codes if self.scheme.bits == 8 else tiled(codes, self.scheme.bits, tile_of(width))

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
            return self.product(x, layer)
        if self.scheme.inputs is not None:
            x = rounded(x, self.scheme.inputs, layer.input_scale, layer.input_zero)
        weight = torch.cat([codes.dense(x.dtype) for codes in self.codes(layer)])
        return F.linear(x, weight, layer.bias)

    def slower(self, layer: Fused) -> str:
        """Why the layer's products may take longer than plain numbers would; "" if there is no reason to think so."""
        if layer.packed is None:
            return f"{self.scheme.name} has no kernel of its own, the general one serves it"
        if isinstance(layer.packed, Planes):
            return f"codes of {layer.packed.bits} bits in two planes take less memory, but more instructions"
        if not tuned_rows(facts(layer.codes.device).name).get("packed_gemv"):
            return "no tiles were measured on this device"
        if layer.packed.width % 64 or layer.packed.added:
            few = 17 if layer.packed.each == 4 and layer.packed.tile >= 32 else 2
            return f"{self.scheme.name} is scaled number by number for {few} to {MOST_ROWS} rows"
        if layer.packed.zeros is not None or layer.order is not None:
            return "zero points that differ and columns out of order cost 2 to 64 rows a way through shared memory"
        if layer.packed.kind == "e4m3" and self.scheme.inputs is None:
            return "fp8 codes are made 16 bits for 2 to 64 rows, as activations are not to be rounded"
        return ""

    def product(
        self,
        x: Tensor,
        layer: Fused,
        *,
        norm: tuple[Tensor, float, float] | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
        parts: bool = False,
    ) -> Tensor:
        """The product on a GPU, with what stands around it; arguments as of plain.py."""
        tokens, packed = x.shape[0], layer.packed
        if isinstance(packed, Packed) and tokens == 1 and layer.order is None:
            weight, eps, offset = norm or (None, 0.0, 0.0)
            given = {"norm": weight, "eps": eps, "offset": offset, "gate": gate, "residual": residual}
            return packed_gemv(x, packed, layer.bias, **given)
        if norm is not None:
            x = rms_norm(x, norm[0], norm[1], offset=norm[2])
        if packed is None:
            y = self._product(x, layer)
        elif isinstance(packed, Planes):
            y = planes_product(x, layer, parts and gate is None and residual is None)
        else:
            x = x if layer.order is None else x[:, layer.order]
            if tokens == 1:
                return packed_gemv(x, packed, layer.bias, gate=gate, residual=residual)
            if tokens <= most_rows(x, layer):
                y, gate = self._few(x, layer, gate, parts and residual is None), None
            else:
                y = self._many(x, layer)
        y = y if gate is None else gated_activation(y, gate)
        return y if residual is None else y + residual

    def _few(self, x: Tensor, layer: Fused, gate: str | None, parts: bool) -> Tensor:
        """The product of a few rows: in fp8 if activations may be rounded to it, else in x's type."""
        packed, inputs = layer.packed, self.scheme.inputs
        if not (self._takes_fp8(x, packed) and inputs.width == packed.width):
            return packed_gemm(x, packed, layer.bias, gate=gate, parts=parts)
        codes, scales = round_rows(x, layer.input_scale, limit=inputs.limit, width=inputs.width)
        return scaled_gemm(codes, scales, packed, layer.bias, dtype=x.dtype, gate=gate, parts=parts)

    def _many(self, x: Tensor, layer: Fused) -> Tensor:
        """The product of many rows: in fp8 by torch if rows have one scale each, else by numbers in full."""
        packed, inputs = layer.packed, self.scheme.inputs
        fits = self._takes_fp8(x, packed) and packed.width == inputs.width == 0 and x.dtype == torch.bfloat16
        if not fits or layer.inputs % 16 or layer.outputs % 16:
            return F.linear(x, packed_dense(packed, x.dtype), layer.bias)
        codes, scales = round_rows(x, layer.input_scale, limit=inputs.limit)
        return scaled_product(codes, scales, packed, layer.bias)

    def _takes_fp8(self, x: Tensor, packed: Packed) -> bool:
        """Whether the device multiplies fp8, and activations of this scheme may be rounded to it."""
        inputs = self.scheme.inputs
        fp8 = packed.kind == "e4m3" and inputs is not None and inputs.kind == "fp8"
        return fp8 and packed.width % 128 == 0 and speaks_ptx(x)

    def _product(self, x: Tensor, layer: Fused) -> Tensor:
        """The product by the general kernel; one for each part where parts have groups of their own."""
        if layer.groups is not None and layer.groups.dim() > 1:
            rows = [layer.rows(part) for part in range(len(layer.parts))]
            y = torch.cat([self._rows(x, layer, r, g) for r, g in zip(rows, layer.groups, strict=True)], dim=1)
            return y if layer.bias is None else y + layer.bias
        return self._rows(x, layer, slice(None), layer.groups, layer.bias)

    def _rows(self, x: Tensor, layer: Fused, rows: slice, groups: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """The product with some rows of the weight."""
        given = (layer.codes[rows], layer.scales[rows], None if layer.zeros is None else layer.zeros[rows])
        kind = kind_of(layer.codes)
        if layer.table is not None:
            kind = "e2m1" if self.scheme.table == FP4 else "table"
        layout = {"bits": self.scheme.bits, "width": self.scheme.width, "kind": kind}
        layout |= {"table": layer.table, "groups": groups}
        if x.shape[0] <= most_rows(x, layer):
            return grouped_gemm(x, *given, bias, **layout)
        return F.linear(x, grouped_dense(*given, columns=layer.inputs, dtype=x.dtype, **layout), bias)


def kind_of(codes: Tensor) -> str:
    """What codes without a table are, as kernels call it."""
    return "e4m3" if codes.is_floating_point() else "int"


def most_rows(x: Tensor, layer: Fused) -> int:
    """The largest number of rows for which a product reads codes rather than numbers made of them."""
    shape = {"inputs": layer.inputs, "outputs": layer.outputs, "bits": 8 * layer.codes.element_size()}
    packed, most = layer.packed, MOST_ROWS
    if packed is not None:
        shape["bits"] = packed.bits
        # Four bits have tiles of 128 tokens there: at 256 as fast as numbers in full, or a third faster.
        most = 256 if packed.each == 4 and packed.width % 128 == 0 and speaks_ptx(x) else MOST_ROWS
    return choose("grouped_product", x, {"GROUPED_ROWS": most}, **shape)["GROUPED_ROWS"]


def scaled_product(codes: Tensor, scales: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """fp8 times fp8 by torch, [T, N] in bfloat16. Args: codes [T, K], scales [T, 1]: of the activations."""
    y = torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y if bias is None else y + bias


def all_zeros(zeros: list[Tensor | None], scales: list[Tensor]) -> Tensor | None:
    """Return the zero points of all parts [N, G], or None if no part has any."""
    given = [one for one in zeros if one is not None]
    if given and len(given) < len(zeros):  # one part has zero points, another none
        zeros = [
            torch.zeros_like(scale) if zero is None else zero.to(scale.dtype)
            for zero, scale in zip(zeros, scales, strict=True)
        ]
    return stacked(zeros) if given else None


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


def grouped_formats(
    online: Scheme | None = None, *, blocks: bool = False, planes: bool = False
) -> Callable[[str, Fused, tuple[Stored, ...]], WeightFormat]:
    """Return the choice per layer, also of experts: (path, layer, stored parts) -> format.

    Args:
        online: what plain numbers are rounded to, except those of the head; None: they stay plain.
        blocks: whether blocks of GGUF files stay codes; else they are plain numbers.
        planes: whether codes of those take as many bits as in the file, in linear layers and the table.
    """

    def scheme_of(stored: Stored) -> Scheme | None:
        scheme = getattr(stored, "scheme", None)
        return None if scheme is not None and scheme.blocks and not blocks else scheme

    def choose(path: str, layer: Fused, stored: tuple[Stored, ...]) -> WeightFormat:
        schemes = [scheme_of(tensor) for tensor in stored]
        if path != "head":
            schemes = [online if scheme is None else scheme for scheme in schemes]
        if hasattr(layer, "experts"):
            return expert_format(schemes, stored)
        if len(set(schemes)) == 1:
            return one_format(schemes[0], planes)
        return ByPart([one_format(scheme, planes) for scheme in schemes])

    return choose


def one_format(scheme: Scheme | None, planes: bool) -> WeightFormat:
    """Return the format of a scheme; plain numbers for None."""
    return Plain() if scheme is None else Grouped(scheme, planes=planes)
