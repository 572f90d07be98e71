"""The unsorted path for few tokens, against its reference and against the grouped products."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tests.kernels.test_moe_gemm import CASES, by_hand, inputs
from tinyserve.kernels import moe_decode as module


@pytest.mark.parametrize("tokens, top_k, experts, hidden, inner, kind, bias, scales", CASES[:3])
def test_decode_is_its_reference_and_the_sum_over_slots(
    device, dtype, tokens, top_k, experts, hidden, inner, kind, bias, scales
):
    x, ids, weights, biases, routing = inputs(dtype, device, tokens, top_k, experts, hidden, inner, bias, scales)
    shared = randn(tokens, hidden, dtype=dtype, device=device, seed=8)
    gate = randn(tokens, 1, dtype=dtype, device=device, seed=9)
    stream = randn(tokens, hidden, dtype=dtype, device=device, seed=10)

    def call(suffix=""):
        gate_up, down = (getattr(module, name + suffix) for name in ("moe_decode_gate_up", "moe_decode_down"))
        h = gate_up(x, weights[0], ids, kind=kind, bias=biases[0])
        return down(h, weights[1], ids, bias=biases[1], scales=routing, shared=shared, gate=gate, residual=stream)

    out = call()
    slots = by_hand(x, ids, weights, biases, routing, kind)
    summed = (slots.sum(dim=1) + gate.float().sigmoid() * shared.float() + stream.float()).to(dtype)

    assert_close(out, call("_reference"), scale=4)
    assert_close(out, summed, scale=8)
    assert torch.equal(out, call())


def test_scales_may_stand_before_the_activation(device, dtype):
    x, ids, weights, _, routing = inputs(dtype, device, 3, 2, 4, 64, 48, False, True)

    h = module.moe_decode_gate_up(x, weights[0], ids, kind="silu", scales=routing)

    assert_close(h, module.moe_decode_gate_up_reference(x, weights[0], ids, kind="silu", scales=routing), scale=4)
    assert_close(
        module.moe_decode_down(h, weights[1], ids), module.moe_decode_down_reference(h, weights[1], ids), scale=4
    )


def test_refusals(device):
    x, ids, weights, _, _ = inputs(torch.float32, device, 2, 2, 3, 32, 16, False, False)
    with pytest.raises(ValueError, match="unknown kind"):
        module.moe_decode_gate_up(x, weights[0], ids, kind="swish")
    h = module.moe_decode_gate_up(x, weights[0], ids, kind="silu")
    with pytest.raises(ValueError, match=r"shared must be \[2, 32\]"):
        module.moe_decode_down(h, weights[1], ids, shared=torch.zeros(2, 16, device=device))
    with pytest.raises(ValueError, match=r"residual must be \[2, 32\]"):
        module.moe_decode_down(h, weights[1], ids, residual=torch.zeros(2, 16, device=device))


def compile_cases():
    def case(dtype, tokens, experts, hidden, inner, top_k, kind, bias):
        x, ids = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens, top_k, dtype=torch.int32)
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        weights = [torch.empty(shape, dtype=dtype) for shape in shapes]
        biases = [torch.empty(shape[:2], dtype=dtype) if bias else None for shape in shapes]
        h = module.moe_decode_gate_up(x, weights[0], ids, kind=kind, bias=biases[0])
        options = {"bias": biases[1], "scales": torch.empty(tokens, top_k)}
        if not bias:
            options |= {"shared": torch.empty(tokens, hidden, dtype=dtype), "gate": torch.empty(tokens, 1, dtype=dtype)}
        module.moe_decode_down(h, weights[1], ids, **options)

    for arguments in (
        (torch.bfloat16, 1, 128, 2048, 768, 8, "silu", False),
        (torch.float32, 4, 32, 2880, 2880, 4, "clamped_swiglu", True),
    ):
        yield lambda arguments=arguments: case(*arguments)
