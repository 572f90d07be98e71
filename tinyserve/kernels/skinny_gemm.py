"""A matrix times a few vectors: the products of a decode step of 2 to about 128 tokens.

    y = x · Wᵀ + bias                  or, gated, act(first half) * (second half)

Up to there a product is still bound by reading W, 2·N·K bytes, and not by its 2·M·N·K operations. One program takes all
rows of x (in tiles of BLOCK_M) and a strip of W, and walks along K with several loads in flight. With SWAP the strip is
the side of the matrix instruction that must be 64 wide, and x, which may be as narrow as 16, the other.

A short W (few rows) gives too few programs to fill the device, so K can be split. The splits are not added here:
`parts` returns them, [P, M, N] float32, and whoever reads the product next (`norm.py`) adds them in order. So nobody
waits, there are no atomics, and the sum is the same each time.

`invariant` takes tiles that depend on the shape of W alone, one split: a row's numbers are then the same to the bit
whatever shares its batch, at the price of speed.

Source: Osama et al., "Stream-K", arXiv:2301.03598, section 3 (split-K and its cost); tile sizes from measurements.

Before: `gemv.py`, for one row.  After: `norm.py`, which adds the parts; quant/plain.py chooses among these and torch.
"""

import torch
import triton
import triton.language as tl

from .activation import activate, gated_activation_reference
from .gemv import check_product
from .launch import cdiv, choose, facts, next_power_of_2, overlap, start_next, use_kernel, wait_inputs, warm_rows


def skinny_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: str | None = None,
    parts: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """The specification of `skinny_gemm`, with its arguments; it never splits."""
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gate is not None:
        y = gated_activation_reference(y, gate)
    return y[None] if parts else y.to(x.dtype)


@triton.jit
def multiply(weight, x, total, SWAP: tl.constexpr):
    """total + weight · xᵀ if SWAP, else total + x · weightᵀ; weight [rows, K], x [tokens, K]."""
    if SWAP:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


# The number of tokens differs from step to step, and one token is as good as sixteen.
@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2 N, K] if GATE
    bias_ptr,  # [N] or [2 N]; read if BIAS
    out_ptr,  # [M, N]; [SPLITS, M, N] float32 if the parts are asked for
    M,
    N,
    K,
    x_stride,  # elements between rows
    GATE: tl.constexpr,  # a kind of activation.py, "" for none
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K * SPLITS
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    split = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1)  # rows past the end read the last one again, and are not stored
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    first = split * share
    if EVEN:
        warm_rows(weight_ptr + first, read, K, LINES, PDL)
        if GATE != "":
            warm_rows(weight_ptr + first, read + N, K, LINES, PDL)
    wait_inputs(PDL)

    lane = tl.arange(0, BLOCK_K)
    x_row = x_ptr + token[:, None].to(tl.int64) * x_stride
    weight_row = weight_ptr + read[:, None].to(tl.int64) * K
    up_row = weight_ptr + (read[:, None].to(tl.int64) + N) * K
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if SWAP else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_up = total
    for start in tl.range(first, first + share, BLOCK_K, num_stages=STAGES):
        column = (start + lane)[None, :]
        if EVEN:
            x = tl.load(x_row + column, mask=token[:, None] < M, other=0.0)
            weight = tl.load(weight_row + column)
        else:
            x = tl.load(x_row + column, mask=(token[:, None] < M) & (column < K), other=0.0)
            weight = tl.load(weight_row + column, mask=column < K, other=0.0)
        total = multiply(weight, x, total, SWAP)
        if GATE != "":
            up = tl.load(up_row + column) if EVEN else tl.load(up_row + column, mask=column < K, other=0.0)
            total_up = multiply(up, x, total_up, SWAP)

    if SWAP:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    if BIAS:
        share_of_bias = tl.where(split == 0, 1.0, 0.0)
        total += (tl.load(bias_ptr + read).to(tl.float32) * share_of_bias)[None, :]
        if GATE != "":
            total_up += tl.load(bias_ptr + N + read).to(tl.float32)[None, :]
    if GATE != "":
        total = activate(total, GATE) * total_up
    place = out_ptr + (split.to(tl.int64) * M + token[:, None]) * N + row[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(token[:, None] < M) & (row[None, :] < N))


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: str | None = None,
    parts: bool = False,
    invariant: bool = False,
) -> torch.Tensor:
    """Multiply a few rows by a matrix. Right for any number of rows, fast up to about 128.

    Args:
        x: [M, K]; rows may lie apart.
        weight: [N, K], contiguous, in x's type; with `gate` [2 N, K], the gate's rows first.
        bias: one number per row of `weight`.
        gate: a kind of activation.py: the product's first half goes through it and is multiplied by the second.
        parts: return the splits instead of their sum; not with `gate`.
        invariant: tiles must not depend on M.

    Returns:
        [M, N] in x's type; with `parts` [P, M, N] float32 to be added up, P being what suits the device and the shape.

    Raises:
        ValueError: shapes that do not fit, or an unknown kind.
    """
    check_product("skinny_gemm", x, weight, bias, gate)
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"skinny_gemm: the last dimension must be contiguous, strides are {x.stride()}")
    if parts and gate is not None:
        raise ValueError("skinny_gemm: a gated product has no parts")
    if not use_kernel(x):
        return skinny_gemm_reference(x, weight, bias, gate=gate, parts=parts, invariant=invariant)
    (tokens, width), rows = x.shape, weight.shape[0] // (2 if gate else 1)
    options = _options(x, rows, gate is not None, parts, invariant)
    shape = (options["SPLITS"], tokens, rows) if parts else (tokens, rows)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    grid = (cdiv(rows, options["BLOCK_N"]), options["SPLITS"], cdiv(tokens, options["BLOCK_M"]))
    if tokens and rows:
        _skinny_gemm_kernel[grid](
            x,
            weight,
            x if bias is None else bias,
            out,
            tokens,
            rows,
            width,
            x.stride(0),
            GATE=gate or "",
            BIAS=bias is not None,
            EVEN=width % (options["BLOCK_K"] * options["SPLITS"]) == 0,
            **options,
            **overlap(x),
        )
    return out


def _options(x: torch.Tensor, rows: int, gated: bool, parts: bool, invariant: bool) -> dict[str, int]:
    """What was measured for this shape, or the formula. Only where parts are asked for is there more than one."""
    tokens, shape = x.shape[0], {"inputs": x.shape[1], "outputs": rows, "gated": int(gated)}
    if invariant:
        options = choose("skinny_gemm_invariant", x, _formula(x, 64, rows, gated), **shape)
    else:
        formula = _formula(x, min(max(next_power_of_2(tokens), 16), 64), rows, gated)
        options = choose("skinny_gemm", x, formula, tokens=tokens, parts=int(parts), **shape)
    if not parts or invariant:
        options = options | {"SPLITS": 1}
    return options


def _formula(x: torch.Tensor, block_m: int, rows: int, gated: bool) -> dict[str, int]:
    """Strips of 64 rows and up to four loads of 256 bytes a row in flight; splits until they fill the device."""
    device, width = facts(x.device), x.shape[1]
    block_n, block_k, splits = 64, 256 // x.element_size(), 1
    while splits < 4 and cdiv(rows, block_n) * splits < 2 * device.processors and width >= 4 * splits * block_k:
        splits *= 2
    stage = (block_m + block_n * (1 + gated)) * block_k * x.element_size()
    stages = min(max(device.shared * 9 // 10 // stage, 1), 4)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "SWAP": int(block_m <= 32 or not gated),
        "STAGES": stages,
        "LINES": 0,
        "num_warps": 4,
    }
