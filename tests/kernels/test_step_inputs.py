"""What a step reads of its rows, against Python loops; padding included."""

import pytest
import torch

from tests.kernels.harness import nan_like
from tinyserve.kernels.step_inputs import RowState, StepBuffers, step_inputs, step_inputs_reference

BLOCK, GROUPS, ROWS, LENGTH, COLUMNS = 16, 2, 7, 600, 10


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def rows(device):
    """Distinct numbers everywhere, so that a wrong row, group or place shows."""
    blocks = -(-LENGTH // BLOCK)
    tables = torch.arange(GROUPS * ROWS * blocks, dtype=torch.int32).view(GROUPS, ROWS, blocks) + 1
    tokens = torch.arange(ROWS * (LENGTH + 1), dtype=torch.int32).view(ROWS, LENGTH + 1)
    params = torch.randint(-(2**31), 2**31, (COLUMNS, ROWS), generator=torch.Generator().manual_seed(0)).int()
    return RowState(tokens.to(device), tables.to(device), params.to(device))


def buffers(state, tokens, seqs):
    """Fronts of larger tensors, full of the largest number."""
    wide = {
        "tokens": (tokens,), "positions": (tokens,), "writes": (GROUPS, tokens + 5),
        "tables": (GROUPS, seqs + 3, state.tables.shape[2]), "params": (COLUMNS - 2, seqs + 3), "seeds": (seqs,),
    }  # fmt: skip
    like = {"writes": state.tokens.long(), "seeds": state.tokens.long()}
    full = {name: nan_like(like.get(name, state.tokens), shape=shape) for name, shape in wide.items()}
    fronts = {
        "writes": full["writes"][:, :tokens],
        "tables": full["tables"][:, :seqs],
        "params": full["params"][:, :seqs],
    }
    return StepBuffers(**full | fronts)


@pytest.mark.parametrize("named", [False, True], ids=["decode", "chunks"])
@pytest.mark.parametrize("op", [step_inputs, step_inputs_reference])
def test_every_number_comes_from_the_right_row(device, op, named):
    """Decode: 5 sequences, one of padding. Chunks: 300 tokens (more than one program's), 9 of padding, 4 sequences."""
    device = torch.device("cpu") if op is step_inputs_reference else device  # it is in numpy
    state = rows(device)
    if named:
        slots, lens = [5, 0, 3, 6], [600, 17, 290, 0]
        owners = [(5, 599), (0, 16), *((3, p) for p in range(1, 290))] + [(6, -1)] * 9
        token_rows, places = (ints(list(part), device) for part in zip(*owners, strict=True))
    else:
        slots, lens = [2, 6, 5, 0, 3], [33, 0, 16, 600, 1]
        owners = [(slot, length - 1) for slot, length in zip(slots, lens, strict=True)]
        token_rows = places = None
    out = buffers(state, len(owners), len(slots))

    op(state, out, ints(slots, device), ints(lens, device), token_rows, places, BLOCK)

    tokens, tables = state.tokens.tolist(), state.tables.tolist()
    assert out.positions.tolist() == [max(place, 0) for _, place in owners]
    assert out.tokens.tolist() == [tokens[row][max(place, 0)] for row, place in owners]
    for group in range(GROUPS):
        writes = [
            -1 if place < 0 else tables[group][row][place // BLOCK] * BLOCK + place % BLOCK for row, place in owners
        ]
        assert out.writes[group].tolist() == writes
        for seq, (slot, length) in enumerate(zip(slots, lens, strict=True)):
            needed = -(-length // BLOCK)
            assert out.tables[group, seq, :needed].tolist() == tables[group][slot][:needed]
    assert torch.equal(out.params, state.params[:-2, slots])
    low, high = state.params[-2:, slots].cpu().long()
    assert out.seeds.tolist() == (high * 2**32 + low % 2**32).tolist()


def test_shapes_are_checked(device):
    state = rows(device)

    with pytest.raises(ValueError, match="2 tokens of 3 sequences"):
        step_inputs(state, buffers(state, 2, 3), ints([0, 1, 2], device), ints([1, 1, 1], device), None, None, BLOCK)


def compile_cases():
    def case(named):
        state = RowState(*(torch.empty(*shape, dtype=torch.int32) for shape in ((9, 4097), (2, 9, 64), (10, 9))))
        vectors = {"tokens": torch.int32, "positions": torch.int32, "seeds": torch.int64}
        out = {name: torch.empty(4, dtype=dtype) for name, dtype in vectors.items()}
        out["writes"] = torch.empty(2, 4, dtype=torch.int64)
        out |= {"tables": torch.empty(2, 4, 64, dtype=torch.int32), "params": torch.empty(8, 4, dtype=torch.int32)}
        four = torch.empty(4, dtype=torch.int32)
        more = four if named else None
        step_inputs(state, StepBuffers(**out), four, four, more, more, 64)

    yield lambda: case(False)
    yield lambda: case(True)
