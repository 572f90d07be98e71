"""The tensors of one step, as every layer reads them.

    sequences    | decode 0 | decode 1 |   prefill 2   | prefill 3 |       single-token sequences stand first
    tokens       [   t    ,    t     ,  t  t  t  t   ,  t  t  t  ]       T = 9 tokens of S = 4 sequences
    query_start  [   0    ,    1     ,  2            ,  6       , 9 ]    [S + 1]

A Batch is made of views into buffers that are allocated once, at addresses that never change: a captured graph can
read them. The host fills one int32 array per step, which reaches the device in one copy; everything else (input
tokens, block tables, cache positions to write) is gathered on the device from the rows, because the host may not know
it yet.

Before: runner/slots.py.  After: layers/attention.py and all other layers, which get the Batch as an argument.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import field, frozen

from ..device import Device
from ..step import SeqSlice, StepInput
from .slots import Rows


@frozen(kw_only=True, eq=False)
class Batch:
    """One step's inputs on the device, and the few numbers of it that the host needs to choose kernels.

    Args:
        tokens: [T] int32.    positions: [T] int32.
        query_start: [S + 1] int32: sequence s owns tokens query_start[s] .. query_start[s + 1] - 1.
        seq_lens: [S] int32: tokens of the sequence that the cache holds after this step.
        slots: [S] int32: the row of each sequence.
        block_tables: per KV group [S, B] int32.
        slots_to_write: per KV group [T] int64: block * block_size + offset where the token's K and V go.
        logit_rows: [L] int32: tokens after which a token is chosen.
        num_decodes: how many leading sequences have exactly one query token.
        max_seq_len: no entry of seq_lens is larger.
        memo: what the layers of this step share on the CPU (kernels/launch.py::once).
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slots_to_write: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    memo: dict = field(factory=dict)


class BatchBuilder:
    """Owns the static buffers and turns the slices of a step into a Batch.

    Args:
        rows: the device state to gather from.
        max_tokens, max_seqs: most tokens and sequences of one step.
        device: where.   ring: how many steps may be in flight; the host buffer of a step is not reused before.
    """

    def __init__(self, rows: Rows, max_tokens: int, max_seqs: int, device: Device, ring: int = 3) -> None:
        self._rows = rows
        self._max_tokens, self._max_seqs = max_tokens, max_seqs
        groups, _, width = rows.tables.shape
        size = 2 * max_tokens + 4 * max_seqs + 1
        self._host = [device.host_buffer(size, dtype=torch.int32) for _ in range(ring)]
        self._ints = torch.zeros(size, dtype=torch.int32, device=device.torch)
        self._tokens = torch.zeros(max_tokens, dtype=torch.int32, device=device.torch)
        self._tables = torch.zeros(groups, max_seqs, width, dtype=torch.int32, device=device.torch)
        self._writes = torch.zeros(groups, max_tokens, dtype=torch.int64, device=device.torch)
        self._turn = 0

    def order(self, step: StepInput) -> list[int]:
        """Indices of the step's slices in the order in which the batch holds them: single tokens first."""
        return sorted(range(len(step.slices)), key=lambda i: step.slices[i].count > 1)

    def build(self, pieces: list[SeqSlice]) -> Batch:
        """The Batch of these slices, in this order. Rows must already hold the step's differences."""
        counts = np.array([piece.count for piece in pieces], dtype=np.int32)
        ends = np.array([piece.end for piece in pieces], dtype=np.int32)
        slots = np.array([piece.slot for piece in pieces], dtype=np.int32)
        stops = np.cumsum(counts, dtype=np.int32)
        samples = np.array([piece.samples for piece in pieces], dtype=bool)
        total, seqs = int(stops[-1]), len(pieces)
        positions = np.arange(total, dtype=np.int32) + np.repeat(ends - stops, counts)
        fields = (
            np.concatenate(([0], stops)).astype(np.int32),
            ends,
            slots,
            stops[samples] - 1,
            positions,
            np.repeat(slots, counts),
        )
        query_start, seq_lens, device_slots, logit_rows, device_positions, token_rows = self._upload(fields)
        longest = int(ends.max())
        self._gather(device_slots, token_rows, device_positions, longest)
        needed = -(-longest // self._rows.block_size)
        groups = range(self._tables.shape[0])
        return Batch(
            tokens=self._tokens[:total],
            positions=device_positions,
            query_start=query_start,
            seq_lens=seq_lens,
            slots=device_slots,
            block_tables=tuple(self._tables[g, :seqs, :needed] for g in groups),
            slots_to_write=tuple(self._writes[g, :total] for g in groups),
            logit_rows=logit_rows,
            num_tokens=total,
            num_seqs=seqs,
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_seq_len=longest,
        )

    def _upload(self, fields: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        """Copy the fields to their fixed places in the device buffer, in one transfer; returns views of them."""
        seqs, tokens = self._max_seqs, self._max_tokens
        places = np.cumsum([0, seqs + 1, seqs, seqs, seqs, tokens])
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % len(self._host)
        flat = host.numpy()
        for place, values in zip(places, fields, strict=True):
            flat[place : place + len(values)] = values
        used = int(places[-1]) + len(fields[-1])
        self._ints[:used].copy_(host[:used], non_blocking=True)
        return [self._ints[place : place + len(values)] for place, values in zip(places.tolist(), fields, strict=True)]

    def _gather(self, slots: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, longest: int) -> None:
        """Fetch on the device what the rows know: input tokens, block tables and cache positions."""
        state, size = self._rows, self._rows.block_size
        total, seqs = len(rows), len(slots)
        needed = -(-longest // size)
        self._tokens[:total] = state.tokens[rows, positions]
        in_table = positions // size
        offsets = positions % size
        for group in range(self._tables.shape[0]):
            table = state.tables[group]
            self._tables[group, :seqs, :needed] = table[:, :needed].index_select(0, slots)
            blocks = table[rows, in_table].to(torch.int64)
            self._writes[group, :total] = blocks * size + offsets
