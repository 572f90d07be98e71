"""A span for each request, sent to an OpenTelemetry collector: who asked for how much, and where the time went.

Off unless `--otlp-traces-endpoint` names a collector; then every generator of outputs is watched on its way to the
client, whichever protocol it belongs to. A span ends with its last output, with an error, or when the client leaves.
The caller's own span, from the header `traceparent`, is its parent, and decides whether it is kept at all.

Attributes are those of OpenTelemetry's conventions for generative AI, and vLLM's `gen_ai.latency.*` beside them. What
was asked and answered is never in them. Spans are collected and sent by a thread of the library, a few seconds later.

Before: request.py (Output).  After: the protocol files, which have their outputs watched; serve.py, which closes this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field
from starlette.requests import Request

from .. import __version__
from ..config import LogOptions
from ..engine.thread import in_own_thread
from ..errors import ConfigError
from ..request import FinishReason, Output, SamplingParams, Usage

CLOSE_SECONDS = 2.0  # for the last spans to leave
CHAT, TEXT, EMBEDDINGS = "chat", "text_completion", "embeddings"  # operations, as the conventions call them
_ASKED = ("temperature", "top_p", "max_tokens", "seed")
_IF_SET = ("frequency_penalty", "presence_penalty", "top_k")  # 0 is off
_PATH = "/v1/traces"


def asked(name: str, operation: str, model: str, sampling: SamplingParams, n: int) -> dict[str, Any]:
    """The attributes that are known before the first output."""
    values = {key: getattr(sampling, key) for key in _ASKED}
    values |= {key: value for key in _IF_SET if (value := getattr(sampling, key)) and value != -1}
    if sampling.stop:
        values["stop_sequences"] = sampling.stop
    if n != 1:
        values["choice.count"] = n
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tinyserve",
        "gen_ai.request.id": name,
        "gen_ai.request.model": model,
        "gen_ai.response.id": name,
        "gen_ai.response.model": model,
        **{f"gen_ai.request.{key}": value for key, value in values.items() if value is not None},
    }


@define
class _Answers:
    """What the last outputs of a request's answers said."""

    n: int
    reasons: dict[int, FinishReason] = field(factory=dict)
    usages: dict[int, Usage] = field(factory=dict)
    timings: list[Any] = field(factory=list)
    error: Exception | None = None

    def note(self, output: Output) -> None:
        self.error = self.error or output.error
        self.reasons[output.index] = output.finish_reason
        self.usages[output.index] = output.usage
        if output.metrics is not None:
            self.timings.append(output.metrics)

    def attributes(self) -> dict[str, Any]:
        """The prompt counts once, whatever n; an answer without an end was aborted."""
        reasons = [str(self.reasons.get(index, FinishReason.ABORT)) for index in range(self.n)]
        usages = list(self.usages.values())
        found: dict[str, Any] = {"gen_ai.response.finish_reasons": reasons}
        if usages:
            output = sum(usage.completion_tokens for usage in usages)
            found["gen_ai.usage.input_tokens"] = found["gen_ai.usage.prompt_tokens"] = usages[0].prompt_tokens
            found["gen_ai.usage.output_tokens"] = found["gen_ai.usage.completion_tokens"] = output
            if cached := max(usage.cached_tokens for usage in usages):
                found["gen_ai.usage.cache_read.input_tokens"] = cached
        return found | self._latencies()

    def _latencies(self) -> dict[str, float]:
        """Seconds, of the first answer to begin until the last one to end."""
        seen = [timing for timing in self.timings if timing.first_token_ts is not None]
        if not seen:
            return {}
        queued, first = min(t.queued_ts for t in seen), min(t.first_token_ts for t in seen)
        scheduled, last = min(t.scheduled_ts for t in seen), max(t.last_token_ts for t in seen)
        return {
            "gen_ai.latency.time_to_first_token": first - queued,
            "gen_ai.latency.e2e": last - queued,
            "gen_ai.latency.time_in_queue": scheduled - queued,
            "gen_ai.latency.time_in_model_prefill": first - scheduled,
            "gen_ai.latency.time_in_model_decode": last - first,
            "gen_ai.latency.time_in_model_inference": last - scheduled,
        }


class NoSpans:
    """The null object."""

    def watch(
        self,
        outputs: AsyncGenerator[Output, None],
        request: Request,
        operation: str,
        *,
        name: str,
        model: str,
        sampling: SamplingParams,
        n: int = 1,
    ) -> AsyncGenerator[Output, None]:
        """The same outputs; a span is made of them as they pass.

        Args: operation: CHAT, TEXT or EMBEDDINGS.   name: of the request.   model: its name in the API.   n: answers.
        """
        return outputs

    async def close(self) -> None:
        """Send what was not sent."""


class Spans(NoSpans):
    """Args: endpoint: URL that takes spans over HTTP, e.g. http://localhost:4318/v1/traces.

    Raises: ConfigError: the library is not installed, or it is no such URL.
    """

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"--otlp-traces-endpoint must be a URL that takes OTLP over HTTP (not gRPC), got {endpoint!r}."
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"--otlp-traces-endpoint needs pip install 'tinyserve[otel]' ({error}).") from error
        ours = Resource({"service.name": "tinyserve", "service.version": __version__})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))  # its variables go first
        exporter = OTLPSpanExporter(endpoint=endpoint if url.path.strip("/") else endpoint.rstrip("/") + _PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tinyserve", __version__)
        self._parent = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    async def watch(
        self,
        outputs: AsyncGenerator[Output, None],
        request: Request,
        operation: str,
        *,
        name: str,
        model: str,
        sampling: SamplingParams,
        n: int = 1,
    ) -> AsyncGenerator[Output, None]:
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._parent(request.headers),
            kind=self._kind,
            attributes=asked(name, operation, model, sampling, n),
            start_time=request.scope["tinyserve.arrival"],
        )
        answers = _Answers(n)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        answers.note(output)
                    yield output
        except Exception as error:
            answers.error = error
            raise
        finally:
            span.set_attributes(answers.attributes())
            if answers.error is not None:
                span.set_attribute("error.type", type(answers.error).__name__)
                span.set_status(self._failed)
            span.end()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(in_own_thread("spans", self._provider.shutdown, daemon=True), CLOSE_SECONDS)


def spans_of(options: LogOptions) -> NoSpans:
    """Spans, if somebody is to get them. Raises: ConfigError."""
    return Spans(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else NoSpans()
