"""A quantised matrix, whoever wrote it: small codes, and what turns them back into numbers.

    W[n, k] = (number(code[n, k]) - zero[n, g]) * scale[n, g]        g = the group of column k

`number` is the code itself (int8, fp8, unsigned integers) or a row of a table (fp4, nf4). Published formats differ in
how they lay codes out and in how many weights share a scale; all of them are this formula once the scales of tensors,
blocks and rows are spelled out as [N, G]: a tensor's scale is that of each of its rows, a block's that of each of its
128 rows. Fused parts with different scales are then nothing special, and neither is cutting rows out.

Before: quant/format.py.  After: stored.py reads it from a checkpoint, grouped.py keeps it and multiplies.
"""

from __future__ import annotations

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ..kernels.grouped_gemm import numbers, spread

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, OCP MX v1.0
LARGEST = {"fp8": 448.0, "int8": 127.0}
ROWS = 1024  # of a matrix that are worked on at once, so that intermediate numbers take little memory
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # of a group's largest number, at which codes may end
SMALLEST = torch.finfo(torch.float32).tiny  # a step that is not 0, for rows of zeros


@frozen
class Inputs:
    """How activations are rounded before a product, where a checkpoint was made for that.

    Args:
        kind: "fp8" (e4m3) or "int8".
        static: one scale, from the checkpoint; else one is computed for each token.
        width: columns that share a computed scale; 0: all of a token's.
        symmetric: around 0; else int8 codes with a zero point.
        limit: bound of the magnitude that a computed scale must reach; 0: none (FBGEMM).
    """

    kind: str
    static: bool = False
    width: int = 0
    symmetric: bool = True
    limit: float = 0.0


@frozen
class Scheme:
    """What two matrices must share to be one product.

    Args:
        name: for people, such as "fp8 in blocks of 128".
        bits: of a code in memory: 2, 4 or 8.
        width: consecutive columns that share a scale; 0: all of a row.
        table: the numbers that codes stand for; None: codes are numbers.
        inputs: how activations are rounded; None: not at all.
        added: `zeros` of the codes are no zero points but numbers added after the scale.
        blocks: the codes are a GGUF file's own.
        fine: bits that a code has in the file, where memory has more: it may be kept in these (planes.py); else 0.
        values: the numbers that codes of `fine` bits are, in ascending order; None: consecutive ones.
    """

    name: str
    bits: int
    width: int = 0
    table: tuple[float, ...] | None = field(default=None, repr=False)
    inputs: Inputs | None = None
    added: bool = False
    blocks: bool = False
    fine: int = 0
    values: tuple[int, ...] | None = field(default=None, repr=False)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes in memory of a matrix without zero points, about: scales have two bytes, one a row or of fp8 four."""
        groups = -(-columns // self.width) if self.width else 1
        scale = 1 if self.table and self.width == 32 else 4 if groups == 1 or self.bits == 8 else 2
        return rows * (-(-columns * self.bits // 8) + groups * scale)


@frozen(eq=False)
class Codes:
    """A matrix of N rows and K columns, in G groups of columns.

    Args:
        scheme: of this matrix.
        codes: [N, K] int8, uint8 or float8, one an element; packed to bits by `pack`.
        scales: [N, G] floating point.
        zeros: [N, G] or None, in codes.
        groups: [K] group of each column where they are not consecutive (act-order), else None.
        input_scale, input_zero: of static inputs, one number each, or None.
        inner, outer: [N, G] and [N, G / 16, 1 or 2]: what scales (and zeros) were made of, as planes.py may keep them.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None
    inner: Tensor | None = None
    outer: Tensor | None = None

    def rows(self, which: slice | Tensor) -> Codes:
        """Return some of the rows."""
        by_row = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "inner", "outer")}
        return evolve(self, **{name: None if own is None else own[which] for name, own in by_row.items()})

    def scaled_for(self, dtype: torch.dtype) -> Codes:
        """The same for layers of a type. Scales of a GGUF file's K-quants are products of a half and a small integer:
        exact in float32, else halves again (wrong by one part in 4096, where bfloat16 is by one in 512).
        """
        if dtype == torch.float32 or not self.scheme.blocks:
            return self
        zeros = self.zeros.half().float() if self.scheme.added else self.zeros
        return evolve(self, scales=self.scales.half().float(), zeros=zeros)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, [N, K]; computed in float32."""
        dense = as_numbers(self.codes, self.scheme)
        width = self.scheme.width
        zeros = None if self.zeros is None else spread(self.zeros.float(), width, self.groups, dense.shape[1])
        if zeros is not None and not self.scheme.added:
            dense = dense - zeros
        dense = dense * spread(self.scales.float(), width, self.groups, dense.shape[1])
        return (dense + zeros if self.scheme.added else dense).to(dtype)


def as_numbers(codes: Tensor, scheme: Scheme) -> Tensor:
    """Return what codes [N, K] stand for, before zeros and scales; float32."""
    table = None if scheme.table is None else torch.tensor(scheme.table, dtype=torch.float32, device=codes.device)
    return numbers(codes, table)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes [N, K] below 2**bits as bytes [N, ceil(K * bits / 8)], the first column in the lowest bits.

    Undone by kernels/grouped_gemm.py::unpack.
    """
    if bits == 8:
        return codes
    each = 8 // bits
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % each))
    packed = torch.zeros(padded.shape[0], padded.shape[1] // each, dtype=torch.uint8, device=codes.device)
    for place in range(each):
        packed |= padded[:, place::each] << (bits * place)
    return packed


def from_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Read `count` unsigned integers of `bits` bits along the last dimension of int32 words, lowest bits first.

    The integers follow each other without gaps, so that those of three bits may lie across two words.
    Returns: uint8 [..., count].
    """
    if 8 % bits == 0:  # none lies across two bytes
        octets = words.contiguous().view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((octets[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :count]
    return torch.cat([_across_words(rows, bits, count) for rows in words.split(ROWS)])


def _across_words(words: Tensor, bits: int, count: int) -> Tensor:
    """`from_words` at any width; takes 24 bytes for each integer while it works."""
    first = torch.arange(count) * bits
    word, shift = first // 32, first % 32
    wide = words.long() & 0xFFFFFFFF
    low = wide[..., word] >> shift
    high = wide[..., (word + 1).clamp(max=words.shape[-1] - 1)] << (32 - shift)
    return ((low | high) & (2**bits - 1)).to(torch.uint8)


def compact(scales: Tensor) -> Tensor:
    """Return float32 scales in the smallest type that holds them exactly; files mostly hold halves."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales


def one_value(zeros: Tensor | None) -> int | None:
    """Return the integer that all zero points are, or None if they differ; 0 if there are none."""
    if zeros is None or not zeros.numel():
        return 0
    first = float(zeros.flatten()[0])
    return int(first) if first == int(first) and bool((zeros == zeros.flatten()[0]).all()) else None


def blocks_to_rows(scales: Tensor, rows: int, block: int) -> Tensor:
    """Return the scales [ceil(rows / block), G] of blocks as one for each row, [rows, G]."""
    return scales.repeat_interleave(block, dim=0)[:rows]


def rounded(x: Tensor, inputs: Inputs, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """Return x [T, K] as the rounded activations stand for it; in x's type, computed in float32.

    Args: scale, zero: of static inputs.
    """
    columns, width = x.shape[1], inputs.width or max(x.shape[1], 1)
    tiles = torch.nn.functional.pad(x.float(), (0, -columns % width)).unflatten(1, (-1, width))
    largest = LARGEST[inputs.kind]
    if not inputs.static and inputs.symmetric:
        reach = tiles.abs().amax(dim=-1, keepdim=True)
        scale = (reach.clamp(max=inputs.limit) if inputs.limit else reach) / largest
    elif not inputs.static:
        low, high = tiles.amin(-1, keepdim=True).clamp(max=0), tiles.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        zero = (-128 - low / scale.clamp(min=SMALLEST)).round()
    scale = scale.float().clamp(min=SMALLEST)
    codes = tiles / scale
    if inputs.kind == "fp8":
        codes = codes.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
    else:
        shift = 0.0 if zero is None else zero.float()
        codes = (codes + shift).round().clamp(-128, 127) - shift
    return (codes * scale).flatten(1)[:, :columns].to(x.dtype)


def fitting_scales(tiles: Tensor, middle: int, dtype: torch.dtype) -> Tensor:
    """Return for each group [..., K] of numbers the scale [...], rounded to `dtype`, whose codes are least wrong.

    With few codes it pays to cut the largest numbers off: most of the others then lie nearer to a code. Wrong by a sum
    of |error| ** 2.4, which minds large errors more than squares do. Codes go from -middle to middle - 1.

    Source: the search for a grid in GPTQ's published code (Frantar et al., arXiv:2210.17323).
    """
    reach = tiles.abs().amax(dim=-1) / (middle - 1)
    best = least = None
    for share in SHARES:
        scales = (reach * share).to(dtype).float().clamp(min=SMALLEST)
        codes = (tiles / scales[..., None]).round_().clamp_(-middle, middle - 1)
        wrong = codes.mul_(scales[..., None]).sub_(tiles).abs_().pow_(2.4).sum(-1)
        better = None if least is None else wrong < least
        best = scales if better is None else torch.where(better, scales, best)
        least = wrong if better is None else torch.where(better, wrong, least)
    return best


def quantise(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32) -> Codes:
    """Round a matrix [N, K] to the nearest codes of a symmetric scheme of integers or fp8: the online formats.

    Args: scale_dtype: scales are rounded to it first, so that codes make up for that.
    """
    parts = [_quantise(rows, scheme, scale_dtype) for rows in weight.split(ROWS)]
    zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts])
    codes, scales = (torch.cat([getattr(part, what) for part in parts]) for what in ("codes", "scales"))
    return Codes(scheme, codes, scales, zeros)


def _quantise(weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Codes:
    """`quantise` of a few rows."""
    columns, width = weight.shape[1], scheme.width or weight.shape[1]
    tiles = torch.nn.functional.pad(weight.float(), (0, -columns % width)).unflatten(1, (-1, width))
    float8 = scheme.name.startswith("fp8")
    middle = 2 ** (scheme.bits - 1)
    largest = LARGEST["fp8"] if float8 else middle - 1
    if scheme.bits < 8:
        scales = fitting_scales(tiles, middle, scale_dtype)
    else:
        scales = (tiles.abs().amax(dim=-1) / largest).to(scale_dtype).float().clamp(min=SMALLEST)
    codes = (tiles / scales[..., None]).flatten(1)[:, :columns]
    if float8:
        return Codes(scheme, codes.clamp(-largest, largest).to(torch.float8_e4m3fn), scales)
    codes = codes.round().clamp(-middle, largest)
    if scheme.bits == 8:
        return Codes(scheme, codes.to(torch.int8), scales)
    return Codes(scheme, (codes + middle).to(torch.uint8), scales, torch.full_like(scales, middle, dtype=torch.uint8))
