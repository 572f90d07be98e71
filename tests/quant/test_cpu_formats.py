"""The CPU formats against dequantise-then-matmul in fp32, and which layer gets which format.

Tolerances follow from the arithmetic: bf16 keeps 8 bits, so an input, a scale or a result is off by at most 2^-9 of
itself; errors of K terms add up like their root.
"""

import numpy as np
import pytest
import torch
from attrs import frozen

from tinyserve.checkpoint.dequantize import decode
from tinyserve.layers.linear import Linear
from tinyserve.quant import cpu, cpu_dense, cpu_int4, cpu_int8
from tinyserve.quant.plain import Plain

CPU = torch.device("cpu")
needs_int4 = pytest.mark.skipif(not cpu_int4.available(), reason="no int4 product on this CPU")
needs_int8 = pytest.mark.skipif(not cpu_int8.available(), reason="no exact int8 product on this CPU")


@frozen(eq=False)
class Dense:
    """Plain numbers in a checkpoint."""

    numbers: torch.Tensor
    qtype = None

    @property
    def shape(self):
        return tuple(self.numbers.shape)

    @property
    def nbytes(self):
        return self.numbers.nbytes

    def read(self, dtype):
        return self.numbers.to(dtype)


@frozen(eq=False)
class Blocks:
    """Random GGUF blocks; scales as a trained matrix has them."""

    raw: torch.Tensor
    qtype: str
    shape: tuple

    @property
    def nbytes(self):
        return self.raw.nbytes

    def blocks(self):
        return self.raw

    def read(self, dtype):
        return decode(self.raw, self.qtype, dtype)


def random_blocks(rows, columns, qtype, seed=0):
    rng = np.random.default_rng(seed)
    groups = columns // 32
    codes = rng.integers(0, 256, (rows, groups, 16), dtype=np.uint8)
    numbers = [rng.uniform(0.01, 0.02, (rows, groups))]
    if qtype == "Q4_1":
        numbers.append(-8 * numbers[0] * rng.uniform(0.8, 1.2, (rows, groups)))
    head = np.stack(numbers, -1).astype(np.float16).view(np.uint8).reshape(rows, groups, -1)
    raw = torch.from_numpy(np.concatenate([head, codes], -1).reshape(rows, -1))
    return Blocks(raw, qtype, (rows, columns))


def filled(inputs, stored, fmt, *, bias=None):
    layer = Linear(inputs, tuple(one.shape[0] for one in stored), bias=bias is not None)
    layer.format = fmt
    layer.allocate(torch.float32, CPU)
    for part in reversed(range(len(stored))):
        layer.load("weight", part, stored[part])
        if bias is not None:
            layer.load("bias", part, Dense(bias[layer.rows(part)]))
    layer.finish()
    return layer


def relative_error(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


def unwrapped(fmt):
    """The format for few rows, where there are two."""
    return fmt.few if isinstance(fmt, cpu.ByRows) else fmt


@needs_int4
@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1"])
def test_blocks_are_taken_over_as_they_are(qtype):
    """Breaks if a code lands at another column than the de-quantiser's: codes and scales give back its numbers."""
    stored = random_blocks(48, 96, qtype)
    codes, scales = cpu_int4.unpack(stored.blocks(), qtype)
    scale, zero = scales.float().repeat_interleave(32, dim=1).unbind(-1)

    rebuilt = (codes - 8) * scale + zero

    # d * 15 is at most 0.3; bf16 rounds d and m + 8 d by 2^-9 of themselves
    torch.testing.assert_close(rebuilt, stored.read(torch.float32), atol=0.3 * 2**-8, rtol=0)


@needs_int4
@pytest.mark.parametrize("rows", [0, 1, 3, 37])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int4_equals_dequantise_then_matmul(rows, with_bias):
    """Breaks at the first odd row count, or where two fused parts meet."""
    torch.manual_seed(rows)
    stored = [random_blocks(32, 160, "Q4_1", 1), random_blocks(16, 160, "Q4_0", 2)]
    bias = torch.randn(48) if with_bias else None
    layer = filled(160, stored, cpu_int4.Int4(), bias=bias)
    weight = torch.cat([one.read(torch.float32) for one in stored])
    x = torch.randn(rows, 160)

    y = layer(x)

    assert y.shape == (rows, 48) and y.dtype == torch.float32
    if rows:
        assert relative_error(y, torch.nn.functional.linear(x, weight, bias)) < 0.01


@needs_int8
@pytest.mark.parametrize("rows", [0, 1, 4, 41])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_equals_dequantise_then_matmul(rows, with_bias):
    """Breaks if a step belongs to another row, or at odd counts."""
    torch.manual_seed(rows)
    stored = [Dense(torch.randn(33, 70).bfloat16()), Dense(torch.randn(20, 70).bfloat16() * 5)]
    bias = torch.randn(53) if with_bias else None
    layer = filled(70, stored, cpu_int8.Int8(), bias=bias)
    weight = torch.cat([one.numbers for one in stored]).float()
    x = torch.randn(rows, 70) * torch.logspace(-3, 3, rows)[:, None]

    y = layer(x)

    assert y.shape == (rows, 53)
    if rows:  # a code is off by half a step of max / 127
        assert relative_error(y, torch.nn.functional.linear(x, weight, bias)) < 0.015


@needs_int4
@needs_int8
@pytest.mark.parametrize("rows", [0, 1, cpu.INT4_ROWS, cpu.INT4_ROWS + 1, 37])
@pytest.mark.parametrize("many", [cpu_dense.Dense(), cpu_int8.Int8()])
def test_two_formats_side_by_side_hold_the_same_weight(rows, many):
    """Breaks if one of the two misses a part, or if both keep their numbers under one name."""
    torch.manual_seed(rows)
    stored = [random_blocks(32, 160, "Q4_1", 1), random_blocks(16, 160, "Q4_0", 2)]
    layer = filled(160, stored, cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, many), bias=torch.randn(48))
    weight = torch.cat([one.read(torch.float32) for one in stored])
    x = torch.randn(rows, 160)

    y = layer(x)

    assert y.shape == (rows, 48)
    if rows:
        assert relative_error(y, torch.nn.functional.linear(x, weight, layer.bias)) < 0.015


@needs_int8
def test_two_limbs_keep_fifteen_bits_of_the_input():
    """Breaks above 1e-4 if the second limb is lost: with one limb the error is 4e-3."""
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (64, 256), dtype=torch.int8)
    x = torch.randn(4, 256)

    y = cpu_int8.two_limbs(x, cpu_int8.pack(codes, torch.ones(64)))

    assert relative_error(y, x @ codes.float().T) < 1e-4


@needs_int8
def test_a_row_does_not_depend_on_its_neighbours():
    """Breaks if one scale serves several rows: alone and beside a row of 1e6 the same bits come out."""
    torch.manual_seed(0)
    layer = filled(64, [Dense(torch.randn(32, 64).bfloat16())], cpu_int8.Int8())
    x = torch.randn(4, 64)
    x[2], x[3] = 1e6, float("nan")
    many = torch.cat((x, torch.randn(9, 64)))

    for together, alone in ((layer(x), layer(x[:1])), (layer(many), layer(many[:5]))):
        assert torch.equal(together[0], alone[0])
        assert together[3].isnan().all() and together[:3].isfinite().all()
    assert (layer(torch.zeros(2, 64)) == 0).all()


def test_a_dense_copy_multiplies_like_its_weight():
    """Breaks if packing changes a number: same result as the unpacked weight in the same dtype."""
    torch.manual_seed(0)
    weight = torch.randn(24, 40).to(cpu_dense.dense_dtype())
    x = torch.randn(9, 40)

    y = cpu_dense.product(x, cpu_dense.pack(weight))

    assert relative_error(y, x @ weight.float().T) < 0.01


def test_fp32_is_never_rounded():
    """Breaks if --dtype auto touches an fp32 checkpoint."""
    choose = cpu.cpu_formats()
    layer = Linear(64, (32,))

    assert isinstance(choose("layers.0.mlp.down", layer, (Dense(torch.zeros(32, 64)),)), Plain)


@needs_int4
@needs_int8
def test_each_layer_gets_the_format_of_its_numbers():
    """Breaks if a mixed layer, a narrow one or the head is given to the int4 product."""
    choose = cpu.cpu_formats()
    q4, half = random_blocks(32, 64, "Q4_1"), Dense(torch.zeros(32, 64, dtype=torch.bfloat16))
    layer = Linear(64, (32, 32))

    blocks = choose("layers.0.attn.qkv", layer, (q4, q4))
    assert isinstance(blocks.few, cpu_int4.Int4)
    assert isinstance(unwrapped(choose("layers.0.attn.qkv", layer, (q4, half))), cpu_int8.Int8)
    assert isinstance(unwrapped(choose("layers.0.mlp.down", Linear(64, (24,)), (q4,))), cpu_int8.Int8)
    assert isinstance(choose("head", Linear(64, (32,)), (q4,)), cpu_int8.Int8)


def test_without_fast_products_numbers_stay_plain(monkeypatch):
    """Breaks if an old processor is given a product that it cannot do."""
    monkeypatch.setattr(cpu_int8, "available", lambda: False)
    monkeypatch.setattr(cpu_int4, "available", lambda: False)
    choose = cpu.cpu_formats()

    assert isinstance(choose("head", Linear(64, (32,)), (random_blocks(32, 64, "Q4_1"),)), Plain)


def test_keys_and_values_are_rounded_where_weights_are():
    """bf16 beside packed weights, the type of the activations beside plain ones: fp32 stays what it is."""
    plain, packed = Linear(64, (32,)), Linear(64, (32,))
    packed.format = cpu.ByRows(cpu_int8.Int8(), 6, cpu_dense.Dense())
    assert cpu.cached_dtype(torch.nn.ModuleList([plain]), torch.float32) == torch.float32
    assert cpu.cached_dtype(torch.nn.ModuleList([plain, packed]), torch.float32) == torch.bfloat16
