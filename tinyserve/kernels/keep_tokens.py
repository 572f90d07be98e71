"""What a step leaves behind: its tokens in the rows, for the next step, and beside the bad flags, for the host.

    token table[slots[s], places[s]] = tokens[s]  where kept[s]          result = [ tokens 0 .. S-1 | bad 0 .. S-1 ]

The next step, which may be queued already, reads its input from the token table, so no token goes through the host
before it is used. The result is one piece of memory so that it goes home in one copy. One program for 1024 sequences.

Before: `sample.py`.  After: `step_inputs.py` of the next step; runner/runner.py copies the result.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, use_kernel

BLOCK = 1024


def keep_tokens_reference(
    tokens: torch.Tensor,
    bad: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    kept: torch.Tensor,
    table: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """The specification of `keep_tokens`, with its arguments."""
    S = len(tokens)
    some = kept > 0
    table[slots[some], places[some]] = tokens[some]
    result[:S] = tokens
    result[S:] = bad


@triton.jit(do_not_specialize=["S"])
def _keep_tokens_kernel(
    tokens_ptr,  # [S] int32
    bad_ptr,  # [S] int8
    slots_ptr,  # [S]
    places_ptr,  # [S]
    kept_ptr,  # [S]
    table_ptr,  # [N, W] int32
    result_ptr,  # [2 * S] int32
    S,
    W,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < S
    token = tl.load(tokens_ptr + sequence, mask=inside, other=0)
    slot = tl.load(slots_ptr + sequence, mask=inside, other=0).to(tl.int64)
    place = tl.load(places_ptr + sequence, mask=inside, other=0)
    kept = tl.load(kept_ptr + sequence, mask=inside, other=0)
    tl.store(table_ptr + slot * W + place, token, mask=inside & (kept > 0))
    tl.store(result_ptr + sequence, token, mask=inside)
    tl.store(result_ptr + S + sequence, tl.load(bad_ptr + sequence, mask=inside, other=0).to(tl.int32), mask=inside)


def keep_tokens(
    tokens: torch.Tensor,
    bad: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    kept: torch.Tensor,
    table: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """Write the chosen tokens where they are needed.

    Args:
        tokens: [S] int32.   bad: [S] bool.
        slots, places: [S] int32: row and position of each token.   kept: [S] int32, 0: not written to the table.
        table: [N, W] int32, changed.   result: [2 S] int32, contiguous, written.

    Raises:
        ValueError: shapes that do not fit.
    """
    S = len(tokens)
    if any(len(part) != S for part in (bad, slots, places, kept)) or result.shape != (2 * S,):
        raise ValueError(f"keep_tokens: {S} tokens, {len(slots)} slots, result {list(result.shape)}")
    if not use_kernel(tokens):
        return keep_tokens_reference(tokens, bad, slots, places, kept, table, result)
    if S:
        _keep_tokens_kernel[(cdiv(S, BLOCK),)](
            tokens, bad.view(torch.int8), slots, places, kept, table, result, S, table.stride(0),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return None
