"""Attention of a few tokens per sequence, kernel and reference, against one dense softmax per sequence.

As in `test_attention_decode.py`: NaN in the cache wherever no token was written, impossible ids behind the last block.
"""

import pytest
import torch
from attrs import evolve

from tests.kernels.harness import assert_close, nan_like, randn
from tests.kernels.test_attention_decode import both, equal_far_away, fill_pages, with_head_numbers
from tests.kernels.test_attention_prefill import expected_prefill, starts
from tinyserve.kernels import attention_decode
from tinyserve.kernels import attention_verify as module

# (query length, length) of each sequence: a single token, drafts, nothing, a whole short prompt, the most
MIXED = [(1, 1), (5, 70), (0, 0), (3, 64), (16, 16), (0, 20), (9, 130), (2, 65)]
CASES = [
    # sequences, head_dim, query heads, kv heads, page, options
    (MIXED, 64, 6, 2, 16, {}),
    (MIXED, 80, 4, 4, 64, {"window": 7, "sinks": True}),
    (MIXED, 96, 4, 1, 32, {"softcap": 3.0, "alibi_slopes": True}),
    ([(5, 300)], 128, 8, 2, 64, {"window": 100, "softcap": 5.0, "sinks": True}),
    ([(4, 4), (2, 200)], 256, 3, 1, 16, {"sinks": True}),
    ([(3, 3)], 16, 1, 1, 16, {}),
    ([(0, 0)], 64, 1, 1, 16, {}),
    ([], 64, 1, 1, 16, {}),
]


@both("attention_verify")
@pytest.mark.parametrize("sequences, head_dim, heads, kv_heads, page, options", CASES)
def test_verify_is_dense_softmax(device, dtype, implementation, sequences, head_dim, heads, kv_heads, page, options):
    """The last five tokens belong to nobody and become zero."""
    query_lens, lengths = [one for one, _ in sequences], [one for _, one in sequences]
    pages = fill_pages(lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype, device=device)
    q = randn(sum(query_lens) + 5, heads, head_dim, dtype=dtype, device=device, spread=2)
    options = with_head_numbers(dict(options, scale=head_dim**-0.5), heads, dtype, device)

    def call():
        return getattr(module, implementation)(
            q, pages.k_cache, pages.v_cache, pages.tables, starts(query_lens, device), pages.lens,
            max_query_len=max(query_lens, default=1) or 1, **options,
        )  # fmt: skip

    out = call()

    assert_close(out, expected_prefill(q, pages, query_lens, **options))
    assert torch.equal(out, call())


@pytest.mark.parametrize("target, window", [(1, 0), (9, 0), (9, 500), (40, 0)])
def test_parts_and_tokens_in_front(device, monkeypatch, target, window):
    """Breaks if a part loses a key, or if the three tokens in front, which belong to others, are written."""
    facts = attention_decode.launch.facts(torch.device(device))
    monkeypatch.setattr(attention_decode.launch, "facts", lambda _: evolve(facts, processors=target))
    monkeypatch.setattr(attention_decode, "PROGRAMS", 1)
    query_lens, lengths = [3, 0, 6], [700, 0, 1500]
    pages = fill_pages(lengths, kv_heads=1, head_dim=16, page=64, dtype=torch.float32, device=device)
    q = randn(12, 2, 16, dtype=torch.float32, device=device)
    options = {"scale": 0.3, "window": window, "sinks": torch.tensor([1.0, -1.0], device=device)}
    wide = nan_like(q, shape=(12, 3, 20))
    out = wide[:, :2, :16]

    module.attention_verify(
        q, pages.k_cache, pages.v_cache, pages.tables, starts(query_lens, device) + 3, pages.lens, max_query_len=6,
        out=out, **options,
    )  # fmt: skip

    assert out[:3].isnan().all() and wide[:, 2:].isnan().all() and wide[..., 16:].isnan().all()
    assert_close(out[3:], expected_prefill(q[3:], pages, query_lens, **options))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_query_len": 17}, "max_query_len is 17; 1 to 16"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "seq_lens has 2 sequences, block_tables 2 rows"),
    ],
)
def test_refusals(device, change, message):
    arguments = {
        "q": torch.zeros(2, 4, 64),
        "k_cache": torch.zeros(4, 2, 16, 64),
        "v_cache": torch.zeros(4, 2, 16, 64),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "query_start": torch.arange(3, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
    }
    arguments = {name: value.to(device) for name, value in arguments.items()} | {"scale": 1.0, "max_query_len": 2}

    with pytest.raises(ValueError, match=message):
        module.attention_verify(**arguments | change)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    def attend(q, k, v, tables, lens):
        return module.attention_verify(q, k, v, tables, starts([5, 4], device), lens, scale=0.2, max_query_len=5)

    equal_far_away(device, 9, attend)


def compile_cases():
    def case(dtype, head_dim, queries, **options):
        cache = torch.empty(8, 2, 64, head_dim, dtype=dtype)
        tables, lens = torch.empty(2, 64, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        q, query_start = torch.empty(2 * queries, 8, head_dim, dtype=dtype), torch.empty(3, dtype=torch.int32)
        options = with_head_numbers(options, 8, dtype, "meta")
        module.attention_verify(q, cache, cache, tables, query_start, lens, scale=0.1, max_query_len=queries, **options)

    for dtype, head_dim, queries, options in (
        (torch.bfloat16, 128, 4, {}),
        (torch.bfloat16, 128, 16, {"sinks": True, "window": 1024}),
    ):
        yield lambda args=(dtype, head_dim, queries), options=options: case(*args, **options)
