"""The router: every kind of choosing experts that a model family has, kernel against reference and by hand."""

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, randn
from tinyserve.kernels import moe_router as module

KINDS = {
    "softmax": {},
    "softmax-renormalised": {"renormalise": True, "scale": 1.5},
    "softmax-bias": {"bias": True, "renormalise": True},
    "softmax-groups": {"groups": 4, "top_groups": 2, "scale": 16.0},
    "sigmoid": {"kind": "sigmoid"},
    "sigmoid-groups": {"kind": "sigmoid", "bias": True, "groups": 4, "top_groups": 3, "group_best": 2, "scale": 2.5},
    "sigmoid-renormalised": {"kind": "sigmoid", "group_best": 2, "renormalise": True},
    "sparsemixer": {"kind": "sparsemixer"},
}


def options_of(kind, experts, device):
    options = dict(KINDS[kind])
    if options.pop("bias", False):
        options["bias"] = randn(experts, dtype=torch.float32, device=device, seed=5, spread=0.2)
    return options


@pytest.mark.parametrize("tokens, experts, top_k", [(0, 8, 2), (1, 128, 8), (7, 20, 3), (33, 60, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_router_is_its_reference(device, dtype, tokens, experts, top_k, kind):
    logits = gapped(randn(tokens, experts, dtype=dtype, device=device, spread=2))
    options = options_of(kind, experts, device)

    weights, ids = module.moe_router(logits, top_k=top_k, **options)
    expected_weights, expected_ids = module.moe_router_reference(logits, top_k=top_k, **options)

    if dtype == torch.float32:  # in half precision two logits may be equal, and torch does not say which comes first
        assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights)


def test_by_hand():
    """softmax of (ln 1, ln 2, ln 5) is 1/8, 2/8, 5/8: the best two, renormalised, are 5/7 and 2/7."""
    weights, ids = module.moe_router(torch.tensor([[1.0, 2.0, 5.0]]).log(), top_k=2, renormalise=True)

    assert ids.tolist() == [[2, 1]]
    assert_close(weights, torch.tensor([[5 / 7, 2 / 7]]))


def test_the_bias_chooses_and_does_not_weigh(device):
    """Expert 0 has the lowest score, 0.5 of 0.5 + 0.73 + 0.88, and a bias of 1 brings it to the front."""
    logits, bias = torch.tensor([[0.0, 1.0, 2.0]], device=device), torch.tensor([1.0, 0.0, 0.0], device=device)

    weights, ids = module.moe_router(logits, top_k=1, kind="sigmoid", bias=bias)

    assert (ids.item(), weights.item()) == (0, 0.5)


def test_only_the_best_groups_are_chosen_from(device):
    """Experts 0 and 4 are the two best, but group 0 as a whole (0.9 + 0.1) loses to groups 1 (1.4) and 2 (1.5)."""
    scores = torch.tensor([[0.9, 0.1, 0.7, 0.7, 0.8, 0.7]], device=device)

    _, ids = module.moe_router(scores.logit(), top_k=2, kind="sigmoid", groups=3, top_groups=2, group_best=2)

    assert ids[0, 0] == 4 and ids[0, 1] in (2, 3, 5)


def test_a_row_of_nan_stays_a_fault_of_its_own_token(device):
    """Ids stay within 0..7, so no other weight is read; the row's weights are NaN, its neighbours' are not."""
    logits = randn(3, 8, dtype=torch.float32, device=device)
    logits[1] = float("nan")

    for call in (module.moe_router, module.moe_router_reference):
        weights, ids = call(logits, top_k=2)

        assert ids.min() >= 0 and ids.max() < 8
        assert weights.isnan().any(dim=1).tolist() == [False, True, False]


def test_refusals():
    logits = torch.zeros(2, 8)
    for message, options in {
        "unknown kind 'max'": {"top_k": 1, "kind": "max"},
        "9 of 8 experts": {"top_k": 9},
        "5 of 8 experts in 1 of 2 groups": {"top_k": 5, "groups": 2},
        "1 of 3 groups": {"top_k": 1, "groups": 3},
    }.items():
        with pytest.raises(ValueError, match=message):
            module.moe_router(logits, **options)


def compile_cases():
    def case(dtype, tokens, experts, top_k, **options):
        if options.pop("bias", False):
            options["bias"] = torch.empty(experts, dtype=torch.float32)
        module.moe_router(torch.empty(tokens, experts, dtype=dtype), top_k=top_k, **options)

    for arguments, options in (
        ((torch.bfloat16, 4, 128, 8), {"renormalise": True}),
        ((torch.float32, 2048, 256, 8), KINDS["sigmoid-groups"] | {"groups": 8, "top_groups": 4, "renormalise": True}),
        ((torch.float32, 4, 160, 6), {"groups": 8, "top_groups": 3, "scale": 16.0}),
        ((torch.bfloat16, 4, 16, 2), {"kind": "sparsemixer"}),
    ):
        yield lambda arguments=arguments, options=options: case(*arguments, **options)
