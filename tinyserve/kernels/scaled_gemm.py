"""fp8 times fp8 for a few rows: the products of a decode step where activations are rounded too.

    y = (codes of x · codes of Wᵀ) * scale of the row of x * scale of the row of W + bias       or gated, as elsewhere

The matrix unit multiplies e4m3 as it is, so nothing is decoded, and a product of up to about 64 rows costs what reading
W costs: half of bf16. One program takes all rows of x (in tiles) and a strip of W, which is the side of the matrix
instruction that must be 64 wide, and walks along K with several loads in flight. The unit adds up in fewer bits than
float32 has, so its sums are taken over after every 256 columns, or 128 with blocks of 128 x 128, whose scales come in
there.

A short W gives too few programs to fill the device, so K can be split. With `parts` the splits are returned, [P, M, N]
float32, and whoever reads the product next (`norm.py`) adds them in order.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.2 (sums of fp8 products); Osama et al., "Stream-K", arXiv:2301.03598.

Before: `round_rows.py`, `packed.py`.  After: quant/grouped.py, which chooses among this and torch's scaled product.
"""

import torch
import triton
import triton.language as tl

from .activation import gated_activation_reference
from .launch import cdiv, choose, facts, next_power_of_2, overlap, speaks_ptx, start_next, use_kernel, wait_inputs
from .packed import Packed, biased_and_gated, half_of_e4m3, packed_dense_reference
from .packed_gemv import check_packed

EXACT = 256  # columns that the matrix unit adds up by itself; with blocks, 128


def scaled_gemm_reference(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    gate: str | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """The specification of `scaled_gemm`, with its arguments; it never splits."""
    spread = x_scales.repeat_interleave(weight.width or x.shape[1], dim=1)[:, : x.shape[1]]
    dense = packed_dense_reference(weight, torch.float32)
    y = torch.nn.functional.linear(x.float() * spread, dense, None if bias is None else bias.float())
    if gate is not None:
        y = gated_activation_reference(y, gate)
    return y[None] if parts else y.to(dtype)


@triton.jit
def _codes(row, column, inside, NATIVE: tl.constexpr):
    """A tile of codes as the matrix unit takes them: e4m3, or float16 that is 256 times too small."""
    code = tl.load(row + column, mask=inside, other=0.0 if NATIVE else 0)
    return code if NATIVE else half_of_e4m3(code)


@triton.jit
def _step(
    total,  # [rows, tokens] float32, added to; [tokens, rows] if SWAP
    w_row,  # [rows, 1] pointers
    x,  # [tokens, columns]
    column,
    w_inside,
    w_scale,  # [rows] of the step; read if WIDTH
    x_scale,  # [tokens] of the step; read if WIDTH
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    EXACT: tl.constexpr,
    SWAP: tl.constexpr,
):
    """total + the product of one step."""
    w = _codes(w_row, column, w_inside, NATIVE)
    if WIDTH == 0:
        return tl.dot(w, tl.trans(x), total, max_num_imprecise_acc=EXACT)
    elif SWAP:
        return total + tl.dot(x, tl.trans(w)) * x_scale[:, None] * w_scale[None, :]
    else:
        return total + tl.dot(w, tl.trans(x)) * w_scale[:, None] * x_scale[None, :]


@triton.jit
def _of_group(ptr, row, start, K, stride, inside, WIDTH: tl.constexpr):
    """float32 scales of rows for the group of column `start`; row: where theirs begin; stride: between groups."""
    group = tl.minimum(start, K - 1) // WIDTH
    return tl.load(ptr + row + group * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _scaled_gemm_kernel(
    x_ptr,  # [M, K] e4m3
    x_scales_ptr,  # [M, G] float32, tokens beside each other
    codes_ptr,  # [N, K] e4m3, or [2 N, K] if GATE
    scales_ptr,  # [N, G] or [2 N, G] float32
    bias_ptr,  # [N] or [2 N]; read if BIAS
    out_ptr,  # [M, N]; [SPLITS, M, N] float32 if there are parts
    M,
    N,
    K,
    G,
    x_stride,  # elements between groups of x, which is at least M
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,  # a multiple of EXACT, or 0
    NATIVE: tl.constexpr,
    EXACT: tl.constexpr,  # columns that the matrix unit adds up by itself; BLOCK_K is a multiple
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K * SPLITS
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,  # tokens are the side that must be 64 wide; with blocks
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    split = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1).to(tl.int64)  # rows past the end read the last one again, and are not stored
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    first = split * share
    lane = tl.arange(0, EXACT if WIDTH > 0 else BLOCK_K)
    x_row = x_ptr + token[:, None].to(tl.int64) * K
    w_row = codes_ptr + read[:, None] * K
    up_row = codes_ptr + (read[:, None] + N) * K
    total = tl.zeros([BLOCK_M, BLOCK_N] if SWAP else [BLOCK_N, BLOCK_M], tl.float32)
    total_up = total
    w_scale = tl.zeros([BLOCK_N], tl.float32)
    up_scale = w_scale
    x_scale = tl.zeros([BLOCK_M], tl.float32)
    if WIDTH > 0:
        w_scale = _of_group(scales_ptr, read * G, first, K, 1, row >= 0, WIDTH)
        if GATE != "":
            up_scale = _of_group(scales_ptr, (read + N) * G, first, K, 1, row >= 0, WIDTH)
    wait_inputs(PDL)
    if WIDTH > 0:
        x_scale = _of_group(x_scales_ptr, token, first, K, x_stride, token < x_stride, WIDTH)

    for begin in tl.range(first, first + share, BLOCK_K, num_stages=STAGES):
        for piece in tl.static_range(BLOCK_K // EXACT if WIDTH > 0 else 1):  # of 128 columns with blocks
            start = begin + piece * EXACT
            next_w, next_up, next_x = w_scale, up_scale, x_scale
            if WIDTH > 0:  # scales of the next piece, whose way takes longer than this one
                next_w = _of_group(scales_ptr, read * G, start + EXACT, K, 1, row >= 0, WIDTH)
                next_x = _of_group(x_scales_ptr, token, start + EXACT, K, x_stride, token < x_stride, WIDTH)
                if GATE != "":
                    next_up = _of_group(scales_ptr, (read + N) * G, start + EXACT, K, 1, row >= 0, WIDTH)
            column = (start + lane)[None, :]
            x = _codes(x_row, column, (token[:, None] < M) if EVEN else (token[:, None] < M) & (column < K), NATIVE)
            w_inside = tl.full([1, 1], True, tl.int1) if EVEN else column < K
            total = _step(total, w_row, x, column, w_inside, w_scale, x_scale, WIDTH, NATIVE, EXACT, SWAP)
            if GATE != "":
                total_up = _step(total_up, up_row, x, column, w_inside, up_scale, x_scale, WIDTH, NATIVE, EXACT, SWAP)
            w_scale, up_scale, x_scale = next_w, next_up, next_x

    if SWAP:
        total, total_up = tl.trans(total), tl.trans(total_up)
    if not NATIVE:
        total *= 65536.0
        total_up *= 65536.0
    if WIDTH == 0:
        x_scale = tl.load(x_scales_ptr + token, mask=token < M, other=0.0)
        total *= tl.load(scales_ptr + read).to(tl.float32)[:, None] * x_scale[None, :]
        if GATE != "":
            total_up *= tl.load(scales_ptr + read + N).to(tl.float32)[:, None] * x_scale[None, :]
    total = biased_and_gated(total, total_up, bias_ptr, read, split, N, GATE, BIAS)
    place = out_ptr + (split.to(tl.int64) * M + token[None, :]) * N + row[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(token[None, :] < M) & (row[:, None] < N))


def scaled_gemm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    gate: str | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """Multiply a few rows of fp8 by a matrix of fp8. Right for any number of rows, fast up to about 128.

    Args:
        x, x_scales: [M, K] float8_e4m3fn, [M, G] float32, as `round_rows` returns them; G is 1 if width is 0.
        weight: e4m3 with width 0 or a multiple of 128; N rows, with `gate` 2 N, the gate's rows first.
        bias: one number per row of `weight`.   dtype: of the result.
        gate: a kind of activation.py: the product's first half goes through it and is multiplied by the second.
        parts: return the splits instead of their sum; not with `gate`.

    Returns:
        [M, N] in `dtype`; with `parts` [P, M, N] float32 to be added up, P being what suits the device and the shape.

    Raises:
        ValueError: shapes that do not fit, or an unknown kind.
    """
    check_packed("scaled_gemm", x, weight, bias, gate)
    (tokens, columns), groups = x.shape, weight.scales.shape[1]
    if weight.kind != "e4m3" or weight.width % 128 or x.dtype != torch.float8_e4m3fn or not x.is_contiguous():
        raise ValueError(f"scaled_gemm: x is {x.dtype}, weights {weight.kind} in groups of {weight.width}")
    if x_scales.shape != (tokens, groups) or (tokens > 1 and x_scales.stride(0) != 1) or (parts and gate is not None):
        raise ValueError(f"scaled_gemm: x_scales {list(x_scales.shape)}; parts {parts} with gate {gate!r}")
    if not use_kernel(x):
        return scaled_gemm_reference(x, x_scales, weight, bias, dtype=dtype, gate=gate, parts=parts)
    rows, native = weight.codes.shape[0] // (2 if gate else 1), speaks_ptx(x)
    options = _options(x, weight, rows, gate is not None, parts)
    shape = (options["SPLITS"], tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else dtype, device=x.device)
    if tokens and rows:
        _scaled_gemm_kernel[(cdiv(rows, options["BLOCK_N"]), options["SPLITS"], cdiv(tokens, options["BLOCK_M"]))](
            x if native else x.view(torch.uint8),
            x_scales,
            weight.codes if native else weight.raw(),
            weight.scales,
            x_scales if bias is None else bias,
            out,
            tokens,
            rows,
            columns,
            groups,
            x_scales.stride(1) if groups > 1 else tokens,
            GATE=gate or "",
            BIAS=bias is not None,
            WIDTH=weight.width,
            NATIVE=native,
            EXACT=min(128 if weight.width else EXACT, options["BLOCK_K"]),
            EVEN=columns % (options["BLOCK_K"] * options["SPLITS"]) == 0,
            **options,
            **overlap(x),
        )
    return out


def _options(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """What was measured for this shape, or the formula. Only where parts are asked for is there more than one."""
    shape = {"tokens": x.shape[0], "inputs": x.shape[1], "outputs": rows, "gated": int(gated), "parts": int(parts)}
    options = choose("scaled_gemm", x, _formula(x, weight, rows, gated, parts), width=weight.width, **shape)
    return options if parts else options | {"SPLITS": 1}


def _formula(x: torch.Tensor, weight: Packed, rows: int, gated: bool, parts: bool) -> dict[str, int]:
    """Strips of 64 rows, 256 bytes a row and load, up to four loads in flight; splits until they fill the device.

    With two halves 128 bytes where there are many tokens (or one scale a row), so that two programs fit on a processor
    and a wide W needs one round of them; with blocks three loads in flight for the same reason.
    """
    device, (tokens, columns) = facts(x.device), x.shape
    block_m, block_n, splits = min(max(next_power_of_2(tokens), 16), 64), 64, 1
    narrow = block_m > 16 or not weight.width if gated else weight.width and not speaks_ptx(x)
    block_k = 128 if narrow else 256
    strips, most = cdiv(rows, block_n), 4 if weight.width else 2
    while parts and splits < most and strips * splits < 2 * device.processors and columns >= 4 * splits * block_k:
        splits *= 2
    stage = (block_m + block_n * (1 + gated)) * block_k
    flights = 3 if weight.width and stage > 30_000 and strips * splits > device.processors else 4
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "SWAP": 0,
        "STAGES": min(max(device.shared * 9 // 10 // stage, 1), flights),
        "num_warps": 4,
    }
