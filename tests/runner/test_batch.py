"""runner/slots.py and batch.py against a slow recompute, one token at a time."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.device import Device
from tinyserve.runner.batch import RIDERS, BatchBuilder, Shape
from tinyserve.runner.lengths import AHEAD
from tinyserve.runner.slots import Rows
from tinyserve.sampling.params import COLUMNS
from tinyserve.step import Decodes, SeqSlice, SlotOpening, StepInput, TableEdit

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


def make(rows, **sizes):
    params = torch.zeros(len(COLUMNS), len(rows.tokens), dtype=torch.int32)
    sizes = {"max_tokens": ROWS * LENGTH, "max_seqs": ROWS} | sizes
    return BatchBuilder(rows, params, device=CPU, **sizes)


def build(builder, pieces, shape=None, differences=None):
    counts = [piece.count for piece in pieces]
    views = builder.send(pieces, shape or Shape(sum(counts), len(counts), counts.count(1)), differences)
    builder.turn.fill_(builder.slot)  # nobody ends these steps
    builder.gather(views)
    cached = max((piece.start for piece in pieces if piece.count > 1), default=0)
    return builder.batch(views, max(counts), max(piece.end for piece in pieces), cached)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_batch_equals_the_slow_recompute(step):
    rows = Rows(ROWS, LENGTH, GROUPS, BLOCK, torch.device("cpu"))
    builder = make(rows)
    order = builder.order(step)

    batch = build(builder, [step.slices[i] for i in order], differences=rows.take(step))

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
    assert batch.logit_rows.tolist() == ends.tolist()
    assert batch.views.kept.tolist() == [step.slices[i].samples for i in order]
    for group in range(GROUPS):
        for seq, index in enumerate(order):
            piece = step.slices[index]
            want = [tables[group, piece.slot][b] for b in range(-(-piece.end // BLOCK))]
            assert batch.block_tables[group][seq, : len(want)].tolist() == want


def test_a_token_written_on_the_device_is_the_input_of_the_next_step():
    """The host never says which token stands at position 3: the sampler wrote it into the row."""
    rows = Rows(2, LENGTH, 1, BLOCK, torch.device("cpu"))
    opened = SlotOpening(1, 3, (7, 8, 9))
    rows.write(rows.take(StepInput(step_id=0, opened=(opened,), edits=(TableEdit(1, 0, 0, (5,)),))))
    rows.tokens[1, 3] = 42
    batch = build(make(rows), [SeqSlice(1, 3, 1)])

    assert batch.tokens.tolist() == [42]
    assert batch.slots_to_write[0].tolist() == [5 * BLOCK + 3]


def test_buffers_of_steps_in_flight_are_not_reused():
    """With a ring of 2, the host buffer of step k is still whole when step k + 1 has been built."""
    rows = Rows(2, LENGTH, 1, BLOCK, torch.device("cpu"))
    builder = make(rows, ring=2)
    build(builder, [SeqSlice(0, 0, 3)])
    first = builder._mail[builder.slot].clone()

    build(builder, [SeqSlice(1, 5, 1)])

    assert torch.equal(builder._mail[builder.slot - 1], first)


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))
def test_padding_reads_the_spare_row_and_writes_nowhere(step, more_decodes, more_prompts, more_tokens):
    """In a larger shape the real sequences keep their numbers, and every other token has write slot -1."""
    rows = Rows(ROWS, LENGTH, GROUPS, BLOCK, torch.device("cpu"))
    rows.write(rows.take(step))
    builder = make(rows, max_seqs=2 * ROWS)
    pieces = [step.slices[i] for i in builder.order(step)]
    counts = [piece.count for piece in pieces]
    exact = build(builder, pieces)
    wanted = {name: getattr(exact, name).tolist() for name in ("tokens", "positions", "seq_lens", "slots")}
    wanted_writes = exact.slots_to_write[1].tolist()
    decodes = counts.count(1)
    wide = Shape(
        sum(counts) + more_decodes + more_tokens, len(counts) + more_decodes + more_prompts, decodes + more_decodes
    )

    batch = build(builder, pieces, wide)

    seqs = [wide.place(i, decodes) for i in range(len(pieces))]
    starts = batch.query_start.tolist()
    tokens = [t for i in seqs for t in range(starts[i], starts[i + 1])]
    assert len(tokens) == sum(counts)
    for name, places in (("tokens", tokens), ("positions", tokens), ("seq_lens", seqs), ("slots", seqs)):
        assert getattr(batch, name)[places].tolist() == wanted[name]
    assert batch.slots_to_write[1][tokens].tolist() == wanted_writes
    for others, values, padding in (
        (set(range(wide.tokens)) - set(tokens), batch.slots_to_write[0], -1),
        (set(range(wide.seqs)) - set(seqs), batch.seq_lens, 0),
        (set(range(wide.seqs)) - set(seqs), batch.views.kept, 0),
        (set(range(wide.seqs)) - set(seqs), batch.slots, rows.spare),
    ):
        assert values[sorted(others)].tolist() == [padding] * len(others)
    assert [batch.logit_rows[i] for i in seqs] == [starts[i + 1] - 1 for i in seqs]


def test_many_differences_travel_by_themselves():
    """One more than ride along with a step's integers: RIDERS + 1 tokens of a new row."""
    rows = Rows(2, RIDERS + 8, 1, BLOCK, torch.device("cpu"))
    step = StepInput(step_id=0, opened=(SlotOpening(1, RIDERS + 1, tuple(range(RIDERS + 1))),))

    batch = build(make(rows, max_tokens=16), [SeqSlice(1, RIDERS - 3, 4)], differences=rows.take(step))

    assert batch.tokens.tolist() == list(range(RIDERS - 3, RIDERS + 1))


def test_lengths_follow_positions_through_any_number_of_steps():
    """Two convoys of 150 and 5 steps, and back: each of the 160 steps sends its rows' positions + 1, and no others."""
    builder = make(Rows(ROWS, 999, GROUPS, BLOCK, torch.device("cpu")))
    one, two = np.array([3, 40, 7], dtype=np.int32), np.array([500, 1, 2], dtype=np.int32)
    flights = [((4, 0, 2), one, step) for step in range(2 * AHEAD + 22)]
    flights += [((4, 0, 2), two, step) for step in range(5)] + [((4, 0, 2), one, step) for step in (9, 8, 150, 4, 5)]
    shape = Shape(4, 4, 4)
    for count, (slots, first, further) in enumerate(flights):
        pieces = Decodes(slots, first, further)
        if count % 7:
            builder.resend(pieces, shape)
            views = builder.views(shape)
        else:
            views = builder.send(pieces, shape, None, slots)
        builder.turn.fill_(builder.slot)
        builder.gather(views)
        assert views.seq_lens.tolist() == [*(first + further + 1).tolist(), 0]
        assert views.slots.tolist() == [*slots, ROWS] and views.kept.tolist() == [1, 1, 1, 0]
