"""Prefill attention over pages, kernel and reference, against one dense softmax per sequence.

As in `test_attention_decode.py`: NaN in the cache wherever no token was written, impossible ids behind the last block.
"""

import re

import pytest
import torch

from tests.kernels.harness import assert_close, compile_only, nan_like, randn
from tests.kernels.test_attention_decode import (
    both,
    check_gaps,
    dense_attention,
    equal_far_away,
    fill_pages,
    with_head_numbers,
)
from tinyserve.kernels import attention_prefill as module


def starts(query_lens, device):
    return torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)


def expected_prefill(q, pages, query_lens, **options):
    rows = [
        dense_attention(part, k, v, **options)
        for part, k, v in zip(q[: sum(query_lens)].split(query_lens), pages.keys, pages.values, strict=True)
    ]
    return torch.cat([*rows, torch.zeros_like(q[sum(query_lens) :])])


# (query length, length) of each sequence: single tokens with and without prefix, nothing, a page, a page and one, odd
MIXED = [(1, 1), (1, 70), (0, 0), (64, 64), (65, 65), (0, 20), (7, 100), (33, 33), (16, 32)]
CASES = [
    # sequences, head_dim, query heads, kv heads, page, options
    (MIXED, 64, 3, 1, 16, {}),
    (MIXED, 64, 2, 2, 64, {"sinks": True}),
    (MIXED, 80, 4, 1, 64, {"window": 40}),
    (MIXED, 96, 4, 1, 32, {"softcap": 3.0}),
    (MIXED, 128, 3, 1, 16, {"window": 1, "sinks": True}),
    ([(130, 300)], 128, 4, 1, 64, {"window": 100, "softcap": 5.0, "sinks": True}),
    ([(100, 100), (1, 90)], 256, 2, 1, 16, {}),
    ([(200, 260)], 64, 3, 1, 64, {}),
    ([(70, 160), (1, 3)], 64, 3, 1, 64, {"alibi_slopes": True}),
    ([(40, 90)], 64, 40, 1, 64, {}),
    ([(3, 3)], 16, 1, 1, 16, {}),
    ([(0, 0)], 64, 1, 1, 16, {}),
    ([], 64, 1, 1, 16, {}),
]


@both("attention_prefill")
@pytest.mark.parametrize("sequences, head_dim, heads, kv_heads, page, options", CASES)
def test_prefill_is_dense_softmax(device, dtype, implementation, sequences, head_dim, heads, kv_heads, page, options):
    query_lens, lengths = [one for one, _ in sequences], [one for _, one in sequences]
    pages = fill_pages(lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype, device=device)
    q = randn(sum(query_lens), heads, head_dim, dtype=dtype, device=device, spread=2)
    options = with_head_numbers(dict(options, scale=head_dim**-0.5), heads, dtype, device)

    def call():
        return getattr(module, implementation)(
            q, pages.k_cache, pages.v_cache, pages.tables, starts(query_lens, device), pages.lens,
            max_query_len=max(query_lens, default=0), **options,
        )  # fmt: skip

    out = call()

    assert_close(out, expected_prefill(q, pages, query_lens, **options))
    assert torch.equal(out, call())


@pytest.mark.parametrize("options", [{}, {"window": 150, "sinks": True}, {"softcap": 4.0, "alibi_slopes": True}])
def test_tiles_from_descriptors(device, monkeypatch, options):
    """Breaks if a tile is taken twice or left out where whole tiles come by TMA: with 0, 1 and 4 unmasked ones."""
    monkeypatch.setattr(module, "choose", lambda *a, **b: a[2] | {"BLOCK_M": 64, "TILE": 64, "TMA": True})
    sequences = [(30, 60), (0, 0), (40, 100), (1, 64), (60, 330)]
    query_lens, lengths = [one for one, _ in sequences], [one for _, one in sequences]
    pages = fill_pages(lengths, kv_heads=2, head_dim=64, page=64, dtype=torch.float16, device=device)
    q = randn(sum(query_lens), 4, 64, dtype=torch.float16, device=device, spread=2)
    options = with_head_numbers(dict(options, scale=0.125), 4, torch.float16, device)

    out = module.attention_prefill(
        q, pages.k_cache, pages.v_cache, pages.tables, starts(query_lens, device), pages.lens, max_query_len=60,
        **options,
    )  # fmt: skip

    assert_close(out, expected_prefill(q, pages, query_lens, **options))


@both("attention_prefill")
def test_tokens_in_front_are_left_alone(device, implementation):
    """Breaks at 200 single tokens in front if a tile before the first sequence is taken for one of its neighbours."""
    pages = fill_pages([30, 40], kv_heads=1, head_dim=64, page=16, dtype=torch.float32, device=device)
    tables = torch.cat([pages.tables[:1]] * 2 + [pages.tables[1:]])  # what lies in front in memory is readable
    lens = torch.cat([pages.lens[:1]] * 2 + [pages.lens[1:]])
    q = randn(240, 2, 64, dtype=torch.float32, device=device)
    out = nan_like(q)

    getattr(module, implementation)(
        q, pages.k_cache, pages.v_cache, tables[2:], torch.tensor([198, 199, 200, 240], device=device).int()[2:],
        lens[2:], scale=0.1, max_query_len=40, out=out,
    )  # fmt: skip

    assert out[:200].isnan().all()
    assert_close(out[200:], dense_attention(q[200:], pages.keys[1], pages.values[1], scale=0.1))


@both("attention_prefill")
@pytest.mark.parametrize("options", [{}, {"window": 30}])
def test_padding_is_zero(device, dtype, implementation, options):
    """Breaks if a row without keys divides by zero: tokens behind the last sequence, and sequences of length 0."""
    pages = fill_pages([40, 0, 0], kv_heads=1, head_dim=64, page=16, dtype=dtype, device=device)
    q = randn(40 + 1 + 2 + 30, 2, 64, dtype=dtype, device=device)

    out = getattr(module, implementation)(
        q, pages.k_cache, pages.v_cache, pages.tables, starts([40, 1, 2], device), pages.lens, scale=0.1,
        max_query_len=40, **options,
    )  # fmt: skip

    assert_close(out[:40], dense_attention(q[:40], pages.keys[0], pages.values[0], scale=0.1, **options))
    assert (out[40:] == 0).all()


@both("attention_prefill")
def test_strided_queries_and_a_given_output(device, dtype, implementation):
    def attend(q, k, v, tables, lens, **given):
        prefill = getattr(module, implementation)
        return prefill(q, k, v, tables, starts([20, 10], device), lens, scale=0.1, max_query_len=20, **given)

    check_gaps(30, attend, lambda q, pages: expected_prefill(q, pages, [20, 10], scale=0.1), dtype=dtype, device=device)


@pytest.mark.parametrize("options", [{}, {"window": 100, "sinks": True}])
def test_pages_through_descriptors(device, dtype, monkeypatch, options):
    """Breaks if a descriptor's row is not block, head, slot in this order: 2 kv heads, pages of two tiles."""
    monkeypatch.setattr(module, "choose", lambda _, __, default, **shape: default | {"TMA": True, "TILE": 64})
    pages = fill_pages([300, 64], kv_heads=2, head_dim=64, page=128, dtype=dtype, device=device)
    q = randn(114, 4, 64, dtype=dtype, device=device)
    options = with_head_numbers(dict(options, scale=0.1), 4, dtype, device)

    out = module.attention_prefill(
        q, pages.k_cache, pages.v_cache, pages.tables, starts([50, 64], device), pages.lens, max_query_len=64, **options
    )

    assert_close(out, expected_prefill(q, pages, [50, 64], **options))


def test_more_sequences_than_one_search_step(device):
    """Breaks at sequence 128 or later if the search for a tile's sequence ends after one block of 128."""
    query_lens = [0] * 127 + [1, 0, 2, 0, 40]
    lengths = [one + 3 if one else 0 for one in query_lens]
    pages = fill_pages(lengths, kv_heads=1, head_dim=16, page=64, dtype=torch.float32, device=device)
    q = randn(43, 1, 16, dtype=torch.float32, device=device)

    out = module.attention_prefill(
        q, pages.k_cache, pages.v_cache, pages.tables, starts(query_lens, device), pages.lens, scale=0.3,
        max_query_len=40,
    )  # fmt: skip

    assert_close(out, expected_prefill(q, pages, query_lens, scale=0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"softcap": 4.0}])
def test_the_reference_keeps_probabilities_in_float32(dtype, options):
    """Breaks at 900 nearly equal keys if softmax runs in bfloat16; the chunks of 512 queries must not show either."""
    pages = fill_pages([900], kv_heads=1, head_dim=64, page=16, dtype=dtype, device="cpu")
    q = randn(600, 2, 64, dtype=dtype, device="cpu", spread=0.05)

    out = module.attention_prefill_reference(
        q, pages.k_cache, pages.v_cache, pages.tables, starts([600], "cpu"), pages.lens, scale=0.125,
        max_query_len=600, **options,
    )  # fmt: skip

    assert_close(out, expected_prefill(q, pages, [600], scale=0.125, **options), scale=0.2)


@pytest.mark.parametrize("shared", [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
def test_block_sizes_hold_every_head_of_a_group(monkeypatch, shared, head_dim):
    """Breaks if a tile has fewer rows than query heads of a kv head (71 in Falcon), or sizes are no powers of two."""
    facts = module.launch.DeviceFacts("some", "cuda", shared, 100)
    monkeypatch.setattr(module.launch, "facts", lambda _: facts)
    cache = torch.empty(2, 1, 64, head_dim, dtype=torch.bfloat16)

    for group, queries in ((1, 1), (1, 10**5), (3, 2), (71, 1), (71, 1000)):
        q = torch.empty(0, group, head_dim, dtype=torch.bfloat16)
        options = module._options(q, cache, queries)

        assert options["BLOCK_M"] >= max(group, 16) and options["TILE"] >= 16
        assert all(size & (size - 1) == 0 for size in (options["BLOCK_M"], options["BLOCK_D"], options["TILE"]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(2, 3, 64)}, r"q \[2, 3, 64\] does not fit a cache of \[4, 2, 16, 64\]"),
        ({"q": torch.zeros(2, 64, 4).mT}, "contiguous in the last dimension"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "seq_lens has 2 sequences, block_tables 2 rows"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\], is \[2\]"),
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
    } | change

    with pytest.raises(ValueError, match=message):
        module.attention_prefill(
            **{name: value.to(device) for name, value in arguments.items()}, scale=1.0, max_query_len=1
        )


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    def attend(q, k, v, tables, lens):
        return module.attention_prefill(q, k, v, tables, starts([150, 65], device), lens, scale=0.2, max_query_len=150)

    q, pages, out = equal_far_away(device, 215, attend)

    assert_close(out, expected_prefill(q, pages, [150, 65], scale=0.2))


@pytest.mark.skipif(module.launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")
def test_nothing_spills_on_rdna():
    """Breaks at 74 registers spilled (head size 128, gfx1100) if a program holds more than its 256."""
    with compile_only("gfx1100") as built:
        cache, lens = torch.empty(8, 2, 64, 128, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
        q, query_start = torch.empty(100, 8, 128, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
        tables = torch.empty(2, 64, dtype=torch.int32)
        module.attention_prefill(q, cache, cache, tables, query_start, lens, scale=0.1, max_query_len=4096)

    assert re.findall(r"vgpr_spill_count: +(\d+)", built[0].kernel.asm["amdgcn"]) == ["0"]


def compile_cases():
    def case(dtype, head_dim, page, max_query_len, **options):
        cache = torch.empty(8, 2, page, head_dim, dtype=dtype)
        tables, lens = torch.empty(2, 64, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        options = with_head_numbers(options, 8, dtype, "meta")
        q, starts = torch.empty(100, 8, head_dim, dtype=dtype), torch.empty(3, dtype=torch.int32)
        module.attention_prefill(
            q, cache, cache, tables, starts, lens, scale=0.1, max_query_len=max_query_len, **options
        )

    for dtype, head_dim, page, longest, options in (
        (torch.float32, 80, 16, 4096, {}),
        (torch.bfloat16, 80, 16, 4096, {"sinks": True, "window": 1024, "alibi_slopes": True}),
        (torch.bfloat16, 128, 64, 4096, {}),
        (torch.bfloat16, 256, 64, 4096, {"softcap": 50.0, "window": 1024}),
    ):
        yield lambda args=(dtype, head_dim, page, longest), options=options: case(*args, **options)
