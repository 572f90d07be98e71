"""How fast the kernels are on this GPU: time, rate, and share of what the device can do at most.

    python bench/kernels.py attention             measure, print a table, write results/kernels-<part>-<device>.json
    python bench/kernels.py attention --tune 4k   try block sizes as well where the expression is found, print the best

Each case is recorded into a graph and replayed, because that is how a step runs it; input sets take turns so that the
cache of the device does not hold what is read. A figure is the median of replays. Random data: zeros are faster.
The most the device can do is what was measured on an H200: a streaming read of 4.3 TB/s, products of 790 TFLOP/s.

A part is a module beside this file with `cases()`, which yields `Case`s (kernel_timing.py), `variants(case)`, which
yields the options to try with `--tune`, and `using(options)`, under which launchers take them. All of it also runs on
the meta device, so that all kernels can first be compiled by several processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from attrs import asdict
from kernel_timing import PEAK_BYTES, PEAK_FLOPS, Case, Row, graph_us, measure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PARTS = {name: f"kernels_{name}" for name in ("attention", "dense", "experts", "latent", "moe", "packed", "sampling")}


def wanted(expression: str, case: Case) -> bool:
    """Whether the regular expression is found in the case's name."""
    return re.search(expression, f"{case.kernel} {case.shape}") is not None


def compile_share(part, number: int, processes: int, only: str, tune: str | None) -> None:
    """Compile every `processes`-th kernel variant into Triton's cache, without a GPU."""
    from tests.kernels.harness import compile_only

    with compile_only("sm_90"):
        turn = 0
        for case in part.cases():
            if not wanted(only, case):
                continue
            for use in [{}, *(part.variants(case) if tune and wanted(tune, case) else ())]:
                turn += 1
                if turn % processes == number:
                    with contextlib.suppress(Exception), part.using(use):
                        case.calls[0]()


def compile_ahead(name: str, only: str, tune: str | None, processes: int) -> None:
    command = [sys.executable, __file__, name, "--only", only, *(["--tune", tune] if tune else []), "--compile"]
    running = [subprocess.Popen([*command, f"{number}/{processes}"]) for number in range(processes)]
    for one in running:
        one.wait()


def tune(part, case: Case) -> list[tuple[float, dict]]:
    """(microseconds, options) of what was tried, the fastest first; what does not fit the device is left out."""
    tried = []
    for use in part.variants(case):
        try:
            time.sleep(0.05)
            with part.using(use):
                tried.append((graph_us(case.calls, spaced=case.spaced, millisecond_budget=3, repeats=3), use))
        except Exception as error:  # out of shared memory, mostly
            print(f"  {case.kernel} {case.shape} {use}: {str(error)[:80]}")
    return sorted(tried, key=lambda one: one[0])


def line(row: Row) -> str:
    """One row of the table, in Markdown."""
    rate = f"{row.tflop_s:.0f} TFLOP/s" if row.tflop_s * 1e12 / PEAK_FLOPS > row.tb_s * 1e12 / PEAK_BYTES else ""
    rate = rate or f"{row.tb_s:.2f} TB/s"
    error = "" if row.error is None else f"{row.error:.0e}"
    return f"| {row.kernel} | {row.shape} | {row.us:.1f} | {rate} | {row.percent:.0f} | {error} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tune", default=None, help="a regular expression: cases to try block sizes for")
    parser.add_argument("--only", default="", help="a regular expression: cases to measure")
    parser.add_argument("--out", type=Path, default=None)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=int, default=max(1, min(14, cores - 2)), help="to compile with; 0: as needed"
    )
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    part = importlib.import_module(PARTS[arguments.part])
    if arguments.compile:
        number, processes = map(int, arguments.compile.split("/"))
        return compile_share(part, number, processes, arguments.only, arguments.tune)
    if not torch.cuda.is_available():
        raise SystemExit("bench kernels: there is no GPU here that torch can use.")

    started = time.monotonic()
    compile_ahead(arguments.part, arguments.only, arguments.tune, arguments.processes)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    rows, tuned = [], []
    for case in part.cases():
        if not wanted(arguments.only, case):
            continue
        rows.append(measure(case))
        print(line(rows[-1]), flush=True)
        if arguments.tune and wanted(arguments.tune, case):
            tried = tune(part, case)
            tuned.append({"kernel": case.kernel, "shape": case.shape, "tried": tried})
            for us, use in tried[:3]:
                print(f"    {us:8.2f} us  {use}", flush=True)
    device = torch.cuda.get_device_name()
    record = {
        "device": device,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [asdict(row) for row in rows],
    }
    slug = device.lower().replace(" ", "-")
    path = arguments.out or ROOT / "bench" / "results" / f"kernels-{arguments.part}-{slug}.json"
    path.write_text(json.dumps(record | ({"tuned": tuned} if tuned else {}), indent=1))
    return None


if __name__ == "__main__":
    main()
