"""What a step leaves behind: its tokens in the rows, for the next step, and beside the bad flags, for the host.

    token table[slots[s], places[s]] = tokens[s]  where kept[s]         home[turn] = [ tokens 0 .. S-1 | bad 0 .. S-1 ]
    turn = (turn + 1) mod R

The next step, which may be queued already, reads its input from the token table, so no token goes through the host
before it is used. What the host gets is written straight into its memory, into the slot of this step: see `fetch.py`.
One program does it all, 1024 sequences at a time.

Before: `sample.py`.  After: `fetch.py` and `step_inputs.py` of the next step; runner/runner.py reads `home`.
"""

import torch
import triton
import triton.language as tl

from .launch import overlap, use_kernel, wait_inputs

BLOCK = 1024


def keep_tokens_reference(
    tokens: torch.Tensor,
    bad: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    kept: torch.Tensor,
    table: torch.Tensor,
    home: torch.Tensor,
    turn: torch.Tensor,
    *,
    late: bool = False,
) -> None:
    """The specification of `keep_tokens`, with its arguments, on the CPU: numbers one by one, because they are few."""
    S, turn, rows = len(tokens), turn.numpy(), table.numpy()
    chosen, slot = tokens.numpy(), home.numpy()[(turn[0] - late) % len(home)]
    for row, place, keep, token in zip(slots.tolist(), places.tolist(), kept.tolist(), chosen.tolist(), strict=True):
        if keep:
            rows[row, place] = token
    slot[:S], slot[S : 2 * S] = chosen, bad.numpy()
    if not late:
        turn[0] = (turn[0] + 1) % len(home)


@triton.jit(do_not_specialize=["S", "ring", "late"])
def _keep_tokens_kernel(
    tokens_ptr,  # [S] int32
    bad_ptr,  # [S] int8
    slots_ptr,  # [S]
    places_ptr,  # [S]
    kept_ptr,  # [S]
    table_ptr,  # [N, W] int32
    home_ptr,  # [R, width] int32; memory of the host
    turn_ptr,  # [1]
    S,
    W,
    ring,
    width,
    late,  # 0 or 1
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_inputs(PDL)
    turn = tl.load(turn_ptr)
    next_turn = (turn + 1 - late) % ring
    turn = (turn + ring - late) % ring
    home = home_ptr + turn.to(tl.int64) * width
    for start in range(0, S, BLOCK):
        sequence = start + tl.arange(0, BLOCK)
        inside = sequence < S
        token = tl.load(tokens_ptr + sequence, mask=inside, other=0)
        slot = tl.load(slots_ptr + sequence, mask=inside, other=0).to(tl.int64)
        place = tl.load(places_ptr + sequence, mask=inside, other=0)
        kept = tl.load(kept_ptr + sequence, mask=inside, other=0)
        tl.store(table_ptr + slot * W + place, token, mask=inside & (kept > 0))
        tl.store(home + sequence, token, mask=inside)
        tl.store(home + S + sequence, tl.load(bad_ptr + sequence, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn_ptr, next_turn)


def keep_tokens(
    tokens: torch.Tensor,
    bad: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    kept: torch.Tensor,
    table: torch.Tensor,
    home: torch.Tensor,
    turn: torch.Tensor,
    *,
    late: bool = False,
) -> None:
    """Write the chosen tokens where they are needed, and end the step.

    Args:
        tokens: [S] int32; S may be 0.   bad: [S] bool.
        slots, places: [S] int32: row and position of each token.   kept: [S] int32, 0: not written to the table.
        table: [N, W] int32, changed.
        home: [R, at least 2 S] int32, contiguous; on the CPU, or pinned memory of the host; written.
        turn: [1] int32, which slot of `home`; moved on.
        late: the step has been ended already: its slot is written once more, and `turn` stays.

    Raises:
        ValueError: shapes that do not fit.
    """
    S = len(tokens)
    fits = home.dim() == 2 and home.shape[1] >= 2 * S and turn.shape == (1,)
    if not fits or any(len(part) != S for part in (bad, slots, places, kept)):
        raise ValueError(f"keep_tokens: {S} tokens, {len(slots)} slots, home {list(home.shape)}")
    if not use_kernel(table):
        return keep_tokens_reference(tokens, bad, slots, places, kept, table, home, turn, late=late)
    _keep_tokens_kernel[(1,)](
        tokens, bad.view(torch.int8), slots, places, kept, table, home, turn, S, table.stride(0), len(home),
        home.stride(0), int(late), BLOCK=BLOCK, num_warps=8, **overlap(table),
    )  # fmt: skip
    return None
