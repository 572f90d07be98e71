"""Codes of four bits times a few vectors of whole numbers, on matrix units for bytes.

    y = x · Wᵀ + bias                  or, gated, act(first half) * (second half)

x comes as limbs (round_limbs.py), so a code has to become a byte and no more: three instructions for eight codes. Bytes
are taken as they lie: of a tile of 128 codes in a row, 64 bytes, each of four threads holds 16, and limbs come in the
order that follows. So codes go from memory to shared memory, to registers, to the matrix unit, and nothing changes
hands. Limbs of all rows, the upper ones beside the lower ones, are its other side, and stay in shared memory.

Its sums are whole and exact, also where both limbs' become one after each tile, which is scaled, less the zero point
times the sum of x, and taken over into float32.

A program takes 64 rows of W or more for four warps (gate and up are rows of one program). Codes do not depend on the
kernel in front, so the device's cache is asked for the first ones while x is still being rounded. K can be split, and
`parts` are returned as elsewhere.

It takes Hopper's instruction for four warps, and time to begin: to round x costs more than is won where a matrix is
small, or has no gate and meets eight rows or fewer (bench/README.md).

Source: the layout of wgmma.m64nNk32 in NVIDIA's PTX ISA; Ootomo et al., "DGEMM on Integer Matrix Multiplication Unit",
arXiv:2306.11975 (numbers as limbs).

Before: `round_limbs.py`, `packed.py`.  After: packed_gemv.py and packed_gemm.py come here with large matrices.
"""

import torch
import triton
import triton.language as tl

from .activation import activate
from .launch import (
    cdiv,
    choose,
    facts,
    groups_warps,
    overlap,
    speaks_ptx,
    start_next,
    use_kernel,
    wait_inputs,
    warm_rows,
)
from .packed import Packed
from .packed_strips import packed_strips_reference
from .round_limbs import TILE, round_limbs

MOST_TOKENS = 16
MOST_SPLITS = 8
LARGE = 2**25  # codes


def packed_limbs_reference(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """The specification of `packed_limbs`, with its arguments: that of all kernels for rows of four bits."""
    own = {"norm": norm, "eps": eps, "offset": offset, "gate": gate, "residual": residual, "parts": parts}
    return packed_strips_reference(x, weight, bias, **own)


@triton.jit
def _bytes(words):
    """Words int32 [rows, 16] as bytes [rows, 4, 4, 4]."""
    halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    both = tl.join(halves.to(tl.int8), (halves >> 8).to(tl.int8))
    return tl.reshape(both, [words.shape[0], 4, 4, 4])


@triton.jit
def _nibbles(words, NATIVE: tl.constexpr):
    """The lower and the upper nibbles of all bytes of words. LLVM would do both byte by byte."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;", "=&r,=&r,r", [words],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F


@triton.jit
def _left(words, NATIVE: tl.constexpr):
    """The codes of words [rows, 16] as the left side [rows, 128], int8."""
    lower, upper = _nibbles(words, NATIVE)
    both = tl.join(_bytes(lower), _bytes(upper))
    return tl.reshape(tl.permute(both, (0, 2, 4, 1, 3)), [words.shape[0], 128])


@triton.jit
def _group(tile, G, WIDTH: tl.constexpr):
    """The group that a tile lies in; the last one for tiles past the end."""
    return tl.minimum(tile // max(WIDTH // 128, 1), G - 1)


@triton.jit
def _raw(ptr, row, tile, G, every, WIDTH: tl.constexpr):
    """What holds the values [4, 8, WARPS, EIGHTS] of rows for a tile's group: pairs of them if they have 16 bits."""
    group = _group(tile, G, WIDTH)
    if ptr.dtype.element_ty == tl.float32 or WIDTH == 0:
        return tl.load(ptr + group.to(tl.int64) * every + row)
    else:
        return tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (group >> 1).to(tl.int64) * every + row)


@triton.jit
def _of_rows(raw, tile, G, kind: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 of `_raw` as threads hold sums, [8 * WARPS * EIGHTS, COLUMNS]."""
    WARPS: tl.constexpr = raw.shape[2]
    EIGHTS: tl.constexpr = raw.shape[3]
    values = raw.to(tl.float32)
    if kind != tl.float32 and WIDTH > 0:
        odd = (_group(tile, G, WIDTH) & 1) * 16
        values = (raw >> odd).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    split = tl.permute(tl.reshape(values, [4, 8, WARPS, EIGHTS // 2, 2]), (3, 2, 4, 1, 0))
    own = tl.reshape(split, [8 * WARPS * EIGHTS, 1, 4, 1])
    wide = tl.broadcast_to(own, [8 * WARPS * EIGHTS, COLUMNS // 8, 4, 2])
    return tl.reshape(wide, [8 * WARPS * EIGHTS, COLUMNS])


@triton.jit
def _values(ptr, wide, start, G, every, WIDTH: tl.constexpr, PIECES: tl.constexpr, EACH: tl.constexpr):
    """`_raw` of a step's tiles, EACH of which share one."""
    values = ()
    for piece in tl.static_range(PIECES // EACH):
        values = values + (  # noqa: RUF005 - Triton knows no unpacking with *
            _raw(ptr, wide, start + piece * EACH, G, every, WIDTH),
        )
    return values


@triton.jit(do_not_specialize=["M"])
def _packed_limbs_kernel(
    limbs_ptr,  # [2 ROWS, tiles * 128] int8
    x_scales_ptr,  # [tiles, ROWS] float32
    sums_ptr,  # [tiles, ROWS] float32
    codes_ptr,  # [N, row_elements], or [2 N, ...] if GATE
    scales_ptr,  # rows beside each other: [G / 2, N, 2], or [G, N] of float32; 2 N if GATE
    zeros_ptr,  # as scales; read if ZEROS
    bias_ptr,  # [N] or [2 N]; read if BIAS
    residual_ptr,  # [M, N]; read if RESIDUAL
    out_ptr,  # [M, N]; [SPLITS, M, N] float32 if there are parts
    M,
    N,
    tiles,
    row_elements,
    G,
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,  # a multiple of 128, or 0
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    NATIVE: tl.constexpr,
    EVEN: tl.constexpr,  # tiles are a multiple of PIECES * SPLITS
    ROWS: tl.constexpr,  # of x, at least M
    BLOCKS: tl.constexpr,  # of 16 * WARPS rows of W; half of them are of the second half if GATE
    PIECES: tl.constexpr,  # tiles of a step, an even number
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # of each row: asked for before x is there
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    OWN: tl.constexpr = BLOCKS * WARPS * (8 if GATE != "" else 16)  # rows of the result
    split = tl.program_id(1)
    share = tl.cdiv(tiles, SPLITS * PIECES) * PIECES
    first = split * share
    last = tl.minimum(first + share, tiles)

    inner = tl.arange(0, 16 * BLOCKS * WARPS)
    read = tl.minimum(tl.program_id(0) * OWN + inner % OWN, N - 1) + inner // OWN * N  # past the end: the last again
    warm_rows(codes_ptr + first * 32, read, row_elements, LINES, PDL)
    pairs = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + read.to(tl.int64)[:, None] * (row_elements // 2)
    pairs += tl.arange(0, 32)[None, :]
    every = N * (2 if GATE != "" else 1)
    eighth = tl.arange(0, 2 * BLOCKS)[None, None, None, :]
    wide = 16 * tl.arange(0, WARPS)[None, None, :, None] + eighth // 2 * (16 * WARPS) + eighth % 2 * 8
    wide += tl.arange(0, 8)[None, :, None, None] + tl.zeros([4, 1, 1, 1], tl.int32)  # in the four threads of a row
    wide = tl.minimum(tl.program_id(0) * OWN + wide % OWN, N - 1) + wide // OWN * N
    token, limb = tl.arange(0, ROWS), tl.arange(0, 2 * ROWS)
    limbs = limbs_ptr + limb[:, None] * (tiles * 128) + tl.arange(0, 128)[None, :]
    kind: tl.constexpr = scales_ptr.dtype.element_ty
    EACH: tl.constexpr = 2 if WIDTH == 128 and kind != tl.float32 and PIECES % 2 == 0 else 1
    total = tl.zeros([16 * BLOCKS * WARPS, ROWS], tl.float32)
    scales = _values(scales_ptr, wide, first, G, every, WIDTH, PIECES, EACH) if WIDTH > 0 else ()
    zeros = _values(zeros_ptr, wide, first, G, every, WIDTH, PIECES, EACH) if ZEROS else scales
    wait_inputs(PDL)

    for start in tl.range(first, last, PIECES, num_stages=STAGES):
        for pair in tl.static_range(PIECES // 2):
            here = start + 2 * pair
            inside = None if EVEN else (here + tl.arange(0, 32)[None, :] // 16 < last) & (read >= 0)[:, None]
            words = tl.load(pairs + here * 16, mask=inside, other=None if EVEN else 0)
            words = tl.permute(tl.reshape(words, [16 * BLOCKS * WARPS, 2, 16]), (0, 2, 1))
            both_words = tl.split(words)
            for half in tl.static_range(2):
                tile = here + half
                there = None if EVEN else (token >= 0) & (tile < last)
                x_scale = tl.load(x_scales_ptr + tile * ROWS + token, mask=there, other=None if EVEN else 0.0)
                sums = tl.load(sums_ptr + tile * ROWS + token, mask=there, other=None if EVEN else 0.0)
                some = (limb % ROWS < M) if EVEN else (limb % ROWS < M) & (tile < last)
                x = tl.load(limbs + tile * 128, mask=some[:, None], other=0)
                both = tl.dot(_left(both_words[half], NATIVE), tl.trans(x))
                upper, lower = tl.split(tl.permute(tl.reshape(both, [16 * BLOCKS * WARPS, 2, ROWS]), (0, 2, 1)))
                part = (upper * 128 + lower).to(tl.float32) * x_scale[None, :]
                if ZEROS:
                    part -= _of_rows(zeros[(2 * pair + half) // EACH], tile, G, kind, WIDTH, ROWS) * sums[None, :]
                else:
                    part -= (MIDDLE * sums)[None, :]
                if WIDTH > 0:
                    part *= _of_rows(scales[(2 * pair + half) // EACH], tile, G, kind, WIDTH, ROWS)
                total += part
        scales = _values(scales_ptr, wide, start + PIECES, G, every, WIDTH, PIECES, EACH) if WIDTH > 0 else ()
        zeros = _values(zeros_ptr, wide, start + PIECES, G, every, WIDTH, PIECES, EACH) if ZEROS else scales

    y = total
    if WIDTH == 0:
        y *= tl.load(scales_ptr + read)[:, None].to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + read)[:, None].to(tl.float32) * tl.where(split == 0, 1.0, 0.0)
    if GATE != "":
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OWN, ROWS]), (1, 2, 0)))
        y = activate(gate, GATE) * up
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)[:, None]
    place = (split.to(tl.int64) * M + token[None, :]) * N + own
    inside = (own < N) & (token[None, :] < M)
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


def with_limbs(weight: Packed) -> Packed:
    """The weight with its scales turned, too, if products that `limbs_fit` may meet it: they take 3 % more then."""
    rows, columns = weight.codes.shape[0], weight.columns
    codes = weight.kind == "int" and weight.bits == 4 and weight.tile == TILE
    large = rows * columns >= LARGE and rows >= MOST_SPLITS * TILE
    return weight.with_beside() if codes and large and groups_warps(weight.codes) else weight


def limbs_fit(x: torch.Tensor, weight: Packed, *, gated: bool, parts: bool = False) -> bool:
    """Whether `packed_limbs` multiplies these, faster than other kernels: enough programs for the device, and of a
    product without a gate more rows of x than packed_strips takes at once."""
    if weight.beside is None or x.shape[0] > MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    programs = cdiv(weight.codes.shape[0], 128) * (MOST_SPLITS if parts else 1)
    return (gated or (parts and x.shape[0] > 8)) and programs >= facts(x.device).processors


def packed_limbs(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """Multiply one to sixteen rows by a matrix of four bits in groups of 128 or more, or rows.

    Args:
        x: [M, K]; rows may lie apart.   weight: N rows; with `gate` 2 N, the gate's rows first; see `limbs_fit`.
        bias: one number per row of `weight`.
        norm: [K], the weight of an RMS norm of x that comes first.   eps, offset: of that norm.
        gate: a kind of activation.py: the product's first half goes through it and is multiplied by the second.
        residual: [M, N], added at the end.
        parts: return the splits of K, [P, M, N] in float32, for a norm that adds parts.

    Returns:
        [M, N] in x's type. x is rounded once, to 2**-15 of the largest of a tile's 128.
    """
    own = {"norm": norm, "eps": eps, "offset": offset}
    if not use_kernel(x):
        return packed_limbs_reference(x, weight, bias, gate=gate, residual=residual, parts=parts, **own)
    tokens, rows = x.shape[0], weight.codes.shape[0] // (2 if gate else 1)
    options = _options(x, weight, rows, gate is not None, parts)
    shape = (options["SPLITS"], tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    if out.numel():
        _launch(x, round_limbs(x, norm, eps=eps, offset=offset), weight, bias, out, options, gate, residual)
    return out


def _launch(x, limbs, weight, bias, out, options, gate, residual) -> None:
    """One program for each few rows and split. Unused pointers point at x and are not read."""
    (tokens, columns), rows, constants = x.shape, out.shape[-1], weight.constants()
    tiles, own = cdiv(columns, TILE), options["BLOCKS"] * options["num_warps"] * (8 if gate else 16)
    _packed_limbs_kernel[(cdiv(rows, own), options["SPLITS"])](
        limbs.codes,
        limbs.scales,
        limbs.sums,
        weight.codes,
        *weight.beside,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        tokens,
        rows,
        tiles,
        weight.codes.shape[1],
        weight.scales.shape[1],
        GATE=gate or "",
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        NATIVE=speaks_ptx(x),
        EVEN=tiles % (options["PIECES"] * options["SPLITS"]) == 0,
        ROWS=limbs.scales.shape[1],
        WARPS=options["num_warps"],
        **{name: constants[name] for name in ("WIDTH", "MIDDLE", "ZEROS")},
        **options,
        **overlap(x),
    )


def _options(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """What was measured for this shape, or the formula. Only where parts are asked for is there more than one."""
    shape = {"tokens": x.shape[0], "inputs": x.shape[1], "outputs": rows, "gated": int(gated), "parts": int(parts)}
    options = choose("packed_limbs", x, _formula(x, rows, gated, parts), **shape)
    tiles, pieces, lines = cdiv(x.shape[1], TILE), options["PIECES"], options["LINES"]
    share = cdiv(tiles, pieces * (options["SPLITS"] if parts else 1)) * pieces
    while lines * 2 > share:  # a line has the codes of two tiles
        lines //= 2
    return options | {"SPLITS": cdiv(tiles, share), "LINES": lines}  # without splits that would have no column


def _formula(x: torch.Tensor, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """128 rows for four warps, two programs on a processor, and as much on its way as its memory holds. One row of x is
    no work: half as many rows of W, which four programs share out more evenly."""
    device, tokens, splits = facts(x.device), x.shape[0], 1
    blocks, pieces, stages = (1, 2, 5) if tokens == 1 else (2, 4, 3) if tokens <= 8 else (2, 2, 4)
    codes, limbs = pieces * blocks * 4096, pieces * (2048 if tokens <= 8 else 4096)
    while stages > 1 and (stages - 1) * codes + stages * limbs > device.shared * 9 // 20:
        stages -= 1
    strips = cdiv(rows * (1 + gated), 64 * blocks)
    while parts and splits < MOST_SPLITS and strips * (splits + 1) <= 2 * device.processors:
        splits += 1
    options = {"BLOCKS": blocks, "PIECES": pieces, "SPLITS": splits, "STAGES": stages}
    return options | {"LINES": 0 if parts else 4, "num_warps": 4}
