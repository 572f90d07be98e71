"""What a decode step costs the host, measured without a GPU.

    python bench/host.py [--batch 1,32,256] [--tokens 300] [--read stream] [--step-ms 4] [--profile]

The real loop, scheduler, runner and streams drive a device that computes nothing: its graphs are replayed by a function
that does nothing, and a step is done so many milliseconds after the one before. What remains is Python. `launch`,
`plan`, `commit` are medians in microseconds; `loop` is all that the loop's thread does for a step, readers included, in
time of the processor. Processors differ: compare two versions on one
machine.
"""

import argparse
import asyncio
import contextlib
import cProfile
import logging
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.streams import words
from tinyserve import config
from tinyserve.bench.measure import Work, measure
from tinyserve.cli.process import SWITCH_INTERVAL, keep_loaded
from tinyserve.engine.assemble import Machine
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts
from tinyserve.kv.cache import KVCache
from tinyserve.kv.groups import KVGroup
from tinyserve.runner.batch import Shape
from tinyserve.runner.graphs import Computed, Eager, Wanted
from tinyserve.runner.runner import Limits, Runner
from tinyserve.sampling.sampler import Sampler
from tinyserve.scheduling.scheduler import Scheduler

CONTEXT, BLOCK, VOCAB = 2056, 64, 320


class Clock:
    """Wraps methods: microseconds of each call."""

    def __init__(self, **methods) -> None:
        self.spent = {name: [] for name in methods}
        for name, (owner, method) in methods.items():
            setattr(owner, method, self._timed(getattr(owner, method), self.spent[name]))

    @staticmethod
    def _timed(method, spent):
        def call(*args):
            began = time.perf_counter()
            result = method(*args)
            spent.append((time.perf_counter() - began) * 1e6)
            return result

        return call

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(times), 1) for name, times in self.spent.items() if times}


class Event:
    def __init__(self, device) -> None:
        self.device, self.done = device, 0.0

    def record(self, stream=None) -> None:
        self.done = self.device.free = max(self.device.free, time.perf_counter()) + self.device.seconds

    def synchronize(self) -> None:
        time.sleep(max(self.done - time.perf_counter(), 0.0))


class NoDevice:
    """Stands for a GPU whose steps take `seconds`, one after the other; its memory is the host's."""

    torch, is_cpu, has_graphs = torch.device("cpu"), False, True

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free = seconds, 0.0

    def event(self):
        return Event(self)

    def current_stream(self):
        return None

    def use(self):
        return contextlib.nullcontext()

    def select(self): ...

    def release_unused(self): ...

    def host_buffer(self, *shape, dtype):
        return torch.zeros(shape, dtype=dtype)


class Replayed(Eager):
    """Graphs of the usual shapes that compute nothing."""

    def __init__(self, seqs: int, tokens: int) -> None:
        self.sizes = Wanted.usual(seqs, tokens).decodes
        self.fits = {}
        hidden = torch.zeros(1, 8)
        self.computed = Computed(hidden, torch.zeros(1, VOCAB), True)

    def fit(self, shape: Shape) -> Shape:
        if not shape.is_decode:
            return shape
        if shape not in self.fits:
            size = next(size for size in self.sizes if size >= shape.seqs)
            self.fits[shape] = Shape(size, size, size)
        return self.fits[shape]

    def holds(self, shape: Shape) -> bool:
        return shape.is_decode

    def run(self, views, compute):
        return self.computed


class NoModel:
    vocab_size = VOCAB


async def engine_for(batch: int, seconds: float) -> Engine:
    settings = config.build(
        {"model": "none", "max_num_seqs": batch, "max_num_batched_tokens": 8192, "disable_log_stats": True}
    )
    resolved = settings.resolve("cuda")
    depth = resolved.scheduler.depth
    cache = KVCache((KVGroup(0, None, (0,)),), batch * (CONTEXT // BLOCK + 1) + 1, BLOCK, enable_prefix_caching=False)
    rows, device = batch + depth, NoDevice(seconds)
    limits = Limits(
        rows=rows, max_seqs=batch, max_tokens=8192, max_model_len=CONTEXT, block_size=BLOCK, groups=1, depth=depth
    )
    sampler = Sampler(rows, VOCAB, CONTEXT, device.torch)
    runner = Runner(NoModel(), sampler, limits, device, Replayed(batch, 8192))
    scheduler = Scheduler(resolved.scheduler, cache, max_model_len=CONTEXT, slots=rows)
    machine = Machine(
        scheduler=scheduler, runner=runner, cache=cache, vocab_size=VOCAB, max_model_len=CONTEXT, depth=depth
    )
    parts = Parts(model=None, tokenizer=words(), max_model_len=CONTEXT, eos_ids={256}, served_names=("none",))
    return await Engine.start(settings, parts=parts, machine=machine)


async def run(batch: int, tokens: int, stream: bool, seconds: float, profile: bool) -> None:
    engine = await engine_for(batch, seconds)
    machine = engine.machine
    sizes = ((16, 160), (100, 1024)) if tokens == 0 else (128, tokens)
    work = Work.random(batch, *sizes, ids=256, stream=stream, temperature=0.6)
    await measure(engine, Work.random(batch, 128, 20, ids=256, stream=stream))
    names = {"launch": "runner", "plan": "scheduler", "commit": "scheduler"}
    clock = Clock(**{name: (getattr(machine, owner), name) for name, owner in names.items()})
    profiler = cProfile.Profile() if profile else contextlib.nullcontext()
    began = time.thread_time()
    with profiler:
        await measure(engine, work)
    loop = (time.thread_time() - began) * 1e6 / len(clock.spent["launch"])
    await engine.close()
    figures = clock.medians() | {"loop": round(loop, 1)}
    together = sum(figures[name] for name in names)
    print(f"{batch:4} sequences: {figures}, launch + plan + commit {together:.0f}", flush=True)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,32,256")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer; 0: 100 to 1024, evenly spread")
    parser.add_argument("--read", choices=("once", "stream"), default="once")
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_loaded()
    for batch in map(int, options.batch.split(",")):
        asyncio.run(run(batch, options.tokens, options.read == "stream", options.step_ms / 1000, options.profile))


if __name__ == "__main__":
    main()
