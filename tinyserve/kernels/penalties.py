"""Repetition, frequency and presence penalties, computed anew each step from the tokens of the row.

    seen in prompt or output:   logit = logit / repetition   if logit > 0,   else logit * repetition
    seen `count` times in the output:   logit = logit - frequency * count - presence

Nothing is kept between steps. The row of the token table and the length of its prompt say everything, so a preempted
request that comes back with its output as known tokens is penalised exactly as before, and no [rows, V] table of counts
(600 KB a row at V 151936) has to be kept, moved or repaired.

One program does one (row, tile of the vocabulary): it reads the row's tokens in chunks, counts with a histogram those
that lie in its tile, and touches only logits whose token was seen. A row of n tokens costs 4·n bytes a tile, from
cache; a row without penalties costs programs that end at once.

Source: Keskar et al., "CTRL", arXiv:1909.05858, section 4.1 (repetition); the OpenAI API reference (the other two).

Before: `token_mask.py`.  After: `threshold.py`, `sample.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs


def penalties_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    positions: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
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
    logits_ptr,  # [L, V]; changed
    tokens_ptr,  # [slots, max_len] int32
    slots_ptr,  # [L]
    prompt_len_ptr,  # [L] int32
    positions_ptr,  # [L]
    repetition_ptr,  # [L] float32
    frequency_ptr,  # [L] float32
    presence_ptr,  # [L] float32
    V,
    logits_stride,  # elements between rows
    tokens_stride,  # elements between rows
    TILE: tl.constexpr,  # ids of a program; a power of two
    CHUNK: tl.constexpr,  # tokens read at a time
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        row_ptr = tokens_ptr + tl.load(slots_ptr + row).to(tl.int64) * tokens_stride
        length = tl.load(positions_ptr + row).to(tl.int32)
        prompt_len = tl.load(prompt_len_ptr + row)
        in_prompt = tl.zeros((TILE,), tl.int32)
        count = tl.zeros((TILE,), tl.int32)
        for start in range(0, length, CHUNK):
            at = start + tl.arange(0, CHUNK)
            place = tl.load(row_ptr + at, mask=at < length, other=-1) - first
            here = (place >= 0) & (place < TILE) & (at < length)
            place = tl.where(here, place, 0)
            if start < prompt_len:
                in_prompt += tl.histogram(place, TILE, mask=here & (at < prompt_len))
            if start + CHUNK > prompt_len:
                count += tl.histogram(place, TILE, mask=here & (at >= prompt_len))
        ids = first + tl.arange(0, TILE)
        seen = ((in_prompt > 0) | (count > 0)) & (ids < V)
        at_logit = logits_ptr + row * logits_stride + ids
        value = tl.load(at_logit, mask=seen, other=0.0).to(tl.float32)
        value = tl.where(value > 0, value / repetition, value * repetition)
        value = value - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
        tl.store(at_logit, value.to(logits_ptr.dtype.element_ty), mask=seen)


def penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    positions: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Apply the three penalties in place.

    Args:
        logits: [L, V], float32 to keep the precision; rows may lie apart; changed.
        tokens: [slots, max_len] int32: all tokens of each request row, prompt first.
        slots: [L] int, the request row of each logit row.   prompt_len: [L] int32.
        positions: [L] int, where the new token will stand: the number of tokens known before it.
        repetition: [L] float32, 1 is off.   frequency, presence: [L] float32, 0 is off.

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
    if L and V:
        tile = min(max(next_power_of_2(V), 32), 2048)
        options = choose("penalties", logits, {"TILE": tile, "CHUNK": 1024, "num_warps": 4}, rows=L, vocab=V)
        _penalties_kernel[(L, cdiv(V, options["TILE"]))](
            logits, tokens, *rows, V, logits.stride(0), tokens.stride(0), **options, **overlap(logits)
        )
    return None
