"""Codes in two planes: their order, their numbers, and products with a few rows."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import launch
from tinyserve.kernels.packed_planes import Planes, in_planes, packed_planes, packed_planes_reference, planes_dense
from tinyserve.kernels.packed_planes import planes_dense_reference as dense_reference
from tinyserve.kernels.skinny_gemm import skinny_gemm_reference

# bits, width, whether a number is added after the scale, outer scales
LAYOUTS = {
    "Q6_K": (6, 16, False, 1),
    "Q5_K": (5, 32, True, 0),
    "Q3_K": (3, 16, False, 0),
    "Q2_K": (2, 16, True, 2),
    "IQ4_NL": (4, 32, False, 0),
}
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def weight_of(name, rows, columns, *, device):
    """A random matrix, and its numbers in float32, computed without it."""
    bits, width, adds, nested = LAYOUTS[name]
    make = torch.Generator().manual_seed(rows)
    groups = -(-columns // width)
    with torch.device("cpu"):
        codes = torch.randint(0, 2**bits, (rows, columns), generator=make, dtype=torch.uint8)
        spread = 4 * 2.0**-bits * columns**-0.5
        scales = randn(rows, groups, dtype=torch.float16, device="cpu", spread=spread, seed=2)
        added = randn(rows, groups, dtype=torch.float16, device="cpu", spread=spread, seed=3) if adds else None
        middle = 0 if adds or name == "IQ4_NL" else 2 ** (bits - 1)
        group, outer, table = torch.arange(columns) // width, None, None
        numbers = codes.float() - middle
        wide = [None if one is None else one.float() for one in (scales, added)]
        if nested:
            outer = randn(rows, -(-groups // 16), nested, dtype=torch.float16, device="cpu", spread=spread / 30, seed=4)
            scales = torch.randint(0, 256, (rows, groups), generator=make, dtype=torch.uint8)
            scales, added = scales if nested == 2 else scales.view(torch.int8), None
            each = outer.float()[:, torch.arange(groups) // 16]
            inner = scales.int() if nested == 1 else scales.int() & 15
            wide = [inner.float() * each[..., 0], None if nested == 1 else -(scales.int() >> 4).float() * each[..., -1]]
        if name == "IQ4_NL":
            table = torch.tensor(TABLE, dtype=torch.float32) / 32
            numbers = table[codes.int()]
        dense = numbers * wide[0][:, group]
        dense = dense if wide[1] is None else dense + wide[1][:, group]
        given = [*in_planes(codes, bits, width), scales, added, columns, bits, width, middle, outer, table]
    return Planes(*(one.to(device) if isinstance(one, torch.Tensor) else one for one in given)), dense


def test_words_hold_their_parts_of_a_tile():
    """Column 5 of a tile of 16: bits 4 to 7 of low word 1, bits 4 and 5 of high word 1."""
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 5] = 0b110101

    low, high = in_planes(codes, 6, 16)

    assert low.tolist() == [[0, 0b0101 << 4, 0, 0, 0, 0, 0, 0]] and high.tolist() == [[0, 0b11 << 4, 0, 0]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers(device, dtype, name):
    """To the last bit of float32, and of chosen rows; 1040 columns end within a block."""
    weight, dense = weight_of(name, 5, 1040, device=device)

    assert torch.equal(dense_reference(weight, torch.float32).cpu(), dense)
    assert_close(planes_dense(weight, dtype), dense.to(device).to(dtype))
    chosen = torch.tensor([4, 0, 4], device=device)
    assert_close(planes_dense(weight.take(chosen), dtype), dense.to(device).to(dtype)[chosen])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_products(device, dtype, name, tokens):
    """37 rows and 160 columns end within a strip and a step; at 70 tokens a second tile is there."""
    weight, dense = weight_of(name, 37, 160, device=device)
    x, bias = randn(tokens, 160, dtype=dtype, device=device), randn(37, dtype=dtype, device=device, seed=3)

    actual = packed_planes(gapped(x) if tokens > 1 else x, weight, bias)

    expected = skinny_gemm_reference(x, dense.to(device), bias)
    assert_close(actual, expected, scale=4)
    assert_close(packed_planes_reference(x, weight, bias), expected, scale=4)
    assert packed_planes(x[:0], weight).shape == (0, 37)


def test_parts_add_up(device, monkeypatch):
    """Four splits of 1008 columns, the last one short; the bias joins once. One row has one part."""
    chosen = {"SPLITS": 4}
    monkeypatch.setattr(launch, "tuned_rows", lambda name: {"packed_planes": [{"when": {}, "use": chosen}]})
    weight, dense = weight_of("Q6_K", 40, 1008, device=device)
    x, bias = (randn(*shape, dtype=torch.float16, device=device) for shape in ((20, 1008), (40,)))

    parts, one = (packed_planes(rows, weight, bias, parts=True) for rows in (x, x[:1]))

    assert parts.shape == (4, 20, 40) and one.shape == (1, 1, 40) and parts.dtype == torch.float32
    expected = skinny_gemm_reference(x, dense.to(device), bias, parts=True)[0]
    assert_close(parts.sum(0), expected, scale=100)
    assert_close(one[0], expected[:1], scale=100)


def test_shapes_that_do_not_fit_are_refused(device):
    weight, _ = weight_of("Q5_K", 8, 64, device=device)
    with pytest.raises(ValueError, match="packed_planes"):
        packed_planes(randn(2, 96, dtype=torch.float16, device=device), weight)


@pytest.mark.gpu
def test_more_than_2_to_the_31_words(device):
    """Breaks at row 524288 of 4096 words, for one row of x and for several: the offset 2**31 wraps in 32 bits."""
    rows, columns = 524290, 16384
    low = torch.zeros(rows, columns // 4, dtype=torch.int16, device=device)
    high = torch.zeros(rows, columns // 8, dtype=torch.int16, device=device)
    scales = torch.zeros(rows, columns // 16, dtype=torch.float16, device=device)
    low[-1], high[-1], scales[-1] = 0x1111, -0x5556, 0.5  # codes of 0b100001, which is 33
    weight = Planes(low, high, scales, None, columns, 6, 16, 32)

    for tokens in (1, 3):
        y = packed_planes(torch.ones(tokens, columns, dtype=torch.float16, device=device), weight)
        assert y[:, -1].tolist() == [8192] * tokens and float(y[:, :-1].abs().max()) == 0


def compile_cases():
    for name, tokens, parts in (("Q6_K", 1, False), ("Q5_K", 16, True)):
        bits, width, adds, nested = LAYOUTS[name]
        rows, columns, low = 4096, 4096, 4
        words = [torch.empty(rows, columns * each // 16, dtype=torch.int16) for each in (low, bits - low)]
        scales = torch.empty(rows, columns // width, dtype=torch.int8 if nested else torch.float16)
        outer = torch.empty(rows, columns // width // 16, nested, dtype=torch.float16) if nested else None
        added, middle = (scales, 0) if adds else (None, 32)
        weight = Planes(*words, scales, added, columns, bits, width, middle, outer)
        x = torch.empty(tokens, columns, dtype=torch.bfloat16)
        yield lambda x=x, w=weight, p=parts: packed_planes(x, w, parts=p)
