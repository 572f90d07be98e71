"""Quantised products against their reference: every width of code, every way of sharing scales."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import launch
from tinyserve.kernels.grouped_gemm import grouped_dense, grouped_dense_reference, grouped_gemm, grouped_gemm_reference

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# bits, kind, width, zeros, act-order
LAYOUTS = {
    "int4-128": (4, "int", 128, True, False),
    "int4-32": (4, "int", 32, True, False),
    "int4-act-order": (4, "int", 32, True, True),
    "int2-16": (2, "int", 16, True, False),
    "int8-row": (8, "int", 0, False, False),
    "uint8-32": (8, "int", 32, True, False),
    "fp8-row": (8, "e4m3", 0, False, False),
    "fp8-128": (8, "e4m3", 128, False, False),
    "nvfp4": (4, "e2m1", 16, False, False),
    "nf4": (4, "table", 64, False, False),
}


def arguments(name, tokens, rows, columns, *, dtype, device, bias=False):
    bits, kind, width, zeros, order = LAYOUTS[name]
    make = torch.Generator().manual_seed(rows)
    shape, count = (rows, -(-columns * bits // 8)), -(-columns // width) if width else 1
    if device == "meta":
        codes, groups = torch.empty(shape, dtype=torch.uint8), torch.empty(columns, dtype=torch.int64)
    else:
        codes = torch.randint(0, 256, shape, generator=make, dtype=torch.int32).to(torch.uint8)
        groups = (torch.arange(columns) // max(width, 1))[torch.randperm(columns, generator=make)]
    if kind == "e4m3":
        codes = torch.where(codes & 127 == 127, torch.zeros_like(codes), codes).view(torch.float8_e4m3fn)  # no NaN
    elif name == "int8-row":
        codes = codes.view(torch.int8)
    spread = {"e4m3": 0.01, "int": 4 * 2.0**-bits, "e2m1": 0.3, "table": 1.0}[kind] * columns**-0.5
    scales = randn(rows, count, dtype=torch.float16, device=device, spread=spread, seed=2)
    middle = torch.full((rows, count), 2 ** (bits - 1), dtype=torch.uint8)
    middle[::2] -= 1
    table = {"e2m1": torch.tensor(E2M1, device="cpu"), "table": torch.linspace(-1, 1, 16, device="cpu")}.get(kind)
    layout = {"bits": bits, "width": width, "kind": kind, "table": None if table is None else table.to(device)}
    layout["groups"] = groups.to(device) if order else None
    given = (codes.to(device), scales, middle.to(device) if zeros else None)
    x = randn(tokens, columns, dtype=dtype, device=device)
    return x, given, randn(rows, dtype=dtype, device=device, seed=3) if bias else None, layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_product_is_its_reference(device, dtype, name):
    """37 x 77 is no multiple of anything: breaks if a column past the end joins a sum, or a code takes a neighbour's
    scale."""
    for tokens, rows, columns in ((3, 37, 77), (17, 65, 300)):
        x, given, bias, layout = arguments(name, tokens, rows, columns, dtype=dtype, device=device, bias=rows == 37)

        actual = grouped_gemm(gapped(x), *given, bias, **layout)

        assert_close(actual, grouped_gemm_reference(x, *given, bias, **layout), scale=4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_those_of_the_reference(device, dtype, name):
    """To the last bit of float32; fp8 and fp4 through all of their codes."""
    _, given, _, layout = arguments(name, 1, 67, 259, dtype=dtype, device=device)

    actual = grouped_dense(*given, columns=259, dtype=dtype, **layout)

    assert_close(actual, grouped_dense_reference(*given, columns=259, dtype=dtype, **layout), scale=0.1)


def test_splits_add_up(device, monkeypatch):
    """Four splits of 1000 columns, the last one short; the bias joins once. No tokens, no launch."""
    chosen = {"SPLITS": 4, "BLOCK_K": 64}
    monkeypatch.setattr(launch, "tuned_rows", lambda name: {"grouped_gemm": [{"when": {}, "use": chosen}]})
    x, given, bias, layout = arguments("int4-32", 5, 40, 1000, dtype=torch.float16, device=device, bias=True)

    y = grouped_gemm(x, *given, bias, **layout)

    assert_close(y, grouped_gemm_reference(x, *given, bias, **layout), scale=4)
    assert torch.equal(y, grouped_gemm(x, *given, bias, **layout))
    assert grouped_gemm(x[:0], *given, bias, **layout).shape == (0, 40)


@pytest.mark.parametrize(
    "change, message",
    [({"bits": 3}, "3 bits"), ({"kind": "e5m2"}, "e5m2"), ({"width": 8}, "groups of 8"), ({"table": 1}, "table True")],
)
def test_refusals(device, change, message):
    x, given, _, layout = arguments("int4-32", 2, 8, 64, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match=message):
        grouped_gemm(x, *given, **layout | change)


def compile_cases():
    for name, tokens in (("int4-128", 4), ("int4-act-order", 40), ("fp8-128", 16), ("nf4", 8)):
        x, given, _, layout = arguments(name, tokens, 6144, 4096, dtype=torch.bfloat16, device="meta")
        yield lambda x=x, given=given, layout=layout: grouped_gemm(x, *given, **layout)
    _, given, _, layout = arguments("nvfp4", 1, 6144, 4096, dtype=torch.bfloat16, device="meta")
    yield lambda: grouped_dense(*given, columns=4096, dtype=torch.bfloat16, **layout)
