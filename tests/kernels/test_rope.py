"""QK-norm, rotation and cache write against the reference, and the reference against the definition."""

import math

import pytest
import torch

from tests.kernels.harness import assert_close, gapped, nan_like, randn
from tinyserve.kernels import rope

BLOCKS, PLACES = 5, 16
# head size, rotated numbers (None = no rotation), q heads, kv heads
SHAPES = [
    (64, 64, 9, 3),
    (80, 32, 4, 4),
    (96, 96, 2, 1),
    (128, 128, 8, 1),
    (256, 64, 2, 2),
    (7, 6, 3, 1),
    (64, None, 4, 2),
]


def angles(rotary: int | None, device, positions: int = 100) -> torch.Tensor | None:
    if rotary is None:
        return None
    frequencies = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    angle = torch.arange(positions)[:, None] * frequencies
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


def inputs(tokens, head_dim, rotary, heads, kv_heads, *, dtype, device, norm=True, cache_dtype=None):
    """Arguments of one call; the caches are NaN, every third token is not stored."""
    qkv = gapped(randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device, spread=2))
    slots = torch.randperm(BLOCKS * PLACES, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[2::3] = -1
    cache = nan_like(qkv, shape=(BLOCKS, kv_heads, PLACES, head_dim)).to(cache_dtype or dtype)
    weights = {
        "q_weight": randn(head_dim, dtype=dtype, device=device, seed=1) if norm else None,
        "k_weight": randn(head_dim, dtype=dtype, device=device, seed=2) if norm else None,
    }
    return {
        "qkv": qkv,
        "positions": torch.arange(tokens, dtype=torch.int32).mul(13).remainder(100).to(torch.int32).to(device),
        "cos_sin": angles(rotary, device),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slots_to_write": slots.to(device),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        **weights,
    }


def run(function, arguments):
    """(q, k_cache, v_cache) after one call on copies of the caches."""
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    return function(**arguments | caches), caches["k_cache"], caches["v_cache"]


@pytest.mark.parametrize("head_dim, rotary, heads, kv_heads", SHAPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_kernel_is_its_reference(device, dtype, head_dim, rotary, heads, kv_heads, norm, interleaved):
    arguments = inputs(5, head_dim, rotary, heads, kv_heads, dtype=dtype, device=device, norm=norm)
    arguments |= {"interleaved": interleaved, "weight_offset": 1.0 if norm else 0.0}

    actual = run(rope.qk_norm_rope_write, arguments)
    expected = run(rope.qk_norm_rope_write_reference, arguments)

    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    again = run(rope.qk_norm_rope_write, arguments)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(actual, again, strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_numbers_of_tokens(device, dtype, tokens):
    arguments = inputs(tokens, 64, 64, 4, 2, dtype=dtype, device=device)

    for one, other in zip(
        run(rope.qk_norm_rope_write, arguments), run(rope.qk_norm_rope_write_reference, arguments), strict=True
    ):
        assert_close(one, other)


@pytest.mark.parametrize("head_dim, rotary, heads, kv_heads", SHAPES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_few_tokens_are_rotated_by_matrices(head_dim, rotary, heads, kv_heads, interleaved):
    """On the CPU, in a step that keeps what layers share: the rotation of pairs, and the matrices are made once."""
    arguments = inputs(5, head_dim, rotary, heads, kv_heads, dtype=torch.float32, device="cpu", norm=False)
    arguments |= {"interleaved": interleaved}
    memo = {}

    actual = run(rope.qk_norm_rope_write_reference, arguments | {"memo": memo})

    for one, other in zip(actual, run(rope.qk_norm_rope_write_reference, arguments), strict=True):
        assert_close(one, other)
    turns = [value for key, value in memo.items() if key[0] == "turn"]
    assert [turn.shape for turn in turns] == [(5, head_dim, head_dim)] * (rotary is not None)


@pytest.mark.parametrize("function", [rope.qk_norm_rope_write, rope.qk_norm_rope_write_reference])
def test_only_the_named_slots_change(device, function):
    """Breaks if slot -1 writes the last place of the last block (79), or V is normalised or turned."""
    arguments = inputs(4, 64, 64, 4, 2, dtype=torch.float32, device=device)
    arguments["slots_to_write"] = torch.tensor([17, -1, 0, 78], device=device)

    _, k_cache, v_cache = run(function, arguments)
    k_written = ~k_cache.isnan().transpose(1, 2).reshape(80, -1)
    v_rows = v_cache.transpose(1, 2).reshape(80, 2, 64)

    assert k_written.any(dim=1).nonzero().flatten().tolist() == [0, 17, 78]
    assert k_written.sum() == 3 * 2 * 64
    assert torch.equal(v_rows[[17, 0, 78]], arguments["qkv"][[0, 2, 3], 6 * 64 :].unflatten(1, (2, 64)))
    assert v_rows.isnan().sum() == 77 * 2 * 64


@pytest.mark.parametrize("function", [rope.qk_norm_rope_write, rope.qk_norm_rope_write_reference])
def test_q_is_a_copy(device, function):
    arguments = inputs(1, 64, None, 4, 2, dtype=torch.float32, device=device, norm=False)

    q, _, _ = run(function, arguments)
    expected = arguments["qkv"][:, : 4 * 64].reshape(1, 4, 64).clone()
    arguments["qkv"].zero_()

    assert torch.equal(q, expected)
    assert q.is_contiguous()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_a_product_of_complex_numbers(interleaved):
    """The pair (a, b) is a + bi, turned by the angle: position 3, frequencies 1 and 1/100, the last 2 of 6 unturned."""
    x = randn(1, 18, dtype=torch.float32, device="cpu")
    arguments = {
        "qkv": x,
        "positions": torch.tensor([3]),
        "cos_sin": angles(4, "cpu"),
        "k_cache": torch.zeros(1, 1, 2, 6),
        "v_cache": torch.zeros(1, 1, 2, 6),
        "slots_to_write": torch.tensor([0]),
    }
    q = rope.qk_norm_rope_write(**arguments, num_heads=1, num_kv_heads=1, interleaved=interleaved)[0, 0].tolist()

    expected = x[0, :6].tolist()
    for pair, frequency in enumerate((1.0, 0.01)):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
        turned = complex(expected[i], expected[j]) * complex(math.cos(3 * frequency), math.sin(3 * frequency))
        expected[i], expected[j] = turned.real, turned.imag
    assert q == pytest.approx(expected, abs=1e-6)


def test_caches_may_lie_interleaved_and_have_another_type(device):
    """Breaks if a cache's block stride is taken for its own size: K and V share one tensor here."""
    arguments = inputs(4, 64, 64, 4, 2, dtype=torch.float32, device=device, cache_dtype=torch.float16)
    both = nan_like(arguments["k_cache"], shape=(BLOCKS, 2, 2, PLACES, 64))
    _, k_cache, v_cache = run(rope.qk_norm_rope_write_reference, arguments)

    rope.qk_norm_rope_write(**arguments | {"k_cache": both[:, 0], "v_cache": both[:, 1]})

    assert_close(both[:, 0], k_cache)
    assert_close(both[:, 1], v_cache)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 5}, r"qkv: expected \[rows, 576\], got \[2, 512\]"),
        ({"k_cache": torch.zeros(2, 3, 16, 64)}, r"k_cache must be \[blocks, 2, block size, head size\]"),
        ({"v_cache": torch.zeros(2, 2, 16, 64)}, r"k_cache is \[5, 2, 16, 64\], v_cache \[2, 2, 16, 64\]"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, r"positions must be \[2\] integers, contiguous, is \[3\]"),
        (
            {"slots_to_write": torch.zeros(2)},
            r"slots_to_write must be \[2\] integers, contiguous, is \[2\] torch.float32",
        ),
        ({"cos_sin": torch.zeros(4, 66)}, r"cos_sin must be \[positions, even and at most 64\] float32.*\[4, 66\]"),
        ({"k_weight": None}, "come together"),
        ({"q_weight": torch.zeros(32)}, r"q_weight must be \[64\], contiguous, is \[32\]"),
    ],
)
def test_refusals(device, change, message):
    arguments = inputs(2, 64, 64, 4, 2, dtype=torch.float32, device=device)
    arguments |= {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()
    }

    with pytest.raises(ValueError, match=message):
        rope.qk_norm_rope_write(**arguments)


@pytest.mark.gpu
def test_the_last_block_of_a_cache_of_more_than_2_to_the_31_elements(device):
    """Breaks at block 32768: 32768 * 8 * 64 * 128 = 2**31 wraps in 32 bits."""
    arguments = inputs(1, 128, 128, 16, 8, dtype=torch.float16, device=device)
    k_cache = torch.zeros(32770, 8, 64, 128, dtype=torch.float16, device=device)
    v_cache = torch.zeros_like(k_cache)
    arguments |= {"k_cache": k_cache, "v_cache": v_cache}
    arguments["slots_to_write"] = torch.tensor([32769 * 64 + 63], device=device)

    rope.qk_norm_rope_write(**arguments)

    assert torch.equal(v_cache[-1, :, -1], arguments["qkv"][0, 24 * 128 :].view(8, 128))
    assert (k_cache[-1, :, -1] != 0).all()
    assert not any(cache[:-1].any() for cache in (k_cache, v_cache))


def compile_cases():
    def case(head_dim, rotary, dtype, cache_dtype=None, **more):
        arguments = {
            "qkv": torch.empty(4, 24 * head_dim, dtype=dtype),
            "positions": torch.empty(4, dtype=torch.int32),
            "cos_sin": None if rotary is None else torch.empty(100, rotary),
            "k_cache": torch.empty(8, 4, 64, head_dim, dtype=cache_dtype or dtype),
            "v_cache": torch.empty(8, 4, 64, head_dim, dtype=cache_dtype or dtype),
            "slots_to_write": torch.empty(4, dtype=torch.int64),
        }
        if more.pop("norm", False):
            arguments |= {name: torch.empty(head_dim, dtype=dtype) for name in ("q_weight", "k_weight")}
        rope.qk_norm_rope_write(**arguments, num_heads=16, num_kv_heads=4, **more)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield lambda dtype=dtype: case(128, 128, dtype, norm=True)
    yield lambda: case(80, 32, torch.bfloat16, interleaved=True)
    yield lambda: case(256, None, torch.bfloat16)
    yield lambda: case(64, 64, torch.float32, cache_dtype=torch.bfloat16)
