"""Requests at their times, and everything that came back, also of a run that was stopped.

With a rate, gaps between requests follow a gamma distribution of mean 1 / rate: burstiness 1 is a Poisson process,
below 1 requests come in bursts, above 1 more evenly. As in vLLM's benchmark the gaps are stretched so that the last of
n requests is sent at n / rate. At most `limit` requests are open together; one that waits for its turn has not been
sent, so its waiting is in no figure.

Before: requests.py.  After: serve.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from tqdm import tqdm

from .client import Server
from .requests import Endpoint, Record, ask


def send_times(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """When each of `count` requests is sent, in seconds from the start. rate: requests a second; inf: all at once."""
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return times * (count / rate / times[-1])


@define
class Run:
    """What a load gave.

    Attributes:
        records: of the requests that were sent, in the order in which they were.
        seconds: from the start to the last answer, or until it was stopped.   cpu: processor time of this process.
    """

    records: list[Record] = field(factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    stopped: bool = False


async def load(
    server: Server, endpoint: Endpoint, bodies: Sequence[bytes], times: Sequence[float], *, limit: int | None, bar: Any
) -> Run:
    """Send every body at its time and wait for the answers. When this is cancelled, it ends with what there is."""
    run, turns = Run(), asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
    began, used = time.perf_counter(), time.process_time()

    async def one(body: bytes) -> None:
        async with turns:
            run.records.append(record := Record())
            await ask(server, endpoint, body, record)
        _show(bar, record, time.perf_counter() - began)

    tasks = []
    try:
        for body, moment in zip(bodies, times, strict=True):
            if (wait := began + moment - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(body)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.stopped = True
        await _ended(tasks)
    finally:
        run.seconds, run.cpu = time.perf_counter() - began, time.process_time() - used
        bar.close()
    return run


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: a cancellation that meets the end of what a task waits for can be lost in it."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1.0)
    await asyncio.gather(*tasks, return_exceptions=True)


def progress_bar(total: int, *, shown: bool) -> tqdm:
    """A bar of requests, with the tokens a second and the failures so far."""
    return tqdm(total=total, unit="request", disable=not shown, smoothing=0.0)


def _show(bar: tqdm, record: Record, seconds: float) -> None:
    if bar.disable:
        return
    bar.tokens = getattr(bar, "tokens", 0) + record.tokens
    bar.failures = getattr(bar, "failures", 0) + (record.error is not None)
    failures = f", {bar.failures} failed" if bar.failures else ""
    bar.set_postfix_str(f"{bar.tokens / seconds:,.0f} tok/s{failures}", refresh=False)
    bar.update()
