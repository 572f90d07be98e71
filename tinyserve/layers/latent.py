"""Multi-head latent attention (MLA): the cache keeps one short vector a token, from which heads make their K and V.

    h -> [ q latent ] -> norm -> q of each head      (or h -> q directly, in small models)
    h -> [ latent c | k_pe ] -> norm of c, rotation of k_pe -> cache
    cached tokens:   q_c = q_nope W_k     attention over the latents themselves     mixed W_v
    tokens of the same step:    k = c W_kᵀ, v = c W_vᵀ     attention of each head over its own keys and values

W_k and W_v are halves of one stored matrix, by head. Moving W_k to the query side and W_v behind the sum ("absorbed")
lets all heads read the same latents, and nothing of the size heads x length is ever made. For many new tokens among
themselves the other way is a third of the work. Both kinds of keys join by the logs of their denominators.

Before: layers/{linear,norm,rope}.py, kernels/{latent_write,attention_latent,attention_ragged}.py.
After: models/deepseek.py.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.attention_latent import attention_latent
from ..kernels.attention_ragged import attention_ragged
from ..kernels.latent_write import latent_write
from ..kernels.launch import once
from ..kv.groups import LayerKV
from ..quant.format import Stored
from .attention import Batch, LayerCache
from .fold import Normed, Product, handed_on
from .linear import Linear
from .norm import RMSNorm
from .rope import Rope


@frozen(kw_only=True)
class LatentSizes:
    """Sizes of latent attention.

    Args:
        heads: query heads.
        latent: numbers of the cached latent (C).   query: of the queries' latent; None: queries have none.
        nope, rotary: numbers of a head's query and key without position (N), and of the part that is rotated (P).
        value: numbers of a head's value (V).
    """

    heads: int
    latent: int
    query: int | None
    nope: int
    rotary: int
    value: int


class HeadProjection(nn.Module):
    """The stored matrix [heads * (N + V), C] as two that are multiplied head by head. Never quantised.

    Attributes: keys [heads, N, C], values [heads, V, C]: views of the weight.
    """

    names = ("weight",)

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.parts = (sizes.heads * (sizes.nope + sizes.value),)
        self.weight = nn.Parameter(torch.empty(*self.parts, sizes.latent, device="meta"), False)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored weight must have."""
        return tuple(self.weight.shape)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the weight, uninitialised."""
        self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=dtype, device=device), False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the weight."""
        self.weight.copy_(stored.read(self.weight.dtype))

    def finish(self) -> None:
        """Nothing to pack."""

    @property
    def keys(self) -> Tensor:
        """[heads, N, C]"""
        return self.weight.unflatten(0, (self.sizes.heads, -1))[:, : self.sizes.nope]

    @property
    def values(self) -> Tensor:
        """[heads, V, C]"""
        return self.weight.unflatten(0, (self.sizes.heads, -1))[:, self.sizes.nope :]


class LatentAttention(nn.Module):
    """MLA.

    Args:
        hidden: size of the stream.
        sizes: of everything else.
        rope: the rotation of P numbers, shared by all layers.
        scale: factor on the scores; 1/sqrt(N + P) when None.
        bias: whether the products from the stream and the last one have biases; only with a query latent.
    """

    def __init__(
        self, hidden: int, sizes: LatentSizes, *, rope: Rope, scale: float | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.rope = rope
        self.scale = (sizes.nope + sizes.rotary) ** -0.5 if scale is None else scale
        queries, stored = sizes.heads * (sizes.nope + sizes.rotary), sizes.latent + sizes.rotary
        # One product from the stream. Its name tells the weight table which queries it makes: latents or whole ones.
        self.compress = Linear(hidden, (sizes.query, stored), bias=bias) if sizes.query else None
        self.direct = None if sizes.query else Linear(hidden, (queries, stored))
        self.q_norm = RMSNorm(sizes.query, 1e-6) if sizes.query else None
        self.q_up = Linear(sizes.query, (queries,)) if sizes.query else None
        self.kv_norm = RMSNorm(sizes.latent, 1e-6)
        self.kv_up = HeadProjection(sizes)
        self.out = Linear(sizes.heads * sizes.value, (hidden,), bias=bias)
        self.cache: LayerCache | None = None

    def layer_kv(self) -> LayerKV:
        """What this layer keeps of each token."""
        return LayerKV(1, self.sizes.latent + self.sizes.rotary, latent=True)

    def bind(self, cache: LayerCache) -> None:
        """Use these tensors from now on; must come before the first forward."""
        self.cache = cache

    def forward(self, x: Tensor | Normed, batch: Batch) -> Tensor | Product:
        """[T, H] -> [T, H]"""
        sizes, cache = self.sizes, self.cache
        q, kv = self._project(x)
        q = q.unflatten(1, (sizes.heads, -1))
        slots, rope = batch.slots_to_write[cache.group], self.rope
        places = (batch.positions, rope.cos_sin, self.kv_norm.weight, cache.k, slots)
        q_pe, latent = latent_write(q, kv, *places, eps=self.kv_norm.eps, interleaved=rope.interleaved)
        q_nope = q[..., : sizes.nope]
        if batch.num_decodes == batch.num_seqs:
            mixed = self._over_cache(q_nope, q_pe, batch)
        else:
            mixed = self._over_step(q_nope, q_pe, latent, batch)
        return handed_on(self.out, mixed.flatten(1), x)

    def _over_cache(self, q_nope: Tensor, q_pe: Tensor, batch: Batch, lse: Tensor | None = None) -> Tensor:
        """Attend over cached latents, [T, heads, V]; the first T tokens of the step, as `token_rows` says.

        lse: [T, heads], gets the log of the denominators.
        """
        q_c = torch.bmm(q_nope.transpose(0, 1), self.kv_up.keys)  # [heads, T, C]
        mixed = torch.empty_like(q_c)
        rows, lengths = once(batch.memo, ("latent rows",), lambda: token_rows(batch))
        attention_latent(
            q_c.transpose(0, 1),
            q_pe,
            self.cache.k,
            batch.block_tables[self.cache.group],
            rows[: len(q_pe)],
            lengths[: len(q_pe)],
            scale=self.scale,
            max_seq_len=batch.max_seq_len,
            out=mixed.transpose(0, 1),
            lse=lse,
        )
        out = q_nope.new_empty(len(q_pe), self.sizes.heads, self.sizes.value)
        torch.bmm(mixed, self.kv_up.values.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def _over_step(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, batch: Batch) -> Tensor:
        """Attend where some sequences have several tokens: over each other, and over what was in the cache before."""
        sizes, decodes = self.sizes, batch.num_decodes
        both = F.linear(latent[:, : sizes.latent], self.kv_up.weight).unflatten(1, (sizes.heads, -1))
        k, v = both.split((sizes.nope, sizes.value), dim=-1)
        starts = batch.query_start[decodes:]
        own, own_lse = attention_ragged(q_nope, q_pe, k, latent[:, sizes.latent :], v, starts, scale=self.scale)
        if batch.max_cached_len:
            lse = torch.empty_like(own_lse)
            cached = self._over_cache(q_nope, q_pe, batch, lse)
            share = torch.sigmoid(lse - own_lse).nan_to_num_(0.0)[..., None]  # neither there: padding
            return torch.lerp(own.float(), cached.float(), share).to(own.dtype)
        if decodes:
            own[:decodes] = self._over_cache(q_nope[:decodes], q_pe[:decodes], batch)
        return own

    def _project(self, x: Tensor | Normed) -> tuple[Tensor, Tensor]:
        """q [T, heads * (N + P)] and kv [T, C + P], views or not."""
        if self.direct is not None:
            return self.direct(x).split(self.direct.parts, dim=1)
        latent, kv = self.compress(x).split(self.compress.parts, dim=1)
        return self.q_up(self.q_norm(latent)), kv


def token_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """For each token, its row of the block tables and how many cached positions it sees, both [T] int32.

    A token that decodes sees its whole sequence, itself included. Where several tokens are new, each sees what was
    there before the step; what they see of each other is not looked up. Padding sees nothing.
    """
    if batch.num_decodes == batch.num_seqs:
        return torch.arange(batch.num_seqs, dtype=torch.int32, device=batch.positions.device), batch.seq_lens
    ends = batch.query_start[1:]
    number = torch.arange(batch.positions.shape[0], dtype=torch.int32, device=ends.device)
    rows = torch.searchsorted(ends, number, right=True, out_int32=True)
    owner = rows.clamp(max=batch.num_seqs - 1)
    before = batch.positions - (number - batch.query_start[owner])
    seen = torch.where(rows < batch.num_decodes, batch.positions + 1, before)
    return owner, torch.where(rows < batch.num_seqs, seen, 0).to(torch.int32)
