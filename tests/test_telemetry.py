"""Metrics: vLLM's names behind a prefix, all there from the start, one registry per engine."""

import asyncio
import logging
import time

import pytest

from tinyserve.telemetry import Metrics, NoMetrics, RequestStats


def value(metrics, name, **labels):
    found = metrics.registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})
    assert found is not None, name
    return found


def test_a_scrape_before_the_first_request_shows_every_series():
    metrics = Metrics("tiny")
    text = metrics.exposition()[0].decode()

    assert value(metrics, "tinyserve:prompt_tokens_total") == 0
    assert value(metrics, "tinyserve:request_success_total", finished_reason="abort") == 0
    assert "tinyserve:time_to_first_token_seconds_bucket" in text
    assert "process_" in text


def test_the_prefix_and_the_engine_are_of_choice():
    text = Metrics("tiny", prefix="vllm:", engine="3").exposition()[0].decode()

    assert 'vllm:num_requests_running{engine="3",model_name="tiny"} 0.0' in text
    assert "tinyserve:" not in text


def test_two_engines_do_not_mix():
    one, two = Metrics("tiny"), Metrics("tiny")
    one.step(tokens=5, prompt_tokens=4, generation_tokens=1)

    assert value(one, "tinyserve:generation_tokens_total") == 1
    assert value(two, "tinyserve:generation_tokens_total") == 0


def test_a_life_of_a_request_is_counted():
    """10 prompt tokens, 4 of them cached, 3 generated: queue 1 s, prefill 2 s, decode 4 s, 2 s a token."""
    metrics = Metrics("tiny")
    metrics.admitted(prompt_tokens=10, cached_tokens=4)
    metrics.step(tokens=6, prompt_tokens=6, generation_tokens=1)
    metrics.first_token(3.0)
    metrics.finished(
        RequestStats(
            reason="stop", prompt_tokens=10, cached_tokens=4, generation_tokens=3, max_tokens=16,
            arrival=1.0, scheduled=2.0, first_token=4.0, last_token=8.0, finished=8.5,
        )
    )  # fmt: skip

    assert value(metrics, "tinyserve:prompt_tokens_total") == 10
    assert value(metrics, "tinyserve:prefix_cache_hits_total") == 4
    assert value(metrics, "tinyserve:request_success_total", finished_reason="stop") == 1
    for name, seconds in (("request_queue_time", 1), ("request_prefill_time", 2), ("request_decode_time", 4)):
        assert value(metrics, f"tinyserve:{name}_seconds_sum") == seconds
    assert value(metrics, "tinyserve:request_time_per_output_token_seconds_sum") == 2
    assert value(metrics, "tinyserve:e2e_request_latency_seconds_sum") == 7.5


def test_the_throughput_line_is_silent_when_idle(caplog):
    async def run():
        metrics = Metrics("tiny")
        metrics.step(tokens=5, prompt_tokens=4, generation_tokens=1)
        task = asyncio.create_task(metrics.report(0.03))
        await asyncio.sleep(0.2)
        task.cancel()

    caplog.set_level(logging.INFO, logger="tinyserve.stats")
    asyncio.run(run())
    lines = [record.message for record in caplog.records]

    assert 1 <= len(lines) <= 2
    assert lines[0].startswith("Engine 000: Avg prompt throughput: 133.3 tokens/s, Avg generation throughput: 33.3")


def test_the_loop_lag_is_the_longest_block():
    """A call that blocks the loop for 150 ms shows as at least 100 ms (a tick is 50 ms)."""

    async def run():
        metrics = Metrics("tiny", log=False)
        task = asyncio.create_task(metrics.report())
        await asyncio.sleep(0.01)
        time.sleep(0.2)
        await asyncio.sleep(0.06)
        task.cancel()
        return metrics

    metrics = asyncio.run(run())
    assert metrics.reset_lag() >= 0.1
    lags = [line for line in metrics.exposition()[0].decode().splitlines() if "event_loop_lag_seconds_bucket" in line]
    below, all_of_them = (float(line.split()[1]) for line in lags if 'le="0.1"' in line or 'le="+Inf"' in line)
    assert all_of_them == below + 1


@pytest.mark.parametrize("name", [name for name in dir(NoMetrics) if not name.startswith("_")])
def test_the_null_object_has_every_method(name):
    assert getattr(Metrics, name) is not getattr(NoMetrics, name)


def test_gaps_observed_together_count_as_single_ones():
    """Every bucket, the sum and the count, with values on the bounds, between them and beyond the last."""
    values = [0.0, 0.001, 0.01, 0.0100001, 0.05, 0.3, 2.5, 1e6, 0.05]
    together, single = Metrics("tiny"), Metrics("tiny")
    together.later_tokens(values)
    for one in values:
        single._values["inter_token_latency_seconds"].observe(one)

    def lines(metrics):
        text = metrics.exposition()[0].decode()
        return [line for line in text.splitlines() if "inter_token_latency" in line and "_created" not in line]

    assert lines(together) == lines(single)
    assert value(together, "tinyserve:inter_token_latency_seconds_count") == 9
