"""Codes as GGUF files hold them, in the bits that they have there, times a few vectors; and as numbers.

    y = x · Wᵀ + bias        W[n, k] = (code[n, k] - middle) * scale[n, g] + added[n, g]        g = k // width

A word of 16 bits holds no whole number of codes of three, five or six bits, so such a code is cut in two. Its low bits
(four, of three-bit codes two) stand in words as those of `packed.py` do, its high bits in words of their own, in the
same tiles:

    six bits, tile 16      low words e = 0 .. 3     bits 4 p ..    column 4 p + e       p = 0 .. 3
                           high words e = 0, 1      bits 2 q ..    column 2 q + e       q = 0 .. 7

What belongs together is LOW * p bits up in both, once the high word has been moved by its column's share of the step:
word e % 2 of the high plane, moved by 2 (e // 2) bits, has the high bits of low word e at the places of their low ones.
Moved by LOW more, and with the exponent of a float in its upper half, it makes two masks and an OR of two instructions,
and the code is a float by its mantissa as in `packed.py`.

Codes of two bits have one plane, and so have those of four bits that are rows of a table (IQ4_NL). Scales of K-quants
stay nested: a byte for each group, times a half for each 256 columns.

    inner [N, G] int8       scale = inner * outer[n, g // 16]                                      Q3_K, Q6_K
    inner [N, G] uint8      scale = (inner & 15) * outer[.., 0]    added = -(inner >> 4) * outer[.., 1]      Q2_K

A matrix then takes what its file takes: 5.5 bits a weight for Q5_0 and 6.6 for Q6_K, where a byte for each code takes
8.5 and 9. A row of codes takes 7 to 8 instructions each on an H200 (as compiled; not timed), as long as reading 8.5
bits, so it is for files that would not fit well otherwise (quant/planes.py).

One row is summed up by threads; more go through matrix instructions, in tiles of 16 to 64, scaled number by number and
rounded to the type of x, as groups are narrow. K can be split where W is short; `parts` are added by who reads them.

Before: `packed.py`, `packed_gemm.py`.  After: quant/grouped.py.

Source: Kim et al., "Who Says Elephants Can't Run", arXiv:2211.10017, section 3 (integers through the mantissa).
"""

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen

from .launch import cdiv, check_rows, choose, facts, next_power_of_2, overlap, start_next, use_kernel, wait_inputs
from .packed import tile_of, tiled, untiled

GROUPS = 16  # of nested scales that share an outer one
LOW_BITS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4}  # bits of a code: of its low part


@frozen(eq=False)
class Planes:
    """A matrix of N rows and K columns.

    Attributes:
        low, high: [N, tiles * tile * bits / 16] int16 words of either part; high is None for two and four bits.
        scales: [N, G] floating point, or with `outer` one byte each, see above.
        added: [N, G] in the type of the scales, or None: numbers that are added after the scale.
        columns: K.   bits: 2 to 6.   width: columns that share a scale, a multiple of 16.
        middle: of all codes.
        outer: [N, G / 16, 1], or 2 for unsigned scales; None: scales are numbers.
        table: float32 [16], what codes stand for; or None.
    """

    low: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    added: torch.Tensor | None
    columns: int
    bits: int
    width: int
    middle: int = 0
    outer: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return tile_of(self.width)

    def take(self, rows: torch.Tensor) -> "Planes":
        """Some of the rows, by their numbers."""
        by_row = {name: getattr(self, name) for name in ("low", "high", "scales", "added", "outer")}
        return evolve(self, **{name: None if own is None else own[rows] for name, own in by_row.items()})

    def constants(self) -> dict[str, int | bool]:
        """What kernels are compiled for."""
        low = LOW_BITS[self.bits]
        given = {"LOW": low, "HIGH": self.bits - low, "TILE": self.tile, "WIDTH": self.width}
        nested = 0 if self.outer is None else self.outer.shape[2]
        given |= {"MIDDLE": self.middle, "ADDED": self.added is not None or nested == 2}
        return given | {"NESTED": nested, "TABLE": self.table is not None}


def in_planes(codes: torch.Tensor, bits: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the low and the high words of codes [N, K] uint8 below 2**bits; no high ones if there are none."""
    low, tile = LOW_BITS[bits], tile_of(width)
    high = tiled(codes >> low, bits - low, tile) if bits > low else None
    return tiled(codes & (2**low - 1), low, tile), high


def planes_dense_reference(weight: Planes, dtype: torch.dtype) -> torch.Tensor:
    """The specification of `planes_dense`."""
    low = LOW_BITS[weight.bits]
    codes = untiled(weight.low, low, weight.tile, weight.columns).int()
    if weight.high is not None:
        codes = codes | untiled(weight.high, weight.bits - low, weight.tile, weight.columns).int() << low
    scales, added = (
        None if one is None else one.repeat_interleave(weight.width, dim=1)[:, : weight.columns]
        for one in _unnested(weight)
    )
    numbers = ((codes - weight.middle).float() if weight.table is None else weight.table[codes]) * scales
    return (numbers if added is None else numbers + added).to(dtype)


def _unnested(weight: Planes) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and what is added or None: [N, G] float32."""
    if weight.outer is None:
        return weight.scales.float(), None if weight.added is None else weight.added.float()
    outer = weight.outer.float().repeat_interleave(GROUPS, dim=1)[:, : weight.scales.shape[1]]
    if outer.shape[2] == 1:
        return weight.scales.float() * outer[..., 0], None
    inner = weight.scales.int()
    return (inner & 15).float() * outer[..., 0], -(inner >> 4).float() * outer[..., 1]


def packed_planes_reference(
    x: torch.Tensor, weight: Planes, bias: torch.Tensor | None = None, *, parts: bool = False
) -> torch.Tensor:
    """The specification of `packed_planes`, with its arguments; it never splits."""
    dense = planes_dense_reference(weight, torch.float32)
    y = torch.nn.functional.linear(x.float(), dense, None if bias is None else bias.float())
    return y[None] if parts else y.to(x.dtype)


@triton.jit
def _moved(high_ptr, element, lane, inside, LOW: tl.constexpr, HIGH: tl.constexpr, SPAN: tl.constexpr):
    """int32 of high words, moved so that their bits stand LOW above the places of the low words' at `lane`; with the
    exponent of the floats that codes will be, which saves them an instruction each.

    Args: element: offset of the tile's first high word; lane: of the low word in its tile; SPAN: high words of a tile.
    """
    if HIGH == 0:
        return tl.full(inside.shape, 0x4B000000, tl.int32)
    else:
        word = tl.load(high_ptr + element + lane % SPAN, mask=inside, other=0).to(tl.int32) & 0xFFFF
        return ((word >> (HIGH * (lane // SPAN))) << LOW) | 0x4B000000


@triton.jit
def _number(
    low,
    high,
    table_ptr,  # [16]; read if TABLE
    place: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MIDDLE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """float32 of the codes at one place of their words, less MIDDLE, times 2 ** (LOW * place)."""
    shift: tl.constexpr = LOW * place
    if TABLE:
        return tl.load(table_ptr + ((low >> shift) & 15)) * (2.0**shift)
    else:
        return _counted(low, high, shift, LOW, HIGH, MIDDLE)


@triton.jit
def _counted(low, high, shift: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, MIDDLE: tl.constexpr):
    """The same of codes that are numbers themselves."""
    mask: tl.constexpr = ((1 << LOW) - 1) << shift
    mask_high: tl.constexpr = (((1 << HIGH) - 1) << (shift + LOW)) | 0x4B000000
    inside = (low & mask) | (high & mask_high)
    return inside.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE * (1 << shift))


@triton.jit
def _of_group(scales_ptr, added_ptr, outer_ptr, row, group, G, ADDED: tl.constexpr, NESTED: tl.constexpr):
    """float32 of the scales of groups, and of what is added. row: int64."""
    added = 0.0
    if NESTED == 0:
        scale = tl.load(scales_ptr + row * G + group).to(tl.float32)
        if ADDED:
            added = tl.load(added_ptr + row * G + group).to(tl.float32)
    else:
        inner = tl.load(scales_ptr + row * G + group).to(tl.int32)
        outer = outer_ptr + (row * tl.cdiv(G, 16) + group // 16) * NESTED
        if NESTED == 2:
            scale = (inner & 15).to(tl.float32) * tl.load(outer).to(tl.float32)
            added = -((inner >> 4).to(tl.float32) * tl.load(outer + 1).to(tl.float32))
        else:
            scale = inner.to(tl.float32) * tl.load(outer).to(tl.float32)
    return scale, added


@triton.jit
def _read(
    low_ptr,
    high_ptr,
    scales_ptr,
    added_ptr,
    outer_ptr,
    row,
    tile,
    lane,
    inside,
    low_elements,
    high_elements,
    G,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDED: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Low words, high words moved to them, scales of their groups, and what is added.

    Args: row: int64; tile: which of the row's; lane: low word in its tile; inside: is it before column K.
    """
    LANES: tl.constexpr = TILE * LOW // 16
    SPAN: tl.constexpr = TILE * HIGH // 16
    low = tl.load(low_ptr + row * low_elements + tile * LANES + lane, mask=inside, other=0).to(tl.int32)
    high = _moved(high_ptr + row * high_elements, tile * SPAN, lane, inside, LOW, HIGH, SPAN)
    group = tl.minimum(tile * TILE // WIDTH, G - 1)
    scale, added = _of_group(scales_ptr, added_ptr, outer_ptr, row, group, G, ADDED, NESTED)
    return low, high, scale, added


@triton.jit
def _weight(
    low,
    high,
    scale,
    added,
    table_ptr,  # [16]; read if TABLE
    place: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ADDED: tl.constexpr,
    TABLE: tl.constexpr,
):
    """float32 of the weights at one place of their words, all that `_read` gave."""
    number = _number(low, high, table_ptr, place, LOW, HIGH, MIDDLE, TABLE) * (2.0 ** (-LOW * place)) * scale
    if ADDED:
        number += added
    return number


@triton.jit
def _planes_dense_kernel(
    low_ptr,  # [N, low_elements]
    high_ptr,  # [N, high_elements]; read if HIGH
    scales_ptr,  # [N, G]
    added_ptr,  # [N, G]; read if ADDED
    outer_ptr,  # [N, G / 16, NESTED]; read if NESTED
    table_ptr,  # [16]; read if TABLE
    out_ptr,  # [N, K]
    K,
    low_elements,
    high_elements,
    G,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ADDED: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    LANES: tl.constexpr = TILE * LOW // 16
    row = tl.program_id(0).to(tl.int64)
    tile = (tl.program_id(1) * (BLOCK_K // TILE) + tl.arange(0, BLOCK_K // TILE))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    inside = tile * TILE + lane * 0 < K
    low, high, scale, added = _read(
        low_ptr, high_ptr, scales_ptr, added_ptr, outer_ptr, row, tile, lane, inside,
        low_elements, high_elements, G, LOW, HIGH, TILE, WIDTH, ADDED, NESTED,
    )  # fmt: skip
    for place in tl.static_range(16 // LOW):
        number = _weight(low, high, scale, added, table_ptr, place, LOW, HIGH, MIDDLE, ADDED, TABLE)
        column = tile * TILE + place * LANES + lane
        tl.store(out_ptr + row * K + column, number.to(out_ptr.dtype.element_ty), mask=column < K)


@triton.jit
def _planes_gemv_kernel(
    x_ptr,  # [K]
    low_ptr,  # [N, low_elements]
    high_ptr,  # [N, high_elements]; read if HIGH
    scales_ptr,  # [N, G]
    added_ptr,  # [N, G]; read if ADDED
    outer_ptr,  # [N, G / 16, NESTED]; read if NESTED
    table_ptr,  # [16]; read if TABLE
    bias_ptr,  # [N]; read if BIAS
    out_ptr,  # [N]
    N,
    K,
    low_elements,
    high_elements,
    G,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ADDED: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    LANES: tl.constexpr = TILE * LOW // 16
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1)  # rows past the end read the last one again, and are not stored
    wide = read.to(tl.int64)[:, None, None]
    lane = tl.arange(0, LANES)[None, None, :]
    tiles = tl.arange(0, BLOCK_K // TILE)[None, :, None]
    total = tl.zeros([BLOCK_N, BLOCK_K // TILE, LANES], tl.float32)
    wait_inputs(PDL)

    for start in range(0, K, BLOCK_K):
        tile = start // TILE + tiles
        inside = (tile * TILE + lane * 0 < K) & (wide >= 0)
        low, high, scale, added = _read(
            low_ptr, high_ptr, scales_ptr, added_ptr, outer_ptr, wide, tile, lane, inside,
            low_elements, high_elements, G, LOW, HIGH, TILE, WIDTH, ADDED, NESTED,
        )  # fmt: skip
        part = tl.zeros(total.shape, tl.float32)
        sums = tl.zeros([1, BLOCK_K // TILE, LANES], tl.float32)
        for place in tl.static_range(16 // LOW):
            column = tile * TILE + place * LANES + lane
            x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
            sums += x
            small = x * (2.0 ** (-LOW * place))
            part += _number(low, high, table_ptr, place, LOW, HIGH, MIDDLE, TABLE) * small
        total += part * scale
        if ADDED:
            total += sums * added

    y = tl.sum(tl.sum(total, axis=2), axis=1)
    if BIAS:
        y += tl.load(bias_ptr + read).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < N)


@triton.jit(do_not_specialize=["M"])
def _planes_gemm_kernel(
    x_ptr,  # [M, K]
    low_ptr,  # [N, low_elements]
    high_ptr,  # [N, high_elements]; read if HIGH
    scales_ptr,  # [N, G]
    added_ptr,  # [N, G]; read if ADDED
    outer_ptr,  # [N, G / 16, NESTED]; read if NESTED
    table_ptr,  # [16]; read if TABLE
    bias_ptr,  # [N]; read if BIAS
    out_ptr,  # [M, N]; [SPLITS, M, N] float32 if there are parts
    M,
    N,
    K,
    low_elements,
    high_elements,
    G,
    x_stride,  # elements between rows
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ADDED: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a multiple of TILE
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    LANES: tl.constexpr = TILE * LOW // 16
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1)[:, None].to(tl.int64)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    element = tl.arange(0, BLOCK_K * LOW // 16)
    lane = (element % LANES)[None, :]
    x_row = x_ptr + token[:, None].to(tl.int64) * x_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_inputs(PDL)

    for start in tl.range(split * share, split * share + share, BLOCK_K, num_stages=STAGES):
        tile = (start // TILE + element // LANES)[None, :]
        inside = (tile * TILE < K) & (read >= 0)
        low, high, scale, added = _read(
            low_ptr, high_ptr, scales_ptr, added_ptr, outer_ptr, read, tile, lane, inside,
            low_elements, high_elements, G, LOW, HIGH, TILE, WIDTH, ADDED, NESTED,
        )  # fmt: skip
        for place in tl.static_range(16 // LOW):
            number = _weight(low, high, scale, added, table_ptr, place, LOW, HIGH, MIDDLE, ADDED, TABLE)
            column = tile * TILE + place * LANES + lane
            x = tl.load(x_row + column, mask=(token[:, None] < M) & (column < K), other=0.0)
            total = tl.dot(number.to(x.dtype), tl.trans(x), total, input_precision="ieee")

    if BIAS:
        bias = tl.load(bias_ptr + tl.minimum(row, N - 1))[:, None].to(tl.float32)
        total += bias * tl.where(split == 0, 1.0, 0.0)
    place_of = out_ptr + (split.to(tl.int64) * M + token[None, :]) * N + row[:, None]
    tl.store(place_of, total.to(out_ptr.dtype.element_ty), mask=(token[None, :] < M) & (row[:, None] < N))


def planes_dense(weight: Planes, dtype: torch.dtype) -> torch.Tensor:
    """Turn codes into numbers. Returns: [N, K] in `dtype`; computed in float32, rounded once."""
    if not use_kernel(weight.low):
        return planes_dense_reference(weight, dtype)
    rows, columns = weight.low.shape[0], weight.columns
    out = torch.empty(rows, columns, dtype=dtype, device=weight.low.device)
    if out.numel():
        _planes_dense_kernel[(rows, cdiv(columns, 1024))](
            *_given(weight), out, columns, *_sizes(weight), **weight.constants(), BLOCK_K=1024, num_warps=4
        )
    return out


def packed_planes(
    x: torch.Tensor, weight: Planes, bias: torch.Tensor | None = None, *, parts: bool = False
) -> torch.Tensor:
    """Multiply a few rows by a matrix in planes. Right for any number of rows, meant for up to 64.

    Args:
        x: [M, K]; rows may lie apart.
        weight: N rows.   bias: one number per row of `weight`.
        parts: return the splits instead of their sum.

    Returns:
        [M, N] in x's type; with `parts` [P, M, N] float32 to be added up, P being what suits the device and the shape.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_rows("packed_planes", x)
    tokens, columns, rows = *x.shape, weight.low.shape[0]
    groups = cdiv(columns, weight.width)
    if columns != weight.columns or weight.scales.shape != (rows, groups) or weight.width % 16:
        raise ValueError(f"packed_planes: x is {list(x.shape)}, scales {list(weight.scales.shape)} of {weight.width}")
    if weight.added is not None and weight.added.shape != weight.scales.shape:
        raise ValueError(f"packed_planes: added is {list(weight.added.shape)}, scales {list(weight.scales.shape)}")
    if not use_kernel(x):
        return packed_planes_reference(x, weight, bias, parts=parts)
    options = _options(x, weight, rows, parts)
    shape = (options["SPLITS"], tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    given = (x if bias is None else bias, out)
    same = {"BIAS": bias is not None, **weight.constants(), **overlap(x)}
    if not out.numel():
        return out
    if tokens == 1:
        block = {"BLOCK_N": 4, "BLOCK_K": min(next_power_of_2(columns), 1024), "num_warps": 1}  # no barrier in the loop
        block = choose("planes_gemv", x, block, inputs=columns, outputs=rows, bits=weight.bits)
        grid = (cdiv(rows, block["BLOCK_N"]),)
        _planes_gemv_kernel[grid](x, *_given(weight), *given, rows, columns, *_sizes(weight), **same, **block)
        return out
    grid = (cdiv(tokens, options["BLOCK_M"]), cdiv(rows, options["BLOCK_N"]), options["SPLITS"])
    sizes = (tokens, rows, columns, *_sizes(weight), x.stride(0))
    _planes_gemm_kernel[grid](x, *_given(weight), *given, *sizes, **same, **options)
    return out


def _given(weight: Planes) -> tuple[torch.Tensor, ...]:
    """Pointers; those that are not read point at the words."""
    given = (weight.low, weight.high, weight.scales, weight.added, weight.outer, weight.table)
    return tuple(weight.low if one is None else one for one in given)


def _sizes(weight: Planes) -> tuple[int, ...]:
    return weight.low.shape[1], 0 if weight.high is None else weight.high.shape[1], weight.scales.shape[1]


def _options(x: torch.Tensor, weight: Planes, rows: int, parts: bool) -> dict[str, int]:
    """What was measured for this shape, or strips of 64 rows, split until they fill the device."""
    device, (tokens, columns) = facts(x.device), x.shape
    splits = 1
    while splits < 4 and cdiv(rows, 64) * splits < 2 * device.processors and columns >= 512 * splits:
        splits *= 2
    formula = {"BLOCK_M": min(max(next_power_of_2(tokens), 16), 64), "BLOCK_N": 64, "BLOCK_K": 128, "SPLITS": splits,
               "STAGES": 2, "num_warps": 4}  # fmt: skip
    shape = {"tokens": tokens, "inputs": columns, "outputs": rows, "bits": weight.bits}
    options = choose("packed_planes", x, formula, parts=int(parts), **shape)
    return options | {"SPLITS": options["SPLITS"] if parts and tokens > 1 else 1}
