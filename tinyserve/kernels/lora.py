"""Low-rank additions to a product, another one for each token: `out[t] += B[p] · (A[p] · x[t])`, p the token's place.

    lora_shrink   y = A[p] · x          [T, K] -> [T, parts · R], float32
    lora_expand   out += B[p] · y       each part of a fused product (q, k, v) from its own R numbers of y

The matrices of all adapters that may run together lie in one buffer, one after the other (lora/batch.py), and `places`
says for each token which it wears, -1 for none. A program takes a tile of tokens and does the product once for every
place that some token of the tile wears; a row keeps what belongs to its own place, so neighbours never mix, and a row
without an adapter is not even written. Beside the product itself, A and B are read once for every tile: R·(K + N)
numbers, R being 8 to 64 where K and N are thousands. With few tokens K is split, as too few programs would read A.

Source: Hu et al., "LoRA", arXiv:2106.09685, section 4.1; Chen et al., "Punica", arXiv:2310.18547 (many at once).

Before: the base product, in any format.  After: lora/batch.py, which adds it there.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, once, overlap, start_next, use_kernel, wait_inputs

MOST_PARTS = 3
FEW = 64  # tokens up to which K is split


def lora_shrink_reference(
    x: torch.Tensor, a: torch.Tensor, places: torch.Tensor, *, memo: dict | None = None
) -> torch.Tensor:
    """The specification of `lora_shrink`, with its arguments; it never splits."""
    y = torch.zeros(1, len(x), a.shape[1], dtype=torch.float32, device=x.device)
    for place, rows in _wearers(places, memo):
        y[0, rows] = torch.nn.functional.linear(x[rows].float(), a[place].float())
    return y


def lora_expand_reference(
    y: torch.Tensor,
    b: torch.Tensor,
    places: torch.Tensor,
    parts: tuple[int, ...],
    out: torch.Tensor,
    *,
    memo: dict | None = None,
) -> torch.Tensor:
    """The specification of `lora_expand`, with its arguments."""
    total, rank = y.sum(dim=0), b.shape[2]
    for place, rows in _wearers(places, memo):
        start = 0
        for part, size in enumerate(parts):
            low = total[rows, part * rank : (part + 1) * rank].to(b.dtype).float()
            more = torch.nn.functional.linear(low, b[place, start : start + size].float())
            out[rows, start : start + size] = (out[rows, start : start + size].float() + more).to(out.dtype)
            start += size
    return out


def _wearers(places: torch.Tensor, memo: dict | None) -> list[tuple[int, torch.Tensor]]:
    """Each place that is worn, and the rows that wear it."""

    def find() -> list[tuple[int, torch.Tensor]]:
        worn = [place for place in places.unique().tolist() if place >= 0]
        return [(place, (places == place).nonzero()[:, 0]) for place in worn]

    return once(memo, ("wearers",), find)


@triton.jit(do_not_specialize=["tokens"])
def _lora_shrink_kernel(
    x_ptr,  # [T, K]
    a_ptr,  # [places, parts * R, K], each place contiguous
    places_ptr,  # [T] int32
    out_ptr,  # [SPLITS, T, parts * R] float32
    tokens,  # T
    width,  # K
    columns,  # parts * R
    places,
    x_stride,  # elements between rows
    place_stride,  # elements between places
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    inside = token < tokens
    worn = tl.load(places_ptr + token, mask=inside, other=-1)
    share = tl.cdiv(width, SPLITS * BLOCK_K) * BLOCK_K
    first = split * share

    x_row = x_ptr + token[:, None].to(tl.int64) * x_stride
    a_row = a_ptr + lane[:, None].to(tl.int64) * width
    result = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for place in range(places):
        mine = worn == place
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for start in range(first, first + share, BLOCK_K):
                column = (start + tl.arange(0, BLOCK_K))[None, :]
                x = tl.load(x_row + column, mask=mine[:, None] & (column < width), other=0.0)
                a = tl.load(a_row + column, mask=(lane[:, None] < columns) & (column < width), other=0.0)
                total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            result = tl.where(mine[:, None], total, result)
        a_row += place_stride
    row = (split * tokens + token)[:, None].to(tl.int64) * columns
    tl.store(out_ptr + row + lane[None, :], result, mask=inside[:, None] & (lane[None, :] < columns))


@triton.jit(do_not_specialize=["tokens"])
def _lora_expand_kernel(
    y_ptr,  # [SPLITS, T, parts * R] float32
    b_ptr,  # [places, N, R], each place contiguous
    places_ptr,  # [T] int32
    out_ptr,  # [T, N]
    tokens,  # T
    columns,  # parts * R
    rank,  # R
    places,
    size_0,  # columns of out that belong to each part; 0 where there is none
    size_1,
    size_2,
    out_stride,  # elements between rows
    place_stride,  # elements between places
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    block = tl.program_id(1)  # the parts' tiles stand one after the other
    tiles_0, tiles_1 = tl.cdiv(size_0, BLOCK_N), tl.cdiv(size_1, BLOCK_N)
    second, third = (block >= tiles_0).to(tl.int32), (block >= tiles_0 + tiles_1).to(tl.int32)
    part = second + third
    at = (block - second * tiles_0 - third * tiles_1) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = at < size_0 + second * (size_1 - size_0) + third * (size_2 - size_1)
    column = second * size_0 + third * size_1 + at
    worn = tl.load(places_ptr + token, mask=token < tokens, other=-1)

    b_row = b_ptr + column[:, None].to(tl.int64) * rank
    result = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for place in range(places):
        mine = worn == place
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            for start in range(0, rank, BLOCK_R):
                lane = (start + tl.arange(0, BLOCK_R))[None, :]
                low = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    row = (split * tokens + token)[:, None].to(tl.int64) * columns + part * rank
                    low += tl.load(y_ptr + row + lane, mask=mine[:, None] & (lane < rank), other=0.0)
                b = tl.load(b_row + lane, mask=here[:, None] & (lane < rank), other=0.0)
                total = tl.dot(low.to(b.dtype), tl.trans(b), total, input_precision="ieee")
            result = tl.where(mine[:, None], total, result)
        b_row += place_stride
    spot = out_ptr + token[:, None].to(tl.int64) * out_stride + column[None, :]
    changed = (worn >= 0)[:, None] & here[None, :]
    before = tl.load(spot, mask=changed, other=0.0).to(tl.float32)
    tl.store(spot, (before + result).to(out_ptr.dtype.element_ty), mask=changed)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, places: torch.Tensor, *, memo: dict | None = None) -> torch.Tensor:
    """The first half: each token times the A of its place.

    Args:
        x: [T, K]; rows may lie apart.
        a: [places, parts * R, K] in x's type, each place contiguous; short ranks are padded with zeros.
        places: [T] int32: which place each token wears, -1 for none.
        memo: what the products of one step share (launch.py::once); read by the reference only.

    Returns:
        [P, T, parts * R] float32, P splits to be added up (`lora_expand` does); zeros where nothing is worn.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_rows("lora_shrink", x, a.shape[2])
    if places.shape != (len(x),) or a.dtype != x.dtype or not a[0].is_contiguous():
        raise ValueError(
            f"lora_shrink: places must be [{len(x)}], is {list(places.shape)}; a {a.dtype} and contiguous, x {x.dtype}"
        )
    if not use_kernel(x):
        return lora_shrink_reference(x, a, places, memo=memo)
    tokens, (slots, rows, width) = len(x), a.shape
    options = choose("lora_shrink", x, _shrink_formula(x, tokens, rows, width), tokens=tokens, inputs=width)
    y = torch.empty(options["SPLITS"], tokens, rows, dtype=torch.float32, device=x.device)
    grid = (cdiv(tokens, options["BLOCK_T"]), cdiv(rows, options["BLOCK_R"]), options["SPLITS"])
    if tokens:
        _lora_shrink_kernel[grid](
            x, a, places, y, tokens, width, rows, slots, x.stride(0), a.stride(0), **options, **overlap(x)
        )
    return y


def lora_expand(
    y: torch.Tensor,
    b: torch.Tensor,
    places: torch.Tensor,
    parts: tuple[int, ...],
    out: torch.Tensor,
    *,
    memo: dict | None = None,
) -> torch.Tensor:
    """The second half, added to the base product in place.

    Args:
        y: [P, T, parts * R] float32, from `lora_shrink`.
        b: [places, N, R] in out's type, each place contiguous; the adapter's factor is in it already.
        places, memo: as there.
        parts: columns of out that each part of y makes, at most three; their sum is N.
        out: [T, N]; rows may lie apart. Rows that wear nothing keep their bits.

    Returns:
        out.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    (slots, columns, rank), tokens = b.shape, len(out)
    check_rows("lora_expand", out, columns)
    if len(parts) > MOST_PARTS or sum(parts) != columns or y.shape[1:] != (tokens, len(parts) * rank):
        raise ValueError(f"lora_expand: y {list(y.shape)} and parts {parts} do not fit b {list(b.shape)}")
    if places.shape != (tokens,) or b.dtype != out.dtype or not b[0].is_contiguous() or not y.is_contiguous():
        raise ValueError(f"lora_expand: places must be [{tokens}], b {out.dtype}, and y and b contiguous")
    if not use_kernel(out):
        return lora_expand_reference(y, b, places, parts, out, memo=memo)
    default = {
        "BLOCK_T": 16 if tokens <= FEW else 64, "BLOCK_N": 64, "BLOCK_R": min(max(next_power_of_2(rank), 16), 64),
        "num_warps": 4,
    }  # fmt: skip
    options = choose("lora_expand", out, default, tokens=tokens, outputs=columns)
    sizes = (*parts, *[0] * (MOST_PARTS - len(parts)))
    grid = (cdiv(tokens, options["BLOCK_T"]), sum(cdiv(size, options["BLOCK_N"]) for size in parts))
    if tokens:
        _lora_expand_kernel[grid](
            y, b, places, out, tokens, len(parts) * rank, rank, slots, *sizes, out.stride(0), b.stride(0),
            SPLITS=len(y), **options, **overlap(out),
        )  # fmt: skip
    return out


def _shrink_formula(x: torch.Tensor, tokens: int, rows: int, width: int) -> dict[str, int]:
    """Up to 8 splits of at least 512 numbers where there are few tokens; loads of 128 or 256 bytes a row."""
    block_k, splits = 256 // x.element_size(), 1
    while tokens <= FEW and splits < 8 and width >= 1024 * splits:
        splits *= 2
    return {
        "BLOCK_T": 16 if tokens <= FEW else 64,
        "BLOCK_R": min(max(next_power_of_2(rows), 16), 64),
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "num_warps": 4,
    }
