"""What a step reads, fetched from the rows of its sequences on the device: one launch in place of a dozen small ones.

    token t of row r at position p       tokens[t] = token table[r, p]
                                         writes[g, t] = block table[g, r, p // P] * P + p % P
    sequence s of row r, n tokens long   tables[g, s, : ceil(n / P)] = block table[g, r, :]
                                         params[:, s] = params[:, r]

The host names rows and positions only. It cannot name the tokens: the newest was chosen by the step before, which may
still be running when this one is launched. One program copies the block numbers and sampling numbers of one sequence,
one handles 256 tokens; all read a few KB, so the node costs its launch and little else.

Before: the host's integers, runner/slots.py (the rows).  After: every layer, through runner/batch.py.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from .launch import cdiv, next_power_of_2, overlap, start_next, use_kernel, wait_inputs

TOKENS = 256  # a program


class RowState(NamedTuple):
    """All rows: tokens [N, W] int32, tables [G, N, B] int32, params [C, N] int32, whose last two are a seed's words."""

    tokens: torch.Tensor
    tables: torch.Tensor
    params: torch.Tensor


class StepBuffers(NamedTuple):
    """The step's: tokens [T], positions [T] int32, writes [G, T] int64, tables [G, S, B], params [C - 2, S] int32,
    seeds [S] int64. They may be the fronts of larger tensors, but the last dimension lies close."""

    tokens: torch.Tensor
    positions: torch.Tensor
    writes: torch.Tensor
    tables: torch.Tensor
    params: torch.Tensor
    seeds: torch.Tensor


def step_inputs_reference(
    rows: RowState,
    out: StepBuffers,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    token_rows: torch.Tensor | None,
    places: torch.Tensor | None,
    block_size: int,
) -> None:
    """The specification of `step_inputs`, with its arguments, on the CPU: in numpy, whose calls cost a fifth of torch's
    where there is next to nothing to compute.
    """
    tokens, tables, params = (part.numpy() for part in rows)
    slots, lens = slots.numpy(), seq_lens.numpy()
    owners, places = (slots, lens - 1) if places is None else (token_rows.numpy(), places.numpy())
    at = np.maximum(places, 0)
    blocks, offsets = np.divmod(at, block_size)
    needed = cdiv(int(lens.max()), block_size) if len(lens) else 0
    out.positions.numpy()[:] = at
    out.tokens.numpy()[:] = tokens[owners, at]
    out.tables.numpy()[:, :, :needed] = tables[:, slots, :needed]
    writes = tables[:, owners, blocks].astype(np.int64) * block_size + offsets
    out.writes.numpy()[:] = np.where(places >= 0, writes, -1)
    values = params[:, slots]
    out.params.numpy()[:] = values[:-2]
    low, high = values[-2:].astype(np.int64)
    out.seeds.numpy()[:] = high << 32 | low & 0xFFFFFFFF


@triton.jit(do_not_specialize=["T", "S", "sequence_programs"])
def _step_inputs_kernel(
    token_table_ptr,  # [N, W]
    block_table_ptr,  # [G, N, B]
    params_ptr,  # [C, N]
    tokens_ptr,  # [T]
    positions_ptr,  # [T]
    writes_ptr,  # [G, ...] int64
    tables_ptr,  # [G, ..., B]
    values_ptr,  # [C - 2, ...]
    seeds_ptr,  # [S] int64
    slots_ptr,  # [S]
    lens_ptr,  # [S]
    rows_ptr,  # [T]; read unless DECODE
    places_ptr,  # [T]; read unless DECODE
    T,
    S,
    N,
    W,
    B,
    writes_stride,  # elements between groups
    tables_stride,  # elements between groups
    values_stride,  # elements between columns
    P: tl.constexpr,  # positions of a block
    G: tl.constexpr,
    C: tl.constexpr,
    DECODE: tl.constexpr,  # token s is the last one of sequence s
    BLOCK_C: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    pid = tl.program_id(0)
    if pid < S:
        slot = tl.load(slots_ptr + pid).to(tl.int64)
        blocks = tl.cdiv(tl.load(lens_ptr + pid), P)
        for group in tl.static_range(G):
            source = block_table_ptr + (group * N + slot) * B
            target = tables_ptr + group * tables_stride + pid.to(tl.int64) * B
            for start in range(0, blocks, TOKENS):
                block = start + tl.arange(0, TOKENS)
                tl.store(target + block, tl.load(source + block, mask=block < blocks), mask=block < blocks)
        column = tl.arange(0, BLOCK_C)
        value = tl.load(params_ptr + column * N + slot, mask=column < C - 2, other=0)
        tl.store(values_ptr + column * values_stride + pid, value, mask=column < C - 2)
        low = tl.load(params_ptr + (C - 2) * N + slot).to(tl.int64)
        high = tl.load(params_ptr + (C - 1) * N + slot).to(tl.int64)
        tl.store(seeds_ptr + pid, (high << 32) | (low & 0xFFFFFFFF))
    else:
        token = (pid - S) * TOKENS + tl.arange(0, TOKENS)
        inside = token < T
        if DECODE:
            row = tl.load(slots_ptr + token, mask=inside, other=0).to(tl.int64)
            place = tl.load(lens_ptr + token, mask=inside, other=0) - 1
        else:
            row = tl.load(rows_ptr + token, mask=inside, other=0).to(tl.int64)
            place = tl.load(places_ptr + token, mask=inside, other=-1)
        real = place >= 0
        at = tl.maximum(place, 0)
        tl.store(positions_ptr + token, at, mask=inside)
        tl.store(tokens_ptr + token, tl.load(token_table_ptr + row * W + at, mask=inside, other=0), mask=inside)
        for group in tl.static_range(G):
            entry = block_table_ptr + (group * N + row) * B + at // P
            write = tl.load(entry, mask=inside, other=0).to(tl.int64) * P + at % P
            tl.store(writes_ptr + group * writes_stride + token, tl.where(real, write, -1), mask=inside)


def step_inputs(
    rows: RowState,
    out: StepBuffers,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    token_rows: torch.Tensor | None,
    places: torch.Tensor | None,
    block_size: int,
) -> None:
    """Fill `out` for S sequences and T tokens (the lengths of its tensors).

    Args:
        rows: all rows.
        out: written; of `tables` only the entries that a sequence of this length has.
        slots: [S] int32, the row of each sequence.   seq_lens: [S] int32, its length after this step; 0 for padding.
        token_rows, places: [T] int32, the row and position of each token; place -1 for padding, which reads the token
            of position 0 and writes nowhere. Both None: T = S, token s is the last one of sequence s.
        block_size: P, positions of a block.

    Raises:
        ValueError: shapes that do not fit.
    """
    T, S, (groups, count, width) = len(out.tokens), len(slots), rows.tables.shape
    named = T == S if places is None else len(places) == len(token_rows) == T
    if not named or len(seq_lens) != S or out.tables.shape != (groups, S, width):
        raise ValueError(f"step_inputs: {T} tokens of {S} sequences, tables {list(out.tables.shape)}")
    if not use_kernel(slots):
        return step_inputs_reference(rows, out, slots, seq_lens, token_rows, places, block_size)
    columns = len(rows.params)
    _step_inputs_kernel[(S + cdiv(T, TOKENS),)](
        *rows, *out, slots, seq_lens,
        slots if places is None else token_rows, slots if places is None else places,
        T, S, count, rows.tokens.stride(0), width, out.writes.stride(0), out.tables.stride(0), out.params.stride(0),
        P=block_size, G=groups, C=columns, DECODE=places is None, BLOCK_C=next_power_of_2(columns), TOKENS=TOKENS,
        num_warps=4, **overlap(slots),
    )  # fmt: skip
    return None
