"""Products with quantised weights at the shapes of a Llama of 8B: fp8 with a scale a row, or one for a block of
128 x 128, int4 in groups of 128, and codes of GGUF files in the bits that they have there.

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
from attrs import evolve
from kernel_timing import Case, options_replaced
from kernels_dense import COLD, MODELS, Role, difference, folded
from torch.nn import functional as F

from tinyserve.kernels.activation import gated_activation
from tinyserve.kernels.packed import Packed, packed_dense
from tinyserve.kernels.packed_gemm import packed_gemm, packed_gemm_reference
from tinyserve.kernels.packed_gemv import packed_gemv, packed_gemv_reference
from tinyserve.kernels.packed_limbs import limbs_fit, with_limbs
from tinyserve.kernels.packed_planes import LOW_BITS, Planes, packed_planes, packed_planes_reference
from tinyserve.kernels.round_rows import round_rows
from tinyserve.kernels.scaled_gemm import scaled_gemm, scaled_gemm_reference
from tinyserve.quant.grouped import scaled_product

PLANES = {"Q3_K": (3, 16, 1), "Q5_0": (5, 32, 0), "Q6_K": (6, 16, 1)}  # bits, width, nested scales
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
    return with_limbs(Packed(codes, scales, None, columns, 4, 128, "int", 8))


def planes_of(kind: str, role: Role) -> Planes:
    """Random codes in the bits of a GGUF type."""
    (bits, width, nested), rows, columns = PLANES[kind], role.rows, role.inputs
    low, high = (
        torch.randint(-(2**15), 2**15, (rows, columns * own // 16), dtype=torch.int16)
        for own in (LOW_BITS[bits], bits - LOW_BITS[bits])
    )
    scales, outer = torch.full((rows, columns // width), columns**-0.5 / 2**bits, dtype=torch.float16), None
    if nested:
        outer = torch.full((rows, columns // width // 16, 1), columns**-0.5 / 2**bits / 64, dtype=torch.float16)
        scales = torch.randint(-128, 128, (rows, columns // width), dtype=torch.int8)
    return Planes(low, high, scales, None, columns, bits, width, 2 ** (bits - 1), outer)


def moved(weight: Packed | Planes) -> int:
    """Bytes of codes and scales."""
    tensors = weight.tensors()[:2] if isinstance(weight, Packed) else (weight.low, weight.high, weight.scales)
    return sum(tensor.nbytes for tensor in tensors)


def _planes(kind: str, role: Role) -> Iterator[Case]:
    """Products of 1 to 64 rows, with as many copies of the codes as the device's cache does not hold; where a layer has
    a gate its product is one more kernel, not timed here."""
    first = planes_of(kind, role)
    weights = [first, *(evolve(first, low=first.low.clone(), high=first.high.clone()) for _ in range(5))]
    for tokens in (1, 16, 64):
        x, own = torch.randn(tokens, role.inputs, dtype=torch.bfloat16), {"parts": role.residual and tokens > 1}

        def error(x: torch.Tensor = x, own: dict = own) -> float:
            y = packed_planes(x, first, None, **own)
            return difference(y.float().sum(0) if y.dim() == 3 else y, packed_planes_reference(x, first))

        yield Case(
            "packed_planes", f"8B {kind} {role.name} {role.inputs} x {role.rows}, {tokens} tokens",
            [lambda w=w, x=x, own=own: packed_planes(x, w, None, **own) for w in weights], error=error,
            moved=moved(first), flops=2 * tokens * role.inputs * role.rows, spaced=False,
        )  # fmt: skip


def cases() -> Iterator[Case]:
    for format in FORMATS:
        for role in MODELS["8B"].roles[:4]:
            first = weight_of(format, role)
            number = min(max(2, math.ceil(COLD / moved(first))), 64)
            others = [first.codes.view(torch.uint8).clone().view(first.codes.dtype) for _ in range(number - 1)]
            weights = [first]
            weights += [evolve(first, codes=codes) for codes in others]
            for tokens in TOKENS[format]:
                yield from _few(format, role, tokens, weights)
            for tokens in MANY if role.name in ("qkv", "gate_up") and format != "fp8-blocks" else ():
                yield from _many(format, role, tokens, weights[: 2 if tokens > 256 else None])
    for kind in PLANES:
        for role in (role for role in MODELS["8B"].roles[:4] if role.name in ("gate_up", "down")):
            yield from _planes(kind, role)


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

    few = format == "int4" and limbs_fit(x, weights[0], gated=role.gate, parts=role.residual and tokens > 1)
    if tokens == 1:
        yield case(
            "packed_limbs" if few else "packed_strips" if format == "int4" else "packed_gemv",
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
    name = "packed_limbs" if few else "packed_strips" if tokens <= STRIPS else "packed_gemm"
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
# Rows and columns of a tile, stages, warps; with blocks, whether tokens are the wide side.
FP8_TILES = [(64, 256, 4, 4), (64, 256, 3, 4), (128, 128, 4, 8), (128, 128, 4, 4), (64, 128, 6, 4)]
# Rows and columns of a tile, stages, warps, splits, whether tokens are the wide side.
BLOCK_TILES = {
    "16 qkv": [(64, 256, 4, 4, 1, 0), (64, 512, 3, 4, 1, 0)],
    "64 qkv": [(64, 256, 4, 4, 1, 0), (64, 512, 3, 4, 1, 0), (32, 256, 4, 4, 1, 1), (64, 256, 4, 8, 1, 0)],
    "16 out": [(64, 128, 8, 4, 4, 0), (64, 256, 4, 4, 4, 0)],
    "64 out": [(64, 128, 4, 4, 4, 0), (64, 256, 4, 4, 2, 0), (64, 256, 3, 4, 4, 0)],
    "16 gate_up": [(64, 128, 6, 4, 1, 0), (64, 256, 3, 4, 1, 0)],
    "64 gate_up": [(64, 128, 4, 4, 1, 0), (64, 256, 2, 4, 1, 0)],
    "16 down": [(64, 128, 8, 4, 4, 0), (64, 256, 4, 4, 4, 0)],
    "64 down": [(64, 128, 4, 4, 4, 0), (32, 128, 4, 4, 4, 1), (64, 256, 3, 4, 4, 0), (64, 128, 6, 4, 2, 0)],
}
# Strips of 16 rows, steps of a round, warps, splits, registers of a thread (0: as many as the compiler likes), whether
# rounds overlap.
STRIP_TILES = {
    "1 qkv": [(2, 2, 8, 1, 128, 0), (2, 1, 8, 1, 128, 1), (1, 1, 8, 1, 80, 1)],
    "1 out": [(1, 2, 16, 1, 64, 0), (1, 1, 8, 1, 80, 1)],
    "1 down": [(1, 1, 16, 1, 64, 0), (1, 2, 8, 1, 128, 1), (1, 1, 8, 1, 80, 1), (1, 1, 16, 1, 0, 1)],
    "8 qkv": [(2, 4, 4, 1, 0, 0), (2, 1, 4, 1, 128, 1), (2, 2, 4, 1, 168, 1)],
    "8 out": [(2, 4, 4, 2, 0, 0), (2, 1, 4, 4, 128, 1)],
    "8 down": [(2, 1, 4, 4, 128, 1), (2, 1, 4, 7, 128, 1), (4, 1, 4, 7, 168, 1), (2, 2, 8, 7, 128, 0),
               (2, 2, 4, 7, 128, 0)],
    "16 qkv": [(2, 4, 4, 1, 0, 0), (2, 1, 4, 1, 168, 1), (2, 2, 4, 1, 168, 0)],
    "16 out": [(2, 4, 4, 2, 0, 0), (2, 1, 4, 4, 168, 1)],
}  # fmt: skip
# Blocks of 16 rows a warp, warps, tiles of a step, stages, lines asked for ahead, splits.
LIMB_TILES = {
    "1 gate_up": [(1, 4, 2, 5, 4, 1), (2, 4, 4, 3, 4, 1)],
    "8 gate_up": [(2, 4, 4, 3, 4, 1), (2, 4, 4, 3, 8, 1), (1, 4, 4, 3, 4, 1), (1, 4, 2, 5, 4, 1), (1, 8, 2, 5, 4, 1)],
    "16 gate_up": [(2, 4, 2, 4, 4, 1), (2, 4, 2, 4, 0, 1), (1, 8, 2, 4, 4, 1), (2, 4, 2, 5, 4, 1)],
    "16 down": [(2, 4, 2, 4, 0, 8), (2, 4, 2, 4, 4, 8), (1, 4, 2, 4, 0, 4), (2, 4, 4, 2, 0, 8)],
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
        for strips, ring, warps, splits, registers, hold in STRIP_TILES[f"{tokens} {role.name}"]:
            use = {"STRIPS": strips, "RING": ring, "SPLITS": splits, "REGISTERS": registers, "HOLD": hold}
            yield use | {"num_warps": warps}
    elif case.kernel == "packed_limbs":
        for blocks, warps, pieces, stages, lines, splits in LIMB_TILES[f"{tokens} {role.name}"]:
            use = {"BLOCKS": blocks, "PIECES": pieces, "STAGES": stages, "LINES": lines, "SPLITS": splits}
            yield use | {"num_warps": warps}
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
    if format == "fp8-blocks":
        tiles = BLOCK_TILES[f"{tokens} {role.name}"]
    else:
        tiles = [(*tile, splits, 0) for tile in FP8_TILES for splits in ((2, 4) if role.residual else (1,))]
    for rows, columns, stages, warps, splits, swap in tiles:
        stage = (block + rows * (1 + role.gate)) * columns
        if stage * stages <= 220_000 and role.inputs % (columns * splits) == 0:
            yield {
                "BLOCK_M": block, "BLOCK_N": rows, "BLOCK_K": columns, "SPLITS": splits, "SWAP": swap,
                "STAGES": stages, "num_warps": warps,
            }  # fmt: skip


@contextlib.contextmanager
def using(options: dict) -> Iterator[None]:
    """Launchers take `options` over what they would choose."""
    names = ("packed_gemv", "packed_gemm", "packed_strips", "packed_limbs", "scaled_gemm")
    with options_replaced([importlib.import_module(f"tinyserve.kernels.{name}") for name in names], options):
        yield
