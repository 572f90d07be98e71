"""`tinyserve bench`: which measurement, with which options.

Before: bench/command.py, bench/serve.py, parse.py.  After: a shell.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench import command
from ..errors import ConfigError
from ..options import nearest
from . import log
from .parse import read_config
from .process import allow_files, keep_loaded

STOPPED = 130  # as after Ctrl-C, also where SIGTERM came
KINDS = {
    "serve": "a running server of any kind, over HTTP: latencies, tokens a second, failed requests",
    "latency": "a batch of requests at a time: time to first token, milliseconds a token, latency",
    "throughput": "many requests at once: tokens a second",
    "startup": "seconds from the command to the first token",
    "anchors": "the table of anchor rows on a GPU (bench/anchors.py of the repository)",
    "kernels": "single kernels on a GPU (bench/kernels.py of the repository)",
}


def run(argv: Sequence[str]) -> int:
    """Run a measurement. Raises: ConfigError: no such one, or a wrong option."""
    if not argv:
        raise ConfigError(f"say what to measure: {', '.join(KINDS)}.")
    if argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    kind, rest = argv[0], list(argv[1:])
    if kind in ("anchors", "kernels"):
        return _script(kind, rest)
    if kind == "first-token":
        asyncio.run(command.first_token(_config(kind, rest)))
        return 0
    if kind == "serve":
        return _serve(rest)
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        raise ConfigError(f"unknown measurement {kind!r}" + (f": did you mean {close!r}?" if close else "."))
    options, others = command.arguments(kind, rest)
    config = command.without_prefix_cache(_config(kind, others), others)
    try:
        result = command.startup(options, others) if kind == "startup" else command.main(kind, options, config)
    except asyncio.CancelledError:
        return STOPPED
    command.report(result, options.output_json)
    return STOPPED if result.get("stopped") else 0


def _serve(argv: Sequence[str]) -> int:
    """Load on a server: as many connections as the system allows, and a collector that does not look at each event."""
    from ..bench import serve

    allow_files()
    keep_loaded()
    return serve.main(argv)


def _config(kind: str, argv: Sequence[str]):
    config = read_config(argv, f"tinyserve bench {kind}", KINDS.get(kind, "measure a start"))
    log.set_up(config.log)
    return config


def _script(name: str, argv: Sequence[str]) -> int:
    """Run a script of the repository's bench folder as if it had been called itself."""
    path = Path(__file__).parent.parent.parent / "bench" / f"{name}.py"
    if not path.is_file():
        raise ConfigError(f"`bench {name}` needs the repository: {path} is not there.")
    before, sys.argv = sys.argv, [str(path), *argv]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as done:
        if isinstance(done.code, str):
            raise ConfigError(done.code) from None
        return int(done.code or 0)
    finally:
        sys.argv = before
        sys.path.remove(str(path.parent))
    return 0


def _usage() -> str:
    lines = [f"  {name:<12}{text}" for name, text in KINDS.items()]
    return "Usage: python -m tinyserve bench KIND [MODEL] [options]\n\nKinds:\n" + "\n".join(lines)
