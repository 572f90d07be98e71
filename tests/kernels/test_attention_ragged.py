"""Attention of a step's new tokens over each other, kernel and reference, against one softmax a token."""

import pytest
import torch

from tests.kernels.harness import assert_close, randn
from tinyserve.kernels import attention_ragged as module

CASES = [
    # query_start, tokens, heads, N, P, V
    ([0, 1, 34, 34, 100], 100, 2, 24, 8, 20),
    ([3, 40], 45, 3, 32, 16, 32),
    ([0, 33], 33, 1, 128, 64, 128),
    ([0], 0, 2, 16, 8, 16),
]


def inputs(dtype, device, starts, tokens, heads, width, rotary, values):
    both = randn(tokens, heads, width + values, dtype=dtype, device=device, seed=1)
    q = randn(tokens, heads, width + rotary, dtype=dtype, device=device, seed=2, spread=1.5)
    latent = randn(tokens, 5 + rotary, dtype=dtype, device=device, seed=3)
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    return q[..., :width], q[..., width:], both[..., :width], latent[:, 5:], both[..., width:], start


def expected(q, q_pe, k, k_pe, v, query_start, scale):
    out = torch.zeros(v.shape)
    lse = torch.full(v.shape[:2], -torch.inf)
    edges = query_start.tolist()
    for number in range(len(edges) - 1):
        for token in range(edges[number], edges[number + 1]):
            seen = slice(edges[number], token + 1)
            scores = torch.einsum("hd,nhd->hn", q[token].float().cpu(), k[seen].float().cpu())
            scores += q_pe[token].float().cpu() @ k_pe[seen].float().cpu().T
            lse[token] = (scores * scale).logsumexp(-1)
            out[token] = torch.einsum("hn,nhv->hv", (scores * scale).softmax(-1), v[seen].float().cpu())
    return out.to(q.dtype).to(q.device), lse.to(q.device)


@pytest.mark.parametrize("implementation", ["attention_ragged", "attention_ragged_reference"])
@pytest.mark.parametrize("starts, tokens, heads, width, rotary, values", CASES)
def test_each_token_sees_what_came_before(device, dtype, implementation, starts, tokens, heads, width, rotary, values):
    """Breaks if a sequence sees another one, a tile loses keys, or tokens outside all sequences are touched."""
    arguments = inputs(dtype, device, starts, tokens, heads, width, rotary, values)
    call = getattr(module, implementation)

    out, lse = call(*arguments, scale=0.1)
    wanted_out, wanted_lse = expected(*arguments, 0.1)

    assert_close(out, wanted_out, scale=2)
    assert_close(lse, wanted_lse, scale=2)
    assert torch.equal(out, call(*arguments, scale=0.1)[0])


def test_refusals(device):
    arguments = list(inputs(torch.float32, device, [0, 4], 4, 2, 16, 8, 16))
    for place, wrong, message in ((3, torch.zeros(4, 9), "do not fit each other"), (0, None, "contiguous")):
        changed = list(arguments)
        changed[place] = torch.zeros(4, 16, 2, device=device).mT if wrong is None else wrong.to(device)
        with pytest.raises(ValueError, match=message):
            module.attention_ragged(*changed, scale=1.0)


def compile_cases():
    def case(dtype, tokens, heads):
        both, q = torch.empty(tokens, heads, 256, dtype=dtype), torch.empty(tokens, heads, 192, dtype=dtype)
        latent, starts = torch.empty(tokens, 576, dtype=dtype), torch.empty(5, dtype=torch.int32)
        parts = (q[..., :128], q[..., 128:], both[..., :128], latent[:, 512:], both[..., 128:])
        module.attention_ragged(*parts, starts, scale=0.1)

    yield lambda: case(torch.bfloat16, 2048, 16)
    yield lambda: case(torch.float32, 100, 16)
