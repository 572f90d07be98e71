"""Causal attention of the new tokens of a step over each other, keys and values as the products leave them: for MLA.

    out[i] = softmax over j <= i of the same sequence of (q_i · k_j + q_pe_i · k_pe_j) · scale,  times v_j

Latent attention over the cache (`attention_latent.py`) spends 2 C + P operations on a pair of tokens and head, because
it works on latents. Where many new tokens look at each other, it is cheaper to make their keys and values (N and V
numbers a head) once: N + P + V operations, a third. What was in the cache before joins by the log of the denominator,
which is why that is a result, too. Nothing here is paged: keys and values of a step lie one behind the other.

One program = (query tile, head). Tiles are numbered as in `attention_prefill.py`; keys before the diagonal are not
masked. The rotated part k_pe is one for all heads.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; Dao, arXiv:2307.08691 (FlashAttention-2).

Before: `latent_write.py`, the product that makes keys and values.  After: the join with the cached part.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl

from . import launch
from .attention_prefill import sequence_of
from .launch import choose, next_power_of_2, use_kernel

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: exp2(-inf - LOWEST) is 0 and not NaN


def attention_ragged_reference(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    k: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `attention_ragged`, with its arguments; also how the CPU serves."""
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(v.shape[:2], -torch.inf, device=q.device)
    edges = query_start.tolist()
    for first, last in pairwise(edges):
        one = slice(first, last)
        scores = torch.einsum("mhd,nhd->hmn", q[one].float(), k[one].float())
        scores += torch.einsum("mhp,np->hmn", q_pe[one].float(), k_pe[one].float())
        scores *= scale
        hidden = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
        lse[one] = scores.logsumexp(-1).T
        out[one] = torch.einsum("hmn,nhv->mhv", scores.softmax(-1), v[one].float()).to(q.dtype)
    return out, lse


@triton.jit
def _attend(
    q, q_pe, acc, peak, total, query, begin, stop, k_ptr, k_pe_ptr, v_ptr, k_stride, k_pe_stride, v_stride, scale,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Key tiles [begin, stop) of a sequence; on the DIAGONAL a key behind its query is hidden."""
    d, p, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    for first in tl.range(begin, stop, TILE, num_stages=STAGES):
        key = first + tl.arange(0, TILE)
        row = key.to(tl.int64)[:, None]
        inside = (key < stop)[:, None]
        k = tl.load(k_ptr + row * k_stride + d[None, :], mask=inside & (d < N)[None, :], other=0.0)
        pe = tl.load(k_pe_ptr + row * k_pe_stride + p[None, :], mask=inside & (p < P)[None, :], other=0.0)
        v = tl.load(v_ptr + row * v_stride + e[None, :], mask=inside & (e < V)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(pe), scores, input_precision="ieee") * scale
        if DIAGONAL:
            scores = tl.where((key[None, :] <= query[:, None]) & (key < stop)[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weight = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak, total = higher, total * shrink + tl.sum(weight, axis=1)
    return acc, peak, total


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"], do_not_specialize_on_alignment=["query_start_ptr"])
def _attention_ragged_kernel(
    q_ptr,  # [T, HQ, N]
    q_pe_ptr,  # [T, HQ, P]
    k_ptr,  # [T, HQ, N]
    k_pe_ptr,  # [T, P]
    v_ptr,  # [T, HQ, V]
    query_start_ptr,  # [S + 1] int32
    out_ptr,  # [T, HQ, V] contiguous
    lse_ptr,  # [T, HQ] contiguous, float32
    q_stride,  # elements between tokens, then between heads
    q_head_stride,
    q_pe_stride,
    q_pe_head_stride,
    k_stride,
    k_head_stride,
    k_pe_stride,
    v_stride,
    v_head_stride,
    num_seqs,  # S
    num_tiles,
    scale,  # with log2(e) in it
    HQ: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries; a power of two, at least 16
    BLOCK_D: tl.constexpr,  # powers of two, at least N, P, V and 16
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,  # keys of one step; divides BLOCK_M
    STAGES: tl.constexpr,
):
    head = tl.program_id(0) % HQ
    tile = num_tiles - 1 - tl.program_id(0) // HQ
    sequence = sequence_of(query_start_ptr, tile, num_seqs, BLOCK_M)
    if (sequence < 0) | (sequence >= num_seqs):
        return
    start = tl.load(query_start_ptr + sequence)
    count = tl.load(query_start_ptr + sequence + 1) - start
    first = (tile - start // BLOCK_M - sequence) * BLOCK_M
    if first >= count:
        return
    query = first + tl.arange(0, BLOCK_M)
    token = (start + query).to(tl.int64)
    d, p, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    real = (query < count)[:, None]
    q_place = q_ptr + (token * q_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_place, mask=real & (d < N)[None, :], other=0.0)
    q_pe_place = q_pe_ptr + (token * q_pe_stride + head * q_pe_head_stride)[:, None] + p[None, :]
    q_pe = tl.load(q_pe_place, mask=real & (p < P)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_ptr += start.to(tl.int64) * k_stride + head * k_head_stride
    k_pe_ptr += start.to(tl.int64) * k_pe_stride
    v_ptr += start.to(tl.int64) * v_stride + head * v_head_stride
    acc, peak, total = _attend(
        q, q_pe, acc, peak, total, query, 0, first, k_ptr, k_pe_ptr, v_ptr, k_stride, k_pe_stride, v_stride, scale,
        N, P, V, BLOCK_D, BLOCK_P, BLOCK_V, TILE, STAGES, False,
    )  # fmt: skip
    stop = tl.minimum(first + BLOCK_M, count)
    acc, peak, total = _attend(
        q, q_pe, acc, peak, total, query, first, stop, k_ptr, k_pe_ptr, v_ptr, k_stride, k_pe_stride, v_stride, scale,
        N, P, V, BLOCK_D, BLOCK_P, BLOCK_V, TILE, STAGES, True,
    )  # fmt: skip
    tl.store(lse_ptr + token * HQ + head, (peak + tl.log2(total)) / LOG2E, mask=query < count)
    place = out_ptr + (token * HQ + head)[:, None] * V + e[None, :]
    tl.store(place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=real & (e < V)[None, :])


def attention_ragged(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    k: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the new tokens of each sequence over those before them in the same step.

    Args:
        q, k: [T, Hq, N].   q_pe: [T, Hq, P].   k_pe: [T, P], for all heads.   v: [T, Hq, V].
            Tokens and heads may lie apart; the last dimension is contiguous.
        query_start: [S + 1] int32, rising; sequence s owns tokens query_start[s] to query_start[s + 1]. Tokens outside
            all sequences are left as they are: zeros, with a log of -inf.
        scale: of the scores.

    Returns:
        [T, Hq, V] in q's type, and the natural log of each softmax's denominator, [T, Hq] float32.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    if not use_kernel(q):
        return attention_ragged_reference(q, q_pe, k, k_pe, v, query_start, scale=scale)
    _check(q, q_pe, k, k_pe, v)
    tokens, heads, width = q.shape
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, device=q.device)
    if not out.numel():
        return out, lse
    sequences = len(query_start) - 1
    options = _options(q, q_pe.shape[2], v.shape[2])
    tiles = tokens // options["BLOCK_M"] + sequences + 1
    _attention_ragged_kernel[(tiles * heads,)](
        q,
        q_pe,
        k,
        k_pe,
        v,
        query_start,
        out,
        lse,
        *q.stride()[:2],
        *q_pe.stride()[:2],
        *k.stride()[:2],
        k_pe.stride(0),
        *v.stride()[:2],
        sequences,
        tiles,
        scale * LOG2E.value,
        HQ=heads,
        N=width,
        P=q_pe.shape[2],
        V=v.shape[2],
        **options,
    )
    return out, lse


def _check(q, q_pe, k, k_pe, v) -> None:
    tokens, heads, rotary = q_pe.shape
    fits = q.shape == k.shape and q.shape[:2] == v.shape[:2] == (tokens, heads) and k_pe.shape == (tokens, rotary)
    if not fits:
        shapes = ", ".join(str(list(one.shape)) for one in (q, q_pe, k, k_pe, v))
        raise ValueError(f"attention_ragged: q, q_pe, k, k_pe and v do not fit each other: {shapes}")
    if any(one.stride(-1) != 1 for one in (q, q_pe, k, k_pe, v)):
        raise ValueError("attention_ragged: all arguments must be contiguous in the last dimension")


def _options(q: torch.Tensor, rotary: int, values: int) -> dict[str, int]:
    """Block sizes: measured ones, or the first whose pipeline fits into the device's shared memory."""
    tokens, _, width = q.shape
    device, size = launch.facts(q.device), q.element_size()
    blocks = [max(16, next_power_of_2(one)) for one in (width, rotary, values)]
    room = (device.shared - 4096) // size
    hopper = device.backend == "cuda" and device.shared > 200 * 1024
    sizes = ((128, 64, 3), (128, 64, 2)) if size == 2 and device.backend != "hip" else ()
    sizes += ((64, 32, 2),) if size == 2 else ()
    rows, tile, stages = next(
        one
        for one in (*sizes, (32, 16, 2), (16, 16, 1))
        if one[0] * (blocks[0] + blocks[1]) + (one[2] if hopper else max(one[2] - 1, 1)) * one[1] * sum(blocks) <= room
        or one == (16, 16, 1)
    )
    if device.backend == "cpu":
        rows, tile, stages = 32, 32, 1  # the interpreter pays by the program
    default = {
        "BLOCK_M": rows,
        "BLOCK_D": blocks[0],
        "BLOCK_P": blocks[1],
        "BLOCK_V": blocks[2],
        "TILE": tile,
        "STAGES": stages,
        "num_warps": 8 if rows == 128 else 4,
    }
    return choose("attention_ragged", q, default, tokens=tokens, width=width, values=values)
