"""Caches of one byte a number: what is written, and attention over it against one dense softmax over decoded keys.

The codes of slots that no token has are those of NaN, and so are their scales.
"""

import pytest
import torch
from attrs import evolve

from tests.kernels.harness import assert_close, randn
from tests.kernels.test_attention_decode import dense_attention, fill_pages, with_head_numbers
from tests.kernels.test_rope import angles
from tinyserve.kernels import attention_decode, attention_prefill, attention_verify, coded, rope

KINDS = tuple(coded.LARGEST)
SCALE = {"e4m3": 0.5, "e5m2": 3.0}


def empty(kind, shape, device, scale=None):
    """A cache in which nothing is written. scale: of fp8."""
    number = {"dtype": torch.int8 if kind == "int8" else torch.uint8, "device": device}
    codes = torch.full(shape, 0x7F, **number)
    scales = torch.full(shape[:3], torch.nan, device=device) if kind == "int8" else scale or SCALE[kind]
    return coded.CodedCache(codes, scales, kind)


def coded_pages(kind, lengths, *, kv_heads, head_dim, page, dtype, device):
    """What `fill_pages` gives with coded caches: keys and values are what their codes stand for."""
    pages = fill_pages(lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, dtype=dtype, device=device)
    caches, tokens = [], []
    for rows in (pages.keys, pages.values):
        caches.append(empty(kind, pages.k_cache.shape, device))
        tokens.append([])
        for one, table in zip(rows, pages.tables, strict=True):
            if len(one):
                place = torch.arange(len(one), device=device)
                caches[-1].write(one, table[place // page].long() * page + place % page)
            blocks = table[: -(-len(one) // page)].long()
            tokens[-1].append(caches[-1].read(blocks, slice(0, len(one)))[0].transpose(0, 1))
    return evolve(pages, keys=tokens[0], values=tokens[1], k_cache=caches[0], v_cache=caches[1])


def spread(pages, queries, q, **options):
    """Dense attention of the last tokens of each sequence."""
    rows = torch.split(q, queries)
    found = [dense_attention(*one, **options) for one in zip(rows, pages.keys, pages.values, strict=True)]
    return torch.cat(found)


CASES = [
    # head_dim, query heads, kv heads, page, options
    (64, 6, 2, 64, {}),
    (80, 3, 1, 16, {"window": 50, "softcap": 4.0, "sinks": True, "alibi_slopes": True}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim, heads, kv_heads, page, options", CASES)
def test_attention_over_codes(device, dtype, kind, head_dim, heads, kv_heads, page, options):
    """Decode, verify and prefill, kernel and reference; breaks if low and high bytes of a word change places."""
    lengths, some = [1, 130, 64], {"dtype": dtype, "device": device}
    pages = coded_pages(kind, lengths, kv_heads=kv_heads, head_dim=head_dim, page=page, **some)
    options = with_head_numbers(dict(options, scale=head_dim**-0.5), heads, **some)
    where = pages.k_cache, pages.v_cache, pages.tables
    for queries, calls in (
        ([1, 1, 1], (attention_decode.attention_decode, attention_decode.attention_decode_reference)),
        ([1, 4, 3], (attention_verify.attention_verify,)),
        ([1, 70, 30], (attention_prefill.attention_prefill, attention_prefill.attention_prefill_reference)),
    ):
        q = randn(sum(queries), heads, head_dim, spread=2, **some)
        start = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32, device=device)
        expected = spread(pages, queries, q, **options)
        for call in calls:
            if max(queries) == 1:
                out = call(q, *where, pages.lens, max_seq_len=130, **options)
            else:
                out = call(q, *where, start, pages.lens, max_query_len=max(queries), **options)
            assert_close(out, expected, scale=2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written(device, dtype, kind):
    """The kernel's codes are its reference's, but for ties; breaks if k and v, or their scales, change places."""
    some = {"dtype": dtype, "device": device}
    qkv = randn(5, (4 + 2 * 2) * 64, spread=3, **some)
    qkv[3, 4 * 64 :] = 0
    qkv[4, 6 * 64 + 5] = 1e4
    slots = torch.tensor([17, -1, 0, 78, 33], device=device)
    positions = torch.arange(5, dtype=torch.int32, device=device)
    found = []
    for function in (rope.qk_norm_rope_write, rope.qk_norm_rope_write_reference):
        k, v = (empty(kind, (5, 2, 16, 64), device, scale) for scale in (0.25, 0.5))
        weight = {"q_weight": randn(64, seed=1, **some), "k_weight": randn(64, seed=2, **some)}
        q = function(qkv, positions, angles(64, device), k, v, slots, num_heads=4, num_kv_heads=2, **weight)
        found.append((q, k, v))

    (q, *mine), (expected, *theirs) = found
    assert_close(q, expected)
    for one, other in zip(mine, theirs, strict=True):
        codes = [torch.where(codes & 127 == 0, 0, codes.int()) for codes in (one.codes, other.codes)]  # 0 is -0
        apart = (codes[0] - codes[1]).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
        if one.each:
            torch.testing.assert_close(one.scales, other.scales, equal_nan=True, rtol=1e-5, atol=0)
    values = mine[1].read(torch.tensor([2, 4], device=device), slice(None))[0, :, [1, 30]].float()
    wanted = qkv[[4, 3], 6 * 64 :].unflatten(1, (2, 64)).transpose(0, 1).float()
    largest = coded.LARGEST[kind] * (1 if kind == "int8" else 0.5)
    error = {"e4m3": 2**-4, "e5m2": 2**-3, "int8": 0}[kind]
    step = wanted.abs().amax(-1, keepdim=True) / 254 * 1.01 if kind == "int8" else 2**-10
    wanted = wanted if kind == "int8" else wanted.clamp(-largest, largest)
    assert ((values - wanted).abs() <= wanted.abs() * error + step).all()
    assert not values[:, 1].any()


def test_a_row_of_int8_with_a_nan_is_nan(device):
    """Breaks if what is not a number is written as a number: nobody would find out later."""
    qkv = randn(1, 3 * 64, dtype=torch.float32, device=device)
    qkv[0, 64 + 7] = torch.nan
    for function in (rope.qk_norm_rope_write, rope.qk_norm_rope_write_reference):
        k, v = (empty("int8", (1, 1, 16, 64), device) for _ in range(2))
        slot, position = (torch.tensor([3], device=device, dtype=dtype) for dtype in (torch.int64, torch.int32))
        function(qkv, position, None, k, v, slot, num_heads=1, num_kv_heads=1)
        rows = [cache.read(slot * 0, slice(3, 4)) for cache in (k, v)]
        assert rows[0].isnan().all() and rows[1].isfinite().all()


def test_keys_and_values_are_coded_alike():
    k, v = empty("e4m3", (2, 1, 16, 64), "cpu"), empty("int8", (2, 1, 16, 64), "cpu")
    with pytest.raises(ValueError, match="must be coded alike"):
        coded.constants(k, v)
    with pytest.raises(ValueError, match="must be coded alike"):
        coded.constants(k, v.codes)


def compile_cases():
    def case(calls, kind, head_dim, page, **options):
        tables, lens = torch.empty(2, 64, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        cache = empty(kind, (8, 2, page, head_dim), "meta")
        some = {"dtype": torch.bfloat16, "device": "meta"}
        options = with_head_numbers(dict(options, scale=0.1), 8, **some)
        start = torch.empty(3, dtype=torch.int32)
        q = torch.empty(300, 8, head_dim, **some)
        if "decode" in calls:
            attention_decode.attention_decode(q[:2], cache, cache, tables, lens, max_seq_len=4096, **options)
        if "verify" in calls:
            attention_verify.attention_verify(q[:8], cache, cache, tables, start, lens, max_query_len=4, **options)
        if "prefill" in calls:
            attention_prefill.attention_prefill(q, cache, cache, tables, start, lens, max_query_len=256, **options)
        if "write" in calls:
            qkv, slots = torch.empty(2, 12 * head_dim, **some), torch.empty(2, dtype=torch.int64)
            rope.qk_norm_rope_write(qkv, lens, None, cache, cache, slots, num_heads=8, num_kv_heads=2)

    yield lambda: case("decode write", "e4m3", 128, 64)
    yield lambda: case("prefill", "e4m3", 64, 64)
    yield lambda: case("verify write", "e5m2", 64, 16, window=1024, sinks=True)
    yield lambda: case("decode write", "int8", 256, 64, softcap=30.0)
