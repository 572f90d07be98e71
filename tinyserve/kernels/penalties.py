"""Repetition, frequency and presence penalties, computed anew each step from the tokens of the row.

    seen in prompt or output:   logit = logit / repetition   if logit > 0,   else logit * repetition
    seen `count` times in the output:   logit = logit - frequency * count - presence

Nothing of a request is kept between steps. The row of the token table and the length of its prompt say everything, so a
preempted request that comes back with its output as known tokens is penalised exactly as before, and nothing has to be
moved or repaired.

Stage 1 counts: each token of the row adds one to its place in `counts`, or sets a bit there if it stands in the prompt.
Stage 2 goes over the tokens again, and whoever takes a count away (and leaves zero) penalises that token, so each does
once, and `counts` is clean for the next step. A row of n tokens costs 2·n atomic operations, whatever the vocabulary; a
row without penalties costs a few programs that end at once.

Source: Keskar et al., "CTRL", arXiv:1909.05858, section 4.1 (repetition); the OpenAI API reference (the other two).

Before: `token_mask.py`.  After: `threshold.py`, `sample.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import check_rows, choose, overlap, start_next, use_kernel, wait_inputs

PROGRAMS = 8  # for a row


def penalties_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    positions: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """The specification of `penalties`, with its arguments."""
    asks = (repetition != 1) | (frequency != 0) | (presence != 0)
    for row in asks.nonzero()[:, 0].tolist():
        known = tokens[slots[row], : int(positions[row])]
        ids, which = known.unique(return_inverse=True)
        count = which[int(prompt_len[row]) :].bincount(minlength=len(ids))
        real = (ids >= 0) & (ids < logits.shape[1])  # a placeholder of an image is no token of the vocabulary
        ids, count = ids[real].long(), count[real]
        value = logits[row, ids].float()
        value = torch.where(value > 0, value / repetition[row], value * repetition[row])
        value = value - frequency[row] * count - presence[row] * (count > 0)
        logits[row, ids] = value.to(logits.dtype)


@triton.jit
def _penalties_kernel(
    logits_ptr,  # [L, V]; changed if APPLY
    tokens_ptr,  # [slots, max_len] int32
    slots_ptr,  # [L]
    prompt_len_ptr,  # [L] int32
    positions_ptr,  # [L]
    repetition_ptr,  # [L] float32
    frequency_ptr,  # [L] float32
    presence_ptr,  # [L] float32
    counts_ptr,  # [L, V] int32: how often in the output, and bit 30 for the prompt; zeros before and after both stages
    V,
    logits_stride,  # elements between rows
    tokens_stride,  # elements between rows
    counts_stride,  # elements between rows
    APPLY: tl.constexpr,  # stage 2
    CHUNK: tl.constexpr,  # tokens read at a time
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        row_ptr = tokens_ptr + tl.load(slots_ptr + row).to(tl.int64) * tokens_stride
        length = tl.load(positions_ptr + row).to(tl.int32)
        prompt_len = tl.load(prompt_len_ptr + row)
        for start in range(tl.program_id(1) * CHUNK, length, tl.num_programs(1) * CHUNK):
            at = start + tl.arange(0, CHUNK)
            token = tl.load(row_ptr + at, mask=at < length, other=-1)
            real = (token >= 0) & (token < V)
            count_ptr = counts_ptr + row * counts_stride + token
            if APPLY:
                # As an exchange by 0, which the AMD compiler cannot translate for gfx942.
                taken = tl.atomic_and(count_ptr, tl.zeros_like(token), mask=real, sem="relaxed")
                mine = real & (taken != 0)
                count = taken & 0x3FFFFFFF
                logit_ptr = logits_ptr + row * logits_stride + token
                value = tl.load(logit_ptr, mask=mine, other=0.0).to(tl.float32)
                value = tl.where(value > 0, value / repetition, value * repetition)
                value = value - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
                tl.store(logit_ptr, value.to(logits_ptr.dtype.element_ty), mask=mine)
            else:
                tl.atomic_add(count_ptr, 1 + tl.zeros_like(token), mask=real & (at >= prompt_len), sem="relaxed")
                bit = 0x40000000 + tl.zeros_like(token)
                tl.atomic_or(count_ptr, bit, mask=real & (at < prompt_len), sem="relaxed")


def penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    positions: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Apply the three penalties in place.

    Args:
        logits: [L, V], float32 to keep the precision; rows may lie apart; changed.
        tokens: [slots, max_len] int32: all tokens of each request row, prompt first.
        slots: [L] int, the request row of each logit row.   prompt_len: [L] int32.
        positions: [L] int, where the new token will stand: the number of tokens known before it.
        repetition: [L] float32, 1 is off.   frequency, presence: [L] float32, 0 is off.
        counts: [at least L, V] int32, zeros, which it holds again afterwards; None: made for this call.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_rows("penalties", logits)
    check_rows("penalties: tokens", tokens)
    L, V = logits.shape
    rows = (slots, prompt_len, positions, repetition, frequency, presence)
    if any(part.shape != (L,) for part in rows):
        raise ValueError(f"penalties: logits are {[L, V]}, rows {[list(part.shape) for part in rows]}")
    if not use_kernel(logits):
        return penalties_reference(logits, tokens, *rows)
    if counts is None:
        counts = torch.zeros(L, V, dtype=torch.int32, device=logits.device)
    if counts.dtype != torch.int32 or counts.shape[0] < L or counts.shape[1] != V or counts.stride(1) != 1:
        raise ValueError(f"penalties: counts must be [at least {L}, {V}] int32, are {list(counts.shape)}")
    if L and V:
        options = choose("penalties", logits, {"CHUNK": 512, "num_warps": 4}, vocab=V)
        for apply in (False, True):
            _penalties_kernel[(L, PROGRAMS)](
                logits, tokens, *rows, counts, V, logits.stride(0), tokens.stride(0), counts.stride(0),
                APPLY=apply, **options, **overlap(logits),
            )  # fmt: skip
    return None
