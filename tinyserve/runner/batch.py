"""The tensors of one step, as every layer reads them.

    sequences    | decode 0 | decode 1 |   prefill 2   | prefill 3 |       single-token sequences stand first
    tokens       [   t    ,    t     ,  t  t  t  t   ,  t  t  t  ]       T = 9 tokens of S = 4 sequences
    query_start  [   0    ,    1     ,  2            ,  6       , 9 ]    [S + 1]

A Batch is made of views into buffers that are allocated once, at addresses that never change: a captured graph can
read them. The host fills one int32 array per step, a slot of the ring `mail`, which the device reads itself. Everything
else (input tokens, block tables, cache positions to write, sampling numbers) is gathered on the device from the rows,
because the host may not know it yet. What a step gives comes back in the same slot of the ring `home`.

A `Shape` says how much of the buffers a step uses. A graph's shape is usually larger than the step: what is left over
is padding, single tokens after the decodes and empty sequences at the end, all of the spare row and of length 0.

Before: runner/slots.py, kernels/step_inputs.py.  After: layers/attention.py and all other layers, runner/graphs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen

from ..device import Device
from ..kernels.fetch import fetch
from ..kernels.step_inputs import RowState, StepBuffers, step_inputs
from ..sampling.params import RowValues
from ..step import Decodes, SeqSlice, StepInput
from .lengths import Lengths
from .slots import ALIGN, Differences, Rows

RIDERS = 1024  # differences of a step that have a place in its slot; more get memory of their own
SHAPES = 256  # whose views are kept


@frozen(cache_hash=True)
class Shape:
    """How many of each a step holds, padding included.

    Args:
        tokens: T.   seqs: S.   decodes: leading sequences of one token each.
        adapted: some row may wear an adapter, so products are followed by additions to them (lora/batch.py).
    """

    tokens: int
    seqs: int
    decodes: int
    adapted: bool = False

    @classmethod
    def of(cls, pieces: Sequence[SeqSlice], *, adapted: bool) -> Shape:
        """The shape of a step as it is, without padding."""
        seqs = len(pieces)
        if isinstance(pieces, Decodes):
            return cls(seqs, seqs, seqs, adapted)
        counts = [piece.count for piece in pieces]
        return cls(sum(counts), seqs, counts.count(1), adapted)

    @property
    def is_decode(self) -> bool:
        """Every sequence has one token."""
        return self.tokens == self.seqs == self.decodes

    def place(self, index: int, decodes: int) -> int:
        """Where sequence `index` of a step with so many decodes stands in a batch of this shape."""
        return index if index < decodes else index + self.decodes - decodes


@frozen(eq=False)
class Views:
    """The buffers of a shape.

    Args:
        shape: theirs.   ints: what the host sent, of which the next seven are parts.
        slots, seq_lens, kept, logit_rows: [S] int32; kept: 1 where the chosen token belongs to the row.
        query_start: [S + 1] int32.
        token_rows, places: [T] int32, row and position of each token, -1 for padding; None for a decode shape.
        out: what is gathered.   values: the sampling numbers in it.
    """

    shape: Shape
    ints: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    kept: torch.Tensor
    logit_rows: torch.Tensor
    query_start: torch.Tensor
    token_rows: torch.Tensor | None
    places: torch.Tensor | None
    out: StepBuffers
    values: RowValues


@frozen(kw_only=True, eq=False)
class Batch:
    """One step's inputs on the device, and the few numbers of it that the host needs to choose kernels.

    Args:
        tokens: [T] int32.    positions: [T] int32.
        query_start: [S + 1] int32: sequence s owns tokens query_start[s] .. query_start[s + 1] - 1.
        seq_lens: [S] int32: tokens of the sequence that the cache holds after this step.
        slots: [S] int32: the row of each sequence.
        block_tables: per KV group [S, B] int32.
        slots_to_write: per KV group [T] int64: block * block_size + offset where the token's K and V go; -1: nowhere.
        logit_rows: [S] int32: the token after which each sequence's next one is chosen.
        num_decodes: how many leading sequences have exactly one query token.
        max_seq_len: no entry of seq_lens is larger.
        max_cached_len: no sequence of several query tokens had more in the cache before this step.
        views: the buffers that all of this stands in.
        memo: what the layers of one computation of this step share (kernels/launch.py::once); the next begins empty.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slots_to_write: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    max_cached_len: int
    views: Views
    memo: dict = field(factory=dict)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.views.shape.tokens

    @property
    def token_rows(self) -> torch.Tensor:
        """[T] int32: the row of each token."""
        return self.slots if self.views.token_rows is None else self.views.token_rows


class _Layout:
    """Places in the array that the host fills: first what a decode needs, then differences, then what others need."""

    def __init__(self, max_tokens: int, max_seqs: int) -> None:
        sizes = {"slots": max_seqs, "lens": max_seqs, "kept": max_seqs, "where": 2 * RIDERS, "values": RIDERS}
        sizes |= {"starts": max_seqs + 1, "logits": max_seqs, "rows": max_tokens, "places": max_tokens}
        self.at: dict[str, int] = {}
        self.size = 0
        for name, size in sizes.items():
            self.at[name] = self.size
            self.size += -(-size // ALIGN) * ALIGN


def _columns(pieces: Sequence[SeqSlice]) -> tuple[list[int], list[int], list[bool]]:
    """Row, length after the step and kept-flag of each."""
    return [p.slot for p in pieces], [p.start + p.count for p in pieces], [p.samples for p in pieces]


@define
class _Slot:
    """A slot of both rings.

    Args: flat: what the host sends.   given: what comes back.
        holds: the rows and the shape of the step that it was used for last, if that only decoded.   lens: in `flat`.
    """

    flat: np.ndarray
    given: memoryview
    holds: tuple[tuple[int, ...], Shape] | None = None
    lens: memoryview | None = None


class BatchBuilder:
    """Owns the static buffers and turns the slices of a step into a Batch.

    Args:
        rows: the device state to gather from.   params: [C, rows + 1] int32, the sampler's numbers of each row.
        max_tokens, max_seqs: most tokens and sequences of one step, padding included.
        device: where.   ring: slots of mail and home; one more than steps may be in flight.

    Attributes:
        home: [R, 2 S] int32 on the host: tokens and bad flags of each step, kernels/keep_tokens.py.
        turn: [1] int32 on the device: the slot of the step that runs.   slot: of the step that was sent last.
    """

    def __init__(
        self, rows: Rows, params: torch.Tensor, max_tokens: int, max_seqs: int, device: Device, ring: int = 3
    ) -> None:
        self._rows = rows
        self._state = RowState(rows.tokens, rows.tables, params)
        self._layout = _Layout(max_tokens, max_seqs)
        self._mail = device.host_buffer(ring, self._layout.size, dtype=torch.int32).zero_()
        self.home = device.host_buffer(ring, 2 * max_seqs, dtype=torch.int32)
        self._ring = [
            _Slot(flat, memoryview(given)) for flat, given in zip(self._mail.numpy(), self.home.numpy(), strict=True)
        ]
        self._lengths = Lengths()
        self.slot = ring - 1
        groups, _, width = rows.tables.shape

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device.torch)

        aligned_tokens, aligned_seqs = (-(-size // ALIGN) * ALIGN for size in (max_tokens, max_seqs))
        self._ints = zeros(self._layout.size)
        self._out = StepBuffers(
            tokens=zeros(max_tokens),
            positions=zeros(max_tokens),
            writes=zeros(groups, aligned_tokens, dtype=torch.int64),
            tables=zeros(groups, aligned_seqs, width),
            params=zeros(len(params) - 2, aligned_seqs),
            seeds=zeros(max_seqs, dtype=torch.int64),
        )
        self.turn = zeros(1)
        self._count = torch.arange(max_seqs + 1, dtype=torch.int32, device=device.torch)
        self._views: dict[Shape, Views] = {}
        self._riders: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def order(self, step: StepInput) -> Sequence[int]:
        """Indices of the step's slices in the order in which the batch holds them: single tokens first."""
        slices = step.slices
        if isinstance(slices, Decodes):
            return range(len(slices))
        singles = [i for i, piece in enumerate(slices) if piece.count == 1]
        if len(singles) == len(slices):
            return singles
        return singles + [i for i, piece in enumerate(slices) if piece.count > 1]

    def send(
        self,
        pieces: Sequence[SeqSlice],
        shape: Shape,
        differences: Differences | None = None,
        slots: tuple[int, ...] | None = None,
    ) -> Views:
        """Write a step's integers where the device will read them, and apply the differences of the rows.

        Args: pieces: in order; single tokens first.   shape: of the step, or of a graph that holds it.
            slots: the rows of the pieces, if the caller has them.
        """
        self.slot = (self.slot + 1) % len(self._ring)
        flat = self._ring[self.slot].flat
        slots = tuple([piece.slot for piece in pieces]) if slots is None else slots
        decodes = len(pieces) if shape.is_decode else sum(piece.count == 1 for piece in pieces)
        if isinstance(pieces, Decodes):
            self._fill_decodes(pieces, shape)
        else:
            self._fill(flat, _columns(pieces[:decodes]), 0, shape.decodes)
            self._fill(flat, _columns(pieces[decodes:]), shape.decodes, shape.seqs)
            self._ring[self.slot].holds = None
        if not shape.is_decode:
            self._fill_tokens(flat, pieces, decodes, shape)
        if differences is not None:
            self._apply(flat, differences)
        return self.views(shape)

    def resend(self, pieces: Decodes, shape: Shape) -> None:
        """`send` for the rows and the shape of the step before, when nothing but positions differs."""
        self.slot = (self.slot + 1) % len(self._ring)
        self._fill_decodes(pieces, shape)

    def given(self, seqs: int) -> memoryview:
        """Where the step that was sent last leaves the tokens and bad flags of so many sequences: [2 S], later."""
        return self._ring[self.slot].given[: 2 * seqs]

    def follow(self) -> None:
        """Let the device's turn be the host's again, after steps that were sent but did not run as a whole."""
        self.turn.fill_((self.slot + 1) % len(self._ring))

    def agrees(self) -> bool:
        """Whether the device has seen what was sent last, and goes on to the slot that comes next. Waits for it."""
        places = [self._layout.at[name] for name in ("slots", "lens", "kept")]
        seen = self._ints[places].tolist() == self._mail[self.slot, places].tolist()
        return seen and int(self.turn) == (self.slot + 1) % len(self._ring)

    def _fill(self, flat: np.ndarray, columns: tuple[Any, Any, Any], start: int, stop: int) -> None:
        """Row, length and kept-flag of some sequences from place `start` on; padding up to `stop`."""
        end, at = start + len(columns[0]), self._layout.at
        for name, column in zip(("slots", "lens", "kept"), columns, strict=True):
            flat[at[name] + start : at[name] + end] = column
        if end < stop:
            for name, value in (("slots", self._rows.spare), ("lens", 0), ("kept", 0)):
                flat[at[name] + end : at[name] + stop] = value

    def _fill_decodes(self, pieces: Decodes, shape: Shape) -> None:
        """The same for all of a step that only decodes; little where this slot held these rows when used last."""
        slot, rows = self._ring[self.slot], (pieces.slots, shape)
        if slot.holds == rows:
            slot.lens[:] = self._lengths.of(pieces)
            return
        self._fill(slot.flat, (pieces.slots, pieces.starts + 1, 1), 0, shape.seqs)
        start = self._layout.at["lens"]
        slot.holds, slot.lens = rows, memoryview(slot.flat[start : start + len(pieces)])

    def _fill_tokens(self, flat: np.ndarray, pieces: Sequence[SeqSlice], decodes: int, shape: Shape) -> None:
        """Row and position of each token, where each sequence starts, and which token its logits come from."""
        at, spare, gap = self._layout.at, self._rows.spare, shape.decodes - decodes
        counts = [*(piece.count for piece in pieces[:decodes]), *[1] * gap, *(p.count for p in pieces[decodes:])]
        counts = np.array(counts, dtype=np.int64)
        slots, lens = (flat[at[name] : at[name] + len(counts)] for name in ("slots", "lens"))
        stops = np.cumsum(counts)
        total = int(stops[-1]) if len(stops) else 0
        padding = shape.seqs - len(counts)
        flat[at["starts"]] = 0
        flat[at["starts"] + 1 : at["starts"] + 1 + shape.seqs] = [*stops, *[total] * padding]
        flat[at["logits"] : at["logits"] + shape.seqs] = [*(stops - 1), *[0] * padding]
        rows, places = flat[at["rows"] :], flat[at["places"] :]
        rows[:total] = np.repeat(slots, counts)
        places[:total] = np.arange(total) + np.repeat(lens - stops, counts)
        rows[total : shape.tokens] = spare
        places[total : shape.tokens] = -1

    def _apply(self, flat: np.ndarray, differences: Differences) -> None:
        """Scatter the differences: few come from the slot's own pinned memory, many from some of their own."""
        count, at = len(differences.where), self._layout.at
        if count > RIDERS:
            self._rows.write(differences)
            return
        start, values, stop = at["where"], at["values"], at["values"] + count
        flat[start : start + 2 * count] = differences.where.view(np.int32)
        flat[values:stop] = differences.values
        parts = self._riders.get((self.slot, count))
        if parts is None:
            where = self._ints[start : start + 2 * count].view(torch.int64)
            parts = self._ints[start:stop], self._mail[self.slot, start:stop], where, self._ints[values:stop]
            self._riders[self.slot, count] = parts  # a few thousand at most
        here, there, *given = parts
        here.copy_(there, non_blocking=True)
        self._rows.scatter(*given)

    def views(self, shape: Shape) -> Views:
        """The buffers of a shape."""
        found = self._views.get(shape)
        if found is None:
            while len(self._views) >= SHAPES:
                del self._views[next(iter(self._views))]
            found = self._views[shape] = self._make_views(shape)
        return found

    def _make_views(self, shape: Shape) -> Views:
        T, S, at = shape.tokens, shape.seqs, self._layout.at

        def sent(name: str, size: int) -> torch.Tensor:
            return self._ints[at[name] :][:size]

        one, slots = shape.is_decode, sent("slots", S)
        out = StepBuffers(
            tokens=self._out.tokens[:T],
            positions=self._out.positions[:T],
            writes=self._out.writes[:, :T],
            tables=self._out.tables[:, :S],
            params=self._out.params[:, :S],
            seeds=self._out.seeds[:S],
        )
        return Views(
            shape=shape,
            ints=self._ints[: at["kept"] + S if one else at["places"] + T],
            slots=slots,
            seq_lens=sent("lens", S),
            kept=sent("kept", S),
            logit_rows=self._count[:S] if one else sent("logits", S),
            query_start=self._count[: S + 1] if one else sent("starts", S + 1),
            token_rows=None if one else sent("rows", T),
            places=None if one else sent("places", T),
            out=out,
            values=RowValues.of(slots, out.params, out.seeds),
        )

    def batch(self, views: Views, max_query_len: int, max_seq_len: int, max_cached_len: int) -> Batch:
        """The Batch that layers read; its gathered parts hold something after `gather`."""
        shape, out = views.shape, views.out
        width = out.tables.shape[2]
        if self._ints.is_cpu:  # references copy what they are given, so tables end with the block of the longest
            width = -(-max_seq_len // self._rows.block_size)
            max_seq_len = width * self._rows.block_size
        return Batch(
            tokens=out.tokens,
            positions=out.positions,
            query_start=views.query_start,
            seq_lens=views.seq_lens,
            slots=views.slots,
            block_tables=tuple(table[:, :width] for table in out.tables),
            slots_to_write=tuple(out.writes),
            logit_rows=views.logit_rows,
            num_seqs=shape.seqs,
            num_decodes=shape.decodes,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            max_cached_len=max_cached_len,
            views=views,
        )

    def gather(self, views: Views) -> None:
        """Fetch on the device what the host sent, and what the rows know: tokens, tables, cache positions, numbers."""
        fetch(self._mail, self.turn, views.ints)
        step_inputs(
            self._state, views.out, views.slots, views.seq_lens, views.token_rows, views.places, self._rows.block_size
        )
