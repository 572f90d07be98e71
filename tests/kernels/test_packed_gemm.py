"""A few rows times packed codes, whole and in parts, against plain numbers."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.harness import assert_close, compile_only, gapped, local_memory, randn
from tests.kernels.test_packed import LAYOUTS, meta_weight, weight_of
from tinyserve.kernels import launch
from tinyserve.kernels.packed_gemm import _of_left, packed_gemm, packed_gemm_reference
from tinyserve.kernels.skinny_gemm import skinny_gemm_reference


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_packed_gemm_is_the_product_of_its_numbers(device, dtype, name, gate):
    """Breaks at 37 x 77 if a row or a column past the end joins a sum, at 70 tokens if the second tile is missed."""
    for tokens, rows, width in ((3, 37, 77), (70, 65, 384)) if gate is None else ((17, 33, 300),):
        weight, dense = weight_of(name, rows * (2 if gate else 1), width, device=device)
        bias = randn(len(dense), dtype=dtype, device=device, seed=3) if rows != 65 else None
        x = randn(tokens, width, dtype=dtype, device=device)

        actual = packed_gemm(gapped(x), weight, bias, gate=gate)

        expected = skinny_gemm_reference(x, dense.to(device), bias, gate=gate)
        assert_close(actual, expected, scale=4)
        assert_close(packed_gemm_reference(x, weight, bias, gate=gate), expected, scale=4)


@pytest.mark.parametrize("name", ["int4-128", "fp8-row"])
def test_parts_add_up_to_the_product(device, monkeypatch, name):
    """Four splits of 1000 columns, the last one short; the bias joins once. No tokens, no launch. (20 tokens: up to 16
    go to packed_strips on a GPU, which gives one part.)"""
    chosen = {"SPLITS": 4, "BLOCK_K": 128}
    monkeypatch.setattr(launch, "tuned_rows", lambda name: {"packed_gemm": [{"when": {}, "use": chosen}]})
    weight, dense = weight_of(name, 40, 1000, device=device)
    x, bias = (randn(*shape, dtype=torch.float16, device=device) for shape in ((20, 1000), (40,)))

    parts = packed_gemm(x, weight, bias, parts=True)

    assert parts.shape == (4, 20, 40) and parts.dtype == torch.float32
    assert_close(parts.sum(0), skinny_gemm_reference(x, dense.to(device), bias, parts=True)[0], scale=100)
    assert torch.equal(parts, packed_gemm(x, weight, bias, parts=True))
    assert packed_gemm(x[:0], weight, bias).shape == (0, 40)


@pytest.mark.parametrize("name", ["int4-128", "int4-128-zeros"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_numbers_scaled_before_the_product_give_the_product(device, monkeypatch, name, gate):
    """As many tokens take it: breaks if a scale meets another row, or codes are rounded twice (bfloat16 on a GPU)."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    chosen = {"FOLD": 1, "BLOCK_M": 128, "BLOCK_N": 64 if gate else 128, "BLOCK_K": 128, "STAGES": 2, "num_warps": 4}
    monkeypatch.setattr(launch, "tuned_rows", lambda name: {"packed_gemm": [{"when": {}, "use": chosen}]})
    weight, dense = weight_of(name, 70, 512, device=device)
    x = randn(130, 512, dtype=dtype, device=device)

    actual = packed_gemm(x, weight, gate=gate)

    rounded = dense.to(device).to(dtype) if device.type != "cpu" else dense
    assert_close(actual, skinny_gemm_reference(x, rounded, gate=gate), scale=1 if device.type != "cpu" else 4)


@triton.jit
def _left_kernel(values, out, first, limit, start, G, K, ROWS: tl.constexpr, WARPS: tl.constexpr):
    found = _of_left(values, first, limit, start, G, K, 128, 32, ROWS, WARPS)
    tl.store(out + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :], found)


@pytest.mark.parametrize(("rows", "warps"), [(128, 8), (256, 8), (64, 4)])
def test_values_loaded_as_threads_need_them_stand_by_their_rows(device, rows, warps):
    """Breaks if a row has another's scale; rows past the last one have its."""
    values = randn(rows - 20, 4, dtype=torch.float16, device=device)
    out = torch.zeros(rows, 32, device=device)

    _left_kernel[(1,)](values, out, 7, rows - 20, 256, 4, 512, ROWS=rows, WARPS=warps, num_warps=warps)

    which = (7 + torch.arange(rows, device=device)).clamp(max=rows - 21)
    assert torch.equal(out, values[which, 2].float()[:, None].expand(rows, 32))


def test_float32_with_a_gate_stays_in_registers():
    """Two sums of float32 took 10 KB of local memory a thread, which the device must have for all of its threads."""
    with compile_only("sm_90") as built:
        packed_gemm(torch.empty(17, 384), meta_weight("int8-row", 66, 384), gate="silu")

    assert max(local_memory(one) for one in built) <= 512


def compile_cases():
    for name, tokens, rows, width, gate, parts in [
        ("int4-128-zeros", 130, 16384, 4096, "silu", False),
        ("int4-32-added", 16, 4096, 4096, "silu", False),
        ("fp8-row", 64, 4096, 14336, None, True),
    ]:
        weight = meta_weight(name, rows * (2 if gate else 1), width)
        x = torch.empty(tokens, width, dtype=torch.bfloat16)
        yield lambda x=x, w=weight, g=gate, p=parts: packed_gemm(x, w, gate=g, parts=p)
