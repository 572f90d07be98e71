"""Products with quantised weights: 2 to 8 bits a weight, a scale for each group of columns.

    y = x · Wᵀ + bias        W[n, k] = (number(code[n, k]) - zero[n, g]) * scale[n, g]

Up to about 64 rows of x such a product is bound by reading W, and codes are a half to an eighth of it. One program
takes all rows of x (in tiles) and a strip of 64 rows of W. It turns codes into numbers in registers, and multiplies in
the type of x with float32 sums. Several codes lie in one byte, so the strip is multiplied in that many steps: first
the columns in the low bits of each byte, then those in the next ones, each with its own columns of x. Nothing has to be
put in order. W is the left side of the matrix instruction, which may come from registers; x is the narrow right side.

fp8 and fp4 are decoded by moving their bits into a float16 and scaling by a power of two, which is exact, also below
the smallest normal number, and needs no instruction that only some GPUs have. (e4m3's NaN becomes 480.)

A short W gives too few programs, so K can be split; the splits are added in order by a second launch, without atomics.
For more rows `grouped_dense` writes W out once, and torch multiplies.

Source: Frantar et al., "MARLIN", arXiv:2408.11743, section 3 (decoding in registers); Osama et al., "Stream-K",
arXiv:2301.03598 (split-K).

Before: `skinny_gemm.py`, the same for plain numbers.  After: quant/grouped.py.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, facts, next_power_of_2, use_kernel

BLOCK_K = 128  # columns of a tile, unless somebody measured another
KINDS = ("int", "e4m3", "e2m1", "table")


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return codes [N, columns], one an element, from bytes [N, ceil(columns * bits / 8)], lowest bits first."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(1)[:, :columns]


def spread(values: torch.Tensor, width: int, groups: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Return values [N, G] of groups as [N, columns], or [N, 1] where one group has all columns."""
    if groups is not None:
        return values[:, groups]
    return values if values.shape[1] == 1 else values.repeat_interleave(width, dim=1)[:, :columns]


def numbers(codes: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Return what codes [N, K] stand for, before zeros and scales; float32."""
    return codes.float() if table is None else table.float()[codes.int()]


def grouped_dense_reference(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    columns: int,
    dtype: torch.dtype,
    bits: int = 8,
    width: int = 0,
    kind: str = "int",
    table: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `grouped_dense`, with its arguments."""
    dense = numbers(unpack(codes, bits, columns), table)
    if zeros is not None:
        dense = dense - spread(zeros.float(), width, groups, columns)
    return (dense * spread(scales.float(), width, groups, columns)).to(dtype)


def grouped_gemm_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **layout,
) -> torch.Tensor:
    """The specification of `grouped_gemm`, with its arguments; weights are rounded to x's type, sums are float32."""
    dense = grouped_dense_reference(codes, scales, zeros, columns=x.shape[1], dtype=x.dtype, **layout)
    y = torch.nn.functional.linear(x.float(), dense.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


@triton.jit
def _number(code, table_ptr, KIND: tl.constexpr):
    """The number of each code, float32."""
    if KIND == "e4m3":
        half = (code.to(tl.uint16) & 128) << 8 | (code.to(tl.uint16) & 127) << 7
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "e2m1":
        half = (code.to(tl.uint16) & 8) << 12 | (code.to(tl.uint16) & 7) << 9
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == "table":
        return tl.load(table_ptr + code.to(tl.int32))
    else:
        return code.to(tl.float32)


@triton.jit
def _weights(
    code,  # [rows, columns] codes
    column,  # [columns] which they are
    start,  # the first column of the tile
    scale_row,  # [rows, 1] pointers to the first scale of each row
    zero_row,
    table_ptr,
    groups_ptr,
    K,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,  # columns of the tile, which starts at a multiple of it
):
    """The numbers of a tile of W, float32; anything past K."""
    if GROUPS:
        group = tl.load(groups_ptr + column, mask=column < K, other=0)[None, :]
    elif WIDTH == 0:
        group = tl.zeros([1, 1], tl.int32)
    elif WIDTH % TILE == 0:
        group = tl.zeros([1, 1], tl.int32) + tl.minimum(start, K - 1) // WIDTH
    else:
        group = (tl.minimum(column, K - 1) // WIDTH)[None, :]
    number = _number(code, table_ptr, KIND)
    if ZEROS:
        number -= tl.load(zero_row + group).to(tl.float32)
    return number * tl.load(scale_row + group).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _grouped_gemm_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # [N, ceil(K / PER)] bytes
    scales_ptr,  # [N, G]
    zeros_ptr,  # [N, G]; read if ZEROS
    bias_ptr,  # [N]; read if BIAS
    table_ptr,  # [2 ** bits] float32; read if KIND is "table"
    groups_ptr,  # [K] int; read if GROUPS
    out_ptr,  # [SPLITS, M, N]
    M,
    N,
    K,
    G,
    x_stride,  # elements between rows
    PER: tl.constexpr,  # codes to a byte
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that share a scale; 0: all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(row, N - 1).to(tl.int64)[:, None]  # rows past the end read the last one again
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    first = split * share

    lane = tl.arange(0, BLOCK_K // PER)
    bytes_of_row = tl.cdiv(K, PER)
    x_row = x_ptr + token[:, None].to(tl.int64) * x_stride
    codes_row = codes_ptr + read * bytes_of_row
    scale_row = scales_ptr + read * G
    zero_row = zeros_ptr + read * G
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first, first + share, BLOCK_K, num_stages=STAGES):
        byte = start // PER + lane
        packed = tl.load(codes_row + byte[None, :], mask=byte[None, :] < bytes_of_row, other=0)
        for place in tl.static_range(PER):
            column = start + lane * PER + place
            code = packed if PER == 1 else (packed >> (place * (8 // PER))) & (2 ** (8 // PER) - 1)
            weight = _weights(
                code, column, start, scale_row, zero_row, table_ptr, groups_ptr, K, KIND, ZEROS, GROUPS, WIDTH, BLOCK_K
            )
            x = tl.load(x_row + column[None, :], mask=(token[:, None] < M) & (column[None, :] < K), other=0.0)
            total = tl.dot(weight.to(x.dtype), tl.trans(x), total, input_precision="ieee")

    if BIAS:
        share_of_bias = tl.where(split == 0, 1.0, 0.0)
        total += tl.load(bias_ptr + read).to(tl.float32) * share_of_bias
    place = out_ptr + (split.to(tl.int64) * M + token[None, :]) * N + row[:, None]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(token[None, :] < M) & (row[:, None] < N))


@triton.jit
def _grouped_dense_kernel(
    codes_ptr,  # [N, ceil(K / PER)] bytes
    scales_ptr,  # [N, G]
    zeros_ptr,  # [N, G]; read if ZEROS
    table_ptr,  # [2 ** bits] float32; read if KIND is "table"
    groups_ptr,  # [K] int; read if GROUPS
    out_ptr,  # [N, K]
    N,
    K,
    G,
    PER: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    start = tl.program_id(1) * BLOCK_K
    read = tl.minimum(row, N - 1).to(tl.int64)
    bytes_of_row = tl.cdiv(K, PER)
    byte = start // PER + tl.arange(0, BLOCK_K // PER)
    packed = tl.load(codes_ptr + read * bytes_of_row + byte[None, :], mask=byte[None, :] < bytes_of_row, other=0)
    for place in tl.static_range(PER):
        column = start + tl.arange(0, BLOCK_K // PER) * PER + place
        code = packed if PER == 1 else (packed >> (place * (8 // PER))) & (2 ** (8 // PER) - 1)
        weight = _weights(
            code, column, start, scales_ptr + read * G, zeros_ptr + read * G, table_ptr, groups_ptr, K, KIND, ZEROS,
            GROUPS, WIDTH, BLOCK_K,
        )  # fmt: skip
        inside = (row < N) & (column[None, :] < K)
        tl.store(out_ptr + row.to(tl.int64) * K + column[None, :], weight.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_dense(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    columns: int,
    dtype: torch.dtype,
    bits: int = 8,
    width: int = 0,
    kind: str = "int",
    table: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn codes into numbers.

    Args: as of `grouped_gemm`; columns: K.   dtype: of the result.
    Returns: [N, columns].
    """
    check_codes(codes, scales, zeros, columns, bits, width, kind, table, groups)
    if not use_kernel(codes):
        return grouped_dense_reference(
            codes, scales, zeros, columns=columns, dtype=dtype, bits=bits, width=width, table=table, groups=groups
        )
    rows = codes.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if out.numel():
        _grouped_dense_kernel[(cdiv(rows, 32), cdiv(columns, 128))](
            raw(codes),
            scales,
            scales if zeros is None else zeros,
            scales if table is None else table,
            scales if groups is None else groups,
            out,
            rows,
            columns,
            scales.shape[1],
            **_constants(scales, zeros, bits, width, kind, groups),
            BLOCK_N=32,
            BLOCK_K=128,
            num_warps=4,
        )
    return out


def grouped_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    bits: int = 8,
    width: int = 0,
    kind: str = "int",
    table: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a few rows by a quantised matrix. Right for any number of rows, meant for up to about 64.

    Args:
        x: [M, K]; rows may lie apart.
        codes: [N, ceil(K * bits / 8)] bytes, contiguous, the first column in the lowest bits; int8, uint8 or float8.
        scales: [N, G], contiguous.   zeros: [N, G], or None for none.   bias: [N].
        bits: of a code: 2, 4 or 8.
        width: columns that share a scale; ignored if G is 1.
        kind: what codes are: "int"; "e4m3"; "e2m1" with its 16 numbers in `table`; "table".
        table: [2 ** bits] float32, of the last two kinds.
        groups: [K] int, group of each column where they are not consecutive.

    Returns:
        [M, N] in x's type.

    Raises:
        ValueError: shapes that do not fit, or an unknown kind.
    """
    check_rows("grouped_gemm", x)
    check_codes(codes, scales, zeros, x.shape[1], bits, width, kind, table, groups)
    if not use_kernel(x):
        layout = {"bits": bits, "width": width, "table": table, "groups": groups}
        return grouped_gemm_reference(x, codes, scales, zeros, bias, **layout)
    (tokens, columns), rows = x.shape, codes.shape[0]
    options = _options(x, rows, bits, groups is not None or (scales.shape[1] > 1 and width % BLOCK_K > 0))
    splits = options["SPLITS"]
    out = torch.empty(splits, tokens, rows, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    if tokens and rows:
        _grouped_gemm_kernel[(cdiv(rows, options["BLOCK_N"]), splits, cdiv(tokens, options["BLOCK_M"]))](
            x,
            raw(codes),
            scales,
            scales if zeros is None else zeros,
            x if bias is None else bias,
            scales if table is None else table,
            scales if groups is None else groups,
            out,
            tokens,
            rows,
            columns,
            scales.shape[1],
            x.stride(0),
            BIAS=bias is not None,
            **_constants(scales, zeros, bits, width, kind, groups),
            **options,
        )
    return out[0] if splits == 1 else out.sum(0).to(x.dtype)


def _constants(scales, zeros, bits, width, kind, groups) -> dict[str, int | str | bool]:
    """What both kernels are compiled for."""
    width = 0 if scales.shape[1] == 1 else width
    return {"PER": 8 // bits, "KIND": kind, "ZEROS": zeros is not None, "GROUPS": groups is not None, "WIDTH": width}


def raw(codes: torch.Tensor) -> torch.Tensor:
    """Return float8 codes as the bytes that they are."""
    return codes.view(torch.uint8) if codes.dtype.is_floating_point else codes


def check_codes(codes, scales, zeros, columns, bits, width, kind, table, groups) -> None:
    """Refuse what the kernels cannot read. Raises: ValueError: with the shapes."""
    if bits not in (2, 4, 8) or kind not in KINDS or (table is None) != (kind in ("int", "e4m3")):
        raise ValueError(f"grouped_gemm: {bits} bits of kind {kind!r} with table {table is not None}")
    if codes.shape[1] != -(-columns * bits // 8) or scales.shape[0] != codes.shape[0]:
        raise ValueError(f"grouped_gemm: codes {list(codes.shape)}, scales {list(scales.shape)}, {columns} columns")
    count = scales.shape[1]
    fits = groups.shape == (columns,) if groups is not None else count == 1 or count * width >= columns
    if not fits or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(f"grouped_gemm: scales {list(scales.shape)} in groups of {width} for {columns} columns")
    if not all(one is None or one.is_contiguous() for one in (codes, scales, zeros, table, groups)):
        raise ValueError("grouped_gemm: codes, scales, zeros, table and groups must be contiguous")


def _options(x: torch.Tensor, rows: int, bits: int, gathers: bool) -> dict[str, int]:
    """What was measured for this shape, or the formula."""
    shape = {"tokens": x.shape[0], "inputs": x.shape[1], "outputs": rows, "bits": bits}
    return choose("grouped_gemm", x, _formula(x, rows, bits, gathers), **shape)


def _formula(x: torch.Tensor, rows: int, bits: int, gathers: bool) -> dict[str, int]:
    """Strips of 64 rows, 128 columns at a time, several loads in flight; splits until they fill the device.

    Args: gathers: a tile has columns of several groups, so that every number loads a scale and a zero of its own.
    """
    device, (tokens, columns) = facts(x.device), x.shape
    block_m, block_n, block_k, splits = min(max(next_power_of_2(tokens), 16), 64), 64, BLOCK_K, 1
    programs = cdiv(rows, block_n) * cdiv(tokens, block_m)
    while splits < 8 and programs * splits < 2 * device.processors and columns >= 4 * splits * block_k:
        splits *= 2
    stage = block_m * block_k * x.element_size() + block_n * block_k * (bits + 24 * gathers) // 8
    stages = min(max(device.shared * 6 // 10 // stage, 1), 4)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "STAGES": stages,
        "num_warps": 4,
    }
