"""Records into figures, with the names and meanings of vLLM's `bench serve`.

    ttft  time to first token         of each request
    tpot  time per output token       (latency - ttft) / (tokens - 1), of each request with two tokens or more
    itl   inter-token latency         between two pieces of an answer, of all answers together
    e2el  end-to-end latency          of each request

Only answers that came whole count, in every figure but `failed`. Goodput is how many of them a second kept every limit;
tpot of an answer of one token is 0 there.

Before: requests.py (the records).  After: serve.py, command.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .requests import Record

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
TOTALS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "unfinished": "Unfinished requests (stopped):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
    "client_cpu_share": "This client's own CPU, share of a core:",
}


def check_writable(file: Path | None) -> None:
    """Whether figures can be written there is better known before they are measured. Raises: ConfigError."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"--output-json: {error}") from None


def percentiles(values: Sequence[float], points: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """Mean and percentiles, by linear interpolation; of one value, that value."""
    found = {"mean": np.mean(values)}
    found |= {f"p{point:g}": value for point, value in zip(points, np.percentile(values, points), strict=True)}
    return {name: round(float(value), 3) for name, value in found.items()}


def of_metric(name: str, records: Sequence[Record]) -> list[float]:
    """The metric's values in seconds."""
    if name == "itl":
        return np.concatenate([np.diff(record.pieces) for record in records]).tolist() if records else []
    if name == "tpot":
        return [record.tpot for record in records if record.tokens > 1]
    return [record.ttft if name == "ttft" else record.latency for record in records]


def summary(
    records: Sequence[Record], seconds: float, *, goodput: Mapping[str, float], points: Sequence[float]
) -> dict[str, Any]:
    """All figures of a run.

    Args:
        seconds: from the first request until the last answer.
        goodput: the limits in milliseconds, by metric: ttft, tpot, e2el.   points: percentiles, 0..100.
    """
    whole = [record for record in records if record.whole]
    given, made = sum(r.prompt_tokens or 0 for r in whole), sum(r.tokens for r in whole)
    good = sum(all(getattr(r, NAMES[name]) * 1000 <= most for name, most in goodput.items()) for r in whole)
    peak, together = peaks(whole)
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(whole),
        "failed": sum(record.error is not None for record in records),
        "unfinished": sum(record.error is None and not record.whole for record in records),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(whole) / seconds,
        "request_goodput": good / seconds if goodput else None,
        "output_throughput": made / seconds,
        "total_token_throughput": (given + made) / seconds,
        "max_output_tokens_per_s": peak,
        "max_concurrent_requests": together,
    }
    for name in METRICS:
        found |= _statistics(name, of_metric(name, whole), points)
    return found


NAMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}  # what goodput may speak of, and the records' names


def _statistics(name: str, values: Sequence[float], points: Sequence[float]) -> dict[str, float]:
    milliseconds = 1000 * np.asarray(values or [0.0])
    found = {
        f"mean_{name}_ms": np.mean(milliseconds),
        f"median_{name}_ms": np.median(milliseconds),
        f"std_{name}_ms": np.std(milliseconds),
    }
    found |= {f"p{point:g}_{name}_ms": np.percentile(milliseconds, point) for point in points}
    return {key: float(value) for key, value in found.items()}


def peaks(whole: Sequence[Record]) -> tuple[float, int]:
    """Tokens in the best second, counted from the first request on, and the most requests that were open together."""
    if not whole:
        return 0.0, 0
    start = min(record.sent for record in whole)
    times = np.concatenate([record.pieces for record in whole]) - start
    weights = np.concatenate([np.full(len(r.pieces), r.tokens / len(r.pieces)) for r in whole])
    tokens = np.bincount(times.astype(int), weights)
    moments = sorted([(r.sent, 1) for r in whole] + [(r.ended, -1) for r in whole])  # an end before a start
    return float(tokens.max()), int(np.cumsum([change for _, change in moments]).max())


def table(found: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """The figures for people: totals, then the chosen metrics, if any answer came whole."""
    lines = [f"{' Serving Benchmark Result ':=^58}"]
    for name, label in TOTALS.items():
        value = found.get(name)
        if value is not None and (value or name != "unfinished"):
            lines.append(f"{label:<42}{value:<.2f}" if isinstance(value, float) else f"{label:<42}{value}")
    for name in metrics if found["completed"] else ():
        short, title = METRICS[name]
        lines.append(f"{title:-^58}")
        for key, value in found.items():
            if key.endswith(f"_{name}_ms") and not key.startswith("std"):
                label = f"{key.partition('_')[0].capitalize()} {short} (ms):"
                lines.append(f"{label:<42}{value:<.2f}")
    return "\n".join([*lines, "=" * 58])
