"""Sequences cut at the borders of chunks, against cutting them token by token."""

from itertools import pairwise

import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.layers.chunk import chunked

BLOCK = 4


@frozen
class Step:
    """The fields of a batch that chunk.py reads."""

    positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor]
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int


def step_of(decodes, prefills, padding):
    """A step of sequences with (cached, new) positions; block b of sequence s is called 100 s + b."""
    spans = [(length - 1, 1) for length in decodes] + prefills
    positions = [cached + i for cached, new in spans for i in range(new)] + [0] * padding
    starts = torch.tensor([0] + [new for _, new in spans]).cumsum(0)
    lengths = [cached + new for cached, new in spans]
    width = -(-max(lengths) // BLOCK)
    table = 100 * torch.arange(len(spans))[:, None] + torch.arange(width)
    ints = (torch.tensor(values, dtype=torch.int32) for values in (positions, starts.tolist(), lengths))
    most = max(new for _, new in spans)
    return Step(*ints, (table.int(),), len(spans), len(decodes), most, max(lengths))


@settings(max_examples=80, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 30), max_size=3),
    prefills=st.lists(st.tuples(st.integers(0, 20), st.integers(2, 30)), max_size=3),
    chunk=st.sampled_from([4, 8, 12]),
    padding=st.integers(0, 3),
)
def test_every_token_sees_its_own_chunk(decodes, prefills, chunk, padding):
    """Breaks with the lengths for which a token's piece, its place in it, or its blocks are not those of its chunk."""
    if not decodes + prefills:
        return
    step = step_of(decodes, prefills, padding if prefills else 0)
    pieces = chunked(step, 0, chunk, BLOCK)

    starts = pieces.query_start.tolist()
    spans = [(row, row + 1) for row in range(len(decodes))]
    spans += list(pairwise(starts)) if prefills else []
    owners = [(s, i) for s, (cached, new) in enumerate([(n - 1, 1) for n in decodes] + prefills) for i in range(new)]
    seen = []
    for (begin, end), length, table in zip(spans, pieces.lengths.tolist(), pieces.tables.tolist(), strict=True):
        for token in range(begin, end):
            sequence, position = owners[token][0], step.positions[token].item()
            inside = length - (end - token)  # place of the token in its piece
            first = position // chunk * chunk
            blocks = [100 * sequence + block for block in range(first // BLOCK, position // BLOCK + 1)]
            seen.append(token)

            assert inside == position - first
            assert table[: len(blocks)] == blocks
        assert 0 <= length <= pieces.max_seq_len and end - begin <= pieces.max_query_len
    assert seen == list(range(len(owners)))
    assert len(pieces.lengths) == pieces.num_seqs
