"""Quantised experts at the shapes of Qwen3-30B-A3B: 128 experts of 768, top 8, hidden size 2048; and plain ones beside.

fp8 with a scale a row, fp8 in blocks of 128 columns, int4 in groups of 128, MXFP4. Up to 2 tokens by the unsorted
kernels, else by the grouped ones. Bytes are those of the experts that are touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from kernel_timing import Case, options_replaced
from kernels_moe import INNER, E, H, K, distance, numbers

from tinyserve.kernels import moe_align as align
from tinyserve.kernels import moe_decode as decode
from tinyserve.kernels import moe_gemm as gemm
from tinyserve.kernels import moe_packed_decode as packed_decode
from tinyserve.kernels import moe_packed_gemm as packed_gemm
from tinyserve.kernels import moe_router as router
from tinyserve.kernels.packed import Packed

LAYERS = 3  # sets of weights: none stays in the cache of the device
TOKENS = (1, 64, 2048)
FORMATS = ("bf16", "fp8", "fp8-128", "int4", "mxfp4")


def weight_of(format: str, rows: int, columns: int) -> torch.Tensor | Packed:
    """Random codes of all experts; scales give numbers of a usual size."""
    count, size = E * rows, columns**-0.5
    if format == "bf16":
        return numbers(E, rows, columns) * size
    if format.startswith("fp8"):
        codes = numbers(count, columns).to(torch.float8_e4m3fn)
        width = 128 if "128" in format else 0
        scales = torch.full((count, columns // width if width else 1), size)
        return Packed(codes, scales, None, columns, 8, width, "e4m3")
    codes = torch.randint(-(2**15), 2**15, (count, columns // 4), dtype=torch.int16)
    if format == "int4":
        scales = torch.full((count, columns // 128), size / 4.6, dtype=torch.float16)
        return Packed(codes, scales, None, columns, 4, 128, "int", 8)
    scales = torch.full((count, columns // 128), 0x78787878, dtype=torch.int32)  # 2 ** -7 four times
    return Packed(codes, scales, None, columns, 4, 32, "e2m1")


def bytes_of(weight: torch.Tensor | Packed) -> float:
    """Of one expert, scales included."""
    whole = weight.nbytes if isinstance(weight, torch.Tensor) else weight.codes.nbytes + weight.scales.nbytes
    return whole / E


def cases() -> Iterator[Case]:
    routed = {}
    for tokens in TOKENS:
        weights, ids = router.moe_router(numbers(tokens, E), top_k=K, renormalise=True)
        touched = min(E, tokens * K) if ids.device.type == "meta" else int(ids.unique().numel())
        routed[tokens] = (weights, ids, *align.moe_align(ids, E), touched)
    for format in FORMATS:
        layers = [(weight_of(format, 2 * INNER, H), weight_of(format, H, INNER)) for _ in range(LAYERS)]
        for tokens in TOKENS:
            yield from _both(format, tokens, layers, *routed[tokens])
        del layers


def _both(format, tokens, layers, weights, ids, order, starts, touched) -> Iterator[Case]:
    x, shape, flops = numbers(tokens, H), f"{format}, {tokens} tokens", 2 * tokens * K * H * INNER
    tags = {"tokens": tokens, "format": format}
    if tokens * K <= 2 * K:
        up, down = _few(format, ids, weights)
        names = ("moe_decode_gate_up", "moe_decode_down")
    else:
        up, down = _many(format, order, starts, weights, tokens)
        names = ("moe_gate_up", "moe_down")
    h = up(x, layers[0][0])

    def error() -> float:
        if format == "bf16":
            return 0.0
        dense = packed_gemm.packed_dense_reference(layers[0][1], torch.bfloat16).view(E, H, INNER)
        plain = (
            _few("bf16", ids, weights)[1] if tokens * K <= 2 * K else _many("bf16", order, starts, weights, tokens)[1]
        )
        return distance(down(h, layers[0][1]), plain(h, dense))

    moved = touched * bytes_of(layers[0][0])
    yield Case(names[0], shape, [lambda w=w[0]: up(x, w) for w in layers], moved, 2 * flops, None, tags)
    moved = touched * bytes_of(layers[0][1])
    yield Case(names[1], shape, [lambda w=w[1]: down(h, w) for w in layers], moved, flops, error, tags)


Product = Callable[[torch.Tensor, torch.Tensor | Packed], torch.Tensor]


def _few(format: str, ids, weights) -> tuple[Product, Product]:
    """Gate-up and down of few tokens."""
    if format == "bf16":
        return (
            lambda x, w: decode.moe_decode_gate_up(x, w, ids, kind="silu"),
            lambda h, w: decode.moe_decode_down(h, w, ids, scales=weights),
        )
    return (
        lambda x, w: packed_decode.moe_packed_decode_gate_up(x, w, ids, E, kind="silu"),
        lambda h, w: packed_decode.moe_packed_decode_down(h, w, ids, E, scales=weights),
    )


def _many(format: str, order, starts, weights, tokens: int) -> tuple[Product, Product]:
    """Gate-up and down of sorted slots."""
    up, down = {"top_k": K, "kind": "silu"}, {"top_k": K, "scales": weights, "parts": tokens <= 512}
    if format == "bf16":
        return (
            lambda x, w: gemm.moe_gate_up(x, w, order, starts, **up),
            lambda h, w: gemm.moe_down(h, w, order, starts, **down),
        )
    return (
        lambda x, w: packed_gemm.moe_packed_gate_up(x, w, order, starts, **up),
        lambda h, w: packed_gemm.moe_packed_down(h, w, order, starts, **down),
    )


def variants(case: Case) -> Iterator[dict]:
    """What to try for a case; the unsorted kernels by rows, columns and warps, the others by tiles."""
    tokens, format = case.tags["tokens"], case.tags["format"]
    if format == "bf16":
        return
    if "decode" in case.kernel:
        for rows, columns, warps in (
            ((1, 1024, 1), (2, 1024, 1), (2, 1024, 2), (1, 512, 1), (2, 2048, 2))
            if "gate_up" in case.kernel
            else ((1, 256, 1), (2, 256, 1), (4, 256, 1), (2, 256, 2), (1, 1024, 2))
        ):
            yield {"ROWS": rows, "BLOCK": columns, "num_warps": warps}
        return
    tiles = (
        ((16, 64, 128, 3, 4), (16, 64, 128, 6, 4), (16, 128, 128, 3, 8), (16, 64, 256, 3, 4))
        if tokens <= 128
        else ((128, 64, 128, 3, 8), (64, 128, 128, 3, 8), (128, 128, 128, 2, 8))
    )
    for slots, rows, columns, stages, warps in tiles:
        if columns == 128 or format in ("fp8", "int4"):
            yield {"BLOCK_M": slots, "BLOCK_N": rows, "BLOCK_K": columns, "STAGES": stages, "num_warps": warps}


@contextlib.contextmanager
def using(use: dict) -> Iterator[None]:
    """Let the launchers of packed experts take these options."""
    with options_replaced([packed_decode, packed_gemm], use) if use else contextlib.nullcontext():
        yield
