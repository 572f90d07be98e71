"""What the parts of `kernels.py` share: a case, its time on the GPU, its share of the peak."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from attrs import field, frozen

# Measured on an H200: a streaming read, and products of 8192 x 8192 matrices.
PEAK_BYTES, PEAK_FLOPS = 4.3e12, 790e12


@frozen
class Case:
    """One kernel at one shape.

    Attributes:
        kernel, shape: what the table calls it.
        calls: one function per input set; each launches the kernel once.
        moved: bytes that must be read or written.   flops: operations that must be done; the larger share counts.
        error: compares with the reference and gives ‖out - ref‖ / ‖ref‖, or None.
        tags: for `variants` of the part.
        spaced: whether a call is timed behind a kernel that waits for all before it; else calls overlap if they can.
    """

    kernel: str
    shape: str
    calls: list[Callable[[], object]]
    moved: float = 0
    flops: float = 0
    error: Callable[[], float] | None = None
    tags: dict = field(factory=dict)
    spaced: bool = True


@frozen
class Row:
    """A result. `percent` is of the peak that the case is bound by."""

    kernel: str
    shape: str
    us: float
    tb_s: float
    tflop_s: float
    percent: float
    error: float | None


def graph_us(
    calls: list[Callable[[], object]], *, spaced: bool = True, millisecond_budget: float = 12, repeats: int = 5
) -> float:
    """Microseconds of one call in a graph, median over replays.

    If spaced, a call follows a small kernel that waits for everything before it, and whose own time is subtracted: a
    row of the same kernel would overlap with itself as no step does, where something else stands between.
    """
    spacer = torch.zeros(1024, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        once = _elapsed_us(calls[0], stream)
        rounds = max(1, min(50, int(1000 * millisecond_budget / once / len(calls))))
        if not spaced:
            return _replays_us(calls * rounds, repeats, stream) / rounds / len(calls)
        both = _replays_us([one for call in calls for one in (lambda: spacer.add_(1), call)] * rounds, repeats, stream)
        alone = _replays_us([lambda: spacer.add_(1)] * 200, repeats, stream) / 200
    return both / rounds / len(calls) - alone


def _elapsed_us(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.synchronize()
    start.record()
    call()
    end.record()
    stream.synchronize()
    return max(start.elapsed_time(end) * 1000, 1.0)


def _replays_us(calls: list[Callable[[], object]], repeats: int, stream: torch.cuda.Stream) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(_elapsed_us(graph.replay, stream) for _ in range(repeats))


def measure(case: Case) -> Row:
    """Time a case and compare it with its reference."""
    products = case.flops / PEAK_FLOPS > case.moved / PEAK_BYTES
    if (
        products
    ):  # they draw the power limit within a tenth of a second, and clocks fall: this is the rate of a short run
        time.sleep(0.3)
    us = graph_us(case.calls, spaced=case.spaced, millisecond_budget=3 if products else 12)
    tb_s, tflop_s = case.moved / us / 1e6, case.flops / us / 1e6
    percent = 100 * max(tb_s * 1e12 / PEAK_BYTES, tflop_s * 1e12 / PEAK_FLOPS)
    error = case.error() if case.error else None
    return Row(case.kernel, case.shape, us, tb_s, tflop_s, percent, error)


@contextlib.contextmanager
def options_replaced(modules: list, use: dict) -> Iterator[None]:
    """Launchers of these modules take `use` over what they would choose; keys they do not have are ignored."""
    old = [module.choose for module in modules]

    def choose(kernel, tensor, default, **shape):
        return default | {name: value for name, value in use.items() if name in default}

    for module in modules:
        module.choose = choose
    try:
        yield
    finally:
        for module, one in zip(modules, old, strict=True):
            module.choose = one
