"""What the engine tells about itself: Prometheus metrics, a throughput line every ten seconds, the loop's largest gap.

Every engine has its own registry, so two engines in one process never mix. The engine calls one small method per event;
nothing here reaches back. Names, labels and buckets are vLLM's behind a prefix of choice, so that dashboards work with
`--metrics-prefix vllm:`. Every series exists from the start with the value 0. Nothing is sent anywhere.

Before: config.py.  After: engine/engine.py (calls it), server/admin.py (shows it at /metrics).
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

logger = logging.getLogger("tinyserve.stats")

LOG_INTERVAL = 10.0  # seconds
_UNDER_A_SECOND = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT = (*_UNDER_A_SECOND, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# name, help, extra label, its values
GAUGES = (
    ("num_requests_running", "Sequences in the running batch.", None, ()),
    ("num_requests_waiting", "Sequences waiting to run.", None, ()),
    ("num_requests_waiting_by_reason", "Waiting for room, or passed by others.", "reason", ("capacity", "deferred")),
    ("kv_cache_usage_perc", "Share of the KV blocks in use, 0..1.", None, ()),
    ("loop_lag_seconds", "Largest delay of the event loop in the last ten seconds.", None, ()),
)  # fmt: skip
COUNTERS = (
    ("requests_started", "Answers that were queued: those that finished, run and wait add up to it.", None, ()),
    ("prompt_tokens", "Prompt tokens of answers that got their first token, computed or found.", None, ()),
    ("prompt_tokens_by_source", "Prompt tokens, by where their keys and values came from.", "source",
     ("local_compute", "local_cache_hit", "external_kv_transfer")),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", None, ()),
    ("generation_tokens", "Tokens generated.", None, ()),
    ("request_success", "Finished requests.", "finished_reason", ("stop", "length", "abort", "error", "repetition")),
    ("num_preemptions", "Times a running sequence was put back.", None, ()),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", None, ()),
    ("prefix_cache_hits", "Tokens found there.", None, ()),
    ("corrupted_requests", "Requests ended because the model produced NaN.", None, ()),
    ("admission_rejections", "Refused with 503.", "reason",
     ("queue_reqs", "queue_tokens", "queue_grammars", "queue_templates", "paused")),
)  # fmt: skip
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Arrival to first token.", _TTFT),
    ("inter_token_latency_seconds", "Between two output steps of a request.", _ITL),
    ("request_time_per_output_token_seconds", "Mean time of a token after the first, per request.", _ITL),
    ("e2e_request_latency_seconds", "Arrival to end.", _LATENCY),
    ("request_queue_time_seconds", "Arrival to first scheduled.", _LATENCY),
    ("request_inference_time_seconds", "First scheduled to last token.", _LATENCY),
    ("request_prefill_time_seconds", "First scheduled to first token.", _LATENCY),
    ("request_decode_time_seconds", "First to last token.", _LATENCY),
    ("request_prompt_tokens", "Prompt tokens of a request.", None),
    ("request_generation_tokens", "Generated tokens of an answer.", None),
    ("request_max_num_generation_tokens", "Generated tokens of the longest of n answers.", None),
    ("request_params_max_tokens", "max_tokens of a request.", None),
    ("request_params_n", "n of a request.", (1, 2, 5, 10, 20)),
    ("request_prefill_kv_computed_tokens", "Prompt tokens that were computed, not found.", None),
    ("request_num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20)),
    ("iteration_tokens_total", "Tokens computed in a step.", _STEP),
    ("event_loop_lag_seconds", "By how much a timer of the event loop was late, looked at 20 times a second.", _LAG),
)  # fmt: skip
# name, help, labels, whether it is a sum with a count and no buckets; names without prefix, as everywhere in Python
HTTP = (
    ("http_request_duration_seconds", "Until the last byte of the answer was sent.", ("handler", "method"), False),
    ("http_request_size_bytes", "Announced size of bodies.", ("handler",), True),
    ("http_response_size_bytes", "Bytes of answers.", ("handler",), True),
)


def described() -> Iterable[tuple[str, str, str | None, str]]:
    """Every metric for people: name without the prefix, kind, extra label, help."""
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        yield from ((name, kind, label, help) for name, help, label, _ in table)
    yield from ((name, "histogram", None, help) for name, help, _ in HISTOGRAMS)
    yield "cache_config_info", "gauge", "cache option", "1; the KV cache's sizes and options are its labels."
    yield "http_requests", "counter", "handler, method and status", "HTTP requests answered; without the prefix."
    for name, help, labels, plain in HTTP:
        yield name, "summary" if plain else "histogram", " and ".join(labels), help


@frozen(kw_only=True)
class RequestStats:
    """One finished answer. Times are time.monotonic() seconds, 0.0 where the moment never came.

    Args:
        reason: a FinishReason's value.
        arrival, scheduled, first_token, last_token, finished: when the front took it, when a step first computed
            it, when its first and its last token were seen, when it ended.
        max_tokens: as asked and clamped.
    """

    reason: str
    prompt_tokens: int
    generation_tokens: int = 0
    cached_tokens: int = 0
    max_tokens: int | None = None
    preemptions: int = 0
    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = field(factory=time.monotonic)


@frozen(kw_only=True)
class HttpCall:
    """One answered HTTP request. handler: the route's pattern, never the raw path. received, sent: bytes of bodies."""

    handler: str
    method: str
    status: int
    seconds: float = 0.0
    received: int = 0
    sent: int = 0


class NoMetrics:
    """The null object: same methods, nothing kept. Also the list of everything an engine may report."""

    def queues(self, now: Any) -> None:
        """After a step or an arrival. now: the scheduler's numbers of the moment (SchedulerStats)."""

    def started(self, answers: int) -> None:
        """Answers were queued."""

    def cache_config(self, facts: Mapping[str, Any]) -> None:
        """The KV cache's sizes and options, once."""

    def step(self, *, tokens: int, prompt_tokens: int, generation_tokens: int) -> None:
        """A step ended. tokens: computed in all; prompt_tokens: computed for prompts; generation_tokens: accepted."""

    def admitted(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A request got its first blocks; `cached_tokens` of its prompt were found in the prefix cache."""

    def first_token(self, seconds: float) -> None:
        """A request's first token was seen, `seconds` after its arrival."""

    def later_tokens(self, seconds: Sequence[float], times: int = 1) -> None:
        """A step's outputs of requests that had some before: the seconds since then, each for so many requests."""

    def preempted(self, count: int = 1) -> None:
        """Running sequences were put back into the queue."""

    def rejected(self, reason: str) -> None:
        """A request was refused with 503. reason: one that COUNTERS has for it."""

    def corrupted(self) -> None:
        """A request ended because its logits held NaN."""

    def finished(self, stats: RequestStats) -> None:
        """An answer ended, for whatever reason."""

    def call_ended(self, *, n: int, longest: int) -> None:
        """All n answers of a request have ended. longest: tokens of the longest one."""

    def http(self, call: HttpCall) -> None:
        """An HTTP request was answered."""

    async def report(self, interval: float = LOG_INTERVAL) -> None:
        """Measure the loop's lag and write the throughput line until cancelled. Run it as a task."""

    def reset_lag(self) -> float:
        """The loop's largest gap in seconds since the last call."""
        return 0.0

    def exposition(self) -> tuple[bytes, str]:
        """The metrics as Prometheus text, and its content type."""
        return b"", CONTENT_TYPE_LATEST


class Metrics(NoMetrics):
    """One engine's metrics.

    Args:
        model_name: first served name; a label of every series.
        max_model_len: upper end of the token histograms.
        prefix: put before every name, e.g. "tinyserve:".
        engine: index of the engine as text; the other label.
        log: whether `report` writes the throughput line.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = 8192,
        prefix: str = "tinyserve:",
        engine: str = "0",
        log: bool = True,
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._values: dict[str, Counter | Gauge | Histogram] = {}
        self._prefix = prefix
        self._log = log
        self._window = _Window()
        self._lag = [0.0, 0.0]  # largest since reset_lag; largest in this interval
        for kind, table in ((Gauge, GAUGES), (Counter, COUNTERS)):
            for name, help, label, values in table:
                self._add(kind(prefix + name, help, self._names(label), registry=self.registry), name, label, values)
        for name, help, buckets in HISTOGRAMS:
            bounds = buckets or tuple(_one_two_five(max_model_len))
            metric = _Histogram(prefix + name, help, self._names(None), buckets=bounds, registry=self.registry)
            self._add(metric, name, None, ())
        self._http = Counter(
            "http_requests", "HTTP requests answered.", ("handler", "method", "status"), registry=self.registry
        )
        self._calls = {
            name: Summary(name, help, labels, registry=self.registry)
            if plain
            else Histogram(name, help, labels, registry=self.registry, buckets=_LATENCY)
            for name, help, labels, plain in HTTP
        }
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _names(self, label: str | None) -> list[str]:
        return [*self._labels, *([label] if label else [])]

    def _add(self, metric, name: str, label: str | None, values: Iterable[str]) -> None:
        if label is None:
            self._values[name] = metric.labels(**self._labels)
        for value in values:
            self._values[f"{name}.{value}"] = metric.labels(**self._labels, **{label: value})

    def queues(self, now: Any) -> None:
        self._values["num_requests_running"].set(now.running)
        self._values["num_requests_waiting"].set(now.waiting)
        self._values["num_requests_waiting_by_reason.capacity"].set(now.waiting - now.deferred)
        self._values["num_requests_waiting_by_reason.deferred"].set(now.deferred)
        self._values["kv_cache_usage_perc"].set(now.kv_usage)
        self._window.running, self._window.waiting, self._window.usage = now.running, now.waiting, now.kv_usage

    def started(self, answers: int) -> None:
        self._values["requests_started"].inc(answers)

    def cache_config(self, facts: Mapping[str, Any]) -> None:
        labels = {"engine": self._labels["engine"], **{name: str(value) for name, value in facts.items()}}
        info = Gauge(self._prefix + "cache_config_info", "The KV cache.", list(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def step(self, *, tokens: int, prompt_tokens: int, generation_tokens: int) -> None:
        self._values["iteration_tokens_total"].observe(tokens)
        self._values["generation_tokens"].inc(generation_tokens)
        self._window.prompt += prompt_tokens
        self._window.generated += generation_tokens

    def admitted(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._values["prompt_tokens"].inc(prompt_tokens)
        self._values["prompt_tokens_by_source.local_compute"].inc(prompt_tokens - cached_tokens)
        self._values["prompt_tokens_cached"].inc(cached_tokens)
        self._values["prompt_tokens_by_source.local_cache_hit"].inc(cached_tokens)
        self._values["prefix_cache_queries"].inc(prompt_tokens)
        self._values["prefix_cache_hits"].inc(cached_tokens)
        self._window.hits.append((prompt_tokens, cached_tokens))

    def first_token(self, seconds: float) -> None:
        self._values["time_to_first_token_seconds"].observe(seconds)

    def later_tokens(self, seconds: Sequence[float], times: int = 1) -> None:
        self._values["inter_token_latency_seconds"].observe_all(seconds, times)

    def preempted(self, count: int = 1) -> None:
        self._values["num_preemptions"].inc(count)
        self._window.preempted += count

    def rejected(self, reason: str) -> None:
        self._values[f"admission_rejections.{reason}"].inc()

    def corrupted(self) -> None:
        self._values["corrupted_requests"].inc()

    def finished(self, stats: RequestStats) -> None:
        self._values[f"request_success.{stats.reason}"].inc()
        seen = self._observe
        seen("request_prompt_tokens", stats.prompt_tokens)
        seen("request_generation_tokens", stats.generation_tokens)
        seen("request_params_max_tokens", stats.max_tokens)
        seen("request_prefill_kv_computed_tokens", stats.prompt_tokens - stats.cached_tokens)
        seen("request_num_preemptions", stats.preemptions)
        seen("e2e_request_latency_seconds", stats.finished - stats.arrival)
        if stats.scheduled:
            seen("request_queue_time_seconds", stats.scheduled - stats.arrival)
        if stats.first_token:
            decode = stats.last_token - stats.first_token
            seen("request_prefill_time_seconds", stats.first_token - stats.scheduled)
            seen("request_inference_time_seconds", stats.last_token - stats.scheduled)
            seen("request_decode_time_seconds", decode)
            if stats.generation_tokens > 1:
                seen("request_time_per_output_token_seconds", decode / (stats.generation_tokens - 1))

    def call_ended(self, *, n: int, longest: int) -> None:
        self._observe("request_params_n", n)
        self._observe("request_max_num_generation_tokens", longest)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._values[name].observe(value)

    def http(self, call: HttpCall) -> None:
        self._http.labels(call.handler, call.method, str(call.status)).inc()
        self._calls["http_request_duration_seconds"].labels(call.handler, call.method).observe(call.seconds)
        self._calls["http_request_size_bytes"].labels(call.handler).observe(call.received)
        self._calls["http_response_size_bytes"].labels(call.handler).observe(call.sent)

    async def report(self, interval: float = LOG_INTERVAL) -> None:
        tick = min(0.05, interval)
        end = time.monotonic() + interval
        while True:
            start = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            self._observe("event_loop_lag_seconds", lag := max(now - start - tick, 0.0))
            self._lag = [max(largest, lag) for largest in self._lag]
            if now >= end:
                self._values["loop_lag_seconds"].set(self._lag[1])
                self._lag[1], end = 0.0, now + interval
                self._write_line(interval)

    def _write_line(self, interval: float) -> None:
        line, idle = self._window.line(interval)
        if self._log:
            logger.log(logging.DEBUG if idle else logging.INFO, "Engine %03d: %s", int(self._labels["engine"]), line)

    def reset_lag(self) -> float:
        lag, self._lag[0] = self._lag[0], 0.0
        return lag

    def exposition(self) -> tuple[bytes, str]:
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _Histogram(Histogram):
    """prometheus_client's, with a way to observe the values of a step together: 0.13 us each instead of 0.7."""

    def observe_all(self, values: Sequence[float], times: int = 1) -> None:
        """What `observe` does with each of them, so many times, with one addition for each bucket that is met."""
        self._raise_if_not_observable()
        self._sum.inc(sum(values) * times)
        for bucket, count in Tally(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[bucket].inc(count * times)


class _Window:
    """What happened since the last throughput line. It is silent after two intervals without a token."""

    def __init__(self) -> None:
        self.prompt = self.generated = self.preempted = 0
        self.running, self.waiting, self.usage = 0, 0, 0.0
        self.hits: deque[tuple[int, int]] = deque(maxlen=1000)
        self.was_idle = True

    def line(self, interval: float) -> tuple[str, bool]:
        """The line's text, and whether the engine was idle in this interval and the one before."""
        queries, hits = sum(q for q, _ in self.hits), sum(h for _, h in self.hits)
        parts = [
            f"Avg prompt throughput: {self.prompt / interval:.1f} tokens/s",
            f"Avg generation throughput: {self.generated / interval:.1f} tokens/s",
            f"Running: {self.running} reqs, Waiting: {self.waiting} reqs",
            *([f"Preemptions: {self.preempted}"] if self.preempted else []),
            f"KV cache usage: {100 * self.usage:.1f}%",
            f"Prefix cache hit rate: {100 * hits / queries if queries else 0:.1f}%",
        ]
        idle = not (self.prompt or self.generated)
        silent, self.was_idle = idle and self.was_idle, idle
        self.prompt = self.generated = self.preempted = 0
        return ", ".join(parts), silent


def _one_two_five(top: int) -> Iterable[int]:
    """1, 2, 5, 10, 20, 50 ... up to `top`, at least (1,)."""
    power = 1
    while power <= top:
        yield from (power * step for step in (1, 2, 5) if power * step <= top)
        power *= 10
