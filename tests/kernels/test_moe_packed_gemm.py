"""Grouped products of packed experts, against the plain ones of the numbers that the codes stand for."""

import pytest
import torch

from tests.kernels.harness import assert_close, compile_only, gapped, local_memory, randn
from tests.kernels.test_moe_align import random_ids
from tests.kernels.test_packed import meta_weight, weight_of
from tinyserve.kernels import moe_gemm
from tinyserve.kernels import moe_packed_gemm as module
from tinyserve.kernels.moe_align import moe_align
from tinyserve.kernels.packed import E2M1, Packed, packed_dense, tiled

CASES = [
    # layout, tokens, top_k, experts, hidden, inner, kind, bias
    ("fp8-row", 9, 3, 5, 96, 80, "silu", False),
    ("fp8-128", 40, 2, 3, 256, 128, "silu", False),
    ("int4-128", 7, 2, 4, 256, 128, "gelu_tanh", False),
    ("int4-32", 9, 2, 3, 77, 36, "silu", True),
    ("int8-row", 5, 2, 3, 64, 48, "silu", False),
    ("mxfp4", 9, 3, 4, 160, 96, "clamped_swiglu", True),
    ("mxfp4", 40, 1, 2, 128, 256, "clamped_swiglu", True),
]


def mxfp4(rows, columns, *, device, seed=1):
    """A Packed of random codes of four bits with a power of two for each 32, and its numbers, computed without it."""
    make = torch.Generator().manual_seed(rows + seed)
    with torch.device("cpu"):
        codes = torch.randint(0, 16, (rows, columns), generator=make).to(torch.uint8)
        exponents = torch.randint(114, 121, (rows, -(-columns // 32)), generator=make)
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])[codes.int()]
        dense = numbers * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)[:, :columns]
        padded = torch.zeros(rows, -(-columns // 128) * 4, dtype=torch.uint8)
        padded[:, : exponents.shape[1]] = exponents
    scales = padded.view(torch.int32)
    return Packed(tiled(codes, 4, 128).to(device), scales.to(device), None, columns, 4, 32, "e2m1"), dense


def experts_of(name, experts, rows, columns, *, device, seed=1):
    """Packed experts, and their numbers [E, rows, columns] in float32."""
    make = mxfp4 if name == "mxfp4" else lambda *shape, **given: weight_of(name, *shape, **given)
    weight, dense = make(experts * rows, columns, device=device, seed=seed)
    return weight, dense.view(experts, rows, columns).to(device)


def inputs(layout, tokens, top_k, experts, hidden, inner, bias, *, dtype, device):
    """x, ids, packed weights, their numbers, biases, routing weights."""
    x = gapped(randn(tokens, hidden, dtype=dtype, device=device, seed=1))
    ids = random_ids(tokens, top_k, experts)
    ids[:, 0] = 1 % experts  # one busy expert; another one, most likely, without a token
    shapes = (2 * inner, hidden), (hidden, inner)
    weights, numbers = zip(
        *(experts_of(layout, experts, *shape, device=device, seed=seed) for seed, shape in enumerate(shapes)),
        strict=True,
    )
    biases = [randn(experts, shape[0], dtype=dtype, device=device, seed=4) if bias else None for shape in shapes]
    routing = randn(tokens, top_k, dtype=torch.float32, device=device, seed=6)
    return x, ids.to(device), weights, numbers, biases, routing


def spare_float32(layout, dtype, device):
    """Products of float32 have no matrix unit and take long to compile: on a GPU one layout stands for all."""
    if device.type != "cpu" and dtype == torch.float32 and layout != "fp8-row":
        pytest.skip("the interpreter has seen it")


@pytest.mark.parametrize("layout, tokens, top_k, experts, hidden, inner, kind, bias", CASES)
def test_packed_products_are_those_of_their_numbers(
    device, dtype, layout, tokens, top_k, experts, hidden, inner, kind, bias
):
    """Breaks at 77 columns if one past the end joins a sum, at 40 tokens if the second tile of an expert is missed."""
    spare_float32(layout, dtype, device)
    given = inputs(layout, tokens, top_k, experts, hidden, inner, bias, dtype=dtype, device=device)
    x, ids, weights, numbers, biases, routing = given
    order, starts = moe_align(ids, experts)
    first = {"top_k": top_k, "kind": kind, "bias": biases[0]}
    second = {"top_k": top_k, "bias": biases[1], "scales": routing}

    h = module.moe_packed_gate_up(x, weights[0], order, starts, **first)
    out = module.moe_packed_down(h, weights[1], order, starts, **second)
    parts = module.moe_packed_down(h, weights[1], order, starts, **second, parts=True)

    assert_close(h, moe_gemm.moe_gate_up_reference(x, numbers[0], order, starts, **first), scale=8)
    assert_close(h, module.moe_packed_gate_up_reference(x, weights[0], order, starts, **first), scale=8)
    assert_close(out, moe_gemm.moe_down_reference(h, numbers[1], order, starts, **second), scale=8)
    assert_close(parts.transpose(0, 1).to(dtype), out, scale=2)
    assert torch.equal(out, module.moe_packed_down(h, weights[1], order, starts, **second))


def test_scales_may_stand_before_the_activation(device, dtype):
    x, ids, weights, numbers, _, routing = inputs("fp8-row", 6, 1, 3, 32, 16, False, dtype=dtype, device=device)
    order, starts = moe_align(ids, 3)
    given = {"top_k": 1, "kind": "silu", "scales": routing}

    h = module.moe_packed_gate_up(x, weights[0], order, starts, **given)

    assert_close(h, moe_gemm.moe_gate_up_reference(x, numbers[0], order, starts, **given), scale=8)
    assert module.moe_packed_gate_up(x[:0], weights[0], order[:0], starts * 0, top_k=1, kind="silu").shape == (0, 16)


def test_numbers_of_mxfp4():
    """Every code at every place of a word, to the bit: codes 7 and 15 are 6 and -6; groups of a tile differ."""
    weight, dense = mxfp4(3, 200, device="cpu")

    assert torch.equal(packed_dense(weight, torch.float32), dense)
    assert torch.equal(module.Numbers(weight, 3)[1], dense[1:2])


def lop3_and_or(word, factor, shift, mask, kind):
    """What the PTX of `four_e2m1` computes for two words in a register of 32 bits, before the factor of the group."""
    found = []
    for left in (12, 8, 4, 0):
        moved = word << left & 0xFFFFFFFF
        bits = moved & 0x80008000 | moved >> shift & mask
        halves = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.int16).view(kind)
        found.append((halves.float() * factor).tolist())
    return found


def test_the_instructions_of_mxfp4_by_hand():
    """All pairs of words that hold the 16 codes: the masks let no bit of the neighbour through."""
    table = [*E2M1, *(-number for number in E2M1)]
    for low in range(0, 65536, 4369):
        for high in (0x0000, 0xFFFF, 0x1234, 0xFEDC):
            for factor, shift, mask, kind in (
                (2.0**126, 6, 0x01C001C0, torch.bfloat16),
                (2.0**14, 3, 0x0E000E00, torch.float16),
            ):
                found = lop3_and_or(high << 16 | low, factor, shift, mask, kind)
                expected = [[table[word >> 4 * place & 15] for word in (low, high)] for place in range(4)]
                assert found == expected


def test_refusals(device):
    x, ids, weights, _, _, _ = inputs("mxfp4", 4, 2, 3, 64, 32, False, dtype=torch.float32, device=device)
    order, starts = moe_align(ids, 3)
    options = {"top_k": 2, "kind": "silu"}
    for message, arguments, changes in (
        ("unknown kind 'swish'", (x, weights[0]), {"kind": "swish"}),
        ("does not fit 3 experts", (x[:, :32], weights[0]), {}),
        (r"bias must be \[3, 64\]", (x, weights[0]), {"bias": torch.zeros(3, 32, device=device)}),
        ("8 slots, expected 12", (x, weights[0]), {"top_k": 3}),
    ):
        with pytest.raises(ValueError, match=message):
            module.moe_packed_gate_up(*arguments, order, starts, **options | changes)


def test_float32_with_a_gate_stays_in_registers():
    """Larger steps took 4 to 8 KB of local memory a thread, which the device must have for all of its threads."""
    with compile_only("sm_90") as built:
        order, starts = torch.empty(512, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
        for layout in ("fp8-row", "mxfp4"):
            weight = meta_experts(layout, 4, 2 * 96, 256)
            module.moe_packed_gate_up(torch.empty(256, 256), weight, order, starts, top_k=2, kind="silu")

    assert max(local_memory(one) for one in built) <= 512


def meta_experts(name, experts, rows, columns):
    """Packed experts without numbers."""
    if name != "mxfp4":
        return meta_weight(name, experts * rows, columns)
    tiles = -(-columns // 128)
    codes = torch.empty(experts * rows, 32 * tiles, dtype=torch.int16)
    return Packed(codes, torch.empty(experts * rows, tiles, dtype=torch.int32), None, columns, 4, 32, "e2m1")


def compile_cases():
    def gate_up():
        x, order = torch.empty(128, 2048, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.int32)
        weight, starts = meta_experts("fp8-row", 128, 2 * 768, 2048), torch.empty(129, dtype=torch.int32)
        module.moe_packed_gate_up(x, weight, order, starts, top_k=8, kind="silu")

    def down():
        h, order = torch.empty(256, 2880, dtype=torch.bfloat16), torch.empty(256, dtype=torch.int32)
        weight, starts = meta_experts("mxfp4", 32, 2880, 2880), torch.empty(33, dtype=torch.int32)
        bias, scales = torch.empty(32, 2880, dtype=torch.bfloat16), torch.empty(64, 4)
        module.moe_packed_down(h, weight, order, starts, top_k=4, bias=bias, scales=scales)

    return gate_up, down
