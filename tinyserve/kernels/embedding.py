"""Embedding: row `tokens[t]` of the table, times a scale (Gemma multiplies by sqrt(H)).

One program copies one piece of one row: T·H numbers are read and written. An id outside the vocabulary reads nothing
and gives a row of NaN: a device cannot raise, and NaN fails its own request where a clamped id would answer wrongly.

Before: the step's token ids, written by the sampler or the host.  After: the first layer's norm.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs


def embed_reference(tokens: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """The specification of `embed`, with its arguments."""
    known = (tokens >= 0) & (tokens < table.shape[0])
    rows = torch.nn.functional.embedding(torch.where(known, tokens, 0), table)
    if scale != 1.0:
        rows = (rows.float() * scale).to(table.dtype)
    return rows.masked_fill_(~known[:, None], float("nan"))


@triton.jit
def _embed_kernel(
    tokens_ptr,  # [T]
    table_ptr,  # [V, H]
    out_ptr,  # [T, H] contiguous
    table_stride,  # elements between rows
    vocab_size,
    width,  # H
    scale,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Late, so that kernels behind may read what stood in front (lengths, block tables) without waiting for it.
    wait_inputs(PDL)
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(tokens_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < vocab_size)
    value = tl.load(table_ptr + token * table_stride + column, mask=inside & known, other=float("nan")).to(tl.float32)
    tl.store(out_ptr + row * width + column, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def embed(tokens: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Look up the rows of `tokens`.

    Args:
        tokens: [T] int32 or int64, contiguous. An id outside 0..V-1 gives a row of NaN.
        table: [V, H]; rows may lie apart.
        scale: multiplied in float32, after which the row is rounded; pass it rounded if the model's own is.

    Returns:
        [T, H] in the table's type, contiguous.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if not use_kernel(table):
        return embed_reference(tokens, table, scale=scale)
    check_rows("embed: table", table)
    if tokens.dim() != 1 or not tokens.is_contiguous() or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"embed: tokens must be [T] int32 or int64, contiguous, are {list(tokens.shape)} {tokens.dtype}"
        )
    count, width = tokens.shape[0], table.shape[1]
    out = torch.empty((count, width), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    default = {"BLOCK": min(next_power_of_2(width), 1024), "num_warps": 4}
    options = choose("embed", table, default, tokens=count, width=width)
    grid = (count, cdiv(width, options["BLOCK"]))
    _embed_kernel[grid](tokens, table, out, table.stride(0), table.shape[0], width, scale, **options, **overlap(table))
    return out
