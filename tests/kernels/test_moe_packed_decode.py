"""The unsorted path of packed experts for few tokens, against the plain one of the numbers that the codes stand for."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tests.kernels.test_moe_packed_gemm import inputs, meta_experts, spare_float32
from tinyserve.kernels import moe_decode
from tinyserve.kernels import moe_packed_decode as module

CASES = [
    # layout, tokens, top_k, experts, hidden, inner, kind, bias
    ("fp8-row", 3, 3, 5, 96, 80, "silu", False),
    ("fp8-128", 2, 2, 3, 256, 128, "silu", False),
    ("int4-128", 1, 2, 4, 1536, 128, "gelu_tanh", False),
    ("int4-32", 2, 2, 3, 77, 36, "silu", True),
    ("int4-32-added", 1, 2, 3, 64, 32, "silu", False),
    ("mxfp4", 2, 3, 4, 160, 96, "clamped_swiglu", True),
]


@pytest.mark.parametrize("layout, tokens, top_k, experts, hidden, inner, kind, bias", CASES)
def test_packed_decode_is_the_plain_one_of_its_numbers(
    device, dtype, layout, tokens, top_k, experts, hidden, inner, kind, bias
):
    """Breaks at 77 columns if one past the end joins, at 3 choices if the fourth place of 4 is not left out."""
    spare_float32(layout, dtype, device)
    given = inputs(layout, tokens, top_k, experts, hidden, inner, bias, dtype=dtype, device=device)
    x, ids, weights, numbers, biases, routing = given
    shared = randn(tokens, hidden, dtype=dtype, device=device, seed=8)
    gate = randn(tokens, 1, dtype=dtype, device=device, seed=9)
    after = {"bias": biases[1], "scales": routing, "shared": shared, "gate": gate}
    after["residual"] = randn(tokens, hidden, dtype=dtype, device=device, seed=10)

    h = module.moe_packed_decode_gate_up(x, weights[0], ids, experts, kind=kind, bias=biases[0])
    out = module.moe_packed_decode_down(h, weights[1], ids, experts, **after)

    assert_close(h, moe_decode.moe_decode_gate_up_reference(x, numbers[0], ids, kind=kind, bias=biases[0]), scale=8)
    assert_close(out, moe_decode.moe_decode_down_reference(h, numbers[1], ids, **after), scale=8)
    assert_close(out, module.moe_packed_decode_down_reference(h, weights[1], ids, experts, **after), scale=8)
    assert torch.equal(out, module.moe_packed_decode_down(h, weights[1], ids, experts, **after))


def test_scales_may_stand_before_the_activation(device, dtype):
    x, ids, weights, numbers, _, routing = inputs("int8-row", 3, 2, 4, 64, 48, False, dtype=dtype, device=device)

    h = module.moe_packed_decode_gate_up(x, weights[0], ids, 4, kind="silu", scales=routing)

    expected = moe_decode.moe_decode_gate_up_reference(x, numbers[0], ids, kind="silu", scales=routing)
    assert_close(h, expected, scale=8)
    assert_close(
        module.moe_packed_decode_down(h, weights[1], ids, 4),
        moe_decode.moe_decode_down_reference(h, numbers[1], ids),
        scale=8,
    )


def test_refusals(device):
    x, ids, weights, _, _, _ = inputs("fp8-row", 2, 2, 3, 32, 16, False, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="unknown kind"):
        module.moe_packed_decode_gate_up(x, weights[0], ids, 3, kind="swish")
    with pytest.raises(ValueError, match="does not fit 3 experts"):
        module.moe_packed_decode_gate_up(x, weights[1], ids, 3, kind="silu")
    h = module.moe_packed_decode_gate_up(x, weights[0], ids, 3, kind="silu")
    with pytest.raises(ValueError, match=r"shared must be \[2, 32\]"):
        module.moe_packed_decode_down(h, weights[1], ids, 3, shared=torch.zeros(2, 16, device=device))


def compile_cases():
    def gate_up():
        x, ids = torch.empty(4, 2880, dtype=torch.bfloat16), torch.empty(4, 4, dtype=torch.int32)
        weight, bias = meta_experts("mxfp4", 32, 2 * 2880, 2880), torch.empty(32, 2 * 2880, dtype=torch.bfloat16)
        module.moe_packed_decode_gate_up(x, weight, ids, 32, kind="clamped_swiglu", bias=bias)

    def down():
        h, ids = torch.empty(8, 768, dtype=torch.bfloat16), torch.empty(1, 8, dtype=torch.int32)
        weight, scales = meta_experts("int4-128", 128, 2048, 768), torch.empty(1, 8)
        module.moe_packed_decode_down(h, weight, ids, 128, scales=scales)

    return gate_up, down
