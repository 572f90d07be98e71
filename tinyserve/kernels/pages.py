"""How the references of attention read the paged cache: whole blocks copied out in token order, then plain attention.

On the CPU references are what serves, and there every tensor operation of every layer costs as much as a small product.
So what is the same for all layers of a step (which blocks, where their copies go, which keys each sequence sees) is
worked out by the first layer and kept in the step's memo (`launch.once`).

Before: `launch.py`; kv/storage.py lays the cache out.  After: the references of attention_*.py and rope.py.
"""

import torch
from attrs import frozen

from .launch import cdiv, once

COPIED_TOKENS = 4096  # tokens that are copied out of the cache at once


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in plain torch, on gathered keys: what all references share.

    Args:
        q: [..., M, D]; k, v: [..., N, D]; leading dimensions broadcast.
        visible: boolean, broadcasts to [..., M, N]; None: every key is visible. Each row should see one key.
        scale, softcap: as for `attention_decode`.
        sinks: broadcasts to [..., M, 1], or None.
        bias: float32, is added to the logits, broadcasts to [..., M, N]; or None.

    Returns:
        [..., M, D] in q's type; probabilities are float32.
    """
    if q.is_cpu and not softcap and sinks is None and bias is None:  # elsewhere the formula, not a kernel of torch's
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=scale)
    scores = q.float() @ k.float().mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    return (scores.softmax(dim=-1)[..., : k.shape[-2]] @ v.float()).to(q.dtype)


def joined(k_cache: torch.Tensor, v_cache: torch.Tensor, memo: dict | None = None) -> torch.Tensor | None:
    """Both caches [B, Hkv, P, D] as one tensor [B, P, 2 Hkv, D], if each token's keys and values lie side by side.

    That is how kv/storage.py lays them out on the CPU, where one copy then does what takes two. None: they do not.
    """
    found = once(memo, ("joined", k_cache.data_ptr()), lambda: (_join(k_cache, v_cache),))
    return found[0]


def _join(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor | None:
    blocks, heads, page, head_dim = k_cache.shape
    token = 2 * heads * head_dim
    strides = (page * token, head_dim, token, 1)
    apart = v_cache.data_ptr() - k_cache.data_ptr()
    if k_cache.stride() != strides or v_cache.stride() != strides or 2 * apart != token * k_cache.element_size():
        return None
    return k_cache.as_strided((blocks, page, 2 * heads, head_dim), (page * token, token, head_dim, 1))


def by_token(k_cache: torch.Tensor, v_cache: torch.Tensor, memo: dict | None = None) -> tuple[torch.Tensor, ...]:
    """The caches as references read them: one tensor [B, P, 2 Hkv, D], or two [B, P, Hkv, D]."""
    both = joined(k_cache, v_cache, memo)
    return (k_cache.transpose(1, 2), v_cache.transpose(1, 2)) if both is None else (both,)


def gather(caches: tuple[torch.Tensor, ...], blocks: torch.Tensor, inside: slice) -> tuple[torch.Tensor, ...]:
    """Copy blocks [N] of `by_token` caches out in token order; keep those `inside`: twice [1, Hkv, M, D]."""
    copies = (cache.index_select(0, blocks).view(1, -1, *cache.shape[2:]) for cache in caches)
    found = tuple(tokens[:, inside].transpose(1, 2) for tokens in copies)
    return found[0].chunk(2, dim=1) if len(found) == 1 else found


@frozen(eq=False)
class Copied:
    """Sequences whose blocks are copied out of the cache in one go, and where each one's keys and values then lie.

    Attributes:
        blocks: [N] ids.
        copies: where they go, [N, P, 2 Hkv, D], or twice [N, P, Hkv, D]; as `by_token` has the caches.
        sequences: k and v [1, Hkv, keys, D] of each, views of `copies` of exactly what its newest token sees.
    """

    blocks: torch.Tensor
    copies: tuple[torch.Tensor, ...]
    sequences: list[tuple[torch.Tensor, torch.Tensor]]


def copied(
    block_tables: torch.Tensor, lengths: list[int], caches: tuple[torch.Tensor, ...], window: int
) -> list[Copied]:
    """Divide the sequences into neighbours whose blocks together fit COPIED_TOKENS (or one alone), and lay them out."""
    page = caches[0].shape[1]
    portions: list[list[tuple[torch.Tensor, slice]]] = []
    room = 0
    for table, length in zip(block_tables.unbind(), lengths, strict=True):
        low = max(0, length - window) if window else 0
        first, last = low // page, cdiv(length, page)
        if not portions or last - first > room:
            portions.append([])
            room = COPIED_TOKENS // page
        room -= last - first
        portions[-1].append((table[first:last], slice(low - first * page, length - first * page)))
    sizes = [sum(blocks.shape[0] for blocks, _ in portion) for portion in portions]
    buffers = tuple(cache.new_empty(max(sizes, default=0), *cache.shape[1:]) for cache in caches)
    found = []
    for portion, size in zip(portions, sizes, strict=True):
        copies = tuple(buffer[:size] for buffer in buffers)
        pieces = [copy.split([blocks.shape[0] for blocks, _ in portion]) for copy in copies]
        sequences = []
        for number, (_, inside) in enumerate(portion):
            tokens = [piece[number].flatten(0, 1)[inside].transpose(0, 1)[None] for piece in pieces]
            sequences.append(tuple(tokens[0].chunk(2, dim=1)) if len(tokens) == 1 else tuple(tokens))
        found.append(Copied(torch.cat([blocks for blocks, _ in portion]), copies, sequences))
    return found
