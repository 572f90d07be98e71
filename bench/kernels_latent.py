"""Latent attention (MLA) as DeepSeek-V2-Lite (16 heads) and V3 (128 heads) run it: 512 + 64 numbers a position."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
from kernel_timing import Case, options_replaced

from tinyserve.kernels import attention_latent as latent
from tinyserve.kernels import attention_ragged as ragged
from tinyserve.kernels import latent_write as write
from tinyserve.layers.rope import RopeSpec, table

C, P, NOPE, V, PAGE, SCALE = 512, 64, 128, 128, 64, 192**-0.5
POSITIONS = 16 * 65536  # of the cache, 1.2 GB
random.seed(0)
SHAPES = {
    "1 x 4k": [4096],
    "1 x 64k": [65536],
    "16 x 4k": [4096] * 16,
    "4 x 16k": [16384] * 4,
    "1 x 128k": [131072],
    "32 x 4k": [4096] * 32,
    "128 x 1k": [1024] * 128,
    "16 x 8k": [8192] * 16,
    "32k among 31 x 1k": [1024] * 31 + [32768],
    "100 x 100..2048": [random.randint(100, 2048) for _ in range(100)],
}


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def decode_case(cache: torch.Tensor, heads: int, shape: str, lengths: list[int]) -> Case:
    tokens, width = len(lengths), -(-max(lengths) // PAGE)
    q = torch.empty(tokens, heads, C + P, dtype=torch.bfloat16).normal_()
    lens, rows = torch.tensor(lengths, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
    blocks = [-(-length // PAGE) for length in lengths]
    sets = max(1, min(8, (cache.shape[0] - 1) // sum(blocks)))
    order = (torch.randperm(cache.shape[0] - 1).to(torch.int32) + 1)[: sets * sum(blocks)].split(blocks * sets)
    filled = [torch.nn.functional.pad(one, (0, width - len(one))) for one in order]
    tables = [torch.stack(filled[number * tokens : (number + 1) * tokens]) for number in range(sets)]
    options = {"scale": SCALE, "max_seq_len": max(lengths)}

    def call(tables):
        return lambda: latent.attention_latent(q[..., :C], q[..., C:], cache, tables, rows, lens, **options)

    def error():
        some = sorted({0, tokens // 2, tokens - 1})
        few = (q[some, :, :C], q[some, :, C:], cache, tables[0], rows[some], lens[some])
        return distance(call(tables[0])()[some], latent.attention_latent_reference(*few, **options))

    total = sum(lengths)
    calls = [call(one) for one in tables]
    return Case(
        "attention_latent", f"{heads} heads, {shape}", calls, total * (C + P) * 2, 2 * heads * total * (2 * C + P),
        error, {"heads": heads},
    )  # fmt: skip


def write_case(heads: int, tokens: int) -> Case:
    q = torch.empty(tokens, heads, NOPE + P, dtype=torch.bfloat16).normal_()
    kv = torch.empty(tokens, C + P, dtype=torch.bfloat16).normal_()
    places = torch.arange(tokens, dtype=torch.int32)
    cos_sin = table(RopeSpec(dim=P), 8192).to(q.device)
    cache = torch.zeros(tokens // PAGE + 1, 1, PAGE, C + P, dtype=torch.bfloat16)

    def call():
        return write.latent_write(q, kv, places, cos_sin, kv[0, :C], cache, places.long())

    return Case("latent_write", f"{heads} heads, {tokens} tokens", [call], 3 * kv.nbytes + 2 * tokens * heads * P * 2)


def ragged_case(heads: int, sequences: int, length: int) -> Case:
    tokens = sequences * length
    q = torch.empty(tokens, heads, NOPE + P, dtype=torch.bfloat16).normal_()
    both = torch.empty(tokens, heads, NOPE + V, dtype=torch.bfloat16).normal_()
    k_pe = torch.empty(tokens, P, dtype=torch.bfloat16).normal_()
    starts = torch.arange(sequences + 1, dtype=torch.int32) * length
    arguments = (q[..., :NOPE], q[..., NOPE:], both[..., :NOPE], k_pe, both[..., NOPE:], starts)

    def call():
        return ragged.attention_ragged(*arguments, scale=SCALE)

    flops = sequences * length * (length + 1) * heads * (NOPE + P + V)
    return Case("attention_ragged", f"{heads} heads, {sequences} x {length}", [call], 0, flops, None, {"heads": heads})


def cases() -> Iterator[Case]:
    cache = torch.empty(POSITIONS // PAGE, 1, PAGE, C + P, dtype=torch.bfloat16).normal_()
    for heads in (16, 128):
        for shape, lengths in SHAPES.items():
            yield decode_case(cache, heads, shape, lengths)
        for tokens in (1, 32, 4096):
            yield write_case(heads, tokens)
        for sequences, length in ((1, 2048), (8, 1024), (1, 8192)):
            yield ragged_case(heads, sequences, length)


def variants(case: Case) -> Iterator[dict]:
    """What to try for a case."""
    if case.kernel == "attention_ragged":
        for rows, tile, stages in ((128, 64, 2), (128, 64, 3), (64, 64, 2), (64, 64, 3), (128, 32, 3), (64, 32, 3)):
            for warps in (4, 8):
                yield {"BLOCK_M": rows, "TILE": tile, "STAGES": stages, "num_warps": warps}
    if case.kernel != "attention_latent":
        return
    few = case.tags["heads"] == 16
    for wide in (True, False) if few else (False,):
        for row, tile, stages, warps in ((16, 64, 3, 4), (16, 64, 3, 8), (32, 64, 3, 8), (64, 64, 2, 8)):
            if few == (row == 16):
                yield {"LATENTS_WIDE": wide, "ROWS": row, "TILE": tile, "STAGES": stages, "num_warps": warps}


@contextlib.contextmanager
def using(use: dict) -> Iterator[None]:
    """Let the launchers take these options."""
    with options_replaced([latent, ragged, write], use) if use else contextlib.nullcontext():
        yield
