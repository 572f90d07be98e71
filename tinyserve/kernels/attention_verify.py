"""Causal attention of a few new tokens per sequence (2 to 16) over long cached keys: drafts to verify, short chunks.

With so few queries a sequence is as bound by reading its keys as a single new token is, and `attention_prefill` would
leave all but a few processors idle. So this is `attention_decode` with more rows: the tile of a kv head holds the G
query heads of each of the sequence's tokens, each row sees the keys up to its own position, and the keys are cut into
parts by the same rule. Bytes as for decode; the tile has QUERIES·G rows, so that 8 drafts of a model with G = 8 still
fit into one matrix instruction of 64 rows.

Source: Leviathan et al., arXiv:2211.17192 (what is verified); the rest as `attention_decode.py`.

Before: `rope.py` has written the new keys and values.  After: `attention_merge.py`, then the output projection.
"""

import torch

from .attention_cut import make_cut
from .attention_decode import attend_parts, part_options
from .attention_prefill import attention_prefill_reference, check_ragged
from .coded import CodedCache, raw, words
from .launch import use_kernel

MOST_QUERIES, FEW_QUERIES = 16, 4  # the two sizes that are compiled
MOST_SEQUENCES = 32


def is_short(max_query_len: int, sequences: int) -> bool:
    """Whether this kernel, not `attention_prefill`, is for so many queries of so many sequences: where keys would not
    fill the device otherwise. (And more sequences would be more variants to compile before a server is ready.)"""
    return max_query_len <= MOST_QUERIES and sequences <= MOST_SEQUENCES


def attention_verify_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    **options: object,
) -> torch.Tensor:
    """The specification of `attention_verify`, with its arguments: what it computes is a prefill."""
    return attention_prefill_reference(q, k_cache, v_cache, block_tables, query_start, seq_lens, **options)


def attention_verify(
    q: torch.Tensor,
    k_cache: torch.Tensor | CodedCache,
    v_cache: torch.Tensor | CodedCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    memo: dict | None = None,
) -> torch.Tensor:
    """Attend with up to MOST_QUERIES new tokens of each sequence, whose keys and values are in the cache already.

    Args:
        max_query_len: at least every query length, at most MOST_QUERIES. Of a longer sequence only so many rows are
            written.
        others: as for `attention_prefill`; `memo` as for `attention_decode`.

    Returns:
        [T, Hq, D] in q's type: `out`, or new. Padding gives zeros.

    Raises:
        ValueError: shapes, strides or options that do not fit.
    """
    if not use_kernel(q):
        return attention_verify_reference(
            q, k_cache, v_cache, block_tables, query_start, seq_lens, scale=scale, max_query_len=max_query_len,
            window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, out=out,
        )  # fmt: skip
    tensors = q, raw(k_cache), raw(v_cache), sinks, alibi_slopes, out
    check_ragged("attention_verify", tensors, scale, block_tables, query_start, seq_lens)
    if not 0 < max_query_len <= MOST_QUERIES:
        raise ValueError(f"attention_verify: max_query_len is {max_query_len}; 1 to {MOST_QUERIES} are possible")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.numel():
        queries = FEW_QUERIES if max_query_len <= FEW_QUERIES else MOST_QUERIES
        options = part_options("attention_verify", q, words(k_cache), len(seq_lens), queries)
        sizes = {"invariant": False, "window": window, "queries": queries}
        cut = make_cut(len(seq_lens), k_cache.shape[1], options.pop("PROGRAMS"), **sizes)
        where = (block_tables, query_start, seq_lens)
        attend_parts(q, (k_cache, v_cache), where, (sinks, alibi_slopes), out, (scale, softcap), cut, options, memo)
    return out
