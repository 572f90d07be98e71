"""Between the QKV product and attention: norm of the q and k heads, rotation, and the write of K and V into the cache.

    head(q | k) <- rms_norm(head) * (weight + offset)          if the model has QK-norm
    (a, b)      <- (a cos - b sin,  b cos + a sin)             for each pair of the first R numbers; the rest stays
    cache[slot] <- k, v                                        slot = block * block_size + place in the block

Pairs are (i, i + R/2), or (2i, 2i + 1) if `interleaved`. One kernel does it all, because each step alone costs a launch
and moves the same T·(Hq + 2·Hkv)·D numbers again: here they are read once and written once (each number's partner comes
from the cache line just read). One program takes a few heads of one token. Numbers are float32 between load and store,
also between norm and rotation.

Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.4.2 (rotation); Dehghani et al., arXiv:2302.05442, section 2
(QK-norm); Kwon et al., arXiv:2309.06180, section 4.1 (paged cache).

Before: the QKV product.  After: attention, which reads q and the cache.
"""

import functools

import torch
import triton
import triton.language as tl

from .coded import CodedCache, constants, encode, raw, row_scale
from .launch import (
    cdiv,
    check_rows,
    choose,
    next_power_of_2,
    once,
    overlap,
    start_next,
    use_kernel,
    wait_inputs,
    wide,
)

MATRIX_TOKENS = 16  # up to here the reference rotates by matrices


def qk_norm_rope_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    slots_to_write: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    memo: dict | None = None,
) -> torch.Tensor:
    """The specification of `qk_norm_rope_write`, with its arguments."""
    turning = num_heads + num_kv_heads
    head_dim = k_cache.shape[3]
    heads = qkv.view(qkv.shape[0], turning + num_kv_heads, head_dim)
    rotated, v = heads.split_with_sizes((turning, num_kv_heads), 1)
    rotated = wide(rotated)
    if q_weight is not None:
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        norm = torch.nn.functional.rms_norm
        q = norm(q, q_weight.shape, q_weight.float() + weight_offset, eps)
        k = norm(k, k_weight.shape, k_weight.float() + weight_offset, eps)
        rotated = torch.cat((q, k), dim=1)
    if cos_sin is not None:
        few = memo is not None and qkv.shape[0] <= MATRIX_TOKENS
        make = (
            (lambda: rotation_matrices(cos_sin, positions, interleaved, head_dim))
            if few
            else (lambda: _angles(cos_sin, positions, interleaved))
        )
        turn = once(memo, ("turn", cos_sin.data_ptr(), head_dim, interleaved), make)
        rotated = torch.bmm(rotated, turn) if few else _rotate(rotated, *turn)
    q, k = rotated.split_with_sizes((num_heads, num_kv_heads), 1)
    slots, kept = once(memo, ("written", slots_to_write.data_ptr()), lambda: _written(slots_to_write))
    if kept is not None:
        k, v = k[kept], v[kept]
    _write(k_cache, k, slots)
    _write(v_cache, v, slots)
    if cos_sin is None and q_weight is None:
        q = q.clone()  # it still shares the product's memory
    return (q if q.dtype == qkv.dtype else q.to(qkv.dtype)).contiguous()


def _angles(
    cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cosines (c, c) and sines (-s, s) for the pairs (a, b) of each token, and the dimension in which a pair lies.

    [T, 1, 2, R/2] and -2; if interleaved, [T, 1, R/2, 2] and -1.
    """
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, R/2] each
    pair = -1 if interleaved else -2
    return torch.stack((cos, cos), dim=pair), torch.stack((-sin, sin), dim=pair), pair


def rotation_matrices(cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool, head_dim: int) -> torch.Tensor:
    """The rotation of each token as a matrix, [T, D, D].

    One product by it takes the place of three operations, which is what a step of few tokens consists of on the CPU.
    """
    return matrices(cos_sin, positions, rotation_pattern(head_dim, cos_sin.shape[1], interleaved, cos_sin.device))


def matrices(cos_sin: torch.Tensor, positions: torch.Tensor, pattern: list[torch.Tensor]) -> torch.Tensor:
    """`rotation_matrices` from their `rotation_pattern`; layers/few.py compiles it."""
    units, places, columns, signs = pattern
    numbers = cos_sin.index_select(0, positions).index_select(1, columns).mul_(signs)  # [T, 2 R]
    return (
        units.repeat(len(positions), 1, 1)
        .flatten(1)
        .index_copy_(1, places, numbers)
        .view(-1, units.shape[0], units.shape[1])
    )


@functools.cache
def rotation_pattern(head_dim: int, rotary: int, interleaved: bool, device: torch.device) -> list[torch.Tensor]:
    """What is the same in every rotation matrix of a head: (a, b) @ ((cos, sin), (-sin, cos)) for each pair.

    Returns: the unit matrix [D, D]; the places [2 R] of the pairs' numbers in it, flat; the columns of [cos, sin] that
        they come from; their signs.
    """
    pair = torch.arange(rotary // 2, device=device)
    a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
    places = torch.cat((a * head_dim + a, b * head_dim + b, a * head_dim + b, b * head_dim + a))
    columns = torch.cat((pair, pair, pair + rotary // 2, pair + rotary // 2))
    signs = torch.ones(2 * rotary, device=device)
    signs[-len(pair) :] = -1
    return [torch.eye(head_dim, device=device), places, columns, signs]


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pair: int) -> torch.Tensor:
    """Turn the pairs of `heads` [T, N, D]: (a, b) * (c, c) + (b, a) * (-s, s)."""
    tokens, number, dim = heads.shape
    width = cos.shape[2] * cos.shape[3]
    pairs = heads[..., :width].view(tokens, number, *cos.shape[2:])
    turned = torch.addcmul(pairs * cos, pairs.flip(pair), sin).view(tokens, number, width)
    return turned if width == dim else torch.cat((turned, heads[..., width:]), dim=-1)


def _written(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots of the tokens that are written, and which tokens these are (None: all)."""
    keep = slots >= 0
    kept = None if keep.all() else keep.nonzero()[:, 0]
    return slots if kept is None else slots[kept], kept


def _write(cache: torch.Tensor | CodedCache, new: torch.Tensor, slots: torch.Tensor) -> None:
    """Put `new` [T, Hkv, D] into the slots [T] of a cache [B, Hkv, P, D]."""
    if isinstance(cache, CodedCache):
        cache.write(new, slots)
        return
    (blocks, heads, page, head_dim), strides = cache.shape, cache.stride()
    new = new if new.dtype == cache.dtype else new.to(cache.dtype)
    if strides[0] == page * strides[2]:  # blocks and places are one dimension
        places = torch.as_strided(cache, (blocks * page, heads, head_dim), (strides[2], strides[1], strides[3]))
        places.index_copy_(0, slots, new)
    else:
        cache.transpose(1, 2).index_put_((slots // page, slots % page), new)


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr,  # [T, (HQ + 2 HK) D]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [positions, R] float32, R/2 cosines and then R/2 sines; read if R > 0
    q_weight_ptr,  # [D]; read if NORM
    k_weight_ptr,  # [D]; read if NORM
    slots_ptr,  # [T]
    q_ptr,  # [T, HQ, D] contiguous
    k_cache_ptr,  # [B, HK, P, D]
    v_cache_ptr,  # [B, HK, P, D]
    qkv_stride,  # elements between rows
    k_block_stride,  # elements between blocks, heads and places of the K cache
    k_head_stride,
    k_place_stride,
    v_block_stride,  # and of the V cache
    v_head_stride,
    v_place_stride,
    eps,
    weight_offset,
    k_scales_ptr,  # of a coded cache (coded.py): [B, HK, P] if EACH, else the number
    v_scales_ptr,
    scales_stride,  # if EACH: elements between blocks
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # numbers of a head that are rotated, even; 0 = none
    P: tl.constexpr,  # places in a block
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODE: tl.constexpr,  # of coded.py
    EACH: tl.constexpr,
    HEADS: tl.constexpr,  # heads a program, a power of two
    BLOCK: tl.constexpr,  # a power of two, at least D
    PDL: tl.constexpr,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HQ + 2 * HK) & (column < D)
    is_q, is_k, is_v = head < HQ, (head >= HQ) & (head < HQ + HK), head >= HQ + HK
    head_ptr = qkv_ptr + row * qkv_stride + head * D
    # All but the product itself was there before the kernel in front: it is loaded without waiting for that.
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if NORM:
        weight = _weight(q_weight_ptr, k_weight_ptr, column, is_q, is_v, column < D, weight_offset)
    if R > 0:
        if INTERLEAVED:
            partner, angle, low = column ^ 1, column // 2, column % 2 == 0
        else:
            partner = tl.where(column < R // 2, column + R // 2, column - R // 2)
            angle, low = column % (R // 2), column < R // 2
        turned = column < R
        angle_ptr = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * R + angle
        cos = tl.load(angle_ptr, mask=turned, other=1.0)
        sin = tl.load(angle_ptr + R // 2, mask=turned, other=0.0)
        if NORM:
            other_weight = _weight(q_weight_ptr, k_weight_ptr, partner, is_q, is_v, turned, weight_offset)
    wait_inputs(PDL)

    value = tl.load(head_ptr + column, mask=inside, other=0.0).to(tl.float32)
    result = value
    if NORM:
        scale = tl.where(is_v, 1.0, tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / D + eps))
        result = value * scale * weight
    if R > 0:
        other = tl.load(head_ptr + partner, mask=inside & turned, other=0.0).to(tl.float32)
        if NORM:
            other *= scale * other_weight
        result = tl.where(is_v, result, result * cos + tl.where(low, -other, other) * sin)

    q_column = row * (HQ * D) + head * D + column
    tl.store(q_ptr + q_column, result.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    block, place = slot // P, slot % P
    inside = inside & (slot >= 0)
    key, number = result, value
    if CODE != "":
        if EACH:
            scale = row_scale(result)  # of a head of v, the result is the value
            at = block * scales_stride + place
            first = (column == 0) & inside
            tl.store(k_scales_ptr + at + (head - HQ) * P + column, scale, mask=first & is_k)
            tl.store(v_scales_ptr + at + (head - HQ - HK) * P + column, scale, mask=first & is_v)
        else:
            scale = tl.where(is_v, v_scales_ptr, k_scales_ptr)
        key = encode(tl.div_rn(result, tl.broadcast_to(scale, result.shape)), CODE)
        number = key
        column = 2 * (column % (D // 2)) + column // (D // 2)  # two to a word
    k_ptr = k_cache_ptr + block * k_block_stride + place * k_place_stride + (head - HQ) * k_head_stride + column
    tl.store(k_ptr, key.to(k_cache_ptr.dtype.element_ty), mask=inside & is_k)
    v_ptr = v_cache_ptr + block * v_block_stride + place * v_place_stride + (head - HQ - HK) * v_head_stride + column
    tl.store(v_ptr, number.to(v_cache_ptr.dtype.element_ty), mask=inside & is_v)


@triton.jit
def _weight(q_weight_ptr, k_weight_ptr, column, is_q, is_v, inside, weight_offset):
    """[heads, columns] of the norm's weights in float32: q's, k's, and 1 for the heads of v."""
    q_weight = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_v, 1.0, tl.where(is_q, q_weight, k_weight) + weight_offset)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    slots_to_write: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    memo: dict | None = None,
) -> torch.Tensor:
    """Normalise and rotate q and k, store k and v in the cache, hand on q.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], all q heads, then k, then v; rows may lie apart; not changed.
        positions: [T] integers, each within the rows of `cos_sin`.
        cos_sin: [P, R] float32, the cosines of position p in the first half of row p, the sines in the second; R is
            even and at most D. None = no rotation.
        k_cache, v_cache: [B, Hkv, block size, D]; changed at the slots named and nowhere else. Their type may differ;
            they may be coded.
        slots_to_write: [T] integers, block * block size + place in the block; -1 = this token is not stored.
        num_heads, num_kv_heads: Hq and Hkv.
        q_weight, k_weight: [D], both or neither: RMS norm over each head.
        eps, weight_offset: of that norm.
        interleaved: pairs are neighbours, instead of half a rotation apart.
        memo: of this step, for the reference (launch.py::once).

    Returns:
        q: [T, Hq, D] in qkv's type, contiguous, in memory of its own.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if not use_kernel(qkv):
        return qk_norm_rope_write_reference(
            qkv, positions, cos_sin, k_cache, v_cache, slots_to_write, num_heads=num_heads, num_kv_heads=num_kv_heads,
            q_weight=q_weight, k_weight=k_weight, eps=eps, weight_offset=weight_offset, interleaved=interleaved,
            memo=memo,
        )  # fmt: skip
    tensors = (qkv, positions, cos_sin, k_cache, v_cache, slots_to_write)
    norm = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "weight_offset": weight_offset}
    tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    check_rows("qk_norm_rope_write: qkv", qkv, (num_heads + 2 * num_kv_heads) * head_dim)
    _check_caches(raw(k_cache), raw(v_cache), num_kv_heads)
    _check_vectors(tokens, head_dim, cos_sin, {"positions": positions, "slots_to_write": slots_to_write})
    _check_weights(head_dim, q_weight, k_weight)
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _launch(q, *tensors, **norm, interleaved=interleaved)
    return q


def _launch(
    q, qkv, positions, cos_sin, k_cache, v_cache, slots, *, q_weight, k_weight, eps, weight_offset, interleaved
) -> None:
    """One program for each few heads of each token. Unused pointers point at qkv and are not read."""
    (tokens, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    heads = num_heads + 2 * num_kv_heads
    block, group = next_power_of_2(head_dim), min(next_power_of_2(heads), 8)
    default = {"HEADS": group, "num_warps": min(max(group * block // 128, 1), 8)}
    options = choose("qk_norm_rope_write", qkv, default, heads=heads, head_dim=head_dim)
    _qk_norm_rope_write_kernel[(tokens, cdiv(heads, options["HEADS"]))](
        qkv,
        positions,
        qkv if cos_sin is None else cos_sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        slots,
        q,
        raw(k_cache),
        raw(v_cache),
        qkv.stride(0),
        *raw(k_cache).stride()[:3],
        *raw(v_cache).stride()[:3],
        eps,
        weight_offset,
        HQ=num_heads,
        HK=num_kv_heads,
        D=head_dim,
        R=0 if cos_sin is None else cos_sin.shape[1],
        P=k_cache.shape[2],
        NORM=q_weight is not None,
        INTERLEAVED=interleaved,
        BLOCK=block,
        **constants(k_cache, v_cache),
        **options,
        **overlap(qkv),
    )


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[1] != num_kv_heads or cache.stride(-1) != 1:
            raise ValueError(
                f"qk_norm_rope_write: {name} must be [blocks, {num_kv_heads}, block size, head size] with adjacent "
                f"numbers, is {list(cache.shape)} with strides {cache.stride()}"
            )
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"qk_norm_rope_write: k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}; they must agree"
        )


def _check_vectors(tokens: int, head_dim: int, cos_sin: torch.Tensor | None, vectors: dict[str, torch.Tensor]) -> None:
    for name, vector in vectors.items():
        if vector.shape != (tokens,) or vector.is_floating_point() or not vector.is_contiguous():
            raise ValueError(
                f"qk_norm_rope_write: {name} must be [{tokens}] integers, contiguous, "
                f"is {list(vector.shape)} {vector.dtype}"
            )
    if cos_sin is None:
        return
    fits = cos_sin.dim() == 2 and cos_sin.shape[1] <= head_dim and cos_sin.shape[1] % 2 == 0
    if not fits or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(
            f"qk_norm_rope_write: cos_sin must be [positions, even and at most {head_dim}] float32, contiguous, "
            f"is {list(cos_sin.shape)} {cos_sin.dtype}"
        )


def _check_weights(head_dim: int, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None) -> None:
    if (q_weight is None) != (k_weight is None):
        raise ValueError("qk_norm_rope_write: q_weight and k_weight come together")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != (head_dim,) or not weight.is_contiguous()):
            raise ValueError(f"qk_norm_rope_write: {name} must be [{head_dim}], contiguous, is {list(weight.shape)}")
