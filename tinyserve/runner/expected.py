"""Kernels that every start needs, named before there is a tensor.

A start spends its first seconds importing torch and making the device's context, while the processes of the foundry
wait for something to do. How tokens are drawn depends on the vocabulary and the type of the logits alone, and the
kernel for it is the one that compiles longest; attention depends on the heads and on the cache's pages. So the
launchers run with shadows of tensors, which have a shape, a type and an address that is a multiple of 16, and `noting`
writes down what they would launch: 31 variants of Qwen3-0.6B, nearly half of all, and more than half of the time.

Before: early.py, kernels/sample.py, top_tokens.py and attention_*.py.  After: foundry.py, whose workers compile it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernels.launch import Variant

ROWS = 2
# Attention of so many tokens of each of so many sequences: what kernels/attention_*.py choose their code by.
TOGETHER = (
    (1, (33,)),
    (4, (2, 8)),
    (16, (2, 8)),
    (1, (2, 8)),
    (4, (1,)),
    (16, (1,)),
    (1, (1,)),
)
OTHER = ("kv_lora_rank", "sliding_window", "attn_logit_softcapping")  # attention that is not looked ahead to


def expected(config: Mapping[str, Any], dtype: str, page: int) -> list[tuple[Any, ...]]:
    """What can be expected of a model: arguments of `named`, one for each process, the longest first.

    Args: config: of the checkpoint.   dtype: that the user asks for, or "auto".   page: tokens of a block of the cache.
    """
    vocabulary = config.get("vocab_size")
    told = config.get("dtype") or config.get("torch_dtype") if dtype == "auto" else dtype
    if not isinstance(vocabulary, int) or vocabulary < 1 or told not in ("bfloat16", "float16", "float32"):
        return []
    found: list[tuple[Any, ...]] = [("sample", told, vocabulary, True), ("sample", "float32", vocabulary, True)]
    if sizes := _heads(config):
        found += [("attention", told, *sizes, page, *what) for what in TOGETHER]
    found += [("sample", kind, vocabulary, False) for kind in (told, "float32")]
    return list(dict.fromkeys([*found, *(("top", told, vocabulary, rows) for rows in (False, True))]))


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Query heads, kv heads and the size of a head, where attention is of the usual kind."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads = config.get("num_key_value_heads") or heads
    usual = all(isinstance(one, int) and one > 0 for one in (heads, hidden, kv_heads)) and not heads % kv_heads
    if not usual or any(config.get(name) for name in OTHER):
        return None
    return heads, kv_heads, config.get("head_dim") or hidden // heads


class Shadow:
    """What launchers and Triton ask of a tensor on a GPU, without its numbers."""

    is_cpu = False
    device = None

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return 4 if str(self.dtype).endswith("32") else 2

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(prod(self.shape[one + 1 :]) for one in range(len(self.shape)))
        return strides if dim is None else strides[dim]

    def new_empty(self, *shape: int, dtype: Any = None) -> Shadow:
        return Shadow(shape, dtype or self.dtype)

    def view(self, dtype: Any) -> Shadow:
        return Shadow(self.shape, dtype)


def shadow_of_new(shape: tuple[int, ...], *, dtype: Any, device: Any) -> Shadow:
    """What torch.empty is where there is no torch."""
    return Shadow(tuple(shape), dtype)


def named(what: str, dtype: str, *sizes: Any) -> list[Variant]:
    """The variants of one thing that is expected; in a process that has set up Triton's driver and launch.facts.

    Args: what: "sample", "top" or "attention".   sizes: the arguments of `_sample`, `_top` or `_attention`.
    """
    import torch  # or what stands for it

    from ..kernels.launch import noting

    with noting() as found:
        {"sample": _sample, "top": _top, "attention": _attention}[what](torch, getattr(torch, dtype), *sizes)
    return found


def _sample(torch: Any, dtype: Any, vocabulary: int, filters: bool) -> None:
    """filters: rows may ask for top-k, top-p and min-p."""
    from ..kernels.sample import sample

    single, integers, seeds = (Shadow((ROWS,), kind) for kind in (torch.float32, torch.int32, torch.int64))
    asked = (integers, single, single) if filters else None
    sample(Shadow((ROWS, vocabulary), dtype), single, seeds, integers, filters=asked)


def _top(torch: Any, dtype: Any, vocabulary: int, chosen: bool) -> None:
    """chosen: of some rows only."""
    from ..kernels.top_tokens import top_tokens

    top_tokens(Shadow((ROWS, vocabulary), dtype), 5, Shadow((ROWS,), torch.int32) if chosen else None)


def _attention(
    torch: Any, dtype: Any, heads: int, kv_heads: int, head_dim: int, page: int, queries: int, crowds: Sequence[int]
) -> None:
    """crowds: numbers of sequences, each with so many queries."""
    from ..kernels.attention_decode import attention_decode
    from ..kernels.attention_verify import attention_verify

    caches = [Shadow((ROWS, kv_heads, page, head_dim), dtype)] * 2
    for sequences in crowds:
        q = Shadow((sequences * queries, heads, head_dim), dtype)
        tables, starts, lengths = (
            Shadow(shape, torch.int32) for shape in ((sequences, ROWS), (sequences + 1,), (sequences,))
        )
        if queries == 1:
            attention_decode(q, *caches, tables, lengths, scale=1.0, max_seq_len=1, out=q)
        else:
            attention_verify(q, *caches, tables, starts, lengths, scale=1.0, max_query_len=queries, out=q)
