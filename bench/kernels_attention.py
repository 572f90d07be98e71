"""Attention, as a model of 8B (32 query heads, 8 kv heads, 128) and one of 0.6B (16, 8, 128) run it; pages of 64.

Caches are bf16, and for the cases of CODED also fp8 and int8, with half the bytes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
from attrs import frozen
from kernel_timing import Case, options_replaced

from tinyserve.kernels import attention_cut as cut
from tinyserve.kernels import attention_decode as decode
from tinyserve.kernels import attention_prefill as prefill
from tinyserve.kernels import attention_verify as verify
from tinyserve.kernels import coded

D, KV_HEADS, SCALE = 128, 8, 128**-0.5
TOKENS = 10 * 32768  # of the cache, more than the longest case
MODELS = {"8B": 32, "0.6B": 16}

random.seed(0)
SPREAD = [random.randint(100, 2048) for _ in range(256)]
DECODES = {
    "1 x 256": [256],
    "1 x 1k": [1024],
    "1 x 4k": [4096],
    "1 x 32k": [32768],
    "8 x 32k": [32768] * 8,
    "32 x 640": [640] * 32,
    "32 x 4k": [4096] * 32,
    "33 x 4k": [4096] * 33,
    "256 x 512": [512] * 256,
    "256 x 1k": [1024] * 256,
    "256 x 100..2048": SPREAD,
    "32k among 31 x 1k": [1024] * 31 + [32768],
    "32k before 255 x 512": [32768] + [512] * 255,
    "32k behind 255 x 512": [512] * 255 + [32768],
}
CODED_DECODES = ("1 x 4k", "1 x 32k", "8 x 32k", "32 x 640", "32 x 4k", "256 x 1k")
VERIFIES = {"4 of 1 x 4k": (4, [4096]), "4 of 32 x 4k": (4, [4096] * 32), "16 of 8 x 4k": (16, [4096] * 8)}
PREFILLS = {
    # (queries, length) of each sequence
    "1 x 128": [(128, 128)],
    "1 x 512": [(512, 512)],
    "32 x 512": [(512, 512)] * 32,
    "1 x 2k": [(2048, 2048)],
    "8 x 2k": [(2048, 2048)] * 8,
    "4 x 4k": [(4096, 4096)] * 4,
    "1 x 16k": [(16384, 16384)],
    "2k after 14k": [(2048, 16384)],
}


@frozen
class Cache:
    """Pages of one layer. k, v: [blocks, KV_HEADS, page, D]. token: bytes of one, keys and values."""

    k: torch.Tensor | coded.CodedCache
    v: torch.Tensor | coded.CodedCache
    token: int

    @classmethod
    def make(cls, page: int, kind: str = "") -> Cache:
        """Of normal numbers; kind: of coded.py, else bfloat16."""
        shape = (TOKENS // page, KV_HEADS, page, D)
        drawn = [torch.empty(shape, dtype=torch.bfloat16).normal_() for _ in range(2)]
        if not kind:
            return cls(*drawn, 2 * KV_HEADS * D * 2)
        scale = None if kind == "int8" else 1.0
        made = [coded.CodedCache(*coded.encode_reference(one.float(), kind, scale), kind) for one in drawn]
        return cls(*made, 2 * KV_HEADS * (D + 4 * (scale is None)))

    def tables(self, lengths: list[int]) -> list[torch.Tensor]:
        """Block tables [S, B] of scattered blocks, in as many sets as the cache and 256 MiB hold, at most 24."""
        blocks, page = self.k.shape[0], self.k.shape[2]
        width = -(-max(lengths) // page)
        needed = sum(-(-length // page) for length in lengths)
        sets = max(1, min(24, (blocks - 1) // needed))
        made = []
        order = torch.randperm(blocks - 1).to(torch.int32) + 1 if coded.raw(self.k).device.type != "meta" else None
        for number in range(sets):
            table = torch.zeros(len(lengths), width, dtype=torch.int32)
            used = number * needed
            for row, length in enumerate(lengths):
                count = -(-length // page)
                if order is not None:
                    table[row, :count] = order[used : used + count]
                used += count
            made.append(table)
        return made


def lens_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def decode_case(cache: Cache, model: str, shape: str, lengths: list[int]) -> Case:
    heads, lens = MODELS[model], lens_of(lengths)
    q = torch.empty(len(lengths), heads, D, dtype=torch.bfloat16).normal_()
    out, tables = torch.empty_like(q), cache.tables(lengths)
    options = {"scale": SCALE, "max_seq_len": max(lengths)}

    def call(table):
        memo = {}  # as in a step, whose layers share the list of parts: the first call makes it
        return lambda: decode.attention_decode(q, cache.k, cache.v, table, lens, out=out, memo=memo, **options)

    def error():
        out.fill_(float("nan"))
        call(tables[0])()
        some = sorted({0, len(lengths) // 2, len(lengths) - 1})
        where = tables[0][some], lens[some]
        return distance(out[some], decode.attention_decode_reference(q[some], cache.k, cache.v, *where, **options))

    moved = sum(lengths) * cache.token
    calls = [call(table) for table in tables]
    return Case("attention_decode", f"{model} {shape}", calls, moved, 0, error, {"lengths": lengths})


def cut_case(sequences: int) -> Case:
    """The list that a step makes once."""
    lens, tables = lens_of(SPREAD[:sequences]), torch.zeros(sequences, 32, dtype=torch.int32)
    how = cut.make_cut(sequences, KV_HEADS, 264, invariant=False)

    def call():
        return cut.attention_cut(lens, lens, tables, how, tile=64, page=64)

    return Case("attention_cut", f"{sequences} sequences", [call])


def ragged_case(cache: Cache, operation, shape: str, sequences: list[tuple[int, int]], **options) -> Case:
    query_lens, lengths = [one for one, _ in sequences], [one for _, one in sequences]
    q = torch.empty(sum(query_lens), 32, D, dtype=torch.bfloat16).normal_()
    out, tables, lens = torch.empty_like(q), cache.tables(lengths), lens_of(lengths)
    starts = lens_of([0, *torch.tensor(query_lens, device="cpu").cumsum(0).tolist()])
    options = {"scale": SCALE, "max_query_len": max(query_lens), **options}

    def call(table):
        shared = {"memo": {}} if operation is verify.attention_verify else {}
        return lambda: operation(q, cache.k, cache.v, table, starts, lens, out=out, **options, **shared)

    def error():
        out.fill_(float("nan"))
        call(tables[0])()
        first = query_lens[0]
        where = tables[0][:1], starts[:2], lens[:1]
        return distance(
            out[:first], prefill.attention_prefill_reference(q[:first], cache.k, cache.v, *where, **options)
        )

    window = options.get("window") or 1 << 30
    seen = sum(min(length - queries + query + 1, window) for queries, length in sequences for query in range(queries))
    moved = sum(lengths) * cache.token
    calls = [call(table) for table in tables]
    return Case(operation.__name__, shape, calls, moved, 4 * seen * 32 * D, error, {"lengths": lengths})


def cases() -> Iterator[Case]:
    cache = Cache.make(64)
    for model in MODELS:
        for shape, lengths in DECODES.items():
            yield decode_case(cache, model, shape, lengths)
    for sequences in (32, 256):
        yield cut_case(sequences)
    for shape, (queries, lengths) in VERIFIES.items():
        yield ragged_case(cache, verify.attention_verify, shape, [(queries, length) for length in lengths])
    for shape, sequences in PREFILLS.items():
        yield ragged_case(cache, prefill.attention_prefill, shape, sequences)
    yield ragged_case(cache, prefill.attention_prefill, "4 x 4k, window 1k", PREFILLS["4 x 4k"], window=1024)
    del cache
    cache = Cache.make(16)
    yield decode_case(cache, "8B", "32 x 4k, page 16", DECODES["32 x 4k"])
    yield ragged_case(cache, prefill.attention_prefill, "4 x 4k, page 16", PREFILLS["4 x 4k"])
    for kind in coded.LARGEST:
        del cache
        cache = Cache.make(64, kind)
        for shape in CODED_DECODES:
            yield decode_case(cache, "8B", f"{shape}, {kind}", DECODES[shape])
        yield ragged_case(cache, verify.attention_verify, f"4 of 32 x 4k, {kind}", [(4, 4096)] * 32)
        for shape in ("4 x 4k", "2k after 14k"):
            yield ragged_case(cache, prefill.attention_prefill, f"{shape}, {kind}", PREFILLS[shape])


PART_TILES = [(64, 3, 4), (64, 4, 4), (64, 3, 2), (64, 2, 4), (128, 2, 8), (32, 4, 2), (32, 5, 4)]
CODED_TILES = [(64, 3, 4), (64, 4, 4), (64, 3, 2)]
PREFILL_TILES = [
    # BLOCK_M, TILE, STAGES, EDGE_STAGES, TMA, num_warps
    (64, 64, 3, 2, True, 4),
    (64, 64, 3, 1, True, 4),
    (64, 64, 2, 2, True, 4),
    (128, 64, 3, 2, True, 8),
    (128, 64, 3, 3, False, 8),
]


def variants(case: Case) -> Iterator[dict]:
    """What to try for a case."""
    if case.kernel == "attention_prefill":
        for rows, tile, stages, edge, tma, warps in PREFILL_TILES:
            if tma and "page 16" in case.shape:
                continue
            yield {
                "BLOCK_M": rows, "TILE": tile, "STAGES": stages, "EDGE_STAGES": edge, "TMA": tma, "num_warps": warps,
            }  # fmt: skip
        return
    if any(kind in case.shape for kind in coded.LARGEST):  # bound by instructions as well: more programs may help
        for tile, stages, warps in CODED_TILES:
            for programs in (264, 396, 528):
                yield {"TILE": tile, "STAGES": stages, "num_warps": warps, "PROGRAMS": programs}
        return
    few = len(case.tags["lengths"]) < 64
    short = sum(case.tags["lengths"]) <= 4096
    for tile, stages, warps in PART_TILES if "page" not in case.shape else PART_TILES[:5]:
        for programs in (132, 264, 396) if few and stages > 2 and not short else (264,):
            for least in (64, 128) if short else (64,):
                yield {"TILE": tile, "STAGES": stages, "num_warps": warps, "PROGRAMS": programs, "LEAST": least}


@contextlib.contextmanager
def using(use: dict) -> Iterator[None]:
    """Let the launchers take these options."""
    least, cut.LEAST = cut.LEAST, use.get("LEAST", cut.LEAST)
    try:
        with options_replaced([decode, prefill], use) if use else contextlib.nullcontext():
            yield
    finally:
        cut.LEAST = least
