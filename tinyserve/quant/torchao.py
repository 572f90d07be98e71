"""Checkpoints of torchao, as transformers saves them: the parts of its tensors, described in the header of each file.

    module._weight_qdata, _weight_scale, _weight_zero_point ...
    header    "module.weight": {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], ...}}

    Float8Tensor                fp8 [N, K]; a scale for each block of rows and columns
    Int8Tensor                  int8 [N, K]; scales and perhaps zero points, likewise
    IntxUnpackedToInt8Tensor    integers of 1 to 8 bits, one to a byte; likewise
    Int4Tensor                  signed nibbles [N, K / 2]; W = code * scale + number, both [K / width, N]
    Int4PlainInt32Tensor        nibbles in int32 words along the columns; scales and zero points [K / width, N]
    Int4TilePackedTo4dTensor    nibbles where the lanes of a matrix instruction want them: `in_tiles`
    MXTensor, NVFP4Tensor       fp8 or fp4 with powers of two, fp4 with fp8 scales (fp4.py); perhaps `unswizzled`

A number that is added after the scale needs groups narrower than 128 (kernels/packed.py), so wider ones are cut in
pieces of 64, which costs a quarter of a bit a weight. Activations of integers and fp8 are rounded as the header says,
those beside MX and NVFP4 are not; what it says of kernels is nobody's business here. Files of pickles, which older
versions wrote, are not opened.

Before: stored.py, fp4.py.  After: detect.py.

Source: torchao's tensor classes (quantization/quantize_/workflows); torch's own packing for the tiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError, UnsupportedModel, shown
from ..kernels.grouped_gemm import unpack
from .codes import Codes, Inputs, Scheme, from_words
from .format import Stored
from .fp4 import MXFP4, NVFP4, powers
from .fp8 import E4M3, row_scales
from .stored import QuantizedTensor

QDATA = "_weight_qdata"
LONGEST_ADDED = 64  # columns of a group whose number is added
EIGHT_BITS = ("Float8Tensor", "Int8Tensor")


@frozen
class About:
    """What the header says of one matrix.

    Args:
        kind: torchao's class.   data: its attributes.
        shape: of the matrix.   rows, width: that share a scale; a width of 0 is all columns.
        bits: of an integer.   inputs: how activations are rounded.
    """

    kind: str
    data: Mapping[str, Any]
    shape: tuple[int, int]
    rows: int
    width: int
    bits: int
    inputs: Inputs | None

    def scales(self, own: QuantizedTensor, name: str) -> Tensor:
        """Read what blocks share, as [N, G] in float32."""
        block = (self.rows, self.width or self.shape[1])
        wanted = [-(-size // each) for size, each in zip(self.shape, block, strict=True)]
        return row_scales(own, own.tensor(name, torch.float32).reshape(wanted), block)

    def eight(self, own: QuantizedTensor) -> Codes:
        """Read fp8 or int8, one code a byte."""
        scales, zeros = self.scales(own, "_weight_scale"), None
        codes = own.tensor(QDATA, E4M3 if self.kind == "Float8Tensor" else torch.int8)
        if "_weight_zero_point" in own.tensors:
            zeros = whole(own, self.scales(own, "_weight_zero_point"))
        static = self.inputs is not None and self.inputs.static
        given = own.tensor("_weight_act_quant_scale", torch.float32).reshape(()) if static else None
        zero = own.maybe("_weight_act_quant_zero_point", torch.float32) if static else None
        zero = None if zero is None else zero.reshape(())
        return Codes(own.scheme, codes, scales, zeros, input_scale=given, input_zero=zero)

    def integers(self, own: QuantizedTensor) -> Codes:
        """Read small integers, one a byte; up to four bits they are kept in two or four, all of them positive."""
        codes, scales = own.tensor(QDATA, torch.int8), self.scales(own, "_weight_scale")
        zeros = whole(own, self.scales(own, "_weight_zero_point"))
        if own.scheme.bits == 8:
            return Codes(own.scheme, codes, scales, zeros)
        middle = 2 ** (self.bits - 1)
        zeros = torch.zeros_like(scales) if zeros is None else zeros
        return Codes(own.scheme, (codes + middle).to(torch.uint8), scales, zeros + middle)

    def nibbles(self, own: QuantizedTensor) -> Codes:
        """Read signed nibbles, and what is added."""
        codes = unpack(own.tensor(QDATA, torch.int8).view(torch.uint8), 4, self.shape[1]) ^ 8
        scales, added = (own.tensor(f"_weight_{what}", torch.float32).t() for what in ("scale", "zero_point"))
        return self.summed(own, codes, scales, added)

    def words(self, own: QuantizedTensor) -> Codes:
        """Read nibbles in words."""
        codes = from_words(own.tensor(QDATA, torch.int32), 4, self.shape[1])
        scales = own.tensor("_weight_scale", torch.float32).t()
        return Codes(own.scheme, codes, scales, own.tensor("_weight_zero_point", torch.int8).t().float())

    def tiles(self, own: QuantizedTensor) -> Codes:
        """Read nibbles in tiles; rows and columns beyond the matrix are dropped."""
        rows, columns = self.shape
        both = own.tensor("_weight_scale_and_zero", torch.float32)[: -(-columns // self.width), :rows]
        codes = in_tiles(own.tensor(QDATA, torch.int32))[:rows, :columns]
        return self.summed(own, codes, both[..., 0].t(), both[..., 1].t())

    def summed(self, own: QuantizedTensor, codes: Tensor, scales: Tensor, added: Tensor) -> Codes:
        """(code - 8) * scale + added, in groups of the scheme's width."""
        if not own.scheme.added:
            if added.any():
                raise UnsupportedModel(f"{own.module}: a zero point beside activations in fp8 is not implemented.")
            return Codes(own.scheme, codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))
        pieces = self.width // own.scheme.width
        scales, added = (values.repeat_interleave(pieces, dim=1) for values in (scales, added - 8 * scales))
        return Codes(own.scheme, codes, scales, added)

    def micro(self, own: QuantizedTensor) -> Codes:
        """Read fp8 or fp4 whose 32 columns share a power of two."""
        codes = own.tensor(QDATA, E4M3) if own.scheme.table is None else four(own)
        exponents = own.tensor("_weight_scale", torch.float8_e8m0fnu).view(torch.uint8)
        return Codes(own.scheme, codes, powers(self.in_order(exponents)))

    def nvidia(self, own: QuantizedTensor) -> Codes:
        """Read fp4 with fp8 scales, and perhaps one more of the whole matrix."""
        outer = own.maybe("_weight_per_tensor_scale", torch.float32)
        scales = self.in_order(own.tensor("_weight_scale", torch.float32))
        return Codes(own.scheme, four(own), scales if outer is None else scales * outer.reshape(()))

    def in_order(self, scales: Tensor) -> Tensor:
        """Scales [N, G], wherever they stood."""
        rows, groups = self.shape[0], self.shape[1] // self.width
        return unswizzled(scales, rows, groups) if self.data.get("is_swizzled_scales") else scales.reshape(rows, groups)


READ: dict[str, Callable[[About, QuantizedTensor], Codes]] = {
    "Float8Tensor": About.eight,
    "Int8Tensor": About.eight,
    "IntxUnpackedToInt8Tensor": About.integers,
    "Int4Tensor": About.nibbles,
    "Int4PlainInt32Tensor": About.words,
    "Int4TilePackedTo4dTensor": About.tiles,
    "MXTensor": About.micro,
    "NVFP4Tensor": About.nvidia,
}


@frozen
class TorchAO:
    """How matrices of torchao are read. Args: usual: what the config says of most of them, or None if it does not."""

    usual: Scheme | None = None
    title: str = "torchao"
    kinds: tuple[str, ...] = (
        *(QDATA, "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero", "_weight_per_tensor_scale"),
        *("_weight_act_quant_scale", "_weight_act_quant_zero_point", "_weight_act_pre_scale"),
        "_weight_act_per_tensor_scale",
    )
    marks: tuple[str, ...] = (QDATA,)

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        about = about_of(module, tensors)
        return QuantizedTensor(module, about.shape, scheme_of(about), tensors, lambda own: READ[about.kind](about, own))


def about_of(module: str, tensors: Mapping[str, Stored]) -> About:
    """Read what the header says of one matrix. Raises: CheckpointError: nothing; UnsupportedModel: what is not read."""
    notes = next((own.notes for own in tensors.values() if f"{module}.weight" in getattr(own, "notes", ())), None)
    if notes is None:
        raise CheckpointError(f"{module}: the file's header does not say what {module}.{QDATA} is. Save it again.")
    note = json.loads(notes[f"{module}.weight"])
    kind, data = note.get("_type"), note.get("_data") or {}
    if kind not in READ:
        raise UnsupportedModel(f"{module}: torchao's {shown(kind)} is not implemented; {', '.join(READ)} are.")
    if "_weight_act_pre_scale" in tensors:
        raise UnsupportedModel(
            f"{module}: activations that are scaled before a product (act_pre_scale) are not implemented. Quantise "
            "with a config that does without (no AWQ or SmoothQuant)."
        )
    shape = tuple(data.get("shape") or tensors[QDATA].shape)
    if kind == "NVFP4Tensor" or (kind == "MXTensor" and "float4" in named(data.get("elem_dtype"))):
        shape = (shape[0], 2 * shape[1])
    if len(shape) != 2:
        raise UnsupportedModel(f"{module}: torchao's codes of shape {list(shape)} are not implemented; matrices are.")
    block = data.get("block_size") or shape
    rows, width = (1, block) if isinstance(block, int) else map(int, block)
    bits = int(named(data.get("target_dtype", "int8")).removeprefix("int")) if kind.startswith("Intx") else 4
    inputs = read_inputs(module, kind, data, "_weight_act_quant_scale" in tensors)
    return About(kind, data, shape, rows, 0 if width >= shape[1] and kind in EIGHT_BITS else width, bits, inputs)


def scheme_of(about: About) -> Scheme:
    """The scheme of a matrix. Raises: UnsupportedModel: blocks or numbers that are not implemented."""
    width = about.width
    groups = f"in groups of {width}" if width else "by rows" if about.rows == 1 else "by matrix"
    if about.kind == "NVFP4Tensor":
        return NVFP4
    if about.kind == "MXTensor":
        if named(about.data.get("elem_dtype")) not in ("float8_e4m3fn", "float4_e2m1fn_x2") or width != 32:
            raise UnsupportedModel(f"torchao's MXTensor of {shown(about.data.get('elem_dtype'))} is not implemented.")
        fp4 = "float4" in named(about.data["elem_dtype"])
        return MXFP4 if fp4 else Scheme("mxfp8", 8, 32)
    if about.kind in EIGHT_BITS:
        name = "fp8" if about.kind == "Float8Tensor" else "int8"
        return Scheme(f"{name} {groups}", 8, width, inputs=about.inputs)
    if about.kind == "IntxUnpackedToInt8Tensor":
        bits = 2 if about.bits <= 2 else 4 if about.bits <= 4 else 8
        return Scheme(f"int{about.bits} {groups}", bits, width, inputs=about.inputs)
    if about.kind == "Int4PlainInt32Tensor" or about.inputs is not None:
        return Scheme(f"int4 {groups}", 4, width, inputs=about.inputs)
    narrow = next(size for size in (LONGEST_ADDED, 32, 16, 8, 4, 2, 1) if width % size == 0)
    return Scheme(f"int4 {groups}", 4, narrow if width > LONGEST_ADDED else width, added=True)


def read_inputs(module: str, kind: str, data: Mapping[str, Any], static: bool) -> Inputs | None:
    """How activations are rounded. Raises: UnsupportedModel."""
    if kind == "IntxUnpackedToInt8Tensor":
        return Inputs("int8", symmetric=False) if data.get("activation_quantization") else None
    if kind == "Int4Tensor":  # its codes have a middle of 0 then
        return Inputs("fp8") if "float8" in named(data.get("activation_dtype", "")) else None
    given = data.get("act_quant_kwargs")
    if given is None or kind not in EIGHT_BITS:
        return None
    given = given["_data"]
    wanted = (given.get("granularity") or {}).get("_data") or {}
    block, lowest = wanted.get("block_size"), given.get("hp_value_lb")
    if (block is not None and list(block)[:-1] != [1]) or lowest is not None:
        raise UnsupportedModel(
            f"{module}: activations rounded in blocks of {shown(block)} (lowest bound {shown(lowest)}) are not "
            "implemented; those of rows, of a whole batch (by rows here) and of 1 x K are."
        )
    return Inputs(
        "fp8" if kind == "Float8Tensor" else "int8",
        static=static,
        width=0 if block is None else int(block[-1]),
        symmetric=named(given.get("mapping_type", "SYMMETRIC")) == "SYMMETRIC",
        limit=float(given.get("hp_value_ub") or 0.0),
    )


def named(value: Any) -> str:
    """The name of a type or an enumeration, as the header writes it."""
    return str(value.get("_data") if isinstance(value, Mapping) else value)


def whole(own: QuantizedTensor, zeros: Tensor) -> Tensor | None:
    """Return zero points, or None if all are 0. Raises: UnsupportedModel: some are no integers."""
    if not torch.equal(zeros, zeros.round()):
        raise UnsupportedModel(f"{own.module}: zero points of torchao that are no integers are not implemented.")
    return zeros if bool(zeros.any()) else None


def four(own: QuantizedTensor) -> Tensor:
    """Read fp4 codes [N, K]."""
    return unpack(own.tensor(QDATA, torch.uint8), 4, own.shape[1])


def in_tiles(words: Tensor) -> Tensor:
    """Nibbles uint8 [8 R, 128 C] from words [R, C, 32, 4] in the order of NVIDIA's m16n8k16 instruction.

    Lane t holds row t // 4 of its tile, and of each 32 columns those at 2 (t % 4) and the next, with 8, 16 and 24 more:
    even columns in a word's lower half, odd ones in its upper.
    """
    octets = from_words(words.reshape(-1, 1), 4, 8)
    lanes = octets.reshape(
        *words.shape[:2], 8, 4, words.shape[3], 2, 4
    )  # tile row, tile column, row, pair, word, odd, 8s
    return lanes.permute(0, 2, 1, 4, 6, 3, 5).reshape(8 * words.shape[0], -1).contiguous()


def unswizzled(scales: Tensor, rows: int, groups: int) -> Tensor:
    """Scales [rows, groups] from the order of cuBLAS: tiles of 128 x 4, in which row 32 a + b stands at b, a."""
    high, wide = -(-rows // 128), -(-groups // 4)
    tiles = scales.reshape(high, wide, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(128 * high, 4 * wide)[:rows, :groups].contiguous()


def read_torchao(config: Mapping[str, Any]) -> TorchAO:
    """Read a quantization_config with quant_method torchao. Raises: UnsupportedModel: AMD's tiles."""
    if "quant_type" not in config:
        raise CheckpointError("quantization_config: torchao without quant_type.")
    default = config["quant_type"].get("default") if isinstance(config["quant_type"], Mapping) else None
    own = default.get("_data") if isinstance(default, Mapping) else None
    if isinstance(own, Mapping) and own.get("int4_tile_packed_ntile", 8) != 8:
        raise UnsupportedModel(
            "quantization_config: int4 in AMD's tiles (int4_tile_packed_ntile 16) is not implemented; quantise with "
            "int4_packing_format plain."
        )
    return TorchAO(usual_scheme(default))


def usual_scheme(default: Any) -> Scheme | None:
    """The scheme that a config's name stands for, of numbers that are not there: for plans and dummy weights."""
    kind, own = (default.get("_type"), default.get("_data") or {}) if isinstance(default, Mapping) else ("", {})
    width = own.get("group_size", 128)
    if kind == "Int4WeightOnlyConfig" and isinstance(width, int) and width > 0:
        return Scheme(f"int4 in groups of {min(width, LONGEST_ADDED)}", 4, min(width, LONGEST_ADDED))
    if kind in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        return Scheme("int8 by rows", 8, inputs=Inputs("int8") if "Activation" in kind else None)
    if kind in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        return Scheme("fp8 by rows", 8, inputs=Inputs("fp8") if "Activation" in kind else None)
    return None
