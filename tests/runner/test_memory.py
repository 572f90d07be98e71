"""runner/memory.py: sizes are decided by numbers that can be checked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyserve.device import Device, Memory
from tinyserve.errors import ConfigError
from tinyserve.kv.groups import KVGroup
from tinyserve.runner.memory import (
    CacheRequest,
    Needs,
    blocks_per_sequence,
    longest_context,
    plan_cache,
    room,
    size_cache,
)

FULL = (KVGroup(index=0, window=None, layers=(0, 1)),)
HYBRID = (KVGroup(index=0, window=None, layers=(0,)), KVGroup(index=1, window=32, layers=(1,)))


def ask(groups=FULL, **changes):
    values = dict(groups=groups, block_size=16, block_bytes=1000, max_model_len=256, max_num_seqs=4, max_step_tokens=64)
    return CacheRequest(**values | changes)


def test_the_cache_never_takes_more_than_the_requests_can_use():
    """4 sequences of 256 tokens in blocks of 16 are 64 blocks, plus the null block: 65, though a million fit."""
    assert plan_cache(ask(), 10**9).num_blocks == 65


def test_asked_bytes_are_exact():
    """10 500 bytes of blocks of 1000 bytes: 10 blocks."""
    assert plan_cache(ask(cache_bytes=10_500), 10_500).num_blocks == 10


def test_a_context_that_does_not_fit_is_fitted_and_said():
    """9 blocks are 8 usable ones: 128 tokens."""
    plan = plan_cache(ask(num_blocks=9), 0)

    assert (plan.max_model_len, plan.fitted) == (128, True)
    assert "cut" in plan.report()


def test_a_context_that_does_not_fit_is_refused_when_it_must_be_exact():
    with pytest.raises(ConfigError, match="at most 128 tokens fit"):
        plan_cache(ask(num_blocks=9, fit=False), 0)


def test_too_little_for_one_block_is_an_error_with_its_cure():
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        plan_cache(ask(), 1500)


def test_a_window_group_holds_at_most_its_window_and_one_chunk():
    """Full: 16 blocks for 256 tokens. Window 32 + budget 64 = 96 tokens = 6 blocks, + 1 for a window inside a block."""
    assert blocks_per_sequence(ask(HYBRID), 256) == 16 + 7


@given(st.integers(2, 200), st.integers(1, 1000))
def test_the_longest_context_is_the_longest(num_blocks, max_model_len):
    request = ask(HYBRID, max_model_len=max_model_len)

    length = longest_context(request, num_blocks)

    assert length == 0 or blocks_per_sequence(request, length) <= num_blocks - 1
    assert length == max_model_len or blocks_per_sequence(request, length + 1) > num_blocks - 1


@pytest.mark.parametrize("more", [{"cache_bytes": 100 * 2**40}, {"num_blocks": 2**40}])
def test_a_cache_larger_than_the_machine_is_refused(more):
    """100 TiB ended in a traceback of numpy, which could not allocate a byte for each block."""
    with pytest.raises(ConfigError, match="the device has"):
        size_cache(ask(**more), Device.pick("cpu"), 0, Needs())


@pytest.mark.parametrize(
    ("free", "share", "held", "to_come", "expected"),
    [
        (20, 0.92, 0, 4, 4),  # a quarter of the 16 that are free once weights are there
        (16, 0.92, 4, 0, 4),
        (16, 0.15, 4, 0, 0.8),  # the share of 32 is 4.8: 0.8 beside the weights
        (16, 0.001, 4, 0, -4 + 0.032),  # too little for the weights
    ],
)
def test_a_share_of_a_machine_holds_weights_and_cache(free, share, held, to_come, expected):
    """0.001 and 0.92 gave the same 4.93 GiB: the option was not looked at on a CPU."""
    gib = 2**30
    memory = Memory(free * gib, 32 * gib)

    found = room(ask(cpu=True, utilization=share), memory, held * gib, to_come * gib)

    assert found == pytest.approx(expected * gib, abs=2)
    assert room(ask(cpu=True, utilization=share, cache_bytes=5), memory, held * gib, to_come * gib) == 5


def test_too_little_on_a_cpu_names_the_option_that_counts_there():
    with pytest.raises(ConfigError, match="Raise --kv-cache-memory-bytes, or free"):
        plan_cache(ask(cpu=True), -7)
    with pytest.raises(ConfigError, match="Raise --gpu-memory-utilization or"):
        plan_cache(ask(cpu=True, utilization=0.001), -7)
