"""The table of anchor rows on one GPU: latency, throughput and start-up of the engine in this process, no HTTP.

    python bench/anchors.py --models FOLDER                all rows whose model's config.json lies in FOLDER/<model>/
    python bench/anchors.py --models FOLDER --rows W1a,W2b --runs 1 --profile

Weights are random numbers of the right shapes, prompts random ids (seed 0), end tokens ignored, greedy unless a row
says otherwise, prefix caching off. Each row is run once to warm up, then `--runs` times; the median counts. A row of
milliseconds is the decode pace of the sequence that started last, when all run together: (its last token's time - its
first token's) / (its tokens - 1). A row of tokens a second is everything from the first submission to the last token,
read as LLM.generate reads: each answer once, when it is complete. The engine is that of an LLM: its steps have up to
16384 tokens. Ids are not turned into text, because these models have no tokenizer.

Floors are bytes over 4.3 TB/s or operations over 790 TFLOP/s; peer figures are of vLLM 0.25.1 on the same kind of
machine (H200) in the same work. Row M1 is of latent attention: its config is in shapes.py, its floor 33.9 GB (61 of 64
experts a layer, 4.1 GB of latents). Written as {"rows": {"W1a": {"value", "unit", "floor_pct", "peer_ratio", "runs"}}}.
"""

import argparse
import asyncio
import functools
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

from attrs import frozen
from shapes import SHAPES, write

from tinyserve.bench.measure import Work, measure


@frozen(kw_only=True)
class Row:
    """One line of the table.

    Args:
        batch: prompts given at once.   prompt, out: tokens of each; a pair is a uniform range.
        running: most sequences at a time.   chunk: most tokens of a step.
        unit: "ms/token", "tok/s" (of the output) or "prompt tok/s".
        floor, peer, must: in this unit.   ttft: most milliseconds to the first token, if there is such a limit.
    """

    model: str
    batch: int
    prompt: int | tuple[int, int]
    out: int | tuple[int, int]
    unit: str
    floor: float
    must: float
    peer: float | None = None
    ttft: float | None = None
    running: int = 256
    temperature: float = 0.0


def _8b(**values):
    return Row(model="llama-3.1-8b", **values)


def _small(**values):
    return Row(model="qwen3-0.6b", **values)


def _30b(**values):
    return Row(model="qwen3-30b-a3b", **values)


def _fp8(**values):
    return Row(model="llama-3.1-8b-fp8-ct", **values)


def _int4(**values):
    return Row(model="llama-3.1-8b-gptq-int4", **values)


ROWS = {
    "W2b": _small(batch=1, prompt=128, out=256, unit="ms/token", floor=0.29, peer=2.30, must=0.85, ttft=8.0),
    "W2": _small(
        batch=256,
        prompt=(100, 1024),
        out=(100, 1024),
        unit="tok/s",
        floor=35800,
        peer=22674,
        must=24000,
        temperature=0.6,
    ),
    "W1a": _8b(batch=1, prompt=128, out=256, unit="ms/token", floor=3.5, peer=4.95, must=4.4, ttft=14.0),
    "W1b": _8b(batch=32, prompt=512, out=256, unit="ms/token", floor=4.0, peer=5.92, must=5.6),
    "W1c": _8b(batch=512, prompt=512, out=256, unit="tok/s", floor=17000, peer=9787, must=10300),
    "W1d": _8b(batch=32, prompt=4096, out=1, unit="prompt tok/s", floor=52500, peer=40780, must=36000),
    "W1e": _8b(batch=8, prompt=32000, out=64, unit="ms/token", floor=11.3, peer=13.5, must=13.2),
    "W4a": _fp8(batch=1, prompt=128, out=128, unit="ms/token", floor=1.9, peer=3.54, must=3.2),
    "W4b": _fp8(batch=64, prompt=512, out=128, unit="ms/token", floor=2.6, peer=5.26, must=5.0),
    "W4c": _fp8(batch=256, prompt=512, out=128, unit="tok/s", floor=16600, peer=9375, must=9400),
    "W4d": _int4(batch=1, prompt=128, out=128, unit="ms/token", floor=1.1, peer=3.78, must=2.4),
    "W4e": _int4(batch=64, prompt=512, out=128, unit="ms/token", floor=1.8, peer=6.62, must=6.4),
    "W4e256": _int4(batch=256, prompt=512, out=128, unit="tok/s", floor=10400, peer=6374, must=6600),
    "W3a": _30b(batch=1, prompt=128, out=128, unit="ms/token", floor=1.43, peer=4.11, must=2.9, ttft=12.8),
    "W3b": _30b(batch=64, prompt=512, out=128, unit="ms/token", floor=14.5, peer=18.1, must=18.0),
    "W3c": _30b(batch=256, prompt=512, out=128, unit="tok/s", floor=9900, peer=6837, must=6900),
    "M1": Row(
        model="deepseek-v2-lite", batch=32, prompt=4096, out=128, unit="ms/token", floor=7.9, must=12.1, running=32
    ),
}


def work(row: Row) -> Work:
    """The row's requests. Rows of milliseconds stream; the others are read as LLM.generate reads."""
    how = {"temperature": row.temperature, "stream": row.unit == "ms/token"}
    return Work.random(row.batch, row.prompt, row.out, **how)


async def once(engine, row: Row) -> dict:
    """Run the row's requests together."""
    found = await measure(engine, work(row))
    values = {"ms/token": found.pace_ms, "tok/s": found.output_rate, "prompt tok/s": found.prompt_rate}
    return {
        "value": values[row.unit],
        "ttft_ms": found.first_ms[len(found.first_ms) // 2],
        "seconds": found.seconds,
        "prefill_tok_s": found.prompt_tokens / found.prefill_seconds,
    }


class Clock:
    """Wraps the runner's launch, the replay of a graph in it, and the scheduler's two halves: microseconds of a step.

    Wall time, and (`_cpu_us`) processor time of the thread, without what it waits for. All that the event loop's thread
    does is in `loop_us`: its processor time over the steps, readers included.
    """

    NAMES = (
        ("launch", "runner.launch"),
        ("replay", "runner.graphs.run"),
        ("plan", "scheduler.plan"),
        ("commit", "scheduler.commit"),
    )

    def __init__(self, machine) -> None:
        self.spent = {name: [] for name, _ in self.NAMES}
        self._began = time.thread_time()
        for name, path in self.NAMES:
            *owners, method = path.split(".")
            owner = functools.reduce(getattr, owners, machine)
            setattr(owner, method, self._timed(getattr(owner, method), self.spent[name]))

    @staticmethod
    def _timed(method, spent):
        def call(*args):
            began, worked = time.perf_counter(), time.thread_time()
            result = method(*args)
            spent.append(((time.perf_counter() - began) * 1e6, (time.thread_time() - worked) * 1e6))
            return result

        return call

    def take(self) -> dict[str, float]:
        """Medians since the last call, and the largest launches."""
        found = {}
        for name, times in self.spent.items():
            if times:
                wall, worked = (round(statistics.median(part), 1) for part in zip(*times, strict=True))
                found |= {f"{name}_us": wall, f"{name}_cpu_us": worked}
        launches = sorted((wall for wall, _ in self.spent["launch"]), reverse=True)
        if launches:
            found["longest_launches_us"] = [round(wall) for wall in launches[:40:4]]
            found["loop_us"] = round((time.thread_time() - self._began) * 1e6 / len(launches), 1)
        for times in self.spent.values():
            times.clear()
        self._began = time.thread_time()
        return found


async def profile(engine, row: Row, seconds: float) -> dict:
    """Where the device's time goes in a part of the row, a run of which takes so many seconds: see `_spent`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]):
        pass  # loads the tracer
    task = asyncio.create_task(once(engine, row))
    await asyncio.sleep(0.5 * seconds)
    with record(activities=[ProfilerActivity.CUDA]) as trace:
        await asyncio.sleep(min(0.3 * seconds, 0.3))
    await task
    events = trace.events()
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type.name == "CUDA")
    starts = [i for i, (_, _, name) in enumerate(spans) if "fetch" in name]  # a step's first kernel
    return _spent(spans[starts[len(starts) // 4] : starts[-1]]) if len(starts) > 8 else {"profiled_steps": len(starts)}


def _spent(spans: list[tuple[float, float, str]]) -> dict:
    """Kernels a step, idle time and its largest gaps; prints the longest kernels. spans: (start, end, name), in us."""
    busy, gaps, between, end = {}, [], [], spans[0][0]
    for start, stop, name in spans:
        gaps.append(max(start - end, 0.0))
        if "fetch" in name:
            between.append(gaps[-1])
        end = max(end, stop)
        busy.setdefault(name[:60], []).append(stop - start)
    steps = sum("fetch" in name for _, _, name in spans)
    for name, times in sorted(busy.items(), key=lambda item: -sum(item[1]))[:16]:
        count, middle = len(times) / steps, statistics.median(times)
        print(f"    {sum(times) / steps:8.1f} us a step: {count:6.1f} of {middle:6.2f} us  {name}")
    return {
        "profiled_steps": steps,
        "nodes_per_step": round(len(spans) / steps, 1),
        "idle_us_per_step": round(sum(gaps) / steps, 1),
        "step_us": round((end - spans[0][0]) / steps, 1),
        "idle_between_steps_us": round(statistics.median(between), 1),
        "largest_gaps_us": [round(gap, 1) for gap in sorted(gaps, reverse=True)[:: max(steps // 2, 1)]][:4],
    }


def model_folder(folder: Path, model: str) -> Path:
    """Where the model's config.json is: in `folder`, or written to a temporary place if it is one of shapes.py."""
    if model not in SHAPES or (folder / model / "config.json").exists():
        return folder / model
    return write(Path(tempfile.mkdtemp()), model)


def config(folder: Path, model: str, rows: list[Row], budget: int | None = None):
    """An engine for these rows: one load of the model serves all of them."""
    from tinyserve.config import CacheOptions, EngineConfig, LoadOptions, ModelOptions, SchedulerOptions

    longest = max(
        (row.prompt[1] if isinstance(row.prompt, tuple) else row.prompt)
        + (row.out[1] if isinstance(row.out, tuple) else row.out)
        for row in rows
    )
    return EngineConfig(
        model=ModelOptions(model=str(model_folder(folder, model)), max_model_len=longest + 8, device="cuda"),
        load=LoadOptions(load_format="dummy", use_tqdm_on_load=False),
        cache=CacheOptions(enable_prefix_caching=False),
        scheduler=SchedulerOptions(max_num_seqs=max(row.running for row in rows), max_num_batched_tokens=budget),
    )


async def run_model(folder: Path, model: str, rows: dict[str, Row], options) -> dict:
    """Start the engine, run the rows, close it."""
    from tinyserve.engine.engine import Engine

    began = time.perf_counter()
    engine = await Engine.start(config(folder, model, list(rows.values()), options.budget), offline=True)
    ready = time.perf_counter() - began
    print(f"{model}: ready after {ready:.2f} s\n  {engine.machine.report}", flush=True)
    clock, found = Clock(engine.machine), {}
    try:
        async for _ in engine.generate([1] * 128, None):
            break
        first = time.perf_counter() - began
        await asyncio.sleep(options.idle)
        for name, row in rows.items():
            await once(engine, row)
            clock.take()
            runs = [await once(engine, row) for _ in range(options.runs)]
            result = summary(row, runs) | clock.take()
            if name in options.profile.split(","):
                result |= await profile(engine, row, min(run["seconds"] for run in runs))
            found[name] = result
            print(f"{name}: {json.dumps(result)}", flush=True)
    finally:
        await engine.close()
    return {"rows": found, "ready_s": round(ready, 2), "first_token_s": round(first, 2)}


def summary(row: Row, runs: list[dict]) -> dict:
    """The median run against floor, peer and goal."""
    value = statistics.median(run["value"] for run in runs)
    low = row.unit == "ms/token"
    return {
        "value": round(value, 4 if low else 0),
        "unit": row.unit.removeprefix("prompt "),
        "floor_pct": round(100 * (row.floor / value if low else value / row.floor), 1),
        "peer_ratio": row.peer and round(row.peer / value if low else value / row.peer, 3),
        "meets_must": value <= row.must if low else value >= row.must,
        "ttft_ms": round(statistics.median(run["ttft_ms"] for run in runs), 2),
        "prefill_tok_s": round(statistics.median(run["prefill_tok_s"] for run in runs)),
        "runs": [round(run["value"], 4 if low else 0) for run in runs],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder with one folder per model")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to run")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each row")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds after the start, in which graphs are recorded")
    parser.add_argument("--budget", type=int, help="most tokens of a step [by device]")
    parser.add_argument(
        "--profile", nargs="?", const=",".join(ROWS), default="", help="rows whose kernels and idle time are counted"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    wanted = {name: ROWS[name] for name in options.rows.split(",")}
    results: dict = {"rows": {}, "start": {}}
    for model in dict.fromkeys(row.model for row in wanted.values()):
        rows = {name: row for name, row in wanted.items() if row.model == model}
        found = asyncio.run(run_model(options.models, model, rows, options))
        results["rows"] |= found.pop("rows")
        results["start"][model] = found
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
