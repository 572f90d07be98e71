"""`python -m tinyserve`: the first word chooses a command, `serve` when there is none.

    python -m tinyserve                        serve a small real model at 127.0.0.1:8000
    python -m tinyserve --model Qwen/Qwen3-0.6B --max-model-len 8k
    python -m tinyserve chat                   talk to it

Before: cli/ (the commands).  After: a shell.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the rest is imported, Ctrl-C ends it without a traceback

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from . import __version__
from .cli.process import forget_output, reader_left
from .errors import ConfigError, TinyserveError
from .options import nearest

COMMANDS = {
    "serve": ("serve", "run", "serve a model with OpenAI's HTTP API (the default)"),
    "chat": ("chat", "run_chat", "chat with a running server"),
    "complete": ("chat", "run_complete", "let a running server continue texts"),
    "run-batch": ("batch", "run", "answer a file of requests in OpenAI's batch format"),
    "bench": ("bench", "run", "measure latency, throughput or the start"),
    "plan": ("plan", "run", "print the memory plan without loading weights"),
    "quantize": ("quantize", "run", "save a checkpoint in fp8, int8 or int4"),
    "collect-env": ("report", "run", "print versions and devices for a bug report"),
}


_MORE = "Help of a command: python -m tinyserve COMMAND --help. Version: python -m tinyserve --version."
READER_LEFT = 141  # 128 + SIGPIPE, with which Unix tools end when nobody reads their output any more


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns: the exit code: 2 for a wrong option, 1 for a failure, 130 after Ctrl-C, 141 when output is not read on.
    """
    with contextlib.suppress(ValueError):  # in another thread, which gets no signal
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdin, sys.stdout):  # no letter that a terminal lacks, or that is none, ends a command
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where it can be answered that this fails
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        code = READER_LEFT if isinstance(error, BrokenPipeError) and reader_left() else _told(error, 1)
        forget_output()
        return code


def _run(argv: list[str]) -> int:
    if argv[:1] in (["--version"], ["-V"]):
        print(f"tinyserve {__version__}")
        return 0
    if argv[:1] in (["--help"], ["-h"], ["help"]):
        print(_usage())
    try:
        name, rest = _command(argv)
        module, function, _ = COMMANDS[name]
        return getattr(import_module(f".cli.{module}", __package__), function)(rest)
    except ConfigError as error:
        return _told(error, 2)
    except TinyserveError as error:
        return _told(error, 1)


def _told(error: Exception, code: int) -> int:
    """Write the error where somebody may read it. Returns: the exit code."""
    with contextlib.suppress(OSError):
        print(f"tinyserve: {error}", file=sys.stderr)
    return code


def _command(argv: list[str]) -> tuple[str, list[str]]:
    """The command's name and its own arguments."""
    if not argv or argv[0].startswith("-"):
        return "serve", argv
    if argv[0] == "help":
        return "serve", ["--help"]
    if argv[0] in COMMANDS:
        return argv[0], argv[1:]
    if close := nearest(argv[0], COMMANDS):
        raise ConfigError(f"unknown command {argv[0]!r}: did you mean {close!r}? To serve a model so named: --model.")
    if argv[0].replace("_", "").replace("-", "").isalnum() and not Path(argv[0]).exists():
        raise ConfigError(
            f"unknown command {argv[0]!r}, and no file or folder of that name. The commands are "
            f"{', '.join(COMMANDS)}. For a model of the hub: tinyserve --model {argv[0]}"
        )
    return "serve", argv


def _usage() -> str:
    lines = [f"  {name:<13}{text}" for name, (_, _, text) in COMMANDS.items()]
    return "Usage: python -m tinyserve [COMMAND] [options]\n\nCommands:\n" + "\n".join(lines) + f"\n\n{_MORE}\n"


if __name__ == "__main__":
    sys.exit(main())
