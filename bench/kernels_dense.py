"""Dense products of a decode step, as a Llama model of 8B and a Qwen3 of 0.6B run them, and whole chains of a layer.

A product is recorded in a row of itself over enough copies of the weights that the device's cache never helps, so
consecutive ones overlap where the device can do that. A chain is all products and norms of one model in their order,
without attention: it is what a step pays for everything that stands here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from attrs import frozen
from kernel_timing import Case
from torch.nn import functional as F

from tinyserve.kernels import gemv as one
from tinyserve.kernels import skinny_gemm as few
from tinyserve.kernels.activation import gated_activation
from tinyserve.kernels.gemv import gemv, gemv_reference
from tinyserve.kernels.norm import add_rms_norm
from tinyserve.kernels.skinny_gemm import skinny_gemm

COLD = 400e6  # bytes of weights that are read before any is read again
TOKENS = (1, 8, 32, 64, 128)


@frozen
class Role:
    """A product of a layer. Attributes: name; inputs, outputs; norm, gate, residual: what it takes in at one row."""

    name: str
    inputs: int
    outputs: int
    norm: bool = False
    gate: bool = False
    residual: bool = False

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.outputs * (1 + self.gate)

    @property
    def moved(self) -> int:
        """Bytes of the weight."""
        return 2 * self.inputs * self.rows


@frozen
class Model:
    """Sizes of a model. Attributes: layers; roles: the products of a layer in order, and the head."""

    layers: int
    roles: tuple[Role, ...]

    @classmethod
    def of(cls, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int) -> Model:
        """From the numbers of config.json, with heads of 128."""
        return cls(
            layers,
            (
                Role("qkv", hidden, (heads + 2 * kv_heads) * 128, norm=True),
                Role("out", heads * 128, hidden, residual=True),
                Role("gate_up", hidden, inner, norm=True, gate=True),
                Role("down", inner, hidden, residual=True),
                Role("head", hidden, vocab),
            ),
        )


MODELS = {
    "8B": Model.of(32, 4096, 32, 8, 14336, 128256),
    "0.6B": Model.of(28, 1024, 16, 8, 3072, 151936),
}


def copies(role: Role) -> list[torch.Tensor]:
    """Weights of a role, [rows, inputs]."""
    number = min(max(2, math.ceil(COLD / role.moved)), 256)
    return list(torch.randn(number, role.rows, role.inputs, dtype=torch.bfloat16).mul_(role.inputs**-0.5))


def folded(role: Role, norm: torch.Tensor, residual: torch.Tensor) -> dict:
    """What a product of one row takes in."""
    return {
        "norm": norm if role.norm else None,
        "gate": "silu" if role.gate else None,
        "residual": residual if role.residual else None,
    }


def gemv_call(role: Role, x: torch.Tensor, weight: torch.Tensor, norm, residual) -> Callable[[], torch.Tensor]:
    options = folded(role, norm, residual)
    return lambda: gemv(x, weight, **options)


def skinny_call(role: Role, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: skinny_gemm(x, weight, gate="silu" if role.gate else None, parts=role.residual)


def torch_call(role: Role, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    if role.gate:
        return lambda: gated_activation(F.linear(x, weight), "silu")
    return lambda: F.linear(x, weight)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖"""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def cases() -> Iterator[Case]:
    for model_name, model in MODELS.items():
        for role in model.roles:
            weights = copies(role)
            for tokens in TOKENS:
                yield from _cases_of(model_name, role, tokens, weights)
    for model_name, model in MODELS.items():
        yield from _chains(model_name, model)


def _cases_of(model: str, role: Role, tokens: int, weights: list[torch.Tensor]) -> Iterator[Case]:
    x = torch.randn(tokens, role.inputs, dtype=torch.bfloat16)
    norm, residual = torch.ones(role.inputs, dtype=torch.bfloat16), torch.randn(1, role.outputs, dtype=torch.bfloat16)
    given = {"moved": role.moved, "flops": 2 * tokens * role.inputs * role.rows}
    shape = f"{model} {role.name} {role.inputs} x {role.rows}, {tokens} tokens"
    tags = {"role": role, "tokens": tokens}
    plain = [torch_call(role, x, weight) for weight in weights]
    if tokens == 1:
        calls, options = (
            [gemv_call(role, x, weight, norm, residual) for weight in weights],
            folded(role, norm, residual),
        )

        def error() -> float:
            return difference(calls[0](), gemv_reference(x, weights[0], **options))

        yield Case("gemv", shape, calls, error=error, tags=tags, spaced=False, **given)
    else:
        calls = [skinny_call(role, x, weight) for weight in weights]

        def error() -> float:
            return difference(calls[0]().sum(0) if role.residual else calls[0](), plain[0]())

        yield Case("skinny_gemm", shape, calls, error=error, tags=tags, spaced=False, **given)
    yield Case("torch", shape, plain, spaced=False, **given)


def _chains(name: str, model: Model) -> Iterator[Case]:
    """All products and norms of a step, each layer with its own weights: 4 kernels a layer at one token, else 6."""
    qkv, out, _, _, head = model.roles
    layers = [[torch.randn(r.rows, r.inputs, dtype=torch.bfloat16).mul_(r.inputs**-0.5) for r in model.roles[:4]]]
    layers += [[torch.empty_like(w).copy_(w) for w in layers[0]] for _ in range(model.layers - 1)]
    top = torch.randn(head.rows, head.inputs, dtype=torch.bfloat16).mul_(head.inputs**-0.5)
    moved = sum(role.moved for role in model.roles[:4]) * model.layers + head.moved
    norm = torch.ones(qkv.inputs, dtype=torch.bfloat16)
    for tokens in (1, 8, 32, 64):
        x = torch.randn(tokens, qkv.inputs, dtype=torch.bfloat16)

        def one_token(x=x) -> torch.Tensor:
            for w in layers:
                attended = gemv(x, w[0], norm=norm)[:, : out.inputs]
                x = gemv(attended, w[1], residual=x)
                x = gemv(gemv(x, w[2], norm=norm, gate="silu"), w[3], residual=x)
            return gemv(x, top)

        def more(x=x) -> torch.Tensor:
            delta = torch.zeros_like(x)
            for w in layers:
                x, h = add_rms_norm(x, delta, norm, 1e-6)
                attended = skinny_gemm(h, w[0])[:, : out.inputs]
                x, h = add_rms_norm(x, skinny_gemm(attended, w[1], parts=True), norm, 1e-6)
                delta = skinny_gemm(skinny_gemm(h, w[2], gate="silu"), w[3], parts=True)
            return skinny_gemm(add_rms_norm(x, delta, norm, 1e-6)[1], top)

        yield Case(
            "chain",
            f"{name}, {tokens} tokens",
            [one_token if tokens == 1 else more],
            moved=moved,
            spaced=False,
        )


# Rows and columns of a tile, warps.
GEMV_TILES = [
    (1, 1024, 2), (1, 2048, 4), (2, 512, 2), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4), (4, 512, 2), (4, 512, 4),
    (4, 1024, 2), (4, 1024, 4), (4, 2048, 4), (4, 2048, 8), (8, 512, 4), (8, 512, 2), (8, 1024, 4), (16, 512, 4),
    (2, 256, 1), (4, 256, 1), (8, 256, 2),
]  # fmt: skip
# Rows and columns of a tile, stages, warps, and whether the weights are the wide side.
SKINNY_TILES = [
    (64, 128, 4, 4, 1), (64, 256, 3, 4, 1), (128, 64, 5, 4, 1), (128, 128, 3, 8, 1), (32, 128, 4, 4, 0),
    (64, 128, 4, 4, 0), (64, 64, 6, 4, 0), (32, 256, 3, 4, 0),
]  # fmt: skip


def variants(case: Case) -> Iterator[dict]:
    if case.kernel not in ("gemv", "skinny_gemm"):
        return
    role, tokens = case.tags["role"], case.tags["tokens"]
    if case.kernel == "gemv":
        for rows, columns, warps in GEMV_TILES:
            held = rows * columns * (1 + role.gate) // (32 * warps)
            if role.inputs % columns == 0 and role.outputs // rows >= 64 and held <= 128:
                yield {"BLOCK_N": rows, "BLOCK_K": columns, "num_warps": warps}
        return
    if tokens > 64:
        return
    wide = 2 if role.gate else 1
    for rows, columns, stages, warps, swap in SKINNY_TILES:
        block_m = min(max(16, 1 << (tokens - 1).bit_length()), 128 if not swap else 64)
        fits = (rows * wide + block_m) * columns * 2 * stages <= 220_000
        for splits in (1, 2, 4) if role.residual else (1,):
            programs = role.outputs // rows * splits
            if not fits or role.inputs % (columns * splits) or (splits > 1 and programs > 1100):
                continue
            for lines in (0, 8) if role.moved < 40e6 and tokens <= 32 else (0,):
                yield {
                    "BLOCK_M": block_m, "BLOCK_N": rows, "BLOCK_K": columns, "SPLITS": splits, "SWAP": swap,
                    "STAGES": stages, "LINES": lines, "num_warps": warps,
                }  # fmt: skip


@contextlib.contextmanager
def using(options: dict) -> Iterator[None]:
    """Launchers take `options` over what they would choose."""
    old = one.choose, few.choose
    one.choose = few.choose = lambda kernel, tensor, default, **shape: default | options
    try:
        yield
    finally:
        one.choose, few.choose = old
