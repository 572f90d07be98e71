"""`tinyserve collect-env`: what to paste into a bug report.

Before: device.py, parse.py.  After: the reader of the report.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import __version__
from .parse import Parser

PACKAGES = (
    "torch", "triton", "numpy", "attrs", "anyio", "starlette", "hypercorn", "orjson", "jinja2", "safetensors",
    "tokenizers", "huggingface_hub", "prometheus-client", "llguidance", "gguf", "transformers", "openai", "httpx",
)  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Print the report."""
    Parser(prog="tinyserve collect-env", description="Print versions and devices for a bug report.").parse_args(argv)
    found = list(facts())
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"{name:<{width}}  {value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, one line each."""
    yield "tinyserve", __version__
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    yield "system", platform.platform()
    yield "processor", f"{_processor()}, {os.cpu_count()} cores"
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    yield from _devices()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _devices() -> Iterator[tuple[str, str]]:
    try:
        import torch

        from ..device import Device
    except (ImportError, OSError, RuntimeError) as error:  # a library of the system is missing or of another version
        yield "device", f"torch cannot be imported: {error}"
        return
    device = Device.pick("auto")
    memory = device.memory()
    free, total = memory.free_bytes / 2**30, memory.total_bytes / 2**30
    yield "device", f"{device.kind}: {device.described()}, {free:.1f} of {total:.1f} GiB free"
    yield "torch build", f"CUDA {torch.version.cuda or '-'}, HIP {torch.version.hip or '-'}"
