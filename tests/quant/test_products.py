"""Random combinations of what a quantised layer may be: bits, odd groups, zero points, act-order, parts, bias, gate."""

import contextlib
import random

import pytest
import torch

from tests.kernels.harness import interpreting, nan_outputs
from tinyserve.kernels import packed_gemm, packed_gemv, packed_limbs
from tinyserve.layers.linear import Linear
from tinyserve.quant.codes import FP4, Codes, Scheme
from tinyserve.quant.grouped import Grouped

WIDTHS = (0, 8, 16, 24, 32, 32, 40, 48, 64, 96, 128)
COLUMNS = (16, 48, 80, 96, 128, 160, 200, 256, 264, 384)


class Held:
    """Codes in memory (a `Stored` of quant/format.py)."""

    qtype, nbytes = "codes", 1

    def __init__(self, codes):
        self.made, self.scheme, self.shape = codes, codes.scheme, tuple(codes.codes.shape)

    def codes(self):
        return self.made


def part(draw, make, scheme, kind, rows, columns, zeros, order):
    """One matrix; its scales and zero points are its own."""
    count = -(-columns // scheme.width) if scheme.width else 1
    largest = 2 ** min(scheme.bits, 8)
    if kind == "fp8":
        codes = torch.randn(rows, columns, generator=make).to(torch.float8_e4m3fn)
    elif kind == 8 and zeros == "none":
        codes = torch.randint(-127, 128, (rows, columns), generator=make).to(torch.int8)
    else:
        codes = torch.randint(0, largest, (rows, columns), generator=make, dtype=torch.uint8)
    scales = (torch.rand(rows, count, generator=make) + 0.5) * 0.02
    scales = scales.half().float() if draw.random() < 0.7 else scales
    middle = None
    if zeros == "same":
        middle = torch.full((rows, count), largest // 2, dtype=torch.uint8)
    elif zeros == "differ":
        middle = torch.randint(0, largest, (rows, count), generator=make, dtype=torch.int32).to(torch.uint8)
    groups = None if order is None else (torch.arange(columns) // scheme.width)[order]
    return Codes(scheme, codes, scales, middle, groups)


def drawn(seed):
    """A layer's description: columns, rows of its parts, gate, bias, tokens, type; and its matrices."""
    draw, make = random.Random(seed), torch.Generator().manual_seed(seed)
    kind, columns = draw.choice([2, 4, 4, 8, 8, "fp8", "fp4"]), draw.choice(COLUMNS)
    width = draw.choice([width for width in WIDTHS if width < columns])
    if kind == "fp4":
        width = width or 16
    parts = tuple(draw.choice([1, 7, 16, 24, 33]) for _ in range(draw.choice([1, 2, 3])))
    gate = draw.choice([None, None, "silu"])
    parts = parts if gate is None else (draw.choice([5, 16, 24]),) * 2
    zeros = draw.choice(["none", "same", "differ"]) if isinstance(kind, int) else "none"
    bits = {"fp8": 8, "fp4": 4}.get(kind, kind)
    scheme = Scheme(str(kind), bits, width, table=FP4 if kind == "fp4" else None)
    alike = draw.random() < 0.5
    orders = [torch.randperm(columns, generator=make) for _ in parts]
    ordered = width and isinstance(kind, int) and draw.random() < 0.3
    found = [
        part(draw, make, scheme, kind, rows, columns, zeros, orders[0 if alike else at] if ordered else None)
        for at, rows in enumerate(parts)
    ]
    dtype = draw.choice([torch.float32, torch.float32, torch.float16])
    return columns, parts, gate, draw.random() < 0.5, draw.choice([1, 1, 3, 20, 70]), dtype, scheme, found


@pytest.mark.parametrize("kernels", [False, True])
def test_products_are_those_of_the_dense_numbers(kernels):
    """40 layers, by the readable way and by interpreted kernels: within 1e-3 of the largest output (float16: 4e-3)."""
    for seed in range(40):
        columns, parts, gate, bias, tokens, dtype, scheme, found = drawn(seed)
        with contextlib.ExitStack() as stack:
            if kernels:
                stack.enter_context(interpreting())
                stack.enter_context(nan_outputs())
            layer = Linear(columns, parts, bias=bias)
            layer.format = Grouped(scheme)
            layer.allocate(dtype, torch.device("cpu"))
            make = torch.Generator().manual_seed(seed)
            if bias:
                layer.bias.data.copy_(torch.randn(layer.outputs, generator=make))
            for at, codes in enumerate(found):
                layer.load("weight", at, Held(codes))
            layer.finish()
            x = torch.randn(tokens, columns, generator=make).to(dtype)
            y = layer(x) if gate is None else layer.gated(x, gate)

        dense = torch.cat([codes.dense(torch.float32) for codes in found])
        expected = torch.nn.functional.linear(x.float(), dense, layer.bias.float() if bias else None)
        if gate:
            first, second = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(first) * second
        error = float((y.float() - expected).abs().max() / expected.abs().max())
        assert error < (1e-3 if dtype == torch.float32 else 4e-3), (seed, scheme, parts, gate, tokens, error)


@pytest.mark.parametrize("ordered", [False, True])
def test_large_matrices_of_four_bits_meet_whole_numbers(monkeypatch, ordered):
    """A layer made as if it were large, on Hopper: scales of its groups stand beside each other, and products of 1 and
    3 rows with a gate and of 9 without are those of its numbers; a group that takes its neighbour's scale is 30 %."""
    make, scheme, columns = torch.Generator().manual_seed(5), Scheme("4", 4, 128), 384
    draw, order = random.Random(5), torch.randperm(columns, generator=make) if ordered else None
    found = [part(draw, make, scheme, 4, 40, columns, "differ", order) for _ in range(2)]
    monkeypatch.setattr(packed_limbs, "LARGE", 0)
    monkeypatch.setattr(packed_limbs, "MOST_SPLITS", 0)
    monkeypatch.setattr(packed_limbs, "groups_warps", lambda tensor: True)
    fits = lambda x, weight, **how: weight.beside is not None and x.shape[0] <= 16
    for module in (packed_gemm, packed_gemv):
        monkeypatch.setattr(module, "limbs_fit", fits)
    with interpreting(), nan_outputs():
        layer = Linear(columns, (40, 40))
        layer.format = Grouped(scheme)
        layer.allocate(torch.float16, torch.device("cpu"))
        for at, codes in enumerate(found):
            layer.load("weight", at, Held(codes))
        layer.finish()
        dense = torch.cat([codes.dense(torch.float32) for codes in found])
        assert torch.equal(layer.beside_0.flatten(), layer.packed.scales.t().flatten())
        for tokens, gate in ((1, "silu"), (3, "silu"), (9, None)):
            x = torch.randn(tokens, columns, generator=make).half()
            y = x.float() @ dense.T
            y = y if gate is None else torch.nn.functional.silu(y[:, :40]) * y[:, 40:]
            actual = layer.format.product(x, layer, gate=gate, residual=torch.zeros_like(y).half())
            assert float((actual.float() - y).norm() / y.norm()) < 1e-3
