"""Products with quantised weights at the shapes of a Llama of 8B: fp8 with a scale a row, or one for a block of
128 x 128, and int4 in groups of 128.

A product is recorded in a row of itself over enough copies of the codes that the device's cache never helps. Up to 64
tokens by the kernels that read codes; for more tokens beside what else could be done: activations rounded to fp8 and
torch's scaled product, or the matrix made dense for torch's plain one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator

import torch
from kernel_timing import Case, options_replaced
from kernels_dense import COLD, MODELS, Role, difference, folded
from torch.nn import functional as F

from tinyserve.kernels.activation import gated_activation
from tinyserve.kernels.packed import Packed, packed_dense
from tinyserve.kernels.packed_gemm import packed_gemm, packed_gemm_reference
from tinyserve.kernels.packed_gemv import packed_gemv, packed_gemv_reference
from tinyserve.kernels.round_rows import round_rows
from tinyserve.kernels.scaled_gemm import scaled_gemm, scaled_gemm_reference
from tinyserve.quant.grouped import scaled_product

TOKENS = {"fp8": (1, 16, 64), "fp8-blocks": (1, 16, 64), "int4": (1, 8, 16, 64, 256)}
MANY = (256, 2048)
FORMATS = {"fp8": 8, "fp8-blocks": 8, "int4": 4}
STRIPS = 16  # tokens of int4 up to which packed_gemm goes to packed_strips


def weight_of(format: str, role: Role) -> Packed:
    """Random codes; scales give numbers of a usual size."""
    rows, columns, size = role.rows, role.inputs, role.inputs**-0.5
    if format != "int4":
        codes = (torch.randn(rows, columns, dtype=torch.bfloat16) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        width, groups = (128, columns // 128) if format == "fp8-blocks" else (0, 1)
        return Packed(codes, torch.full((rows, groups), size / 64), None, columns, 8, width, "e4m3")
    codes = torch.randint(-(2**15), 2**15, (rows, columns // 4), dtype=torch.int16)
    scales = torch.full((rows, columns // 128), size / 4.6, dtype=torch.float16)
    return Packed(codes, scales, None, columns, 4, 128, "int", 8)


def moved(weight: Packed) -> int:
    """Bytes of codes and scales."""
    return weight.codes.nbytes + weight.scales.nbytes


def cases() -> Iterator[Case]:
    for format in FORMATS:
        for role in MODELS["8B"].roles[:4]:
            first = weight_of(format, role)
            number = min(max(2, math.ceil(COLD / moved(first))), 64)
            others = [first.codes.view(torch.uint8).clone().view(first.codes.dtype) for _ in range(number - 1)]
            weights = [first]
            weights += [Packed(c, first.scales, None, first.columns, first.bits, first.width, first.kind, first.middle)
                        for c in others]  # fmt: skip
            for tokens in TOKENS[format]:
                yield from _few(format, role, tokens, weights)
            for tokens in MANY if role.name in ("qkv", "gate_up") and format != "fp8-blocks" else ():
                yield from _many(format, role, tokens, weights[: 2 if tokens > 256 else None])


def _few(format: str, role: Role, tokens: int, weights: list[Packed]) -> Iterator[Case]:
    x = torch.randn(tokens, role.inputs, dtype=torch.bfloat16)
    norm, residual = torch.ones(role.inputs, dtype=torch.bfloat16), torch.randn(1, role.outputs, dtype=torch.bfloat16)
    options, gate = folded(role, norm, residual), "silu" if role.gate else None
    given = {"moved": moved(weights[0]), "flops": 2 * tokens * role.inputs * role.rows, "spaced": False}
    given |= {"tags": {"role": role, "tokens": tokens, "format": format}}
    shape = f"8B {format} {role.name} {role.inputs} x {role.rows}, {tokens} tokens"

    def case(kernel: str, call: Callable[[Packed], torch.Tensor], reference: Callable[[], torch.Tensor]) -> Case:
        def error() -> float:
            y = call(weights[0])
            return difference(y.float().sum(0) if y.dim() == 3 else y, reference())

        return Case(kernel, shape, [lambda w=w: call(w) for w in weights], error=error, **given)

    if tokens == 1:
        yield case(
            "packed_strips" if format == "int4" else "packed_gemv",
            lambda w: packed_gemv(x, w, **options),
            lambda: packed_gemv_reference(x, weights[0], **options),
        )
        return
    own = {"gate": gate, "parts": role.residual}
    if format != "int4":
        same, width = {"dtype": torch.bfloat16, "gate": gate}, weights[0].width
        yield case(
            "scaled_gemm",
            lambda w: scaled_gemm(*round_rows(x, width=width), w, parts=role.residual, **same),
            lambda: scaled_gemm_reference(*round_rows(x, width=width), weights[0], **same),
        )
        return
    name = "packed_strips" if tokens <= STRIPS else "packed_gemm"
    yield case(name, lambda w: packed_gemm(x, w, **own), lambda: packed_gemm_reference(x, weights[0], gate=gate))
    if role.gate and tokens > 64:
        yield Case(
            "apart", shape, [lambda w=w: gated_activation(packed_gemm(x, w), "silu") for w in weights],
            **given | {"tags": {"role": Role("apart", role.inputs, role.rows), "tokens": tokens, "format": format}},
        )  # fmt: skip


def _many(format: str, role: Role, tokens: int, weights: list[Packed]) -> Iterator[Case]:
    x = torch.randn(tokens, role.inputs, dtype=torch.bfloat16)
    given = {"moved": moved(weights[0]), "flops": 2 * tokens * role.inputs * role.rows, "spaced": False}
    shape = f"8B {format} {role.name} {role.inputs} x {role.rows}, {tokens} tokens"

    def gated(make: Callable[[Packed], torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
        if role.gate:
            return [lambda w=w: gated_activation(make(w), "silu") for w in weights]
        return [lambda w=w: make(w) for w in weights]

    if format == "fp8":
        yield Case("scaled", shape, gated(lambda w: scaled_product(*round_rows(x), w, None)), **given)
    else:
        yield Case("dense", shape, gated(lambda w: F.linear(x, packed_dense(w, torch.bfloat16))), **given)


# Rows and columns of a tile, warps.
GEMV_TILES = [(8, 512, 4), (8, 1024, 4), (4, 1024, 4), (4, 1024, 2)]
# Rows and columns of a tile, stages, warps.
FP8_TILES = [(64, 256, 4, 4), (64, 256, 3, 4), (128, 128, 4, 8), (128, 128, 4, 4), (64, 128, 6, 4)]
# Tiles of 128 columns of a warp and step, warps.
STRIP_TILES = {
    1: [(2, 4), (2, 8), (4, 4), (1, 8), (1, 4)],
    8: [(2, 4), (2, 8), (1, 8)],
    16: [(1, 4), (1, 8), (2, 4)],
}
# Tokens and rows of a tile, stages, warps, whether numbers are scaled before the product.
INT4_TILES = {
    64: [(64, 64, 4, 4, 0), (64, 128, 4, 8, 1)],
    256: [(256, 128, 2, 8, 1), (256, 128, 3, 8, 1), (128, 128, 4, 8, 1), (128, 128, 4, 8, 0), (128, 256, 3, 8, 1)],
}
GATED_TILES = {
    64: [(64, 64, 4, 4, 0), (64, 128, 3, 8, 1)],
    256: [(128, 128, 3, 8, 1), (64, 128, 3, 8, 1)],
}


def variants(case: Case) -> Iterator[dict]:
    if not case.tags:
        return
    role, tokens, format = case.tags["role"], case.tags["tokens"], case.tags["format"]
    if case.kernel == "packed_gemv":
        for rows, columns, warps in GEMV_TILES:
            if role.inputs % columns == 0:
                rows = max(rows // (2 if role.gate else 1), 1)
                yield {"BLOCK_N": rows, "BLOCK_K": columns, "AHEAD": 0, "num_warps": warps}
    elif case.kernel == "packed_strips":
        for tiles, warps in STRIP_TILES[tokens]:
            yield {"TILES": tiles, "num_warps": warps}
    elif format == "int4":
        for block, rows, stages, warps, fold in (GATED_TILES if role.gate else INT4_TILES)[tokens]:
            for splits in (2, 4) if role.residual else (1,):
                yield {
                    "BLOCK_M": block, "BLOCK_N": rows, "BLOCK_K": 128, "SPLITS": splits, "STAGES": stages,
                    "FOLD": fold, "APART": 0, "num_warps": warps,
                }  # fmt: skip
    else:
        yield from _fp8_variants(role, tokens, format)


def _fp8_variants(role: Role, tokens: int, format: str) -> Iterator[dict]:
    block = 64 if tokens > 32 else 16
    for rows, columns, stages, warps in FP8_TILES:
        if columns > 128 and format == "fp8-blocks":
            continue
        for splits in (2, 4) if role.residual else (1,):
            stage = (block + rows * (1 + role.gate)) * columns
            if stage * stages <= 220_000 and role.inputs % (columns * splits) == 0:
                yield {
                    "BLOCK_M": block, "BLOCK_N": rows, "BLOCK_K": columns, "SPLITS": splits, "STAGES": stages,
                    "num_warps": warps,
                }  # fmt: skip


@contextlib.contextmanager
def using(options: dict) -> Iterator[None]:
    """Launchers take `options` over what they would choose."""
    names = ("packed_gemv", "packed_gemm", "packed_strips", "scaled_gemm")
    with options_replaced([importlib.import_module(f"tinyserve.kernels.{name}") for name in names], options):
        yield
