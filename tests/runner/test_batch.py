"""runner/slots.py and batch.py against a slow recompute, one token at a time."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.device import Device
from tinyserve.runner.batch import BatchBuilder
from tinyserve.runner.slots import Rows
from tinyserve.step import SeqSlice, SlotOpening, StepInput, TableEdit

BLOCK, GROUPS, ROWS, LENGTH = 4, 2, 6, 40
CPU = Device("cpu")


@st.composite
def steps(draw):
    """Rows with random tokens and block tables, and one slice of each."""
    slots = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    opened, edits, slices = [], [], []
    for slot in slots:
        tokens = draw(st.lists(st.integers(0, 999), min_size=1, max_size=LENGTH))
        end = draw(st.integers(1, len(tokens)))
        start = draw(st.integers(0, end - 1))
        opened.append(SlotOpening(slot, len(tokens), tuple(tokens)))
        for group in range(GROUPS):
            blocks = draw(st.lists(st.integers(1, 99), min_size=-(-end // BLOCK), max_size=LENGTH // BLOCK))
            cut = draw(st.integers(1, len(blocks)))
            edits += [TableEdit(slot, group, 0, tuple(blocks[:cut])), TableEdit(slot, group, cut, tuple(blocks[cut:]))]
        slices.append(SeqSlice(slot, start, end - start, (), draw(st.booleans())))
    return StepInput(step_id=1, slices=tuple(slices), opened=tuple(opened), edits=tuple(edits))


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_batch_equals_the_slow_recompute(step):
    rows = Rows(ROWS, LENGTH, GROUPS, BLOCK, torch.device("cpu"))
    rows.apply(step)
    builder = BatchBuilder(rows, max_tokens=ROWS * LENGTH, max_seqs=ROWS, device=CPU)
    order = builder.order(step)

    batch = builder.build([step.slices[i] for i in order])

    tokens = {opening.slot: opening.tokens for opening in step.opened}
    tables = {}
    for edit in step.edits:
        table = tables.setdefault((edit.group, edit.slot), {})
        table.update({edit.start + i: block for i, block in enumerate(edit.blocks)})
    want_tokens, want_positions, want_writes = [], [], [[] for _ in range(GROUPS)]
    for index in order:
        piece = step.slices[index]
        for position in range(piece.start, piece.end):
            want_tokens.append(tokens[piece.slot][position])
            want_positions.append(position)
            for group in range(GROUPS):
                block = tables[group, piece.slot][position // BLOCK]
                want_writes[group].append(block * BLOCK + position % BLOCK)
    counts = [step.slices[i].count for i in order]
    assert batch.tokens.tolist() == want_tokens
    assert batch.positions.tolist() == want_positions
    assert [writes.tolist() for writes in batch.slots_to_write] == want_writes
    assert batch.query_start.tolist() == [0, *np.cumsum(counts).tolist()]
    assert batch.seq_lens.tolist() == [step.slices[i].end for i in order]
    assert batch.slots.tolist() == [step.slices[i].slot for i in order]
    assert batch.num_decodes == counts.count(1)
    assert counts[: batch.num_decodes] == [1] * batch.num_decodes
    ends = np.cumsum(counts) - 1
    assert batch.logit_rows.tolist() == [int(ends[j]) for j, i in enumerate(order) if step.slices[i].samples]
    for group in range(GROUPS):
        for seq, index in enumerate(order):
            piece = step.slices[index]
            want = [tables[group, piece.slot][b] for b in range(-(-piece.end // BLOCK))]
            assert batch.block_tables[group][seq, : len(want)].tolist() == want


def test_a_token_written_on_the_device_is_the_input_of_the_next_step():
    """The host never says which token stands at position 3: the sampler wrote it into the row."""
    rows = Rows(2, LENGTH, 1, BLOCK, torch.device("cpu"))
    rows.apply(StepInput(step_id=0, opened=(SlotOpening(1, 3, (7, 8, 9)),), edits=(TableEdit(1, 0, 0, (5,)),)))
    rows.tokens[1, 3] = 42
    builder = BatchBuilder(rows, max_tokens=8, max_seqs=2, device=CPU)

    batch = builder.build([SeqSlice(1, 3, 1)])

    assert batch.tokens.tolist() == [42]
    assert batch.slots_to_write[0].tolist() == [5 * BLOCK + 3]


def test_buffers_of_steps_in_flight_are_not_reused():
    """With a ring of 2, the host buffer of step k is still whole when step k + 1 has been built."""
    rows = Rows(2, LENGTH, 1, BLOCK, torch.device("cpu"))
    builder = BatchBuilder(rows, max_tokens=8, max_seqs=2, device=CPU, ring=2)
    builder.build([SeqSlice(0, 0, 3)])
    first = builder._host[0].clone()

    builder.build([SeqSlice(1, 5, 1)])

    assert torch.equal(builder._host[0], first)
