"""Keys and values in one byte a number: how they are written to the cache, and read from it inside attention.

    kind    code of x                 scale s of                                    number
    e4m3    fp8(x / s), +-448         a layer, from the checkpoint, else 1          code * s
    e5m2    fp8(x / s), +-57344       a layer, likewise                             code * s
    int8    round(x / s), +-127       each token and head: max(|x|) / 127           code * s

Every code is a number that bfloat16 holds exactly, so attention multiplies codes as they are. The scale of a key joins
its score, that of a value its weight, or the whole result where a layer has one scale. So a coded cache costs a kernel
a conversion for each number that it reads, and with int8 the scales: 8 bytes a token and head.

Matrix instructions take 16-bit numbers, and the way from shared memory to them has no bytes. So codes are read as words
of 16 bits, and a word does not hold neighbours but the columns j (in its low byte) and j + D / 2. All low bytes are
then one operand, all high bytes another, in their places already: q Kᵀ is the sum of two products, and so has V two
halves. A code becomes bfloat16 by moving its bits to where a float has them: e4m3 and e5m2 times a power of two, as
their exponents count from elsewhere; the lower 7 bits of int8 as 128 + x, less 128 + its sign.

A number too large for its type becomes the largest. Of int8, a row with a NaN is all NaN, through its scale; the NaN of
fp8 is a NaN for references only, kernels read it as a number beyond the largest.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (e4m3, e5m2); Liu et al., "KIVI",
arXiv:2402.02750, section 2 (keys and values by token); Kim et al., arXiv:2211.10017, section 3 (bits that are moved).

Before: kv/storage.py allocates.  After: rope.py writes, attention_*.py read.
"""

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen

from .launch import speaks_ptx
from .packed import half_of_e4m3

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
SMALLEST = torch.finfo(torch.float32).tiny  # a scale that is not 0, for rows of zeros


@frozen(eq=False)
class CodedCache:
    """The keys, or the values, of a layer.

    Attributes:
        codes: [B, Hkv, P, D] int8, or uint8 with the bytes of fp8; columns in the order 0, D/2, 1, D/2 + 1 ...
        scales: [B, Hkv, P] float32, one for each token and head; or one number for all.
        kind: see above.
    """

    codes: torch.Tensor
    scales: torch.Tensor | float
    kind: str

    @property
    def shape(self) -> torch.Size:
        """Of the codes."""
        return self.codes.shape

    @property
    def each(self) -> bool:
        """Whether every token and head has a scale of its own."""
        return isinstance(self.scales, torch.Tensor)

    def scaled(self, scale: float) -> "CodedCache":
        """The same memory with another scale, where there is one for all."""
        return self if self.each else evolve(self, scales=scale)

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Put rows [T, Hkv, D] into slots [T]: block * P + place."""
        codes, scales = encode_reference(rows.float(), self.kind, None if self.each else self.scales)
        where = slots // self.shape[2], slots % self.shape[2]
        self.codes.transpose(1, 2).index_put_(where, codes.unflatten(-1, (2, -1)).mT.flatten(-2))
        if self.each:
            self.scales.transpose(1, 2).index_put_(where, scales)

    def read(self, blocks: torch.Tensor, inside: slice) -> torch.Tensor:
        """The numbers of the tokens `inside` blocks [N], float32 [1, Hkv, M, D]."""
        codes = self.codes[blocks].transpose(1, 2).flatten(0, 1)[inside]  # [M, Hkv, D]
        codes = codes.unflatten(-1, (-1, 2)).mT.flatten(-2)
        scales = self.scales[blocks].transpose(1, 2).flatten(0, 1)[inside, :, None] if self.each else self.scales
        return (decode_reference(codes, self.kind) * scales).transpose(0, 1)[None]


def words(cache: torch.Tensor | CodedCache) -> torch.Tensor:
    """What kernels read: numbers [B, Hkv, P, D], or words [B, Hkv, P, D / 2] of two codes."""
    return cache.codes.view(torch.int16) if isinstance(cache, CodedCache) else cache


def raw(cache: torch.Tensor | CodedCache) -> torch.Tensor:
    """What lies in memory for each number: codes, or the numbers themselves."""
    return cache.codes if isinstance(cache, CodedCache) else cache


def encode_reference(
    rows: torch.Tensor, kind: str, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Round float32 rows [..., D]. Returns: codes in bytes [..., D], and the scales: [...] of each row, or `scale`."""
    largest = LARGEST[kind]
    if scale is None:
        scales = (rows.abs().amax(-1) / largest).clamp(min=SMALLEST)
        rows = rows / scales[..., None]
    else:
        scales, rows = scale, rows / scale
    rows = rows.clamp(-largest, largest)
    if kind in FLOATS:
        return rows.to(FLOATS[kind]).view(torch.uint8), scales
    return rows.nan_to_num(0).round().to(torch.int8), scales


def decode_reference(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that codes stand for before their scale, float32."""
    return (codes.view(FLOATS[kind]) if kind in FLOATS else codes).float()


def constants(k_cache: torch.Tensor | CodedCache, v_cache: torch.Tensor | CodedCache) -> dict[str, object]:
    """What kernels of attention and rope.py get of coded caches; of others nothing that would change their code.

    Raises: ValueError: K and V are not coded alike.
    """
    coded = [one for one in (k_cache, v_cache) if isinstance(one, CodedCache)]
    if not coded:
        return {"k_scales_ptr": None, "v_scales_ptr": None, "scales_stride": None, "CODE": "", "EACH": False}
    if len(coded) < 2 or (k_cache.kind, k_cache.each) != (v_cache.kind, v_cache.each):
        raise ValueError("keys and values must be coded alike")
    return {
        "k_scales_ptr": k_cache.scales,
        "v_scales_ptr": v_cache.scales,
        "scales_stride": k_cache.scales.stride(0) if k_cache.each else None,
        "CODE": f"{k_cache.kind} by PTX" if speaks_ptx(k_cache.codes) else k_cache.kind,
        "EACH": k_cache.each,
    }


# Two words at a time to two bfloat16: their low bytes, or their high ones.
def _float8(fraction: int, bits: str, factor: str) -> tuple[tl.constexpr, tl.constexpr]:
    """PTX of both. Args: fraction: how many bits; bits: where they and the exponent come to stand; factor: 2**n."""
    low = f"shl.b32 a, $1, {7 - fraction};", "shl.b32 s, $1, 8;", "s"
    high = f"shr.b32 a, $1, {1 + fraction};", "", "$1"
    return tuple(
        tl.constexpr(f"""{{
    .reg .b32 a, s, f;
    {shift}
    {sign}
    and.b32 a, a, {bits};
    lop3.b32 a, {signed}, 0x80008000, a, 0xEA;
    mov.b32 f, {factor};
    mul.rn.bf16x2 $0, a, f;
}}""")
        for shift, sign, signed in (low, high)
    )


E4M3_LOW, E4M3_HIGH = _float8(3, "0x07F007F0", "0x7B807B80")  # 2**120
E5M2_LOW, E5M2_HIGH = _float8(2, "0x0FE00FE0", "0x77807780")  # 2**112
INT8_LOW = tl.constexpr("""{
    .reg .b32 a, s;
    lop3.b32 a, $1, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 s, $1, 0x00800080, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, a, s;
}""")
INT8_HIGH = tl.constexpr("""{
    .reg .b32 a, s;
    shr.b32 a, $1, 8;
    lop3.b32 s, a, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, a, s;
}""")


@triton.jit
def _by_ptx(word, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def decode(byte, CODE: tl.constexpr, dtype: tl.constexpr):
    """The numbers of codes in the low bytes of int16 words whose high bytes have the sign of int8, else nothing."""
    if CODE == "int8" or CODE == "int8 by PTX":
        return byte.to(dtype)
    elif dtype == tl.float16 and (CODE == "e4m3" or CODE == "e4m3 by PTX"):
        return half_of_e4m3(byte) * 256.0
    elif CODE == "e4m3" or CODE == "e4m3 by PTX":
        return (half_of_e4m3(byte).to(tl.float32) * 256.0).to(dtype)
    else:
        return (byte << 8).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _numbers(word, byte, CODE: tl.constexpr, dtype: tl.constexpr, E4M3: tl.constexpr, E5M2: tl.constexpr,
             INT8: tl.constexpr):  # fmt: skip
    """The numbers of one byte of words: by the text for their code where there is one, else from the byte alone."""
    if CODE == "e4m3 by PTX" and dtype == tl.bfloat16:
        return _by_ptx(word, E4M3)
    elif CODE == "e5m2 by PTX" and dtype == tl.bfloat16:
        return _by_ptx(word, E5M2)
    elif CODE == "int8 by PTX" and dtype == tl.bfloat16:
        return _by_ptx(word, INT8)
    else:
        return decode(byte, CODE, dtype)


@triton.jit
def low(word, CODE: tl.constexpr, dtype: tl.constexpr):
    """The numbers in the low bytes of int16 words, without their scale; exact."""
    return _numbers(word, (word << 8) >> 8, CODE, dtype, E4M3_LOW, E5M2_LOW, INT8_LOW)


@triton.jit
def high(word, CODE: tl.constexpr, dtype: tl.constexpr):
    """The numbers in the high bytes of int16 words, without their scale; exact."""
    return _numbers(word, word >> 8, CODE, dtype, E4M3_HIGH, E5M2_HIGH, INT8_HIGH)


@triton.jit
def row_scale(rows):
    """The scales [N, 1] of float32 rows [N, D] for int8; NaN of a row that has one."""
    reach = tl.max(tl.abs(rows), axis=1, keep_dims=True)
    scale = tl.maximum(tl.div_rn(reach, tl.full(reach.shape, 127.0, tl.float32)), 1.1754943508222875e-38)
    return scale + tl.sum(rows * 0.0, axis=1, keep_dims=True)


@triton.jit
def encode(number, CODE: tl.constexpr):
    """The codes of float32 numbers that are divided by their scale already."""
    if CODE == "int8" or CODE == "int8 by PTX":
        number = tl.minimum(tl.maximum(number, -127.0), 127.0) + 12582912.0  # 1.5 * 2**23 rounds to the nearest integer
        return number.to(tl.int32, bitcast=True).to(tl.int8)
    elif CODE == "e4m3 by PTX":
        return tl.minimum(tl.maximum(number, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif CODE == "e4m3":
        number = tl.minimum(tl.maximum(number, -448.0), 448.0)
        half = _rounded(number, 20, 0.015625, 24576.0) * 0.00390625  # exponents are 8 lower
        half = half.to(tl.float16).to(tl.uint16, bitcast=True)
        return (((half >> 8) & 128) | ((half & 0x7FFF) >> 7)).to(tl.uint8)
    else:
        number = tl.minimum(tl.maximum(number, -57344.0), 57344.0)
        half = _rounded(number, 21, 6.103515625e-05, 192.0)
        return (half.to(tl.float16).to(tl.uint16, bitcast=True) >> 8).to(tl.uint8)


@triton.jit
def _rounded(number, BITS: tl.constexpr, NORMAL: tl.constexpr, MAGIC: tl.constexpr):
    """float32 numbers without their last BITS bits, ties to even; below NORMAL those next to them in steps of MAGIC."""
    bits = number.to(tl.int32, bitcast=True)
    bits = ((bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)) >> BITS) << BITS
    return tl.where(tl.abs(number) < NORMAL, (number + MAGIC) - MAGIC, bits.to(tl.float32, bitcast=True))


@triton.jit
def load_scales(
    scales_ptr, pages, key, end, stride,
    PAGE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The scales [TILE] of coded keys or values of one kv head, at scales_ptr [B, P]; as `load_keys`. Nothing else."""
    scales = None
    if EACH:
        row = tl.arange(0, TILE)
        if PAGE >= TILE:
            place = scales_ptr + pages.to(tl.int64) * stride + (key % PAGE + row)
        else:
            place = scales_ptr + pages.to(tl.int64) * stride + row % PAGE
        scales = tl.load(place, mask=key + row < end, other=0.0) if MASKED else tl.load(place)
    return scales


@triton.jit
def load_queries(ptr, mask, D: tl.constexpr, CODE: tl.constexpr):
    """q at `ptr`, and with a CODE the columns of high bytes, which stand D / 2 behind those of low ones."""
    q = tl.load(ptr, mask=mask, other=0.0)
    q_high = q
    if CODE != "":
        q_high = tl.load(ptr + D // 2, mask=mask, other=0.0)
    return q, q_high


@triton.jit
def averages(acc, acc_high, total, v_scale, CODE: tl.constexpr, EACH: tl.constexpr):
    """Both accumulators over their denominator, and times the one scale of coded values if there is one."""
    share = tl.where(total == 0.0, 1.0, total)[:, None]
    averaged = acc / share
    averaged_high = averaged
    if CODE != "":
        averaged_high = acc_high / share
        if not EACH:
            averaged *= v_scale
            averaged_high *= v_scale
    return averaged, averaged_high


@triton.jit
def store_columns(ptr, numbers, numbers_high, mask, D: tl.constexpr, CODE: tl.constexpr):
    """Write what stands at `ptr`, and with a CODE the columns of high bytes."""
    tl.store(ptr, numbers.to(ptr.dtype.element_ty), mask=mask)
    if CODE != "":
        tl.store(ptr + D // 2, numbers_high.to(ptr.dtype.element_ty), mask=mask)
