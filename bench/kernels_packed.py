"""Products with quantised weights at the shapes of a Llama of 8B: fp8 with a scale a row, and int4 in groups of 128.

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

TOKENS = {"fp8": (1, 16, 64), "int4": (1, 16, 64)}
MANY = (128, 256, 2048)
FORMATS = {"fp8": 8, "int4": 4}


def weight_of(format: str, role: Role) -> Packed:
    """Random codes; scales give numbers of a usual size."""
    rows, columns, size = role.rows, role.inputs, role.inputs**-0.5
    if format == "fp8":
        codes = (torch.randn(rows, columns, dtype=torch.bfloat16) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Packed(codes, torch.full((rows, 1), size / 64), None, columns, 8, 0, "e4m3")
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
            for tokens in MANY if role.name in ("qkv", "gate_up") else ():
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
            "packed_gemv",
            lambda w: packed_gemv(x, w, **options),
            lambda: packed_gemv_reference(x, weights[0], **options),
        )
        return
    own = {"gate": gate, "parts": role.residual}
    if format == "fp8":
        same = {"dtype": torch.bfloat16, "gate": gate}
        yield case(
            "scaled_gemm",
            lambda w: scaled_gemm(*round_rows(x), w, parts=role.residual, **same),
            lambda: scaled_gemm_reference(*round_rows(x), weights[0], **same),
        )
    else:
        yield case(
            "packed_gemm", lambda w: packed_gemm(x, w, **own), lambda: packed_gemm_reference(x, weights[0], gate=gate)
        )


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
        gate = "silu" if role.gate else None
        if tokens <= 256:
            yield Case("packed_gemm", shape, [lambda w=w: packed_gemm(x, w, gate=gate) for w in weights], **given)


# Rows and columns of a tile, warps.
GEMV_TILES = {
    "fp8": [(8, 512, 4), (8, 1024, 4), (4, 1024, 4), (4, 1024, 2)],
    "int4": [(4, 1024, 1), (2, 1024, 1), (8, 1024, 1), (8, 1024, 2), (4, 2048, 2)],
}
# Rows and columns of a tile, stages, warps.
GEMM_TILES = {
    "fp8": [(64, 256, 4, 4), (64, 256, 3, 4), (128, 128, 4, 8), (128, 128, 4, 4), (64, 128, 6, 4)],
    "int4": [(64, 128, 4, 4), (64, 128, 6, 2), (32, 128, 6, 2), (32, 128, 6, 1), (16, 128, 8, 1), (128, 128, 4, 8)],
}


def variants(case: Case) -> Iterator[dict]:
    if not case.tags:
        return
    role, tokens, format = case.tags["role"], case.tags["tokens"], case.tags["format"]
    if case.kernel == "packed_gemv":
        for rows, columns, warps in GEMV_TILES[format]:
            rows = max(rows // (2 if role.gate else 1), 1)
            if role.inputs % columns == 0:
                for ahead in (0, 1) if format == "int4" else (0,):
                    yield {"BLOCK_N": rows, "BLOCK_K": columns, "AHEAD": ahead, "num_warps": warps}
        return
    size = 1 if format == "fp8" else 2
    for rows, columns, stages, warps in GEMM_TILES[format]:
        if tokens == 64 and rows < 32:
            continue
        stage = (64 if tokens > 32 else 16) * columns * size + rows * (1 + role.gate) * columns * FORMATS[format] // 8
        for splits in (2, 4) if role.residual else (1,):
            if stage * stages <= 220_000 and role.inputs % (columns * splits) == 0:
                yield {
                    "BLOCK_M": 64 if tokens > 32 else 16, "BLOCK_N": rows, "BLOCK_K": columns, "SPLITS": splits,
                    "STAGES": stages, "num_warps": warps,
                }  # fmt: skip


@contextlib.contextmanager
def using(options: dict) -> Iterator[None]:
    """Launchers take `options` over what they would choose."""
    names = ("packed_gemv", "packed_gemm", "scaled_gemm")
    with options_replaced([importlib.import_module(f"tinyserve.kernels.{name}") for name in names], options):
        yield
