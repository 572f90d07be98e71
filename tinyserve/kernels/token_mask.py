"""Forbid or favour tokens in place: bit masks over the whole vocabulary, and edits of single tokens.

`token_mask` reads one bit a token (set = may be chosen) and writes -inf where it is not set; grammars and lists of
allowed ids use it. A mask row is V/8 bytes: 19 KB at V 151936, against 300 KB of logits.

`edit_tokens` adds a value to single logits; adding -inf forbids a token. An edit may depend on the row's own history,
which the device knows before the host does: it can end after so many output tokens (min_tokens), and it can ask that
the output so far ends with given tokens (a bad word of several tokens forbids its last one only then). Adding, not
storing, keeps NaN visible to the sampler and lets edits of one token meet in any order: x + bias - inf = -inf.

Before: `launch.py`.  After: `penalties.py`, `sample.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, check_rows, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs

INF = float("inf")
ANY = -1  # in a suffix: nothing is asked of this place


def token_mask_reference(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """The specification of `token_mask`, with its arguments."""
    V = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    for mask, row in zip(masks, rows.tolist(), strict=True):
        banned = ((mask[:, None] >> shifts) & 1 == 0).flatten()[:V]
        logits[row, : len(banned)].masked_fill_(banned, -INF)
        logits[row, len(banned) :] = -INF


def edit_tokens_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    until: torch.Tensor,
    suffix: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """The specification of `edit_tokens`, with its arguments."""
    rows, ids, P = rows.long(), ids.long(), suffix.shape[1]
    end, start = positions[rows].long(), prompt_len[rows].long()
    at = end[:, None] - P + torch.arange(P, device=logits.device)  # [E, P]
    before = tokens[slots[rows].long()[:, None], at.clamp(0, tokens.shape[1] - 1)]
    fits = (suffix == ANY) | ((at >= start[:, None]) & (before == suffix))
    applies = fits.all(dim=-1) & (end - start < until) & (ids >= 0) & (ids < logits.shape[1])
    logits.index_put_((rows[applies], ids[applies]), values[applies], accumulate=True)


@triton.jit(do_not_specialize=["W", "masks_stride"])  # they follow the tokenizer
def _token_mask_kernel(
    logits_ptr,  # [L, V]; changed
    masks_ptr,  # [R, W] int32
    rows_ptr,  # [R]
    V,
    W,
    logits_stride,  # elements between rows
    masks_stride,  # elements between rows
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(masks_ptr + mask_row * masks_stride + ids // 32, mask=ids // 32 < W, other=0)
    banned = ((word >> (ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + ids, float("-inf"), mask=banned & (ids < V))


@triton.jit(do_not_specialize=["E", "P"])  # both differ from batch to batch
def _edit_tokens_kernel(
    logits_ptr,  # [L, V] float32; changed
    rows_ptr,  # [E]
    ids_ptr,  # [E]
    values_ptr,  # [E] float32
    until_ptr,  # [E]
    suffix_ptr,  # [E, P] contiguous
    tokens_ptr,  # [slots, max_len] int32
    slots_ptr,  # [L]
    prompt_len_ptr,  # [L]
    positions_ptr,  # [L]
    E,
    V,
    P,
    logits_stride,  # elements between rows
    tokens_stride,  # elements between rows
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = edit < E
    row = tl.load(rows_ptr + edit, mask=real, other=0).to(tl.int64)
    token = tl.load(ids_ptr + edit, mask=real, other=-1)
    end = tl.load(positions_ptr + row, mask=real, other=0).to(tl.int32)
    start = tl.load(prompt_len_ptr + row, mask=real, other=0).to(tl.int32)
    applies = real & (end - start < tl.load(until_ptr + edit, mask=real, other=0)) & (token >= 0) & (token < V)
    history = tokens_ptr + tl.load(slots_ptr + row, mask=real, other=0).to(tl.int64) * tokens_stride
    for place in range(0, P):
        wanted = tl.load(suffix_ptr + edit.to(tl.int64) * P + place, mask=real, other=-1)
        at = end - P + place
        asked = applies & (wanted != -1)
        before = tl.load(history + at, mask=asked & (at >= start), other=-2)
        applies &= (wanted == -1) | (before == wanted)
    value = tl.load(values_ptr + edit, mask=real, other=0.0)
    tl.atomic_add(logits_ptr + row * logits_stride + token, value, mask=applies, sem="relaxed")


def token_mask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits to -inf in place where the bit of the token is not set.

    Args:
        logits: [L, V] fp32, fp16 or bf16; rows may lie apart; changed.
        masks: [R, W] int32, W words of 32 bits, bit i % 32 of word i // 32 for token i; tokens after the last word are
            forbidden.
        rows: [R] int, the logit row of each mask; different from one another.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_rows("token_mask", logits)
    check_rows("token_mask: masks", masks)
    if masks.dtype != torch.int32 or rows.shape != masks.shape[:1]:
        raise ValueError(f"token_mask: masks are {list(masks.shape)} {masks.dtype}, rows {list(rows.shape)}")
    if not use_kernel(logits):
        return token_mask_reference(logits, masks, rows)
    R, W = masks.shape
    V = logits.shape[1]
    if R and V:
        tile = min(max(next_power_of_2(V), 32), 4096)
        options = choose("token_mask", logits, {"TILE": tile, "num_warps": 4}, rows=R, vocab=V)
        _token_mask_kernel[(R, cdiv(V, options["TILE"]))](
            logits, masks, rows, V, W, logits.stride(0), masks.stride(0), **options, **overlap(logits)
        )
    return None


def edit_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    until: torch.Tensor,
    suffix: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Add values to single logits in place, each where its row's history asks for it.

    Args:
        logits: [L, V] float32; rows may lie apart; changed.
        rows, ids: [E] int32, the logit row and the token of each edit; an id outside the vocabulary does nothing.
        values: [E] float32, what is added; -inf forbids. At most one finite value per (row, id), any number of -inf.
        until: [E] int32, applies while the row has fewer output tokens than this.
        suffix: [E, P] int32, applies if the row's output ends with these P tokens, of which ANY (-1) asks nothing.
        tokens: [slots, max_len] int32: all tokens of each request row, prompt first.
        slots: [L] int, the request row of each logit row.   prompt_len: [L] int32.
        positions: [L] int, where the new token will stand.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    check_rows("edit_tokens", logits)
    E = len(rows)
    if any(len(part) != E for part in (ids, values, until, suffix)) or suffix.dim() != 2:
        raise ValueError(f"edit_tokens: {E} rows, {len(ids)} ids, {len(values)} values, suffix {list(suffix.shape)}")
    if logits.dtype != torch.float32:
        raise ValueError(f"edit_tokens: logits must be float32, are {logits.dtype}")
    history = (tokens, slots, prompt_len, positions)
    if not use_kernel(logits):
        return edit_tokens_reference(logits, rows, ids, values, until, suffix, *history)
    if E:
        options = choose("edit_tokens", logits, {"BLOCK": 128, "num_warps": 4}, edits=E)
        _edit_tokens_kernel[(cdiv(E, options["BLOCK"]),)](
            logits, rows, ids, values, until, suffix.contiguous(), *history,
            E, logits.shape[1], suffix.shape[1], logits.stride(0), tokens.stride(0), **options, **overlap(logits),
        )  # fmt: skip
    return None
