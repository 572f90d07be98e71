"""Between the products of latent attention (MLA) and the attention: norm of the latent, rotation, write to the cache.

    c       <- rms_norm(kv[:C]) * weight            the latent, from which every head's key and value can be made
    k_pe    <- rotate(kv[C:])                       the part of the key that carries the position, one for all heads
    q_pe    <- rotate(q[:, N:])                     of each head
    cache[slot] <- c, k_pe                          C + P numbers a token, instead of 2·Hkv·D

Pairs are (2i, 2i + 1) if `interleaved`, else (i, i + P/2). One program is the key row of a token, or a few of its query
heads. Numbers are float32 between load and store.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.

Before: the down and up products.  After: `attention_latent.py`, `attention_ragged.py`.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, choose, next_power_of_2, overlap, start_next, use_kernel, wait_inputs


def latent_write_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    slots_to_write: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `latent_write`, with its arguments."""
    rotary, width, page = cos_sin.shape[1], weight.shape[0], cache.shape[2]
    angles = cos_sin.index_select(0, positions)
    c = torch.nn.functional.rms_norm(kv[:, :width].float(), weight.shape, weight.float(), eps)
    latent = torch.cat((c, _rotate(kv[:, None, width:], angles, interleaved)[:, 0]), dim=1).to(kv.dtype)
    kept = slots_to_write >= 0
    slots = slots_to_write[kept]
    cache[slots // page, 0, slots % page] = latent[kept].to(cache.dtype)
    return _rotate(q[..., q.shape[2] - rotary :], angles, interleaved).to(q.dtype), latent


def _rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, P] turned by angles [T, P], in float32."""
    cos, sin = angles[:, None].chunk(2, dim=-1)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.float().chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


@triton.jit
def _turned(row_ptr, inside, angle_ptr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """[rows, BLOCK_P] float32: the P numbers at each row pointer [rows, 1], rotated by the angles at angle_ptr."""
    column = tl.arange(0, BLOCK_P)[None, :]
    mask = inside & (column < P)
    if INTERLEAVED:
        partner, angle, low = column ^ 1, column // 2, column % 2 == 0
    else:
        partner = tl.where(column < P // 2, column + P // 2, column - P // 2)
        angle, low = column % (P // 2), column < P // 2
    value = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(row_ptr + partner, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angle_ptr + angle, mask=column < P, other=1.0)
    sin = tl.load(angle_ptr + P // 2 + angle, mask=column < P, other=0.0)
    return value * cos + tl.where(low, -other, other) * sin


@triton.jit
def _latent_write_kernel(
    q_ptr,  # [T, HQ, N + P]
    kv_ptr,  # [T, C + P]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [positions, P] float32: P/2 cosines, then P/2 sines
    weight_ptr,  # [C]
    slots_ptr,  # [T]
    q_out_ptr,  # [T, HQ, P] contiguous
    latent_ptr,  # [T, C + P] contiguous
    cache_ptr,  # [B, 1, PAGE, C + P]
    q_stride,  # elements between tokens
    q_head_stride,  # elements between heads
    kv_stride,  # elements between tokens
    block_stride,  # elements between blocks
    eps,
    HQ: tl.constexpr,
    NOPE: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,  # query heads a program, a power of two
    BLOCK_C: tl.constexpr,  # a power of two, at least C
    BLOCK_P: tl.constexpr,  # a power of two, at least P
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * P
    turning = tl.arange(0, BLOCK_P)[None, :]
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        row = q_ptr + token * q_stride + head * q_head_stride + NOPE
        turned = _turned(row, head < HQ, angle_ptr, P, INTERLEAVED, BLOCK_P)
        place = q_out_ptr + (token * HQ + head) * P + turning
        tl.store(place, turned.to(q_out_ptr.dtype.element_ty), mask=(head < HQ) & (turning < P))
        return
    column = tl.arange(0, BLOCK_C)[None, :]
    row = kv_ptr + token * kv_stride + tl.zeros([1, 1], tl.int32)
    value = tl.load(row + column, mask=column < C, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / C + eps)
    c = value * scale * tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    c = c.to(latent_ptr.dtype.element_ty)
    k_pe = _turned(row + C, turning < P, angle_ptr, P, INTERLEAVED, BLOCK_P).to(latent_ptr.dtype.element_ty)
    tl.store(latent_ptr + token * (C + P) + column, c, mask=column < C)
    tl.store(latent_ptr + token * (C + P) + C + turning, k_pe, mask=turning < P)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    place = cache_ptr + slot // PAGE * block_stride + slot % PAGE * (C + P)
    kind = cache_ptr.dtype.element_ty
    tl.store(place + column, c.to(kind), mask=(column < C) & (slot >= 0))
    tl.store(place + C + turning, k_pe.to(kind), mask=(turning < P) & (slot >= 0))


def latent_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    slots_to_write: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and rotate the latents, store them, rotate the queries.

    Args:
        q: [T, Hq, N + P]; the last P numbers of a head are rotated. Tokens and heads may lie apart; not changed.
        kv: [T, C + P]: latent and shared key part; rows may lie apart; not changed.
        positions: [T] integers.   cos_sin: [positions, P] float32, cosines then sines.
        weight: [C], of the norm.   eps: of the norm.
        cache: [B, 1, block size, C + P], contiguous; changed at the slots named.
        slots_to_write: [T] integers, block * block size + place; -1 = this token is not stored.
        interleaved: pairs are neighbours.

    Returns:
        q's rotated parts [T, Hq, P], and what was (or would have been) stored, [T, C + P]; both contiguous.

    Raises:
        ValueError: shapes that do not fit.
    """
    options = {"eps": eps, "interleaved": interleaved}
    if not use_kernel(q):
        return latent_write_reference(q, kv, positions, cos_sin, weight, cache, slots_to_write, **options)
    _check(q, kv, positions, cos_sin, weight, cache, slots_to_write)
    q_pe = torch.empty((*q.shape[:2], cos_sin.shape[1]), dtype=q.dtype, device=q.device)
    latent = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    if q.shape[0]:
        _launch((q, kv, positions, cos_sin, weight, slots_to_write), (q_pe, latent, cache), **options)
    return q_pe, latent


def _launch(inputs, outputs, *, eps: float, interleaved: bool) -> None:
    """One program for each token's key row, and one for each few of its query heads."""
    q, kv, _, cos_sin, weight, _ = inputs
    cache = outputs[2]
    tokens, heads, size = q.shape
    width, rotary = weight.shape[0], cos_sin.shape[1]
    default = {"HEADS": min(next_power_of_2(heads), 16), "num_warps": 4}
    options = choose("latent_write", q, default, tokens=tokens, heads=heads)
    _latent_write_kernel[(tokens, 1 + cdiv(heads, options["HEADS"]))](
        *inputs,
        *outputs,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        cache.stride(0),
        eps,
        HQ=heads,
        NOPE=size - rotary,
        C=width,
        P=rotary,
        PAGE=cache.shape[2],
        INTERLEAVED=interleaved,
        BLOCK_C=next_power_of_2(width),
        BLOCK_P=next_power_of_2(rotary),
        **options,
        **overlap(q),
    )


def _check(q, kv, positions, cos_sin, weight, cache, slots_to_write) -> None:
    tokens, rotary = q.shape[0], cos_sin.shape[1]
    total = weight.shape[0] + rotary
    fits = kv.shape == (tokens, total) and cache.shape[1::2] == (1, total) and rotary <= q.shape[2]
    if not fits or not cache.is_contiguous():
        raise ValueError(
            f"latent_write: q {list(q.shape)}, kv {list(kv.shape)}, a weight of {weight.shape[0]}, a rotation of "
            f"{rotary} and a contiguous cache of {list(cache.shape)} do not fit each other"
        )
    if q.stride(2) != 1 or kv.stride(1) != 1 or positions.shape != (tokens,) or slots_to_write.shape != (tokens,):
        raise ValueError("latent_write: q and kv have contiguous rows, and a position and a slot for each token")
