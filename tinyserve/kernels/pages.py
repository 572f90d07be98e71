"""How the references of attention read the paged cache: in place, or from whole blocks copied out in token order.

The pool gives a sequence blocks that follow each other as long as it can (kv/pool.py). Where the blocks of each head
also follow each other in memory, as kv/storage.py lays them out on the CPU, such a sequence is one strided tensor
already. The blocks of other sequences are copied.

On the CPU references are what serves, and there every tensor operation of every layer costs as much as a small product.
So what is the same for all layers of a step (which blocks, where their copies go, which keys each sequence sees) is
worked out by the first layer and kept in the step's memo (`launch.once`).

Before: `launch.py`; kv/storage.py lays the cache out.  After: the references of attention_*.py and rope.py.
"""

import torch
from attrs import frozen

from .coded import CodedCache
from .launch import cdiv, once

COPIED_TOKENS = 4096  # tokens that are copied out of the cache at once

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [1, Hkv, keys, D] of sequences


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


def by_head(k_cache: torch.Tensor, v_cache: torch.Tensor, memo: dict | None = None) -> tuple[torch.Tensor, ...]:
    """The caches [B, Hkv, P, D] as references copy from them: two tensors [Hkv, B, P, D].

    Or one [2 Hkv, B, P, D], if that is how kv/storage.py has laid them out: one copy then does what takes two.
    """
    key = ("by head", k_cache.data_ptr(), k_cache.shape, k_cache.stride())
    return once(memo, key, lambda: _by_head(k_cache, v_cache))


def _by_head(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    blocks, heads, page, head_dim = k_cache.shape
    k, v = k_cache.transpose(0, 1), v_cache.transpose(0, 1)
    together = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if together and k.is_contiguous() and v.is_contiguous() and v.storage_offset() == k.storage_offset() + k.numel():
        return (k.as_strided((2 * heads, blocks, page, head_dim), k.stride()),)
    return k, v


def all_by_head(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """The caches [B, Hkv, P, D] of these layers, K and V of each, as one tensor [2 layers, Hkv, B P, D].

    None: they do not lie in memory as kv/storage.py puts layers of one shape on the CPU.
    """
    first, every = pairs[0][0], [cache for pair in pairs for cache in pair]
    blocks, heads, page, head_dim = first.shape
    begin, numbers, memory = first.storage_offset(), first.numel(), first.untyped_storage().data_ptr()
    for place, cache in enumerate(every):
        together = cache.shape == first.shape and cache.untyped_storage().data_ptr() == memory
        if not together or not cache.transpose(0, 1).is_contiguous():
            return None
        if cache.storage_offset() != begin + place * numbers:
            return None
    shape = (len(every), heads, blocks * page, head_dim)
    return first.as_strided(shape, (numbers, blocks * page * head_dim, head_dim, 1), begin)


def start_in_place(blocks: list[int], k_cache: torch.Tensor, v_cache: torch.Tensor) -> int | None:
    """The number of the first token of these blocks in caches [B, Hkv, P, D], counted from block 0, if all tokens of
    them lie at one distance in memory. None: they do not.
    """
    page, strides = k_cache.shape[2], k_cache.stride()
    if strides != v_cache.stride() or strides[0] != page * strides[2]:
        return None
    return blocks[0] * page if blocks and blocks == [*range(blocks[0], blocks[0] + len(blocks))] else None


@frozen
class InPlace:
    """A sequence that is read where it lies.

    Attributes:
        shape, strides: [1, Hkv, its tokens, D], of the views.
        offset: of the first of them from the beginning of the cache, in numbers.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, cache: torch.Tensor, start: int, count: int) -> "InPlace":
        """`count` tokens of a cache [B, Hkv, P, D] from number `start` (of `start_in_place`, or later) on."""
        strides = cache.stride()
        return cls((1, cache.shape[1], count, cache.shape[3]), strides, start * strides[2])

    @property
    def span(self) -> list[int]:
        """The first and behind the last of these tokens, counted from block 0 of the cache."""
        start = self.offset // self.strides[2]
        return [start, start + self.shape[2]]

    def view(self, cache: torch.Tensor) -> torch.Tensor:
        """The tokens in this cache."""
        return torch.as_strided(cache, self.shape, self.strides, cache.storage_offset() + self.offset)

    def read(self, k_cache: torch.Tensor, v_cache: torch.Tensor, memo: dict | None) -> Pairs:
        """Keys and values as the attention of its newest token reads them."""
        return [(self.view(k_cache), self.view(v_cache))]


@frozen(eq=False)
class Decoded:
    """A sequence whose keys and values are codes: they are turned into numbers, in float32, each time.

    Attributes: blocks: [N] ids.   inside: which tokens of these blocks it sees.
    """

    blocks: torch.Tensor
    inside: slice

    def read(self, k_cache: CodedCache, v_cache: CodedCache, memo: dict | None) -> Pairs:
        """Keys and values as the attention of its newest token reads them."""
        return [(k_cache.read(self.blocks, self.inside), v_cache.read(self.blocks, self.inside))]


def tokens_of(
    k_cache: torch.Tensor | CodedCache, v_cache: torch.Tensor | CodedCache, blocks: torch.Tensor, inside: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, Hkv, M, D] of the tokens `inside` blocks [N] of caches [B, Hkv, P, D], copied if need be."""
    if isinstance(k_cache, CodedCache):
        return Decoded(blocks, inside).read(k_cache, v_cache, None)[0]
    start = start_in_place(blocks.tolist(), k_cache, v_cache)
    if start is not None:
        found = InPlace.of(k_cache, start + inside.start, inside.stop - inside.start)
        return found.view(k_cache), found.view(v_cache)
    found = tuple(cache.index_select(1, blocks).flatten(1, 2)[None, :, inside] for cache in by_head(k_cache, v_cache))
    return tuple(found[0].chunk(2, dim=1)) if len(found) == 1 else found


@frozen(eq=False)
class Copied:
    """Sequences whose blocks are copied out of the cache in one go, and where each one's keys and values then lie.

    Attributes:
        blocks: [N] ids.
        copies: where they go, [2 Hkv, N, P, D], or twice [Hkv, N, P, D]; as `by_head` has the caches.
        sequences: k and v [1, Hkv, keys, D] of each, views of `copies` of exactly what its newest token sees.
    """

    blocks: torch.Tensor
    copies: tuple[torch.Tensor, ...]
    sequences: Pairs

    def read(self, k_cache: torch.Tensor, v_cache: torch.Tensor, memo: dict | None) -> Pairs:
        """Copy the blocks of one layer; what an earlier layer's copies held is gone then."""
        for cache, copy in zip(by_head(k_cache, v_cache, memo), self.copies, strict=True):
            torch.index_select(cache, 1, self.blocks, out=copy)
        return self.sequences


def layout(
    block_tables: torch.Tensor,
    lengths: list[int],
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    window: int,
) -> list[InPlace | Copied | Decoded]:
    """How each sequence's keys are read, in order: in place where that is possible, else copied with its neighbours
    as far as their blocks together fit COPIED_TOKENS (or one alone).
    """
    page, found = k_cache.shape[2], []
    scattered: list[tuple[torch.Tensor, slice]] = []

    def copy_scattered() -> None:
        if scattered:
            found.append(_copied(scattered, by_head(k_cache, v_cache)))
            scattered.clear()

    for table, length in zip(block_tables.unbind(), lengths, strict=True):
        low = max(0, length - window) if window else 0
        first, last = low // page, cdiv(length, page)
        blocks = table[first:last]
        if isinstance(k_cache, CodedCache):
            found.append(Decoded(blocks, slice(low - first * page, length - first * page)))
            continue
        start = start_in_place(blocks.tolist(), k_cache, v_cache)
        if start is not None:
            copy_scattered()
            found.append(InPlace.of(k_cache, start + low % page, length - low))
            continue
        if sum(len(blocks) for blocks, _ in scattered) + last - first > COPIED_TOKENS // page:
            copy_scattered()
        scattered.append((blocks, slice(low - first * page, length - first * page)))
    copy_scattered()
    return found


def _copied(sequences: list[tuple[torch.Tensor, slice]], caches: tuple[torch.Tensor, ...]) -> Copied:
    """Room for the blocks of these sequences, and the part of it that each one sees. caches: of `by_head`."""
    sizes = [len(blocks) for blocks, _ in sequences]
    copies = tuple(cache.new_empty(len(cache), sum(sizes), *cache.shape[2:]) for cache in caches)
    pieces = [copy.split(sizes, dim=1) for copy in copies]
    views = []
    for number, (_, inside) in enumerate(sequences):
        tokens = [piece[number].flatten(1, 2)[None, :, inside] for piece in pieces]
        views.append(tuple(tokens[0].chunk(2, dim=1)) if len(tokens) == 1 else tuple(tokens))
    return Copied(torch.cat([blocks for blocks, _ in sequences]), copies, views)
