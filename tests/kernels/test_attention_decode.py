"""Decode attention over pages, kernel and reference, against one dense softmax over the very keys of a sequence.

The cache is NaN wherever no token was written, and the block table holds impossible ids behind a sequence's last block,
so that any read of what does not belong to a sequence shows.
"""

import re
from functools import partial

import pytest
import torch
from attrs import evolve, frozen

from tests.kernels.harness import assert_close, compile_only, nan_like, randn
from tinyserve.kernels import attention_decode as module
from tinyserve.kernels.attention_cut import make_cut

NO_BLOCK = 2**30


@frozen
class Pages:
    """Sequences in a paged cache. keys, values: per sequence [N, Hkv, D]; tables, lens: what a kernel gets."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor


def fill_pages(lengths, *, kv_heads, head_dim, page, dtype, device, blocks=None, seed=10) -> Pages:
    """Random sequences, scattered over `blocks` blocks (default: few more than needed)."""
    counts = [-(-length // page) for length in lengths]
    blocks = blocks or sum(counts) + 3
    shape = (blocks, kv_heads, page, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    free = iter(
        (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + blocks - sum(counts)).tolist()
    )
    tables = torch.full((len(lengths), max(counts, default=0) + 2), NO_BLOCK, dtype=torch.int32)
    keys, values = [], []
    for number, length in enumerate(lengths):
        ids = [next(free) for _ in range(counts[number])]
        tables[number, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        for cache, into, offset in ((k_cache, keys, 0), (v_cache, values, 1)):
            drawn = randn(length, kv_heads, head_dim, dtype=dtype, device=device, seed=seed + 2 * number + offset)
            into.append(drawn)
            for index, block in enumerate(ids):
                piece = drawn[index * page : (index + 1) * page]
                cache[block, :, : len(piece)] = piece.transpose(0, 1)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Pages(keys, values, k_cache, v_cache, tables.to(device), lens)


def dense_attention(q, k, v, *, scale, window=0, softcap=0.0, sinks=None, alibi_slopes=None):
    """q [M, Hq, D] are the last M tokens of k, v [N, Hkv, D]. One score matrix, in float32."""
    if len(q) == 0 or len(k) == 0:
        return torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("mhd,nhd->hmn", q.float(), k.float().repeat_interleave(group, 1)) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    at = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.float()[:, None, None] * (key - at)
    hidden = (key > at) | (key <= at - window) if window else key > at
    weight = scores.masked_fill(hidden, -torch.inf).exp()
    total = weight.sum(-1)
    if sinks is not None:
        total = total + sinks.float().exp()[:, None]
    return torch.einsum("hmn,nhd->mhd", weight / total[..., None], v.float().repeat_interleave(group, 1)).to(q.dtype)


def expected_decode(q, pages, **options):
    rows = [
        dense_attention(q[number : number + 1], k, v, **options)
        for number, (k, v) in enumerate(zip(pages.keys, pages.values, strict=True))
    ]
    return torch.cat(rows) if rows else q


def with_head_numbers(options, heads, dtype, device):
    """Options in which sinks and slopes, given as True, are drawn for each head."""
    drawn = {"sinks": randn(heads, dtype=dtype, device=device, seed=3, spread=2)}
    drawn["alibi_slopes"] = randn(heads, dtype=torch.float32, device=device, seed=4, spread=0.1).abs()
    return {name: drawn.get(name, value) for name, value in options.items()}


def both(name):
    """The two implementations of an operation, as a parameter."""
    return pytest.mark.parametrize("implementation", [f"{name}_reference", name])


RAGGED = [1, 130, 0, 64, 65, 15]
CASES = [
    # lengths, head_dim, query heads, kv heads, page, options
    (RAGGED, 64, 9, 3, 16, {}),
    (RAGGED, 64, 4, 4, 64, {}),
    (RAGGED, 80, 8, 2, 64, {}),
    (RAGGED, 96, 4, 1, 32, {"window": 50}),
    (RAGGED, 128, 8, 2, 16, {"softcap": 3.0}),
    (RAGGED, 128, 3, 1, 64, {"sinks": True}),
    (RAGGED, 64, 6, 2, 64, {"sinks": True, "softcap": 5.0, "window": 1}),
    ([100, 33], 256, 4, 1, 16, {"window": 64, "sinks": True}),
    ([200], 64, 40, 2, 16, {"window": 128}),
    (RAGGED, 64, 6, 2, 64, {"alibi_slopes": True}),
    ([300], 64, 8, 2, 16, {"alibi_slopes": True, "sinks": True, "softcap": 5.0, "window": 150}),
    ([7], 16, 1, 1, 16, {}),
    ([0, 0], 64, 2, 2, 16, {"sinks": True}),
    ([], 64, 2, 2, 16, {}),
]


@both("attention_decode")
@pytest.mark.parametrize("lengths, head_dim, heads, kv_heads, page, options", CASES)
def test_decode_is_dense_softmax(device, dtype, implementation, lengths, head_dim, heads, kv_heads, page, options):
    pages = fill_pages(lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype, device=device)
    q = randn(len(lengths), heads, head_dim, dtype=dtype, device=device, spread=2)
    options = with_head_numbers(dict(options, scale=head_dim**-0.5), heads, dtype, device)

    def call():
        return getattr(module, implementation)(
            q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, max_seq_len=256, **options
        )

    out = call()

    assert_close(out, expected_decode(q, pages, **options))
    assert torch.equal(out, call())


# Lengths that need every part there is room for: half a share too many each; one long one among empty ones.
CUTS = [
    # parts that fill the device, lengths, window
    (1, [65, 0, 500], 0),
    (3, [192, 192], 0),
    (10, [1300] + 40 * [0], 0),
    (7, [65, 0, 1000, 1, 64], 0),
    (40, [500, 2900, 128, 129], 0),
    (8, [65, 0, 1100], 600),
    (4, [1025], 0),
]


@pytest.mark.parametrize("target, lengths, window", CUTS)
def test_the_number_of_parts_does_not_show(device, monkeypatch, target, lengths, window):
    """Breaks if a part takes a key twice or loses one, if an empty part counts, or a part lies outside the grid."""
    facts = module.launch.facts(torch.device(device))
    monkeypatch.setattr(module.launch, "facts", lambda _: evolve(facts, processors=target))
    monkeypatch.setattr(module, "PROGRAMS", 1)
    pages = fill_pages(lengths, kv_heads=1, head_dim=16, page=64, dtype=torch.float32, device=device)
    q = randn(len(lengths), 2, 16, dtype=torch.float32, device=device)
    options = {"scale": 0.3, "window": window, "sinks": torch.tensor([1.0, -1.0], device=device)}

    out = module.attention_decode(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, max_seq_len=1, **options)

    assert_close(out, expected_decode(q, pages, **options))


def test_batch_invariant_bits(device):
    """Breaks at the 1100 keys in the middle if the cut of a sequence looks at its neighbours."""
    lengths = [30, 1100, 600, 0, 700]
    pages = fill_pages(lengths, kv_heads=1, head_dim=16, page=64, dtype=torch.float32, device=device)
    q = randn(len(lengths), 2, 16, dtype=torch.float32, device=device)

    def call(rows):
        where = pages.tables[rows].contiguous(), pages.lens[rows].contiguous()
        return module.attention_decode(
            q[rows], pages.k_cache, pages.v_cache, *where, scale=0.3, max_seq_len=1100, batch_invariant=True
        )

    together = call(slice(0, 5))

    assert_close(together, expected_decode(q, pages, scale=0.3))
    for rows in (slice(1, 2), slice(1, 3), slice(2, 5)):
        assert torch.equal(call(rows), together[rows])


def test_layers_share_a_list(device):
    """Breaks if a layer's list is made anew, or if one with another window or other tables is given that list."""
    pages = fill_pages([130, 0, 700, 64], kv_heads=1, head_dim=16, page=64, dtype=torch.float32, device=device)
    q, memo = randn(4, 2, 16, dtype=torch.float32, device=device), {}
    others = pages.tables.flip(0).contiguous()

    def call(tables, lens, **options):
        options |= {"scale": 0.3, "max_seq_len": 700}
        return module.attention_decode(q, pages.k_cache, pages.v_cache, tables, lens, memo=memo, **options)

    for count, window in ((1, 0), (1, 0), (2, 100)):
        out = call(pages.tables, pages.lens, window=window)
        assert len(memo) == count
        assert_close(out, expected_decode(q, pages, scale=0.3, window=window))
    swapped = evolve(pages, keys=pages.keys[::-1], values=pages.values[::-1])
    assert_close(call(others, pages.lens.flip(0)), expected_decode(q, swapped, scale=0.3))


def check_gaps(tokens, attend, expected, *, dtype, device):
    """Assert that no stride is taken for granted: q is the front of a fused row, out has gaps that must stay NaN."""
    pages = fill_pages([20, 40], kv_heads=2, head_dim=64, page=16, dtype=dtype, device=device)
    q = randn(tokens, 3 * 4, 64, dtype=dtype, device=device)[:, 2:6]
    wide = nan_like(q, shape=(tokens, 5, 72))
    out = wide[:, :4, :64]

    result = attend(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, out=out)

    assert result is out
    assert_close(out, expected(q, pages))
    assert wide[:, 4:].isnan().all() and wide[..., 64:].isnan().all()


@both("attention_decode")
def test_strided_queries_and_a_given_output(device, dtype, implementation):
    attend = partial(getattr(module, implementation), scale=0.1, max_seq_len=40)
    check_gaps(2, attend, partial(expected_decode, scale=0.1), dtype=dtype, device=device)


def test_huge_logits_do_not_overflow(device):
    """Breaks if the peak is not subtracted: exp(1e4) is infinite."""
    pages = fill_pages([70], kv_heads=1, head_dim=64, page=64, dtype=torch.float32, device=device)
    q = pages.keys[0][None, 66] * 300

    for call in (module.attention_decode, module.attention_decode_reference):
        out = call(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, scale=1.0, max_seq_len=70)

        assert_close(out[0], pages.values[0][66])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}])
def test_the_reference_keeps_probabilities_in_float32(dtype, options):
    """Breaks at 2000 nearly equal keys if softmax runs in bfloat16: its sum would stop growing at 256."""
    pages = fill_pages([2000, 1500], kv_heads=1, head_dim=64, page=16, dtype=dtype, device="cpu")
    q = randn(2, 2, 64, dtype=dtype, device="cpu", spread=0.05)

    out = module.attention_decode_reference(
        q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, scale=0.125, max_seq_len=2000, **options
    )

    assert_close(out, expected_decode(q, pages, scale=0.125, **options), scale=0.2)


def test_the_reference_takes_sequences_of_any_lengths_together():
    """Breaks at the empty sequence in the middle if the rows behind it land in the wrong place."""
    pages = fill_pages([5, 40, 0, 17, 16], kv_heads=1, head_dim=64, page=16, dtype=torch.float32, device="cpu")
    q = randn(5, 2, 64, dtype=torch.float32, device="cpu")

    out = module.attention_decode_reference(
        q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, scale=0.1, max_seq_len=40, window=20
    )

    assert_close(out, expected_decode(q, pages, scale=0.1, window=20))


def test_room_for_parts():
    """Breaks if one sequence of 32k keys gets less than the device, or 256 equal ones are cut."""
    cut = make_cut(1, 8, 264, invariant=False)
    assert (cut.target, cut.parts, cut.merges, cut.listed) == (32, 32, 1, False)
    cut = make_cut(32, 8, 264, invariant=False)
    assert (cut.target, cut.parts, cut.merges, cut.listed) == (98, 49, 17, True)
    cut = make_cut(256, 8, 264, invariant=False)
    assert (cut.parts, cut.merges) == (256 + 16, 16)
    assert make_cut(300, 512, 264, invariant=False).merges == make_cut(1, 512, 264, invariant=False).merges == 0
    cut = make_cut(2, 8, 264, invariant=True, window=100, queries=4)
    assert (cut.parts, cut.merges, cut.listed, cut.window, cut.queries) == (32, 2, False, 100, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(2, 3, 64)}, r"q \[2, 3, 64\] does not fit a cache of \[4, 2, 16, 64\]"),
        ({"q": torch.zeros(2, 4, 32)}, "does not fit"),
        ({"q": torch.zeros(2, 64, 4).mT}, "contiguous in the last dimension"),
        ({"v_cache": torch.zeros(4, 2, 32, 64)[:, :, ::2]}, "both caches must be contiguous"),
        (
            {"seq_lens": torch.ones(3, dtype=torch.int32)},
            r"2 sequences, but block_tables .* is \[2, 3\] and seq_lens \[3\]",
        ),
        ({"block_tables": torch.zeros(3, 2, dtype=torch.int32).t()}, "rows must be contiguous"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\], is \[2\]"),
        ({"alibi_slopes": torch.zeros(2, 4)}, r"alibi_slopes must be \[4\], is \[2, 4\]"),
        ({"k_cache": torch.zeros(4, 2, 24, 64), "v_cache": torch.zeros(4, 2, 24, 64)}, "blocks of 24 tokens"),
    ],
)
def test_refusals(device, change, message):
    arguments = {
        "q": torch.zeros(2, 4, 64),
        "k_cache": torch.zeros(4, 2, 16, 64),
        "v_cache": torch.zeros(4, 2, 16, 64),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
    } | change

    def moved(value):  # `to` would make a strided tensor dense, and the fault would be gone
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)

    with pytest.raises(ValueError, match=message):
        module.attention_decode(**{name: moved(value) for name, value in arguments.items()}, scale=1.0, max_seq_len=16)


def equal_far_away(device, tokens, attend):
    """Assert that the last blocks of a large cache give what a small one gives: block 131072 of [8, 64, 32] begins at
    element 2**31, which wraps in 32 bits. Returns: queries, the small cache, and what came out."""
    low = fill_pages([300, 65], kv_heads=8, head_dim=32, page=64, dtype=torch.float16, device=device)
    high = fill_pages([300, 65], kv_heads=8, head_dim=32, page=64, dtype=torch.float16, device=device, blocks=131090)
    q = randn(tokens, 8, 32, dtype=torch.float16, device=device)
    assert high.k_cache.numel() > 2**31

    first, second = (attend(q, one.k_cache, one.v_cache, one.tables, one.lens) for one in (low, high))

    assert torch.equal(first, second)
    return q, low, first


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(device):
    equal_far_away(device, 2, partial(module.attention_decode, scale=0.2, max_seq_len=300))


@pytest.mark.skipif(module.launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")
@pytest.mark.parametrize("sequences, page", [(1, 16), (1, 64), (2, 64)])
def test_loads_run_ahead(sequences, page):
    """Breaks at 0 copies under way if Triton takes the page number into its pipeline: a third of the bandwidth lost."""
    with compile_only("sm_90") as built:
        q = torch.empty(sequences, 8, 128, dtype=torch.bfloat16)
        cache = torch.empty(8, 2, page, 128, dtype=torch.bfloat16)
        table, lens = torch.empty(sequences, 64, dtype=torch.int32), torch.empty(sequences, dtype=torch.int32)
        module.attention_decode(q, cache, cache, table, lens, scale=0.1, max_seq_len=64)

    attention = next(one for one in built if "parts" in one.name)
    under_way = re.findall(r"cp\.async\.wait_group\s+(\d+)", attention.kernel.asm["ptx"])
    assert max(map(int, under_way)) >= 2


def compile_cases():
    def case(dtype, head_dim, page, max_seq_len, **options):
        cache = torch.empty(8, 2, page, head_dim, dtype=dtype)
        tables, lens = torch.empty(2, 64, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        options = with_head_numbers(options, 8, dtype, "meta")
        q = torch.empty(2, 8, head_dim, dtype=dtype)
        module.attention_decode(q, cache, cache, tables, lens, scale=0.1, max_seq_len=max_seq_len, **options)

    for dtype, head_dim, page, longest, options in (
        (torch.float32, 80, 16, 4096, {}),
        (torch.bfloat16, 128, 64, 4096, {}),
        (torch.bfloat16, 128, 64, 64, {"sinks": True, "window": 1024, "alibi_slopes": True}),
        (torch.bfloat16, 128, 16, 64, {"batch_invariant": True}),
        (torch.bfloat16, 256, 64, 4096, {"softcap": 50.0, "window": 1024}),
    ):
        yield lambda args=(dtype, head_dim, page, longest), options=options: case(*args, **options)


@pytest.mark.parametrize("window", [0, 5])
def test_the_reference_reads_both_layouts_of_the_cache_alike(window):
    """Breaks if the copy of whole blocks mixes up heads, places, or keys and values."""
    both = randn(9, 4, 2, 2, 16, dtype=torch.float32, device="cpu")
    k, v = (one.transpose(1, 2) for one in both.unbind(2))
    q = randn(3, 6, 16, dtype=torch.float32, device="cpu", seed=1)
    where = torch.tensor([[3, 1, 7], [2, 0, 0], [8, 5, 4]], dtype=torch.int32), torch.tensor([11, 2, 12])
    options = {"scale": 0.25, "max_seq_len": 12, "window": window}

    joined = module.attention_decode_reference(q, k, v, *where, **options, memo={})
    apart = module.attention_decode_reference(q, k.contiguous(), v.contiguous(), *where, **options)

    assert torch.allclose(joined, apart, atol=1e-6)
