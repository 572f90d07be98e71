"""Grouped products: kernel against reference, and both against one expert after the other."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tests.kernels.test_moe_align import random_ids
from tinyserve.kernels import moe_gemm as module
from tinyserve.kernels.moe_align import moe_align

CASES = [
    # tokens, top_k, experts, hidden, inner, kind, bias, scales
    (0, 2, 4, 16, 16, "silu", False, False),
    (1, 2, 4, 40, 24, "silu", False, True),
    (9, 3, 5, 96, 80, "clamped_swiglu", True, True),
    (70, 2, 3, 64, 48, "gelu_tanh", False, False),
]


def inputs(dtype, device, tokens, top_k, experts, hidden, inner, bias, scales):
    """x, ids, gate-up and down weights, their biases and the routing weights; None where there are none."""

    def one(*shape, seed, spread=1.0):
        return randn(*shape, dtype=dtype, device=device, seed=seed, spread=spread)

    x = gapped(one(tokens, hidden, seed=1))
    gate_up = one(experts, 2 * inner, hidden, seed=2, spread=hidden**-0.5)
    down = one(experts, hidden, inner, seed=3, spread=inner**-0.5)
    biases = (one(experts, 2 * inner, seed=4), one(experts, hidden, seed=5)) if bias else (None, None)
    weights = randn(tokens, top_k, dtype=torch.float32, device=device, seed=6) if scales else None
    ids = random_ids(tokens, top_k, experts)
    ids[:, 0] = 1 % experts  # one busy expert; another one, most likely, without a token
    return x, ids.to(device), (gate_up, down), biases, weights


def by_hand(x, ids, weights, biases, scales, kind):
    """[T, K, H] float32 on x's device of down(act(gate) * up), slot by slot; scales on the results."""
    out = torch.zeros(*ids.shape, x.shape[1], device=x.device)
    for token, choices in enumerate(ids.tolist()):
        for place, expert in enumerate(choices):
            both = weights[0][expert].float() @ x[token].float()
            if biases[0] is not None:
                both += biases[0][expert].float()
            h = module.gated_reference(*both.chunk(2), kind).to(x.dtype).float()
            out[token, place] = weights[1][expert].float() @ h
            if biases[1] is not None:
                out[token, place] += biases[1][expert].float()
            if scales is not None:
                out[token, place] *= scales[token, place]
    return out


@pytest.mark.parametrize("implementation", ["", "_reference"])
@pytest.mark.parametrize("tokens, top_k, experts, hidden, inner, kind, bias, scales", CASES)
def test_grouped_products_are_those_of_each_slot(
    device, dtype, implementation, tokens, top_k, experts, hidden, inner, kind, bias, scales
):
    """Parts are float32 and never rounded: they differ from the reference's on the same h by 8e-5 at most.

    From what is computed by hand they differ by more, because h is rounded there too: another order of summation may
    send it to the next number of its type.
    """
    x, ids, weights, biases, routing = inputs(dtype, device, tokens, top_k, experts, hidden, inner, bias, scales)
    order, starts = moe_align(ids, experts)
    gate_up, down = (getattr(module, name + implementation) for name in ("moe_gate_up", "moe_down"))
    given = {"top_k": top_k, "bias": biases[1], "scales": routing}

    h = gate_up(x, weights[0], order, starts, top_k=top_k, kind=kind, bias=biases[0])
    out = down(h, weights[1], order, starts, **given)
    parts = down(h, weights[1], order, starts, **given, parts=True)

    expected = by_hand(x, ids, weights, biases, routing, kind)
    assert_close(out, expected.to(dtype), scale=4)
    assert torch.equal(out, down(h, weights[1], order, starts, **given))
    assert_close(parts, module.moe_down_reference(h, weights[1], order, starts, **given, parts=True), scale=4)
    assert_close(parts.transpose(0, 1).to(dtype), out)


def test_scales_may_stand_before_the_activation(device, dtype):
    """Llama-4: silu(0.5 g) * 0.5 u, not 0.5 * silu(g) * u."""
    x, ids, weights, _, routing = inputs(dtype, device, 6, 1, 3, 32, 16, False, True)
    order, starts = moe_align(ids, 3)
    options = {"top_k": 1, "kind": "silu"}

    scaled = module.moe_gate_up(x, weights[0], order, starts, scales=routing, **options)

    assert_close(scaled, module.moe_gate_up_reference(x, weights[0], order, starts, scales=routing, **options), scale=4)
    chosen = weights[0][ids[:, 0].long()].float()
    both = routing * torch.einsum("th,tih->ti", x.float(), chosen)
    assert_close(scaled, module.gated_reference(*both.chunk(2, dim=-1), "silu")[order.long()].to(dtype), scale=4)


def test_clamped_swiglu_by_hand():
    """gate 9 counts as 7, up -9 as -7: 7 * sigmoid(1.702 * 7) * (-7 + 1) = -41.99972."""
    result = module.gated_reference(torch.tensor([9.0]), torch.tensor([-9.0]), "clamped_swiglu")

    assert_close(result, torch.tensor([-41.99972]))


def test_a_nan_stays_in_its_own_rows(device):
    x, ids, weights, _, routing = inputs(torch.float32, device, 9, 2, 3, 32, 16, False, True)
    x[4, 3] = float("nan")
    order, starts = moe_align(ids, 3)
    h = module.moe_gate_up(x, weights[0], order, starts, top_k=2, kind="clamped_swiglu")
    out = module.moe_down(h, weights[1], order, starts, top_k=2, scales=routing)

    assert out.isnan().any(dim=-1).any(dim=-1).tolist() == [token == 4 for token in range(9)]


def test_refusals(device):
    x, ids, weights, _, _ = inputs(torch.float32, device, 4, 2, 3, 32, 16, False, False)
    order, starts = moe_align(ids, 3)
    options = {"top_k": 2, "kind": "silu"}
    for message, arguments, changes in (
        ("unknown kind 'swish'", (x, weights[0]), {"kind": "swish"}),
        ("does not fit contiguous experts", (x[:, :16], weights[0]), {}),
        ("must be of one type", (x.half(), weights[0]), {}),
        (r"bias must be \[3, 32\]", (x, weights[0]), {"bias": torch.zeros(3, 16, device=device)}),
        ("8 slots, expected 12", (x, weights[0]), {"top_k": 3}),
    ):
        with pytest.raises(ValueError, match=message):
            module.moe_gate_up(*arguments, order, starts, **options | changes)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """Breaks in the last expert: its weights begin beyond element 2**31."""
    experts, hidden, inner = 68, 4096, 4096
    weight = torch.zeros(experts, 2 * inner, hidden, dtype=torch.float16, device=device)
    weight[-1] = 0.01
    ids = torch.full((3, 1), experts - 1, dtype=torch.int32, device=device)
    order, starts = moe_align(ids, experts)

    h = module.moe_gate_up(
        torch.ones(3, hidden, dtype=torch.float16, device=device), weight, order, starts, top_k=1, kind="relu"
    )

    assert (h > 1600).all()


def compile_cases():
    def case(dtype, tokens, experts, hidden, inner, top_k, kind, bias):
        x, order = torch.empty(tokens, hidden, dtype=dtype), torch.empty(tokens * top_k, dtype=torch.int32)
        starts = torch.empty(experts + 1, dtype=torch.int32)
        scales = torch.empty(tokens, top_k)
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        weights = [torch.empty(shape, dtype=dtype) for shape in shapes]
        biases = [torch.empty(shape[:2], dtype=dtype) if bias else None for shape in shapes]
        h = module.moe_gate_up(x, weights[0], order, starts, top_k=top_k, kind=kind, bias=biases[0])
        module.moe_down(h, weights[1], order, starts, top_k=top_k, bias=biases[1], scales=scales)

    for arguments in (
        (torch.bfloat16, 8192, 128, 2048, 768, 8, "silu", False),
        (torch.bfloat16, 512, 32, 2880, 2880, 4, "clamped_swiglu", True),
        (torch.float32, 64, 8, 64, 48, 2, "silu", False),
    ):
        yield lambda arguments=arguments: case(*arguments)
