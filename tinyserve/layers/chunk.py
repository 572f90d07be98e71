"""Chunked attention as full attention over shorter sequences: a query sees its own chunk of C positions only.

A chunk that a step touches is a sequence to the attention kernels: its table is the part of the sequence's table from
the chunk's first block on, its length what there is of the chunk. A sequence whose new tokens cross into the next chunk
becomes several. So no kernel knows of chunks, and blocks of earlier chunks are never read, nor need they be kept.

    C = 8, new tokens at 5 .. 17       pieces 5 .. 7 (length 8)   8 .. 15 (length 8)   16 .. 17 (length 2)

All of it is computed on the device from shapes that do not depend on the positions: where there may be more pieces than
there are, the rest are empty.

Before: attention.py::Batch.  After: attention.py.

Source: Llama 4's model card and configuration (attention_chunk_size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor


class Step(Protocol):
    """What is read of a Batch; see attention.py."""

    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Sequence[Tensor]
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int


@frozen(eq=False)
class Pieces:
    """What attention reads of a step: sequences of one token first, then the others. See Batch for the fields.

    Args: query_start: [S - num_decodes + 1], of the sequences with several tokens, by their place among all tokens.
    """

    tables: Tensor
    lengths: Tensor
    query_start: Tensor
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int


def whole(batch: Step, group: int) -> Pieces:
    """Return the step as it is, for layers that see beyond chunks."""
    return Pieces(
        tables=batch.block_tables[group],
        lengths=batch.seq_lens,
        query_start=batch.query_start[batch.num_decodes :],
        num_seqs=batch.num_seqs,
        num_decodes=batch.num_decodes,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )


def chunked(batch: Step, group: int, chunk: int, block_size: int) -> Pieces:
    """Cut the sequences of a step into chunks.

    Args:
        group: KV group of the layer.
        chunk: C, a multiple of block_size.
    """
    decodes, table = batch.num_decodes, batch.block_tables[group]
    rows = torch.arange(decodes, device=table.device)
    lengths = batch.seq_lens[:decodes]
    begins = (lengths - 1).clamp(min=0) // chunk * chunk
    lengths = lengths - begins
    starts = batch.query_start[decodes:]
    if decodes < batch.num_seqs:
        starts, more_rows, more_begins, more_lengths = _cut(batch, chunk)
        rows, begins = torch.cat((rows, more_rows)), torch.cat((begins, more_begins))
        lengths = torch.cat((lengths, more_lengths))
    columns = torch.arange(min(chunk // block_size, table.shape[1]), device=table.device)
    columns = (begins[:, None] // block_size + columns).clamp(max=table.shape[1] - 1)
    return Pieces(
        tables=table[rows[:, None], columns],
        lengths=lengths.to(torch.int32),
        query_start=starts,
        num_seqs=len(rows),
        num_decodes=decodes,
        max_query_len=min(batch.max_query_len, chunk),
        max_seq_len=min(batch.max_seq_len, chunk),
    )


def _cut(batch: Step, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pieces of the sequences with several tokens, M of them: starts [M + 1], and [M] rows, begins and lengths."""
    starts = batch.query_start[batch.num_decodes :]
    tokens, sequences = batch.positions.shape[0], batch.num_seqs - batch.num_decodes
    most = 2 * sequences + tokens // chunk  # a sequence touches at most this many: its length / C, and two ends
    token = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(starts, token, right=True) - 1  # -1: a decode; `sequences`: padding
    inside = (sequence >= 0) & (sequence < sequences)
    owner = sequence.clamp(0, sequences - 1)
    cut = inside & ((token == starts[owner]) | (batch.positions % chunk == 0))
    number = torch.where(inside, cut.cumsum(0) - 1, most + 1)  # of the piece; the last place is cut off again
    first = torch.full((most + 2,), tokens, dtype=torch.int32, device=starts.device)
    first = first.scatter_reduce(0, number, token, "amin")[: most + 1]
    first = torch.minimum(first, starts[-1])
    at = first[:-1].clamp(max=tokens - 1)
    position = batch.positions[at]
    begins = position // chunk * chunk
    lengths = position - begins + (first[1:] - first[:-1])
    return first, batch.num_decodes + owner[at], begins, torch.where(first[1:] > first[:-1], lengths, 0)
