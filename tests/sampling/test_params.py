"""The table of numbers on the device: exact values, staged writes, reuse while the batch stays the same."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.sampling.params import FLOATS, ParamTable
from tinyserve.step import RowParams

CPU = torch.device("cpu")
PARAMS = st.builds(
    RowParams,
    **{name: st.floats(0, 1e4, width=32) for name in FLOATS},
    top_k=st.integers(0, 2**40),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@given(PARAMS)
@settings(max_examples=50, deadline=None)
def test_numbers_come_back_exactly(params):
    """Breaks for seed -1 if the low word is not masked, for top_k 2**31 if it wraps."""
    table = ParamTable(3, CPU)
    table.write(2, 17, params)

    values = table.gather((2,))

    assert {name: getattr(values, name).tolist() for name in FLOATS} == {
        name: [getattr(params, name)] for name in FLOATS
    }
    assert (values.seeds.tolist(), values.seeds.dtype) == ([params.seed], torch.int64)
    assert (values.top_k.tolist(), values.prompt_len.tolist()) == ([min(params.top_k, 2**31 - 1)], [17])
    assert values.slots.tolist() == [2]


def test_rows_come_in_the_order_asked_for():
    table = ParamTable(4, CPU)
    for slot in range(4):
        table.write(slot, 1, RowParams(temperature=slot / 2, seed=-slot))

    assert table.gather((3, 0, 2)).temperature.tolist() == [1.5, 0.0, 1.0]
    assert table.gather((3, 0, 2)).seeds.tolist() == [-3, 0, -2]
    assert table.gather(()).temperature.shape == (0,)


def test_the_last_write_before_a_gather_counts_and_an_unchanged_batch_is_reused():
    table = ParamTable(2, CPU)
    table.write(0, 1, RowParams(temperature=0.25))
    table.write(0, 1, RowParams(temperature=0.5))
    first = table.gather((0,))

    assert first.temperature.tolist() == [0.5]
    assert table.gather((0,)) is first
    table.write(0, 1, RowParams(temperature=0.75))
    assert table.gather((0,)).temperature.tolist() == [0.75]
    assert first.temperature.tolist() == [0.5]


def test_alignment_does_not_follow_the_batch():
    """Breaks at 3 rows: the second column would start at byte 12, and every kernel would be compiled once more."""
    table = ParamTable(9, CPU)
    for rows in range(1, 9):
        values = table.gather(tuple(range(rows)))

        assert {getattr(values, name).storage_offset() % 4 for name in (*FLOATS, "top_k", "prompt_len")} == {0}
        assert all(getattr(values, name).is_contiguous() for name in (*FLOATS, "slots", "top_k", "prompt_len", "seeds"))
