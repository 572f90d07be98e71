"""The block types of GGUF, turned into plain numbers.

A quantised row is a chain of blocks; each block holds 32 or 256 small integers and the scales that they share. Every
decoder here takes uint8 [N, bytes of a block] and gives float32 [N, numbers of a block]; the arithmetic is in the
order of the ggml reference, so results are equal to the last bit. Work goes through the cache in pieces. The types
that need ggml's big lookup grids (IQ1, IQ2, IQ3, NVFP4) are decoded by the `gguf` package.

Before: gguf.py (where the bytes are).  After: load.py (fills the model), quant/ (keeps some types packed instead).

Source: block layouts of ggml, ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedModel
from .gguf import BLOCK_SIZES, GGUFTensor

PIECE_NUMBERS = 1 << 18  # 1 MiB of fp32 at a time stays in L2: SmolLM2 in 0.4 s instead of 0.9 s in whole tensors
PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
BY_GGUF_PACKAGE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"}
# The 16 values of the non-linear 4-bit types, and those of MXFP4 (e2m1, doubled).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize(tensor: GGUFTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of a GGUF tensor.

    Args: tensor: of any type in BLOCK_SIZES.   dtype: of the result; rounding is from float32.
    Returns: a new tensor of shape tensor.shape.
    Raises: UnsupportedModel: the type needs the `gguf` package and it is not installed.
    """
    return decode(torch.from_numpy(tensor.data), tensor.type, dtype).view(tensor.shape)


def decode(rows: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode whole rows of blocks.

    Args: rows: uint8 [..., bytes of a row], contiguous.   kind: block type, a key of BLOCK_SIZES.
    Returns: [..., numbers of a row] in `dtype`, newly allocated.
    """
    numbers, size = BLOCK_SIZES[kind]
    shape = (*rows.shape[:-1], rows.shape[-1] // size * numbers)
    blocks = rows.reshape(-1, size)
    out = torch.empty(blocks.shape[0] * numbers, dtype=dtype)
    if kind in PLAIN:
        return out.copy_(_as(blocks, PLAIN[kind]).view(-1)).view(shape)
    decoder = _gguf_package(kind) if kind in BY_GGUF_PACKAGE else DECODERS[kind]
    step = PIECE_NUMBERS // numbers
    for start in range(0, blocks.shape[0], step):
        piece = decoder(blocks[start : start + step])
        out[start * numbers : (start + step) * numbers].copy_(piece.reshape(-1))
    return out.view(shape)


def _gguf_package(kind: str) -> Callable[[Tensor], Tensor]:
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModel(f"GGUF type {kind} is decoded by the `gguf` package: pip install gguf.") from error
    qtype = gguf.GGMLQuantizationType[kind]
    return lambda blocks: torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(blocks.numpy(), qtype)))


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [N, k] read as numbers of `dtype`. Copied when not aligned: blocks have odd sizes."""
    aligned = part.is_contiguous() and part.data_ptr() % dtype.itemsize == 0
    return (part if aligned else part.clone(memory_format=torch.contiguous_format)).view(dtype)


def _half(part: Tensor) -> Tensor:
    return _as(part, torch.float16).float()


def _fields(part: Tensor, bits: int, width: int) -> Tensor:
    """Unpack fields of `bits` bits: of each `width` bytes first all lowest fields, then all next ones ...

    Args: part: uint8 [N, k].   Returns: uint8 [N, k * 8 // bits].
    """
    groups = part.reshape(part.shape[0], -1, width)
    mask = (1 << bits) - 1
    return torch.stack([(groups >> shift) & mask for shift in range(0, 8, bits)], dim=2).flatten(1)


def _nibbles(part: Tensor) -> Tensor:
    """float32 [N, 2 k] from [N, k]: all low halves, then all high halves; the hot one, so with fewer passes."""
    count, width = part.shape
    out = torch.empty(count, 2, width)
    out[:, 0] = part & 15
    out[:, 1] = part >> 4
    return out.view(count, 2 * width)


def q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks[:, :2]))


def q4_1(blocks: Tensor) -> Tensor:
    scales = _half(blocks[:, :4])
    return _nibbles(blocks[:, 4:]).mul_(scales[:, :1]).add_(scales[:, 1:])


def q5_0(blocks: Tensor) -> Tensor:
    high = _fields(blocks[:, 2:6], 1, 1)
    return _nibbles(blocks[:, 6:]).add_(high, alpha=16).sub_(16).mul_(_half(blocks[:, :2]))


def q5_1(blocks: Tensor) -> Tensor:
    scales = _half(blocks[:, :4])
    high = _fields(blocks[:, 4:8], 1, 1)
    return _nibbles(blocks[:, 8:]).add_(high, alpha=16).mul_(scales[:, :1]).add_(scales[:, 1:])


def q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks[:, :2]))


def q8_1(blocks: Tensor) -> Tensor:
    return blocks[:, 4:].view(torch.int8).float().mul_(_half(blocks[:, :2]))  # bytes 2-3: a sum, for dot products


def q8_k(blocks: Tensor) -> Tensor:
    return blocks[:, 4:260].view(torch.int8).float().mul_(_as(blocks[:, :4], torch.float32))


def q2_k(blocks: Tensor) -> Tensor:
    count = blocks.shape[0]
    packed = blocks[:, :16]
    scales = _half(blocks[:, 80:84])
    scale = (scales[:, :1] * (packed & 15).float()).unsqueeze(2)
    least = (scales[:, 1:] * (packed >> 4).float()).unsqueeze(2)
    return _fields(blocks[:, 16:80], 2, 32).float().view(count, 16, 16).mul_(scale).sub_(least)


def q3_k(blocks: Tensor) -> Tensor:
    count = blocks.shape[0]
    absent = 1 - _fields(blocks[:, :32], 1, 32)  # a set bit means that 4 is NOT subtracted
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    scale = _half(blocks[:, 108:110]) * (low | (high << 4)).float().sub_(32)
    numbers = _fields(blocks[:, 32:96], 2, 32).float().sub_(absent, alpha=4)
    return numbers.view(count, 16, 16).mul_(scale.unsqueeze(2))


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum [N, 8, 1] of the sub-blocks of Q4_K and Q5_K: 6 bits each, the upper four split up."""
    scales = _half(blocks[:, :4])
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([first & 63, (mixed & 15) | ((first >> 2) & 48)], dim=1)
    least = torch.cat([second & 63, (mixed >> 4) | ((second >> 2) & 48)], dim=1)
    return (scales[:, :1] * scale.float()).unsqueeze(2), (scales[:, 1:] * least.float()).unsqueeze(2)


def q4_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_mins(blocks)
    return _fields(blocks[:, 16:], 4, 32).float().view(-1, 8, 32).mul_(scale).sub_(least)


def q5_k(blocks: Tensor) -> Tensor:
    scale, least = _scales_and_mins(blocks)
    high = _fields(blocks[:, 16:48], 1, 32)
    numbers = _fields(blocks[:, 48:], 4, 32) | (high << 4)
    return numbers.float().view(-1, 8, 32).mul_(scale).sub_(least)


def q6_k(blocks: Tensor) -> Tensor:
    high = _fields(blocks[:, 128:192], 2, 32)
    numbers = (_fields(blocks[:, :128], 4, 64) | (high << 4)).float().sub_(32)
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return numbers.view(-1, 16, 16).mul_(scale.unsqueeze(2))


def iq4_nl(blocks: Tensor) -> Tensor:
    return _looked_up(_fields(blocks[:, 2:], 4, 16), IQ4_VALUES).mul_(_half(blocks[:, :2]))


def iq4_xs(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, 4:8], 4, 1)
    high = _fields(blocks[:, 2:4], 2, 1)
    scale = _half(blocks[:, :2]) * (low | (high << 4)).float().sub_(32)
    return _looked_up(_fields(blocks[:, 8:], 4, 16), IQ4_VALUES).view(-1, 8, 32).mul_(scale.unsqueeze(2))


def mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()  # half of 2**(e - 127), since the table holds doubled values
    bits = torch.where(exponent < 2, torch.full_like(exponent, 0x200000) << exponent.clamp(max=1), (exponent - 1) << 23)
    return _looked_up(_fields(blocks[:, 1:], 4, 16), MXFP4_VALUES).mul_(bits.view(torch.float32))


def tq1_0(blocks: Tensor) -> Tensor:
    """Ternary digits, five to a byte: a byte times 3**k (mod 256), times 3, has digit k above bit 8."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**k for k in range(digits)], dtype=torch.uint8).view(1, digits, 1)
        parts.append((blocks[:, None, start:stop] * powers).flatten(1))
    digits = (torch.cat(parts, dim=1).int() * 3) >> 8
    return digits.float().sub_(1).mul_(_half(blocks[:, 52:]))


def tq2_0(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, :64], 2, 32).float().sub_(1).mul_(_half(blocks[:, 64:]))


def _looked_up(fields: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[fields.int()]


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q8_1": q8_1,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_K": q8_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
}
