"""Cutting the keys of sequences into parts, so that all of a device reads at once and ends at once.

A kv head has room for so many parts: that is the grid of attention, whatever the lengths are, because the host does not
know them, and one recorded graph must serve them all. Parts are as small as that allows, but hold no less than
`share`, the keys of all sequences over `target`. So one long sequence fills the device, many equal ones are not cut at
all, and the one long among many short ones is. Batch-invariant mode cuts each sequence by its own length alone
(`FIXED`), and so gives it the same bits whatever its neighbours are.

**The list.** Where a part begins and ends depends on lengths only, and all layers of a step have the same. So the first
layer has it written down, and the programs of all layers read what they do, a record of eight numbers, where they would
else look through all lengths (256 of them take longer than a tile of keys). Parts stand in order of their size, the
largest first, so that nobody begins a long one when the others end; records without a part stand last. One sequence and
fixed cuts need no list.

    records     part 0 ... part n - 1, none ...   sequence, length, begin, end, parts of the sequence, its first block
    behind them the sequences in several parts    sequence, its first part, its parts

One program writes the records of SOME sequences, whose places follow from counting what stands before them: S numbers
are read for each, and nothing needs to be sorted.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Ye et al., arXiv:2501.01005 (a plan for a step).

Before: the step's lengths, `step_inputs.py`.  After: `attention_decode.py`, `attention_merge.py`.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen

from .launch import cdiv, overlap, publish, use_kernel, wait_inputs

PROGRAMS = 2  # attention programs for each processor of the device; measured: more cost more than they bring
LEAST = 64  # keys that are worth a part of their own
# Batch-invariant: a part for every so many keys, up to so many parts.
FIXED_LEAST, FIXED_MOST = 512, 16
RECORD = tl.constexpr(8)
SOME, BLOCK_S = 16, 256  # sequences of a program, and to which it compares them at a time


@frozen
class Cut:
    """How many parts there are room for. What the cut kernels and the merge must agree on.

    Attributes:
        target: a part holds at least the keys of all sequences over this.
        parts: most parts of one kv head, over all sequences: the grid.
        merges: most sequences in more than one part.
        least: keys that are worth a part.
        fixed: most parts of a sequence if the cut may not depend on its neighbours, else 0.
        listed: programs read what to do from a list, else they compute it.
        window, queries: of the attention; a sequence has no more than window + queries - 1 keys to read.
    """

    target: int
    parts: int
    merges: int
    least: int
    fixed: int
    listed: bool
    window: int = 0
    queries: int = 1

    def constants(self) -> dict[str, int]:
        """The kernels' compile-time arguments."""
        return {
            "WINDOW": self.window,
            "QUERIES": self.queries,
            "LEAST": self.least,
            "FIXED": self.fixed,
            "LISTED": self.listed,
        }


def make_cut(
    sequences: int,
    kv_heads: int,
    programs: int,
    *,
    invariant: bool,
    window: int = 0,
    queries: int = 1,
) -> Cut:
    """The cut for this many sequences on a device that `programs` programs fill; half as many more can run at once.

    Few sequences are cut into what fills it. More get what room there is: measured, a grid of more programs than run at
    once, of which hardly two thirds have work, takes 10 % longer (32 sequences of 4k), also with these last. Where all
    of that is taken, a few parts are left for what is much longer than the others; programs without work cost 1 %.
    """
    if invariant:
        parts = sequences * FIXED_MOST
        return Cut(1, parts, sequences, FIXED_LEAST, FIXED_MOST, False, window, queries)
    target, room = max(programs // kv_heads, 1), 3 * programs // (2 * kv_heads)
    if target >= 16:  # the merge reads 32 at a time
        target -= target % 16
    parts = target
    if sequences > target // 2:
        target = max(2 * room, 1)
        parts = max(room, sequences + 4) if sequences <= room else sequences + room // 3
    merges = min(sequences, parts - sequences) if sequences > 1 else int(parts > 1)
    return Cut(target, parts, merges, LEAST, 0, sequences > 1, window, queries)


def attention_cut_reference(
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    tables: torch.Tensor,
    cut: Cut,
    *,
    tile: int,
    page: int,
) -> torch.Tensor:
    """The specification of `attention_cut`, with its arguments."""
    lengths, starts = seq_lens.tolist(), query_start.tolist()
    seen = [min(length, cut.window + cut.queries - 1) if cut.window else length for length in lengths]
    share = max(cdiv(sum(seen), cut.target), cut.least)
    sizes = range(cdiv(share, tile) * tile, max(seen) + tile, tile)
    fits = (size for size in sizes if sum(max(cdiv(keys, size), 1) for keys in seen) <= cut.parts)
    share = next(fits, sizes.start)
    pieces = []
    for sequence, length in enumerate(lengths):
        queries = starts[sequence + 1] - starts[sequence] if cut.queries > 1 else 1
        low = max(length - queries - cut.window + 1, 0) // tile * tile if cut.window else 0
        parts = max(cdiv(seen[sequence], share), 1)
        keys = cdiv(cdiv(length - low, parts), tile) * tile
        pieces.append((keys, sequence, range(low, length, keys) if length > low else [0]))
    records, merges = [], []
    for keys, sequence, begins in sorted(pieces, key=lambda one: (-one[0], one[1])):
        if len(begins) > 1:
            merges.append([sequence, len(records), len(begins)])
        for begin in begins:
            end = min(begin + keys, lengths[sequence])
            block = int(tables[sequence, begin // page]) if page >= tile and begin < end else 0
            records.append([sequence, lengths[sequence], begin, end, len(begins), block])
    found = torch.zeros(cut.parts + cut.merges, RECORD.value, dtype=torch.int32)
    found[:, 0] = len(lengths)
    for some, first in ((records, 0), (merges, cut.parts)):
        for number, row in enumerate(some):
            found[first + number, : len(row)] = torch.tensor(row)
    return found.to(seq_lens.device)


@triton.jit
def keys_of(length, WINDOW: tl.constexpr, QUERIES: tl.constexpr):
    """Keys that the queries of a sequence see together, at most."""
    if WINDOW:
        length = tl.minimum(length, WINDOW + QUERIES - 1)
    return length


@triton.jit
def parts_of(keys, share, LEAST: tl.constexpr, FIXED: tl.constexpr):
    """Into how many parts a sequence is cut: at least one, which writes the zeros if there is no key."""
    parts = tl.minimum(tl.cdiv(keys, LEAST), FIXED) if FIXED else tl.cdiv(keys, share)
    return tl.maximum(parts, 1)


@triton.jit
def queries_of(query_start_ptr, sequence, exists, QUERIES: tl.constexpr):
    """A sequence's first token, and how many it has."""
    start = sequence
    queries = sequence * 0 + 1
    if QUERIES > 1:
        start = tl.load(query_start_ptr + sequence, mask=exists, other=0)
        queries = tl.load(query_start_ptr + sequence + 1, mask=exists, other=0) - start
    return start, queries


@triton.jit
def cut_of(query_start_ptr, lens_ptr, sequence, num_seqs, share, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
           LEAST: tl.constexpr, FIXED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Length, first key that is seen (of its tile), keys of a part and parts of a sequence; of many, if it is many."""
    exists = sequence < num_seqs
    length = tl.load(lens_ptr + sequence, mask=exists, other=0)
    parts = parts_of(keys_of(length, WINDOW, QUERIES), share, LEAST, FIXED)
    low = length * 0
    if WINDOW:
        _, queries = queries_of(query_start_ptr, sequence, exists, QUERIES)
        low = tl.maximum(length - queries - WINDOW + 1, 0) // TILE * TILE
    keys = tl.cdiv(tl.cdiv(length - low, parts), TILE) * TILE
    return length, low, keys, parts


@triton.jit
def find_part(
    cut_ptr, query_start_ptr, lens_ptr, num_seqs, target, item, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
    LEAST: tl.constexpr, FIXED: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What part number `item` is: its sequence and that one's length, where it begins and ends, and how many parts its
    sequence has. No part: sequence >= num_seqs, and it begins and ends at 0."""
    if LISTED:
        record = cut_ptr + item * RECORD
        sequence = tl.load(record)
        length = tl.load(record + 1)
        begin = tl.load(record + 2)
        end = tl.load(record + 3)
        parts = tl.load(record + 4)
    else:
        share = target * 0
        sequence = item // FIXED if FIXED else item * 0
        if not FIXED:
            keys = keys_of(tl.load(lens_ptr, mask=num_seqs > 0, other=0), WINDOW, QUERIES)
            share = tl.maximum(tl.cdiv(keys, target), LEAST)
        length, low, keys, parts = cut_of(
            query_start_ptr, lens_ptr, sequence, num_seqs, share, WINDOW, QUERIES, LEAST, FIXED, TILE
        )
        number = item - sequence * FIXED
        begin = low + number * keys
        end = tl.minimum(begin + keys, length)
        sequence = tl.where(number < parts, sequence, num_seqs)
    there = sequence < num_seqs
    return sequence, length, tl.where(there, begin, 0), tl.where(there, end, 0), parts


@triton.jit
def first_block(cut_ptr, item):
    """The number of the block in which part `item` begins, if blocks are in the list."""
    return tl.load(cut_ptr + item * RECORD + 5)


@triton.jit
def find_cut(cut_ptr, lens_ptr, num_seqs, target, most_parts, rank, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
             LEAST: tl.constexpr, FIXED: tl.constexpr, LISTED: tl.constexpr):  # fmt: skip
    """The rank-th sequence that may have several parts, its first one, and their number. None: sequence >= num_seqs."""
    if LISTED:
        record = cut_ptr + (most_parts + rank) * RECORD
        sequence = tl.load(record)
        first = tl.load(record + 1)
        parts = tl.load(record + 2)
    else:
        sequence = rank
        first = rank * FIXED
        keys = keys_of(tl.load(lens_ptr + rank, mask=rank < num_seqs, other=0), WINDOW, QUERIES)
        share = target * 0 if FIXED else tl.maximum(tl.cdiv(keys, target), LEAST)
        parts = parts_of(keys, share, LEAST, FIXED)
    return sequence, first, parts


# Slices begin anywhere in a buffer, and counts change from step to step: that must not make new variants.
@triton.jit(
    do_not_specialize=["num_seqs", "target", "table_stride", "most_parts", "most_merges"],
    do_not_specialize_on_alignment=["query_start_ptr", "lens_ptr", "tables_ptr"],
)
def _attention_cut_kernel(
    query_start_ptr,  # [S + 1] int32; read if QUERIES > 1
    lens_ptr,  # [S] int32
    tables_ptr,  # [S, ...] int32; read if PAGE >= TILE
    out_ptr,  # [most_parts + most_merges, 8] int32
    num_seqs,  # S
    target,
    table_stride,  # elements between sequences
    most_parts,
    most_merges,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_inputs(PDL)
    total = num_seqs * 0
    for start in range(0, num_seqs, BLOCK_S):
        index = start + tl.arange(0, BLOCK_S)
        total += tl.sum(keys_of(tl.load(lens_ptr + index, mask=index < num_seqs, other=0), WINDOW, QUERIES), axis=0)
    share = tl.maximum(tl.cdiv(total, target), LEAST)
    share = _smallest(lens_ptr, num_seqs, most_parts, share, total, WINDOW, QUERIES, TILE, BLOCK_S)
    mine = tl.program_id(0) * SOME + tl.arange(0, SOME)
    length, low, keys, parts = _full_parts(
        query_start_ptr, lens_ptr, mine, num_seqs, share, WINDOW, QUERIES, LEAST, TILE
    )
    item = tl.zeros([SOME], tl.int32)  # of the first part: how many there are in front
    rank = tl.zeros([SOME], tl.int32)
    items = num_seqs * 0
    ranks = num_seqs * 0
    for start in range(0, num_seqs, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        _, _, size, count = _full_parts(query_start_ptr, lens_ptr, other, num_seqs, share, WINDOW, QUERIES, LEAST, TILE)
        larger = (size[:, None] > keys[None, :]) | ((size[:, None] == keys[None, :]) & (other[:, None] < mine[None, :]))
        several = (count > 1).to(tl.int32)
        item += tl.sum(tl.where(larger, count[:, None], 0), axis=0)
        rank += tl.sum(tl.where(larger, several[:, None], 0), axis=0)
        items += tl.sum(count, axis=0)
        ranks += tl.sum(several, axis=0)

    for part in range(0, tl.max(parts, axis=0)):
        there = part < parts
        begin = low + part * keys
        end = tl.minimum(begin + keys, length)
        record = out_ptr + (item + part) * RECORD
        tl.store(record, mine, mask=there)
        tl.store(record + 1, length, mask=there)
        tl.store(record + 2, begin, mask=there)
        tl.store(record + 3, end, mask=there)
        tl.store(record + 4, parts, mask=there)
        if PAGE >= TILE:
            table = tables_ptr + mine.to(tl.int64) * table_stride
            tl.store(record + 5, tl.load(table + begin // PAGE, mask=there & (begin < end), other=0), mask=there)
    record = out_ptr + (most_parts + rank) * RECORD
    tl.store(record, mine, mask=parts > 1)
    tl.store(record + 1, item, mask=parts > 1)
    tl.store(record + 2, parts, mask=parts > 1)
    if tl.program_id(0) == 0:
        _no_more(out_ptr, items, most_parts, num_seqs, SOME)
        _no_more(out_ptr, most_parts + ranks, most_parts + most_merges, num_seqs, SOME)
    publish(PDL)


@triton.jit
def _smallest(lens_ptr, num_seqs, most_parts, share, total, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
              TILE: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """The smallest size of parts, a multiple of TILE and at least share, of which there are at most `most_parts`."""
    low = tl.cdiv(share, TILE)
    high = low
    for start in range(0, num_seqs, BLOCK_S):
        index = start + tl.arange(0, BLOCK_S)
        keys = keys_of(tl.load(lens_ptr + index, mask=index < num_seqs, other=0), WINDOW, QUERIES)
        high = tl.maximum(high, tl.cdiv(tl.max(keys, axis=0), TILE))
    if most_parts > num_seqs:  # a sequence has at most one part that is not full
        high = tl.maximum(tl.minimum(high, tl.cdiv(total, (most_parts - num_seqs) * TILE)), low)
    while low < high:
        size = (low + high) // 2
        count = num_seqs * 0
        for start in range(0, num_seqs, BLOCK_S):
            index = start + tl.arange(0, BLOCK_S)
            keys = keys_of(tl.load(lens_ptr + index, mask=index < num_seqs, other=0), WINDOW, QUERIES)
            parts = tl.maximum(tl.cdiv(keys, size * TILE), 1)
            count += tl.sum(tl.where(index < num_seqs, parts, 0), axis=0)
        fits = count <= most_parts
        high = tl.where(fits, size, high)
        low = tl.where(fits, low, size + 1)
    return low * TILE


@triton.jit
def _full_parts(query_start_ptr, lens_ptr, sequence, num_seqs, share, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
                LEAST: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """As `cut_of`, without parts that would be empty because tiles are whole; 0 parts of what does not exist."""
    length, low, keys, parts = cut_of(
        query_start_ptr, lens_ptr, sequence, num_seqs, share, WINDOW, QUERIES, LEAST, 0, TILE
    )
    parts = tl.maximum(tl.cdiv(length - low, tl.maximum(keys, TILE)), 1)
    return length, low, keys, tl.where(sequence < num_seqs, parts, 0)


@triton.jit
def _no_more(out_ptr, first, last, num_seqs, BLOCK: tl.constexpr):
    """Records [first, last) name no sequence."""
    for start in range(first, last, BLOCK):
        record = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + record * RECORD, record * 0 + num_seqs, mask=record < last)


def attention_cut(
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    tables: torch.Tensor,
    cut: Cut,
    *,
    tile: int,
    page: int,
) -> torch.Tensor:
    """Write down what the programs of attention do, see above.

    Args:
        seq_lens: [S] int32.
        query_start: [S + 1] int32; anything if a sequence has one query.
        tables: [S, ...] int32, the blocks of each sequence.
        cut: how to cut; listed.
        tile: keys of one step, of which parts hold whole ones; a power of two.
        page: tokens of a block; a power of two. Only blocks that hold whole tiles are in the list.

    Returns:
        [cut.parts + cut.merges, 8] int32, the records; of one without a part only the first number is set, to S.
    """
    if not use_kernel(seq_lens):
        return attention_cut_reference(seq_lens, query_start, tables, cut, tile=tile, page=page)
    found = torch.empty((cut.parts + cut.merges, RECORD.value), dtype=torch.int32, device=seq_lens.device)
    sequences = len(seq_lens)
    _attention_cut_kernel[(cdiv(sequences, SOME),)](
        query_start, seq_lens, tables, found, sequences, cut.target,
        tables.stride(0), cut.parts, cut.merges, WINDOW=cut.window, QUERIES=cut.queries, LEAST=cut.least, TILE=tile,
        PAGE=page, SOME=SOME, BLOCK_S=BLOCK_S, num_warps=4,
        **overlap(seq_lens),
    )  # fmt: skip
    return found
