"""Mixtures of experts at the shapes of Qwen3-30B-A3B: 128 experts of 768, top 8, hidden size 2048.

`choice`: router kernel; `sort`: slots by expert; `gate-up`, `down`: grouped products, at the routing that random logits
give; `decode ...`: the unsorted path; `sum`: of the choices. Bytes are those of the experts that are touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from kernel_timing import Case, options_replaced

from tinyserve.kernels import moe_align as align
from tinyserve.kernels import moe_decode as decode
from tinyserve.kernels import moe_gemm as gemm
from tinyserve.kernels import moe_reduce as reduce
from tinyserve.kernels import moe_router as router

E, K, H, INNER = 128, 8, 2048, 768
LAYERS = 3  # sets of weights, 2.4 GB each: none stays in the cache of the device
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192]


def numbers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_()


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def cases() -> Iterator[Case]:
    layers = [(numbers(E, 2 * INNER, H), numbers(E, H, INNER)) for _ in range(LAYERS)]
    for tokens in TOKENS:
        x, logits = numbers(tokens, H), numbers(tokens, E)
        weights, ids = router.moe_router(logits, top_k=K, renormalise=True)
        meta = ids.device.type == "meta"
        touched = min(E, tokens * K) if meta else int(ids.unique().numel())
        flops, expert = 2 * tokens * K * H * INNER, H * INNER * 2
        shape = f"{tokens} tokens"
        tags = {"tokens": tokens}

        yield Case("moe_router", shape, [lambda a=logits: router.moe_router(a, top_k=K, renormalise=True)], tags=tags)
        yield Case("moe_align", shape, [lambda a=ids: align.moe_align(a, E)], tags=tags)
        order, starts = align.moe_align(ids, E)
        up = {"top_k": K, "kind": "silu"}
        h = gemm.moe_gate_up(x, layers[0][0], order, starts, **up)
        down = {"top_k": K, "scales": weights, "parts": tokens <= 512}

        def error(a=x, s=(order, starts), options=up):
            return distance(
                gemm.moe_gate_up(a, layers[0][0], *s, **options),
                gemm.moe_gate_up_reference(a, layers[0][0], *s, **options),
            )

        calls = [lambda w=w[0], a=x, s=(order, starts), o=up: gemm.moe_gate_up(a, w, *s, **o) for w in layers]
        yield Case("moe_gate_up", shape, calls, touched * 2 * expert, 2 * flops, error, tags)
        calls = [lambda w=w[1], a=h, s=(order, starts), o=down: gemm.moe_down(a, w, *s, **o) for w in layers]
        yield Case("moe_down", shape, calls, touched * expert, flops, None, tags)
        parts = numbers(tokens, K, H)
        yield Case("moe_reduce", shape, [lambda a=parts: reduce.moe_reduce(a)], parts.nbytes * (K + 1) / K, tags=tags)
        if tokens * K <= decode.MOST_SLOTS:
            calls = [lambda w=w[0], a=x, i=ids: decode.moe_decode_gate_up(a, w, i, kind="silu") for w in layers]
            yield Case("moe_decode_gate_up", shape, calls, touched * 2 * expert, 0, None, tags)
            calls = [lambda w=w[1], a=h, i=ids, s=weights: decode.moe_decode_down(a, w, i, scales=s) for w in layers]
            yield Case("moe_decode_down", shape, calls, touched * expert, 0, None, tags)


def variants(case: Case) -> Iterator[dict]:
    """What to try for a case."""
    tokens = case.tags["tokens"]
    if case.kernel == "moe_decode_gate_up":
        for rows, block, warps in ((1, 1024, 2), (1, 1024, 4), (2, 1024, 4), (1, 2048, 4), (4, 512, 4), (2, 512, 2)):
            yield {"ROWS": rows, "BLOCK": block, "num_warps": warps}
    elif case.kernel == "moe_decode_down":
        for rows, block, warps in (
            (1, 1024, 4), (1, 1024, 8), (1, 256, 1), (1, 256, 2), (1, 256, 4), (2, 256, 4), (2, 1024, 8), (4, 256, 4),
        ):  # fmt: skip
            yield {"ROWS": rows, "BLOCK": block, "num_warps": warps}
    elif case.kernel in ("moe_gate_up", "moe_down"):
        for rows, columns, k, swap, stages, warps in tiles(tokens):
            yield {
                "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": k, "SWAP": swap, "STAGES": stages, "num_warps": warps,
            }  # fmt: skip
    elif case.kernel == "moe_align":
        for block, warps in ((512, 2), (1024, 4), (2048, 8), (4096, 8)):
            yield {"BLOCK": block, "num_warps": warps}
    elif case.kernel == "moe_router":
        for rows, warps in ((1, 1), (1, 2), (1, 4)):
            yield {"ROWS": rows, "num_warps": warps}


def tiles(tokens: int) -> tuple[tuple[int, ...], ...]:
    """BLOCK_M, BLOCK_N, BLOCK_K, SWAP, STAGES and warps to try for a grouped product of so many tokens."""
    if tokens <= 128:
        return (
            (16, 64, 128, 1, 3, 4), (16, 64, 128, 1, 4, 4), (16, 64, 64, 1, 5, 4), (16, 64, 256, 1, 2, 4),
            (16, 128, 64, 1, 3, 4), (16, 128, 128, 1, 2, 8), (16, 32, 128, 0, 4, 4), (16, 64, 128, 0, 3, 4),
        )  # fmt: skip
    if tokens <= 512:
        return (
            (16, 64, 128, 1, 3, 4), (32, 64, 128, 1, 3, 4), (32, 64, 64, 1, 5, 4), (32, 128, 64, 1, 3, 8),
            (32, 64, 64, 0, 4, 4), (64, 64, 64, 1, 4, 4), (64, 64, 64, 0, 4, 4), (64, 128, 64, 0, 3, 8),
        )  # fmt: skip
    return (
        (64, 128, 64, 0, 3, 4), (64, 128, 64, 0, 4, 8), (128, 64, 64, 0, 4, 4), (128, 64, 64, 0, 4, 8),
        (128, 64, 128, 0, 3, 8), (128, 128, 64, 0, 3, 8), (128, 128, 64, 0, 4, 8), (128, 256, 64, 0, 3, 8),
    )  # fmt: skip


@contextlib.contextmanager
def using(use: dict) -> Iterator[None]:
    """Let the launchers take these options."""
    with options_replaced([align, decode, gemm, reduce, router], use) if use else contextlib.nullcontext():
        yield
