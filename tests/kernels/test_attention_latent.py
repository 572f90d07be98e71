"""Latent attention over pages, kernel and reference, against keys and values written out for every head."""

import re

import pytest
import torch

from tests.kernels.harness import assert_close, compile_only, nan_like, randn
from tests.kernels.test_attention_decode import fill_pages
from tinyserve.kernels import attention_latent as module

CASES = [
    # lengths of the tokens by sequence, heads, C, P, page
    ([[5], [130], [0], [64]], 4, 64, 16, 64),
    ([[38, 39, 40], [7], [1, 2]], 20, 48, 8, 16),
    ([[200]], 64, 32, 16, 16),
    ([[100]], 2, 512, 64, 64),
]


def inputs(dtype, device, lengths, heads, width, rotary, page):
    """Queries, cache, tables, rows and lens of tokens; and the latents of each sequence, [N, C + P]."""
    longest = [max(one) for one in lengths]
    pages = fill_pages(longest, kv_heads=1, head_dim=width + rotary, page=page, dtype=dtype, device=device)
    rows = [number for number, one in enumerate(lengths) for _ in one]
    lens = [length for one in lengths for length in one]
    ints = (torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, lens))
    q = randn(len(rows), heads, width + rotary, dtype=dtype, device=device, spread=1.5)
    return (q[..., :width], q[..., width:], pages.k_cache, pages.tables, *ints), [key[:, 0] for key in pages.keys]


def expected(arguments, latents, scale):
    """Softmax in float32 over the keys that a token sees."""
    q_c, q_pe, _, _, rows, lens = arguments
    out = torch.zeros(q_c.shape)
    for token, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        seen = latents[row][:length].float().cpu()
        q = torch.cat((q_c[token], q_pe[token]), dim=-1).float().cpu()
        if length:
            out[token] = (q @ seen.T * scale).softmax(dim=-1) @ seen[:, : q_c.shape[2]]
    return out.to(q_c.dtype).to(q_c.device)


@pytest.mark.parametrize("implementation", ["attention_latent", "attention_latent_reference"])
@pytest.mark.parametrize("lengths, heads, width, rotary, page", CASES)
def test_latent_attention_is_a_softmax_over_latents(device, dtype, implementation, lengths, heads, width, rotary, page):
    arguments, latents = inputs(dtype, device, lengths, heads, width, rotary, page)
    call = getattr(module, implementation)

    out = call(*arguments, scale=0.1, max_seq_len=256)

    assert_close(out, expected(arguments, latents, 0.1), scale=2)
    assert torch.equal(out, call(*arguments, scale=0.1, max_seq_len=256))


@pytest.mark.parametrize("lengths, heads, width, rotary, page", CASES)
def test_latents_may_be_the_wide_side_of_the_products(device, monkeypatch, lengths, heads, width, rotary, page):
    """As few heads are computed on Hopper; breaks if a pair of rotated numbers is taken apart wrongly."""
    monkeypatch.setattr(module, "choose", lambda _kernel, _tensor, default, **_: default | {"LATENTS_WIDE": True})
    arguments, latents = inputs(torch.float16, device, lengths, heads, width, rotary, page)

    out = module.attention_latent(*arguments, scale=0.1, max_seq_len=256)

    assert_close(out, expected(arguments, latents, 0.1), scale=2)


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_the_number_of_splits_does_not_show(device, monkeypatch, splits):
    """Breaks if a split takes a key twice or loses one, or if an empty split counts."""
    monkeypatch.setattr(module, "count_splits", lambda *_: splits)
    arguments, latents = inputs(torch.float32, device, [[65], [0], [190, 191]], 3, 32, 8, 16)
    wide = nan_like(arguments[0], shape=(3, 4, 40))
    out = wide.transpose(0, 1)[:, :, :32]

    lse, other = (torch.full((4, 3), torch.nan, device=device) for _ in range(2))
    module.attention_latent(*arguments, scale=0.2, max_seq_len=200, out=out, lse=lse)
    module.attention_latent_reference(*arguments, scale=0.2, max_seq_len=200, lse=other)

    assert_close(out, expected(arguments, latents, 0.2))
    assert_close(lse, other)
    assert wide[..., 32:].isnan().all()


def test_refusals(device):
    arguments, _ = inputs(torch.float32, device, [[5]], 2, 32, 8, 16)
    for place, message in ((1, "do not fit a cache"), (4, "need a row and a length each")):
        wrong = list(arguments)
        wrong[place] = torch.cat((wrong[place], wrong[place]), dim=-1)
        with pytest.raises(ValueError, match=message):
            module.attention_latent(*wrong, scale=1.0, max_seq_len=8)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    """Breaks in the last blocks: block 58,255 of [64, 576] begins beyond element 2**31."""
    options = {"kv_heads": 1, "head_dim": 576, "page": 64, "dtype": torch.float16, "device": device}
    low, high = fill_pages([300, 65], **options), fill_pages([300, 65], blocks=58300, **options)
    q = randn(2, 16, 576, dtype=torch.float16, device=device)
    rows = torch.arange(2, dtype=torch.int32, device=device)

    first, second = (
        module.attention_latent(
            q[..., :512], q[..., 512:], one.k_cache, one.tables, rows, one.lens, scale=0.1, max_seq_len=300
        )
        for one in (low, high)
    )

    assert torch.equal(first, second)


def test_rotated_parts_go_to_the_matrix_unit_from_registers():
    """Breaks if Triton stores them to shared memory, where a fence is missing: see the module."""
    with compile_only("sm_90") as built:
        next(compile_cases())()
    products = [line for line in built[0].kernel.asm["ttgir"].splitlines() if " ttng.warp_group_dot " in line]

    first = [re.search(r" : (\S+)<(\w+),", line).groups() for line in products]
    assert first == [("tensor", "64x64xbf16"), ("!ttg.memdesc", "64x512xbf16"), ("!ttg.memdesc", "512x64xbf16")]


@pytest.mark.gpu
@pytest.mark.parametrize("half, heads", [(torch.bfloat16, 16), (torch.float16, 16), (torch.bfloat16, 128)])
def test_many_tiles_at_once(device, half, heads):
    """The sizes of DeepSeek-V2-Lite and V3 on a full device, 27 tiles a program, 30 times: equal bits, and right.

    Breaks if a tile is read before it is there, or overwritten while it is read.
    """
    lengths = [[1700 - sequence] for sequence in range(132)]
    arguments, latents = inputs(half, device, lengths, heads, 512, 64, 64)
    options = {"scale": 0.05, "max_seq_len": 1700}
    out = module.attention_latent(*arguments, **options)

    again = [module.attention_latent(*arguments, **options) for _ in range(30)]

    assert all(torch.equal(one, out) for one in again)
    assert_close(out, expected(arguments, latents, 0.05), scale=2)


def compile_cases():
    def case(dtype, tokens, heads, page, longest):
        q, ints = torch.empty(tokens, heads, 576, dtype=dtype), torch.empty(tokens, dtype=torch.int32)
        cache, tables = torch.empty(8, 1, page, 576, dtype=dtype), torch.empty(2, 64, dtype=torch.int32)
        module.attention_latent(q[..., :512], q[..., 512:], cache, tables, ints, ints, scale=0.1, max_seq_len=longest)

    yield lambda: case(torch.bfloat16, 4, 16, 64, 4096)
    yield lambda: case(torch.bfloat16, 600, 128, 16, 64)
    yield lambda: case(torch.float32, 2, 16, 64, 4096)
