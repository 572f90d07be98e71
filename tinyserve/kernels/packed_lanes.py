"""How codes of four bits and x lie over the threads of a warp, where matrix instructions take them.

A matrix instruction's operands must lie in a certain order over the threads of a warp, and going there through shared
memory takes longer than the product. But the order of columns is free as long as x comes in the same one, so columns
are taken as they lie. Of a tile of 128 codes in a row, 64 bytes, each of four threads loads 16:

    thread q of a row          words 8 q .. 8 q + 7, columns 32 p + 8 q + j at place p
    as the instruction's       column 16 b + 4 q + f of the place's 32, with j = 4 b + f

Reshaping and permuting the tile as (q, b, f) -> (b, q, f) says so to the compiler, and moves nothing. x takes the same
way: eight tokens by the same four threads. One token is read by all eight, so all eight columns of the result are the
same.

A code needs no base: masked, its bits are already a number of x's type, code times the smallest one above zero, and
sixteen times that where the code lies four bits higher. So there are two instructions to three for a pair of words'
eight codes, x of bfloat16 is multiplied by 2**64 in return, and the zero point times the sum of x, which one more
product with ones gives for all strips of a program, is taken away after a tile.

Groups of 32 or 64 columns stand in tiles of as many: then a thread's 16 bytes lie in one group, which has a scale of
its own, and numbers are scaled, and rounded to x's type, before the product.

Source: the layout of mma.m16n8k16 in NVIDIA's PTX ISA; Fasi et al., "Numerical behavior of NVIDIA tensor cores",
PeerJ Computer Science 7:e330 (numbers below the smallest normal one are exact there).

Before: `packed.py`.  After: packed_strips.py.
"""

import triton
import triton.language as tl

from .packed import LEAST_BFLOAT, LEAST_HALF, bare_nibbles, four_scaled_nibbles, pair_product, two_halves

# x of bfloat16 is made this much larger, as its codes are 2**133 times too small and their products would be nothing.
LIFT = tl.constexpr(2.0**64)


@triton.jit
def pairs_of_words(codes_ptr, row, tile, row_elements, last, ALL: tl.constexpr):
    """Pairs of words [8, WARPS, EIGHTS, 16] of rows [8, EIGHTS] and tiles [WARPS]; zeros from tile `last` on.

    They stay pairs until they are needed: numbers of 16 bits that a loop carries are taken out of their registers.
    """
    pairs = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    place = row.to(tl.int64)[:, None, :, None] * (row_elements // 2) + (tile * 16)[None, :, None, None]
    place += tl.arange(0, 16)[None, None, None, :]
    if ALL:
        return tl.load(pairs + place, eviction_policy="evict_first")  # beside the first cache, which is for x
    return tl.load(pairs + place, mask=(tile < last)[None, :, None, None], other=0, eviction_policy="evict_first")


@triton.jit
def of_tiles(ptr, row, tile, G, last, WIDTH: tl.constexpr):
    """Values [4, 8, WARPS, EIGHTS] of the groups in which tiles of these rows lie, the same four times."""
    group = tl.minimum(tile * 128 // max(WIDTH, 1), G - 1)
    place = (row.to(tl.int64) * G)[None, :, None, :] + group[None, None, :, None]
    inside = (tile < last)[None, None, :, None]
    return tl.load(ptr + (place + tl.zeros([4, 1, 1, 1], tl.int32)), mask=inside, other=0.0)


@triton.jit
def of_words(ptr, row, tile, G, last, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Values [8, WARPS, EIGHTS, 4] of the group that each thread's eight words lie in, where that is not all 128."""
    part = tl.arange(0, 4) * 8 // (TILE // 4) * TILE
    group = tl.minimum((tile[None, None, :, None] * 128 + part[:, None, None, None]) // WIDTH, G - 1)
    place = (row.to(tl.int64) * G)[None, :, None, :] + group
    values = tl.load(ptr + place, mask=(tile < last)[None, None, :, None], other=0.0)
    return tl.permute(values, (1, 2, 3, 0))  # loaded so that threads hold what they need


@triton.jit
def _words(pairs):
    """Words [8, WARPS, EIGHTS, 32] of pairs of them."""
    shape: tl.constexpr = pairs.shape
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, [shape[0], shape[1], shape[2], 32])


@triton.jit
def _left(numbers):
    """Numbers [8, WARPS, EIGHTS, 32] as the left side [WARPS, 8 * EIGHTS, 32]."""
    WARPS: tl.constexpr = numbers.shape[1]
    EIGHTS: tl.constexpr = numbers.shape[2]
    split = tl.reshape(numbers, [8, WARPS, EIGHTS, 4, 2, 4])
    return tl.reshape(tl.permute(split, (1, 2, 0, 4, 3, 5)), [WARPS, 8 * EIGHTS, 32])


@triton.jit
def _right(x):
    """x [8, WARPS, EIGHTS, 32] of tokens as the right side [WARPS, 32, 8 * EIGHTS], in the order of `_left`."""
    WARPS: tl.constexpr = x.shape[1]
    EIGHTS: tl.constexpr = x.shape[2]
    split = tl.reshape(x, [8, WARPS, EIGHTS, 4, 2, 4])
    return tl.reshape(tl.permute(split, (1, 4, 3, 5, 2, 0)), [WARPS, 32, 8 * EIGHTS])


@triton.jit
def _summed(x):
    """As `_right`, in the order that the compiler takes numbers of a kernel's own in: for sums it is all the same."""
    WARPS: tl.constexpr = x.shape[1]
    EIGHTS: tl.constexpr = x.shape[2]
    split = tl.reshape(x, [8, WARPS, EIGHTS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, (1, 5, 4, 3, 6, 2, 0)), [WARPS, 32, 8 * EIGHTS])


@triton.jit
def _of_rows(values, TOKENS: tl.constexpr):
    """Values [4, 8, WARPS, EIGHTS] of groups as threads hold products, [WARPS, 8 * EIGHTS, TOKENS]."""
    WARPS: tl.constexpr = values.shape[2]
    EIGHTS: tl.constexpr = values.shape[3]
    own = tl.reshape(tl.permute(values, (2, 3, 1, 0)), [WARPS, 8 * EIGHTS, 1, 4, 1]).to(tl.float32)
    wide = tl.broadcast_to(own, [WARPS, 8 * EIGHTS, TOKENS // 8, 4, 2])
    return tl.reshape(wide, [WARPS, 8 * EIGHTS, TOKENS])


@triton.jit
def _wide(values):
    """Values [8, WARPS, EIGHTS, 4] of threads for each of their eight words, [8, WARPS, EIGHTS, 32]."""
    shape: tl.constexpr = values.shape
    all_words = tl.broadcast_to(values[:, :, :, :, None], [shape[0], shape[1], shape[2], 4, 8])
    return tl.reshape(all_words, [shape[0], shape[1], shape[2], 32])


@triton.jit
def normed_columns(x_row, norm_ptr, column, place: tl.constexpr, K, offset, NORM: tl.constexpr, SHIFT: tl.constexpr,
             TILE: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """x [8, WARPS, eights, 32] at a place's columns, times the norm's weight, and LIFT where codes are bare."""
    where = (column + place * (TILE // 4))[None, :, None, :]
    x = tl.load(x_row + where) if EVEN else tl.load(x_row + where, mask=where < K, other=0.0)
    if NORM:
        every = where + tl.zeros([8, 1, 1, 1], tl.int32)  # each thread its own, in the order of x
        weight = tl.load(norm_ptr + every) if EVEN else tl.load(norm_ptr + every, mask=every < K, other=0.0)
        if NATIVE and not SHIFT:
            x = pair_product(x, weight)
        else:
            x = (x.to(tl.float32) * (weight.to(tl.float32) + offset)).to(x.dtype)
    if NATIVE and TILE == 128 and x.dtype == tl.bfloat16:
        factor: tl.constexpr = LIFT / 16 if place % 2 else LIFT
        x = pair_product(x, tl.full(x.shape, factor, tl.bfloat16))
    return x


@triton.jit
def _four(words, scale, zero, kind: tl.constexpr, TILE: tl.constexpr, MIDDLE: tl.constexpr, ZEROS: tl.constexpr,
          ADDED: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """The four codes of each word, in x's type and as `bare_nibbles` leaves them; the numbers that they stand for if
    groups are narrower than 128, which words of a thread share."""
    half: tl.constexpr = kind == tl.float16
    base: tl.constexpr = (1024 if half else 128) if NATIVE else 0
    if TILE == 128 and NATIVE:
        w0, w1, w2, w3 = bare_nibbles(words, half)
    elif NATIVE:
        minus = tl.full(words.shape, -(base + (0 if ADDED else MIDDLE)), kind)
        if ZEROS and not ADDED:
            minus = _wide((-(zero.to(tl.float32) + base)).to(kind))
        added = _wide(zero.to(kind)) if ADDED else tl.zeros(words.shape, kind)
        scales = _wide(two_halves(scale.to(tl.float32), kind))
        w0, w1, w2, w3 = four_scaled_nibbles(words, minus, scales, added, half)
    else:
        scales, added = 1.0, 0.0
        if TILE < 128:
            scales = _wide(scale.to(tl.float32))
            added = _wide(zero.to(tl.float32)) if ZEROS else MIDDLE
            added = added if ADDED else -added * scales
        w0, w1 = ((words & 15) * scales + added).to(kind), (((words >> 4) & 15) * scales + added).to(kind)
        w2, w3 = (((words >> 8) & 15) * scales + added).to(kind), (((words >> 12) & 15) * scales + added).to(kind)
    return w0, w1, w2, w3


@triton.jit
def _sums(x0, x1, x2, x3, EIGHTS: tl.constexpr, NATIVE: tl.constexpr):
    """Sums of x over a tile's columns, as often as the tile has rows, [WARPS, 8 * EIGHTS, TOKENS], by matrix units."""
    WARPS: tl.constexpr = x0.shape[1]
    TOKENS: tl.constexpr = 8 * x0.shape[2]
    ones = tl.full([WARPS, 16, 32], 1.0, x0.dtype)
    odd = tl.full([WARPS, 16, 32], 16.0 if NATIVE and x0.dtype == tl.bfloat16 else 1.0, x0.dtype)  # as x was made
    sums = tl.dot(ones, _summed(x0), input_precision="ieee")
    sums = tl.dot(odd, _summed(x1), sums, input_precision="ieee")
    sums = tl.dot(ones, _summed(x2), sums, input_precision="ieee")
    sums = tl.dot(odd, _summed(x3), sums, input_precision="ieee")
    wide = tl.broadcast_to(sums[:, None, :, :], [WARPS, EIGHTS // 2, 16, TOKENS])
    return tl.reshape(wide, [WARPS, 8 * EIGHTS, TOKENS])


@triton.jit
def products_of_tiles(
    pairs,  # [8, WARPS, EIGHTS, 16]
    scale,  # [4, 8, WARPS, EIGHTS], or [8, WARPS, EIGHTS, 4] if groups are narrower than 128; read if WIDTH
    zero,  # the same; read if ZEROS
    x0,  # [8, WARPS, eights, 32] of the first place, and so on
    x1,
    x2,
    x3,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    ADDED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Products [WARPS, 8 * EIGHTS, TOKENS] of a tile of each warp, scaled."""
    kind: tl.constexpr = x0.dtype
    EIGHTS: tl.constexpr = pairs.shape[2]
    w0, w1, w2, w3 = _four(_words(pairs), scale, zero, kind, TILE, MIDDLE, ZEROS, ADDED, NATIVE)
    part = tl.dot(_left(w0), _right(x0), input_precision="ieee")
    part = tl.dot(_left(w1), _right(x1), part, input_precision="ieee")
    part = tl.dot(_left(w2), _right(x2), part, input_precision="ieee")
    part = tl.dot(_left(w3), _right(x3), part, input_precision="ieee")
    if TILE == 128:
        least: tl.constexpr = (LEAST_HALF if kind == tl.float16 else LEAST_BFLOAT) if NATIVE else 1.0
        sums = _sums(x0, x1, x2, x3, EIGHTS, NATIVE)
        if ZEROS:
            part -= _of_rows(zero, part.shape[2]) * (sums * least)
        else:
            part -= sums * (MIDDLE * least)
        if WIDTH > 0:
            part *= _of_rows(scale, part.shape[2])
    return part
