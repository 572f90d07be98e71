"""The block types of GGUF as codes and scales: what a layer keeps when it does not turn them into numbers.

    W[n, k] = code[n, k] * scale[n, g] + offset[n, g]        or (code - middle) * scale

Codes are the file's own integers; nothing is quantised again. Types of 4 and 2 bits stay that small. Those of 5 and 6
bits become bytes, and so do the table values of IQ4_NL: half of bf16, though more than in the file. Scales of K-quants,
products of a half and a small integer in the file, are kept as halves (wrong by one part in 4096), or as they are where
a model computes in float32.

    kept in  4 bits  Q4_0 Q4_1 Q4_K (as small as the file, to 11 %)   Q3_K
             2 bits  Q2_K        8 bits  Q8_0 (as small as the file)  Q5_0 Q5_1 Q5_K Q6_K IQ4_NL

A file that would take more than `MOST` times its bytes so has its codes kept in as few bits as there, and scales of
Q2_K, Q3_K and Q6_K as nested as there (quant/planes.py): all then take what the file takes, to 4 %, Q5_K 9 % more.

Before: dequantize.py, which knows the blocks.  After: gguf_names.py; quant/grouped.py keeps and multiplies them.

Source: block layouts of ggml, ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from ..quant.codes import Codes, Scheme
from ..quant.format import Stored
from .dequantize import IQ4_VALUES, _fields, _half, _looked_up, _scales_and_mins
from .gguf import BLOCK_SIZES

MOST = 1.15  # bytes in memory for each byte of the file
ROWS = 4096  # of a matrix that are taken apart at once
Parts = tuple[Tensor, Tensor, Tensor | None]  # codes [N, numbers], scales [N, groups], offsets or None


def _q4_0(blocks: Tensor) -> Parts:
    return _fields(blocks[:, 2:], 4, 16), _half(blocks[:, :2]), None


def _q4_1(blocks: Tensor) -> Parts:
    scales = _half(blocks[:, :4])
    return _fields(blocks[:, 4:], 4, 16), scales[:, :1], scales[:, 1:]


def _q5_0(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4
    return (codes.to(torch.int8) - 16), _half(blocks[:, :2]), None


def _q5_1(blocks: Tensor) -> Parts:
    scales = _half(blocks[:, :4])
    codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return codes.to(torch.int8), scales[:, :1], scales[:, 1:]


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks[:, :2]), None


def _q2_k(blocks: Tensor) -> Parts:
    packed, scales = blocks[:, :16], _half(blocks[:, 80:84])
    offsets = -scales[:, 1:] * (packed >> 4).float()
    return _fields(blocks[:, 16:80], 2, 32), scales[:, :1] * (packed & 15).float(), offsets


def _inner_q3(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, 96:104], 4, 8), _fields(blocks[:, 104:108], 2, 4)
    return (low | (high << 4)).to(torch.int8) - 32


def _q3_k(blocks: Tensor) -> Parts:
    scale = _half(blocks[:, 108:110]) * _inner_q3(blocks).float()
    return _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2, scale, None


def _q4_k(blocks: Tensor) -> Parts:
    scale, least = _scales_and_mins(blocks)
    return _fields(blocks[:, 16:], 4, 32), scale[..., 0], -least[..., 0]


def _q5_k(blocks: Tensor) -> Parts:
    scale, least = _scales_and_mins(blocks)
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes.to(torch.int8), scale[..., 0], -least[..., 0]


def _q6_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes.to(torch.int8) - 32, scale, None


def _iq4_nl(blocks: Tensor) -> Parts:
    return _looked_up(_fields(blocks[:, 2:], 4, 16), IQ4_VALUES).to(torch.int8), _half(blocks[:, :2]), None


# The scheme of each type, the zero point of all codes, and how blocks are taken apart.
KEPT: dict[str, tuple[Scheme, int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (Scheme("Q4_0", 4, 32, blocks=True), 8, _q4_0),
    "Q4_1": (Scheme("Q4_1", 4, 32, added=True, blocks=True), 0, _q4_1),
    "Q5_0": (Scheme("Q5_0", 8, 32, blocks=True, fine=5), 0, _q5_0),
    "Q5_1": (Scheme("Q5_1", 8, 32, added=True, blocks=True, fine=5), 0, _q5_1),
    "Q8_0": (Scheme("Q8_0", 8, 32, blocks=True), 0, _q8_0),
    "Q2_K": (Scheme("Q2_K", 2, 16, added=True, blocks=True, fine=2), 0, _q2_k),
    "Q3_K": (Scheme("Q3_K", 4, 16, blocks=True, fine=3), 4, _q3_k),
    "Q4_K": (Scheme("Q4_K", 4, 32, added=True, blocks=True), 0, _q4_k),
    "Q5_K": (Scheme("Q5_K", 8, 32, added=True, blocks=True, fine=5), 0, _q5_k),
    "Q6_K": (Scheme("Q6_K", 8, 16, blocks=True, fine=6), 0, _q6_k),
    "IQ4_NL": (Scheme("IQ4_NL", 8, 32, blocks=True, fine=4, values=IQ4_VALUES), 0, _iq4_nl),
}


# What the scales of a type are made of: a byte for each group, and one or two halves a block.
NESTED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "Q2_K": lambda blocks: (blocks[:, :16], _half(blocks[:, 80:84])),
    "Q3_K": lambda blocks: (_inner_q3(blocks), _half(blocks[:, 108:110])),
    "Q6_K": lambda blocks: (blocks[:, 192:208].contiguous().view(torch.int8), _half(blocks[:, 208:])),
}


def too_large(tensors: Iterable[Stored]) -> bool:
    """Whether a file's tensors, kept as KEPT says, would take more than MOST times their bytes."""
    found = [(KEPT[one.qtype][0], one) for one in tensors if one.qtype in KEPT]
    held = sum(prod(one.shape) * (kept.bits / 8 + (2 + 2 * kept.added) / kept.width) for kept, one in found)
    return held > MOST * sum(one.nbytes for _, one in found)


def codes_of(rows: Tensor, kind: str) -> Codes:
    """Take whole rows of blocks apart. Args: rows: uint8 [N, bytes of a row]; kind: a key of KEPT."""
    scheme, middle, take = KEPT[kind]
    pieces = [_some(piece, kind, take) for piece in rows.split(ROWS)]
    codes, scales, offsets = (None if one[0] is None else torch.cat(one) for one in zip(*pieces, strict=True))
    if middle:
        offsets = torch.full(scales.shape, middle, dtype=torch.uint8)
    blocks = rows.reshape(-1, BLOCK_SIZES[kind][1])
    inner, outer = NESTED[kind](blocks) if kind in NESTED else (None, None)
    if inner is not None:
        inner, outer = inner.reshape(len(rows), -1), outer.half().reshape(len(rows), -1, outer.shape[-1])
    return Codes(scheme, codes, scales, offsets, inner=inner, outer=outer)


def _some(rows: Tensor, kind: str, take: Callable[[Tensor], Parts]) -> Parts:
    """`take` for a few rows."""
    codes, scales, offsets = take(rows.reshape(-1, BLOCK_SIZES[kind][1]))
    scales, offsets = (None if one is None else one.reshape(len(rows), -1) for one in (scales, offsets))
    return codes.reshape(len(rows), -1), scales, offsets
