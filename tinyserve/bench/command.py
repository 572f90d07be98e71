"""`bench latency`, `bench throughput` and `bench startup`: an engine with any options, measured in this process.

    python -m tinyserve bench latency MODEL --batch-size 8 --input-len 128 --output-len 128
    python -m tinyserve bench throughput MODEL --num-prompts 256 --input-len 512 --output-len 256
    python -m tinyserve bench startup MODEL --runs 3 --cold    from the command to the first token, a process a run

All options of `tinyserve serve` are understood besides. Prompts are random ids of a length, or of a range of lengths
(100:1024), the same in every run, or those of a JSONL file; prefix caching is off unless it is asked for.
`--load-format dummy` measures a model of which there is only a config.json. Lines on stderr say how far it is; Ctrl-C
and SIGTERM end it with the figures of the runs that are over.

Before: measure.py, figures.py, progress.py, engine/engine.py.  After: cli/bench.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from ..config import EngineConfig, environment
from ..errors import ConfigError
from .figures import check_writable, percentiles
from .measure import Measured, Work, measure
from .progress import Progress, tell
from .prompts import RANDOM_IDS, most, only_ids, read_prompts, size

OF_SERVE = (
    "MODEL and all options that say how a model runs are those of `tinyserve serve`: see `tinyserve serve --help`. "
    "Ctrl-C shows what was measured so far."
)
FIRST = "first token after"  # what a child of `startup` says


def arguments(kind: str, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the others, which are the engine's. Raises: ConfigError: a wrong number."""
    parser = argparse.ArgumentParser(
        prog=f"tinyserve bench {kind}",
        usage=f"tinyserve bench {kind} [MODEL] [options]",
        epilog=OF_SERVE,
        allow_abbrev=False,
        exit_on_error=False,
    )
    if kind == "startup":
        parser.add_argument("--runs", type=int, default=3, help="processes, one after the other [%(default)s]")
        parser.add_argument("--cold", action="store_true", help="each with an empty cache of kernels")
    else:
        _of_work(parser, many=kind == "throughput")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="for the figures")
    try:
        found, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if any(isinstance(value, (int, float)) and value < 0 for value in vars(found).values()):
        raise ConfigError(f"tinyserve bench {kind}: numbers must not be negative.")
    if kind != "startup" and found.batch < 1:
        raise ConfigError(f"--{'num-prompts' if kind == 'throughput' else 'batch-size'} must be at least 1.")
    check_writable(found.output_json)
    return found, rest


def _of_work(parser: argparse.ArgumentParser, *, many: bool) -> None:
    """What is asked, and how often."""
    batch = "--num-prompts" if many else "--batch-size"
    count, lengths = {"type": int, "metavar": "N"}, {"type": size, "metavar": "N or N:M"}
    at_once = "requests given at once [%(default)s]"
    parser.add_argument(batch, dest="batch", default=256 if many else 8, help=at_once, **count)
    parser.add_argument("--input-len", default=512 if many else 128, help="tokens of a prompt [%(default)s]", **lengths)
    parser.add_argument("--output-len", default=128, help="tokens of an answer [%(default)s]", **lengths)
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help="JSONL with prompts [random ids]")
    parser.add_argument("--temperature", type=float, metavar="X", default=0.0, help="0 is greedy [%(default)s]")
    parser.add_argument("--runs", "--num-iters", default=3 if many else 10, help="timed runs [%(default)s]", **count)
    parser.add_argument("--warmup", "--num-iters-warmup", default=1, help="runs before them [%(default)s]", **count)


def work(options: argparse.Namespace, engine: Any, *, stream: bool) -> Work:
    """The requests of one run. Raises: ConfigError: one is longer than the context, or the file is no good."""
    how = {"temperature": options.temperature, "stream": stream}
    if options.dataset_path is None:
        ids = min(engine.machine.vocab_size, RANDOM_IDS)
        found = Work.random(options.batch, options.input_len, options.output_len, ids=ids, **how)
    else:
        asked = read_prompts(options.dataset_path, options.batch, most(options.output_len))
        found = Work(prompts=only_ids(asked, engine.tokenizer.encode), outputs=[one.output for one in asked], **how)
    longest = max(len(prompt) + output for prompt, output in zip(found.prompts, found.outputs, strict=True))
    if longest > engine.max_model_len:
        raise ConfigError(f"a request of {longest} tokens is more than the context of {engine.max_model_len}.")
    return found


async def run(kind: str, options: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Start an engine, warm it up and measure; returns the figures, `stopped` among them if a signal came.

    Raises: asyncio.CancelledError: it came before a run was over.
    """
    from ..engine.engine import Engine

    began = time.monotonic()
    engine = await Engine.start(config, offline=kind == "throughput")
    ready = time.monotonic() - began
    try:
        asked = work(options, engine, stream=kind == "latency")
        told = Progress(asked, options.warmup, max(options.runs, 1))
        stopped = await told.stopped_by_signals(told.all(lambda: measure(engine, asked, told.answered)))
    finally:
        await engine.close()
    return {"ready_s": round(ready, 2), **({"stopped": True} if stopped else {}), **figures(kind, told.runs)}


def figures(kind: str, runs: Sequence[Measured]) -> dict[str, Any]:
    """The runs in numbers: percentiles over all their requests, or the rates of each run."""
    found: dict[str, Any] = {"runs": len(runs), "seconds": [round(run.seconds, 4) for run in runs]}
    if kind == "latency":
        found["ttft_ms"] = percentiles([one for run in runs for one in run.first_ms])
        found["latency_ms"] = percentiles([one for run in runs for one in run.latency_ms])
        found["ms_per_token"] = percentiles([run.pace_ms for run in runs])
    else:
        found["requests_s"] = percentiles([len(run.first_ms) / run.seconds for run in runs])
        found["output_tok_s"] = percentiles([run.output_rate for run in runs])
        found["total_tok_s"] = percentiles([run.output_rate + run.prompt_rate for run in runs])
    return found


def startup(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Seconds from the command to the first token, a new process each time. Raises: ConfigError: one failed.

    Returns: besides, when the engine began (Python and its imports come before) and when it was ready.
    """
    found, runs, stopped = [], max(options.runs, 1), False
    try:
        while len(found) < runs:
            found.append(_started(options.cold, argv))
            tell(f"run {len(found)} of {runs}: {found[-1][-1]:.1f} s")
    except KeyboardInterrupt:
        if not found:
            raise
        stopped = True
    begins, ready, first = zip(*found, strict=True)
    return {
        "runs": len(found),
        **({"stopped": True} if stopped else {}),
        "kernel_cache": "empty" if options.cold else "as it was",
        "engine_begins_s": percentiles(begins),
        "ready_s": percentiles(ready),
        "first_token_s": percentiles(first),
        "each_s": [round(one, 2) for one in first],
    }


def _started(cold: bool, argv: Sequence[str]) -> list[float]:
    """Start one process; seconds until its engine begins, is ready and has a token. Raises: ConfigError: it failed."""
    with tempfile.TemporaryDirectory() as empty:
        variables = environment(TRITON_CACHE_DIR=empty) if cold else None
        began = time.monotonic()
        command = [sys.executable, "-m", "tinyserve", "bench", "first-token", *argv]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        try:
            lines = [line for line in child.stdout if line.startswith(FIRST)]
            code = child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
            raise
    if code or not lines:
        raise ConfigError("the engine did not start; its own message stands above.")
    return [float(one) - began for one in lines[-1].removeprefix(FIRST).split()]


async def first_token(config: EngineConfig) -> None:
    """Start, make one token, and say when each was, on the machine's monotonic clock, which all processes share."""
    from ..engine.engine import Engine

    times = [time.monotonic()]
    engine = await Engine.start(config)
    times.append(time.monotonic())
    await measure(engine, Work(prompts=[[1] * 16], outputs=[1]))
    times.append(time.monotonic())
    print(FIRST, *times, flush=True)
    await engine.close()


def without_prefix_cache(config: EngineConfig, argv: Sequence[str]) -> EngineConfig:
    """The config with prefix caching off, unless the command line speaks of it: runs repeat their prompts."""
    if any("enable" in text and "prefix" in text for text in argv):
        return config
    return evolve(config, cache=evolve(config.cache, enable_prefix_caching=False))


def report(result: dict[str, Any], file: Path | None) -> None:
    """Print the figures, a line each, and write them."""
    for name, value in result.items():
        text = ", ".join(f"{key} {number}" for key, number in value.items()) if isinstance(value, dict) else value
        print(f"{name:<16}{text}")
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


def main(kind: str, options: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Run `latency` or `throughput` to the end."""
    return asyncio.run(run(kind, options, config))
