"""Codes of quantised weights in the one order that the fast kernels read, whatever file they came from.

    W[n, k] = (number(code[n, k]) - zero[n, g]) * scale[n, g]        g = k // width, or one scale for a whole row

Codes of 8 bits stand one to a byte, in order. Smaller ones stand in words of 16 bits, and not side by side: columns are
cut into tiles, and a word holds one column of each of the tile's 16 / bits equal pieces:

    4 bits, tile 128      word e of tile t      bits 0-3    column 128 t + e
                          e = 0 .. 31           bits 4-7    column 128 t + 32 + e
                                                bits 8-11   column 128 t + 64 + e
                                                bits 12-15  column 128 t + 96 + e

So the low bits of neighbouring words are neighbouring columns: a kernel masks a whole register of words, and gets codes
that meet neighbouring numbers of x. A tile never crosses a group, so all codes of a word share their scale.

No instruction turns an integer into a float here, they are slow. A code becomes the low bits of a float whose exponent
gives those bits the weight of one, and subtracting the rest of that float leaves the code: 2**23 + code in float32,
128 + code in bfloat16, 1024 + code in float16. All of it is exact, also with the zero point in the subtrahend.

fp8 (e4m3) is moved into a float16 and scaled by a power of two where the device has no conversion of its own.

fp4 (e2m1) in groups of 32 with powers of two, MXFP4, is tiled by 128 all the same: then each place of a word is one
group, and the four exponents of a tile are one int32, the first group's in the lowest byte. Experts are kept so
(moe_packed_gemm.py).

Source: Kim et al., "Who Says Elephants Can't Run", arXiv:2211.10017, section 3 (integers through the mantissa); Frantar
et al., "MARLIN", arXiv:2408.11743, section 3.

Before: quant/codes.py, what a checkpoint says.  After: packed_gemv.py, packed_gemm.py.
"""

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen

from .activation import activate
from .launch import cdiv, speaks_ptx, use_kernel

KINDS = ("int", "e4m3")
LONGEST_TILE = 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of the codes 0 to 7; 8 to 15 are their negatives


@frozen(eq=False)
class Packed:
    """A matrix of N rows and K columns.

    Attributes:
        codes: [N, K] int8, uint8 or float8; [N, tiles * tile * bits / 16] int16 for fewer bits.
        scales: [N, G] floating point; G is 1 for one scale a row. float32 if G is odd (and not 1). For "e2m1" int32
            [N, tiles], four exponents each.
        zeros: [N, G] in the type of the scales, or None where all are `middle`. If `added`, they are no zero points but
            numbers to be added after the scale, as GGUF's blocks have them; groups are narrower than 128 then.
        beside: scales and zeros once more, as `turned` gives them, for packed_limbs.py; or None.
        columns: K.   bits: 2, 4 or 8.   width: columns that share a scale; 0: all.
        kind: "int", "e4m3" or "e2m1".   middle: the zero point of all codes, if `zeros` is None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    columns: int
    bits: int
    width: int
    kind: str
    middle: int = 0
    added: bool = False
    beside: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return LONGEST_TILE if self.kind == "e2m1" else tile_of(self.width)

    @property
    def each(self) -> int:
        """Codes of an element of `codes`."""
        return 1 if self.bits == 8 else 16 // self.bits

    def take(self, rows: torch.Tensor) -> "Packed":
        """Some of the rows, by their numbers."""
        zeros = None if self.zeros is None else self.zeros[rows]
        codes = self.raw()[rows].view(self.codes.dtype)
        return evolve(self, codes=codes, scales=self.scales[rows], zeros=zeros, beside=None)

    def constants(self) -> dict[str, int | str | bool]:
        """What kernels are compiled for."""
        return {
            "KIND": self.kind if self.bits < 8 or self.kind != "int" or self.codes.dtype == torch.int8 else "uint",
            "PER": self.each,
            "TILE": self.tile,
            "WIDTH": self.width,
            "MIDDLE": self.middle,
            "ZEROS": self.zeros is not None,
            "ADDED": self.added,
        }

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zeros as kernels take them: scales again where there are no zeros, to be left alone."""
        return self.raw(), self.scales, self.scales if self.zeros is None else self.zeros

    def with_beside(self) -> "Packed":
        """The same, with scales and zeros turned, too."""
        scales = turned(self.scales)
        return evolve(self, beside=(scales, scales if self.zeros is None else turned(self.zeros)))

    def raw(self) -> torch.Tensor:
        """The codes; float8 as the bytes that they are."""
        return self.codes.view(torch.uint8) if self.codes.dtype.is_floating_point else self.codes


def tile_of(width: int) -> int:
    """Columns of a tile: the largest power of two that divides the group, at most LONGEST_TILE."""
    return LONGEST_TILE if width == 0 else min(width & -width, LONGEST_TILE)


def can_pack(bits: int, width: int, kind: str) -> bool:
    """Whether the fast kernels read such codes: tiles of at least 16 columns."""
    return kind in KINDS and bits in (2, 4, 8) and tile_of(width) >= 16


def tiled(codes: torch.Tensor, bits: int, tile: int) -> torch.Tensor:
    """Return codes [N, K] uint8 as words int16 [N, ceil(K / tile) * tile * bits / 16]; missing columns are zeros."""
    each = 16 // bits
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % tile))
    pieces = padded.unflatten(1, (-1, each, tile // each))
    words = torch.zeros_like(pieces[:, :, 0], dtype=torch.int16)
    for place in range(each):
        words |= pieces[:, :, place].to(torch.int16) << (bits * place)
    return words.flatten(1)


def turned(values: torch.Tensor) -> torch.Tensor:
    """Return values [N, G] of groups with rows beside each other: [G, N] of float32, [G / 2, N, 2] of 16 bits."""
    if values.shape[1] == 1:
        return values
    whole = values if values.element_size() == 4 else values.view(torch.int32)
    return whole.t().contiguous().view(values.dtype)


def untiled(words: torch.Tensor, bits: int, tile: int, columns: int) -> torch.Tensor:
    """Return codes [N, columns] uint8 from the words of `tiled`."""
    each = 16 // bits
    pieces = words.unflatten(1, (-1, 1, tile // each)).int()
    shifts = torch.arange(0, 16, bits, device=words.device)[:, None]
    return ((pieces >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)[:, :columns]


def packed_dense_reference(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The specification of `packed_dense`."""
    codes = weight.codes if weight.bits == 8 else untiled(weight.codes, weight.bits, weight.tile, weight.columns)
    if weight.kind == "e2m1":
        exponents = weight.scales.view(torch.uint8).repeat_interleave(weight.width, dim=1)[:, : weight.columns]
        numbers = torch.tensor((*E2M1, *(-number for number in E2M1)), device=codes.device)[codes.int()]
        return torch.ldexp(numbers, exponents.int() - 127).to(dtype)
    if weight.added:
        return (codes.float() * _spread(weight.scales, weight) + _spread(weight.zeros, weight)).to(dtype)
    numbers = codes.float() - (weight.middle if weight.zeros is None else _spread(weight.zeros, weight))
    return (numbers * _spread(weight.scales, weight)).to(dtype)


def _spread(values: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Values [N, G] of groups as [N, K], or [N, 1] where one group has all columns."""
    if values.shape[1] == 1:
        return values.float()
    return values.float().repeat_interleave(weight.width, dim=1)[:, : weight.columns]


@triton.jit
def half_of_e4m3(code):
    """e4m3 bytes as float16, 256 times too small; exact, also below the smallest normal number. (NaN becomes 480.)"""
    half = (code.to(tl.uint16) & 128) << 8 | (code.to(tl.uint16) & 127) << 7
    return half.to(tl.float16, bitcast=True)


@triton.jit
def single(
    code, place: tl.constexpr, KIND: tl.constexpr, PER: tl.constexpr, MIDDLE: tl.constexpr, NATIVE: tl.constexpr
):
    """float32 of the codes at one place of their words, less MIDDLE; times 2 ** (place * 16 / PER) for words."""
    if KIND == "e4m3":
        if NATIVE:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return half_of_e4m3(code).to(tl.float32) * 256.0
    elif PER == 1:
        base: tl.constexpr = 12582912.0 if KIND == "int" else 8388608.0  # 1.5 * 2**23 leaves room for a sign
        bits: tl.constexpr = 0x4B400000 if KIND == "int" else 0x4B000000
        return (code.to(tl.int32) + bits).to(tl.float32, bitcast=True) - (base + MIDDLE)
    else:
        shift: tl.constexpr = place * (16 // PER)
        mask: tl.constexpr = ((1 << (16 // PER)) - 1) << shift
        if NATIVE:  # one instruction, which the compiler makes two of
            inside = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, $3, 0xEA;",
                "=r,r,r,r",
                [code.to(tl.int32), tl.full([1], mask, tl.int32), tl.full([1], 0x4B000000, tl.int32)],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            inside = (code.to(tl.int32) & mask) | 0x4B000000
        return inside.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE * (1 << shift))


@triton.jit
def shrunk(x, place: tl.constexpr, PER: tl.constexpr):
    """x over the factor that `single` leaves in codes at this place."""
    factor: tl.constexpr = 2.0 ** (-(place * (16 // PER)))
    return x if PER == 1 else x * factor


def _of_places(begin: str, step: str) -> tuple[tl.constexpr, tl.constexpr]:
    """PTX for float16 and bfloat16: `begin`, and `step` for each place of the words $4.

    What stands for something: KIND the type of pairs, BASE the number whose last bit is worth one, ONE, WORD a register
    with the place's codes in its lowest bits, OUT the place's result; w is free.
    """
    texts = []
    for kind, base, one in (("f16x2", "0x64006400", "0x3C003C00"), ("bf16x2", "0x43004300", "0x3F803F80")):
        lines = [".reg .b32 w, one;", "mov.b32 one, ONE;", begin, step.replace("WORD", "$4").replace("OUT", "$0")]
        for place in range(1, 4):
            lines += [f"shr.u32 w, $4, {4 * place};", step.replace("WORD", "w").replace("OUT", f"${place}")]
        text = "\n".join(["{", *lines, "}"])
        texts.append(tl.constexpr(text.replace("KIND", kind).replace("BASE", base).replace("ONE", one)))
    return texts[0], texts[1]


NIBBLES_OF_HALF, NIBBLES_OF_BFLOAT = _of_places(
    "",
    """lop3.b32 w, WORD, 0x000F000F, BASE, 0xEA;
    fma.rn.KIND OUT, w, one, $5;""",
)
SCALED_OF_HALF, SCALED_OF_BFLOAT = _of_places(
    """.reg .b32 t, high, low;
    prmt.b32 high, $6, $6, 0x3232;
    prmt.b32 low, $6, $6, 0x1010;""",
    """lop3.b32 w, WORD, 0x000F000F, BASE, 0xEA;
    fma.rn.KIND w, w, one, $5;
    fma.rn.KIND t, w, low, $8;
    fma.rn.KIND OUT, w, high, t;""",
)


def _bare(*steps: str) -> tl.constexpr:
    return tl.constexpr("\n".join(["{", ".reg .b32 w;", *steps, "}"]))


_LOW, _NEXT = ("and.b32 ${}, {}, 0x000F000F;", "and.b32 ${}, {}, 0x00F000F0;")
BARE_OF_HALF = _bare(
    _LOW.format(0, "$4"), *(f"shr.u32 w, $4, {4 * place}; " + _LOW.format(place, "w") for place in (1, 2, 3))
)
BARE_OF_BFLOAT = _bare(
    _LOW.format(0, "$4"), _NEXT.format(1, "$4"), "shr.u32 w, $4, 8;", _LOW.format(2, "w"), _NEXT.format(3, "w")
)
LEAST_HALF, LEAST_BFLOAT = tl.constexpr(2.0**-24), tl.constexpr(2.0**-133)  # the smallest numbers above zero


@triton.jit
def bare_nibbles(code, HALF: tl.constexpr):
    """The four codes of each word as float16 if HALF, else bfloat16, times the smallest number that there is above
    zero: the bits of a code are such a number already. For bfloat16 the second and fourth are 16 times as large.
    """
    if HALF:
        return tl.inline_asm_elementwise(
            BARE_OF_HALF, "=&r,=&r,=&r,=&r,r", [code],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            BARE_OF_BFLOAT, "=&r,=&r,=&r,=&r,r", [code],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def four_nibbles(code, minus, HALF: tl.constexpr):
    """The four codes of each word, plus `minus`, as float16 if HALF, else bfloat16; two words at a time.

    Args: minus: -(1024 + zero), or -(128 + zero) for bfloat16, of each word.
    """
    if HALF:
        return tl.inline_asm_elementwise(
            NIBBLES_OF_HALF, "=&r,=&r,=&r,=&r,r,r", [code, minus],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            NIBBLES_OF_BFLOAT, "=&r,=&r,=&r,=&r,r,r", [code, minus],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def pair_product(x, y):
    """x * y in bfloat16 or float16, rounded once, two numbers an instruction."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def two_halves(scale, kind: tl.constexpr):
    """A scale as the sum of two numbers of 16 bits, the large one in the upper half of an int32."""
    high = scale.to(kind)
    low = (scale - high.to(tl.float32)).to(kind)
    upper = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return upper | (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def four_scaled_nibbles(code, minus, scale, added, HALF: tl.constexpr):
    """As `four_nibbles`, times a scale given as `two_halves`, plus `added`, as if rounded once: what the small half
    of a scale adds is small. Two neighbouring words share a scale.
    """
    if HALF:
        return tl.inline_asm_elementwise(
            SCALED_OF_HALF, "=&r,=&r,=&r,=&r,r,r,r,r,r", [code, minus, scale, added],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            SCALED_OF_BFLOAT, "=&r,=&r,=&r,=&r,r,r,r,r,r", [code, minus, scale, added],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _packed_dense_kernel(
    codes_ptr,  # [N, row_elements]
    scales_ptr,  # [N, G]
    zeros_ptr,  # [N, G]; read if ZEROS
    out_ptr,  # [N, K]
    K,
    row_elements,
    G,
    KIND: tl.constexpr,
    PER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = (tl.program_id(1) * (BLOCK_K // TILE) + tl.arange(0, BLOCK_K // TILE))[:, None]
    lane = tl.arange(0, TILE // PER)[None, :]
    element = tile * (TILE // PER) + lane
    place_of = codes_ptr + row * row_elements + element
    words = tl.load(place_of) if EVEN else tl.load(place_of, mask=element < row_elements, other=0)
    group = tile * 0 if WIDTH == 0 else tl.minimum(tile * TILE // max(WIDTH, 1), G - 1)
    scale = tl.load(scales_ptr + row * G + group).to(tl.float32)
    for place in tl.static_range(PER):
        number = shrunk(single(words, place, KIND, PER, MIDDLE, NATIVE), place, PER)
        if ZEROS and not ADDED:
            number -= tl.load(zeros_ptr + row * G + group).to(tl.float32)
        number *= scale
        if ADDED:
            number += tl.load(zeros_ptr + row * G + group).to(tl.float32)
        column = tile * TILE + place * (TILE // PER) + lane
        value = number.to(out_ptr.dtype.element_ty)
        if EVEN:
            tl.store(out_ptr + row * K + column, value)
        else:
            tl.store(out_ptr + row * K + column, value, mask=column < K)


def packed_dense(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Turn codes into numbers. Returns: [N, K] in `dtype`; computed in float32, rounded once."""
    if not use_kernel(weight.codes) or weight.kind == "e2m1":
        return packed_dense_reference(weight, dtype)
    rows, columns = weight.codes.shape[0], weight.columns
    out = torch.empty(rows, columns, dtype=dtype, device=weight.codes.device)
    block = 4096 if columns % 4096 == 0 else 1024
    if out.numel():
        _packed_dense_kernel[(rows, cdiv(columns, block))](
            *weight.tensors(),
            out,
            columns,
            weight.codes.shape[1],
            weight.scales.shape[1],
            **weight.constants(),
            NATIVE=speaks_ptx(out),
            EVEN=columns % block == 0,
            BLOCK_K=block,
            num_warps=4,
        )
    return out


@triton.jit
def biased_and_gated(total, total_up, bias_ptr, read, split, N, GATE: tl.constexpr, BIAS: tl.constexpr):
    """Sums [rows, tokens] of a split, with the bias of rows `read`, which the first split has, and gated.

    total_up: sums of the second half; read if GATE.
    """
    if BIAS:
        total += tl.load(bias_ptr + read)[:, None].to(tl.float32) * tl.where(split == 0, 1.0, 0.0)
        if GATE != "":
            total_up += tl.load(bias_ptr + N + read)[:, None].to(tl.float32)
    if GATE != "":
        total = activate(total, GATE) * total_up
    return total
