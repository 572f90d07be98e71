"""Kernels compiled by processes of their own, while this one loads weights and names further kernels.

Half of a compilation is Python and holds the interpreter, so threads that compile wait for each other: 16 of them took
11 s for what is 2 s of work for 16 processes (Qwen3-0.6B on an H200).

    this process                      foundry: imports once          its forks, one a core
    add(variant) ------ socket ------ fork, fork, fork, ... ------>  compile, build the launcher
    wait()       <-------------------------------------------------  "done", and all of it is in Triton's cache on disk

None of these processes ever opens a device: a stand-in tells Triton which one to compile for. Nor do they need torch,
whose import takes as long as half of the compiling: another stand-in is there for the annotations that mention it. They
are forked from a fresh process without threads, not from this one, which has many. Nothing depends on their success:
what they leave out is compiled by this process, which then also raises what is wrong with it.

Before: kernels/launch.py (which variants).  After: warmup.py; engine/assemble.py opens one early in a start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import pkgutil
import select
import socket
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..config import environment

if TYPE_CHECKING:
    from ..kernels.launch import Variant

_log = logging.getLogger(__name__)
LONGEST = 1 << 17  # bytes of a message: a variant's description is 2 to 4 KB
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # it is to be forked
BACKENDS = {"cuda": "nvidia", "hip": "amd"}  # how Triton calls a device, and the code that serves it


class Compilers(Protocol):
    """What the warm-up asks of a foundry."""

    def add(self, variant: Variant) -> None:
        """Have a variant compiled; returns at once."""
        ...

    def wait(self, done: Callable[[Variant], None]) -> list[tuple[str, float]]:
        """Wait until all that was added is done, and tell of each that is; more may be added afterwards.

        Returns: the name and seconds of each, the longest first.
        """
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class NoFoundry:
    """Leaves everything to the threads of this process."""

    def add(self, variant: Variant) -> None:
        """Nothing."""

    def wait(self, done: Callable[[Variant], None]) -> list[tuple[str, float]]:
        """Nothing was added."""
        return []

    def close(self) -> None:
        """There are no processes."""


class Foundry:
    """Processes that fill Triton's cache on disk. Used from one thread at a time.

    Args:
        workers: processes that compile.
        backend: Triton's name of the kind of device, "cuda" or "hip"; a guess saves time, a wrong one does no harm.
    """

    def __init__(self, workers: int, backend: str = "cuda") -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._waiting: deque[bytes] = deque()  # what the socket does not take yet
        self._added: list[Variant] = []
        self._left: set[int] = set()
        self._dead = 0
        call = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
        with theirs:
            command = [sys.executable, "-c", f"{call}; serve({theirs.fileno()}, {workers}, {backend!r})"]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment(**ONE_THREAD), process_group=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def add(self, variant: Variant) -> None:
        """Have a variant compiled for the device of this thread; returns at once."""
        from triton.runtime import driver

        target = driver.active.get_current_target()
        number, function = len(self._added), variant.kernel.fn
        self._added.append(variant)
        self._left.add(number)
        job = [number, function.__module__, function.__name__, variant.data]
        self._waiting.append(json.dumps([*job, target.backend, target.arch, target.warp_size]).encode())
        self._send()

    def wait(self, done: Callable[[Variant], None]) -> list[tuple[str, float]]:
        """Wait until all that was added is done, and tell of each that is; see Compilers."""
        made = []
        while len(self._left) > self._dead:  # a process that died had at most one
            self._send()
            readable, _, _ = select.select([self._link], [self._link] if self._waiting else [], [])
            if not readable:
                continue
            try:
                found = self._receive()
            except EOFError:
                break
            if found is not None:
                made.append((found[0].kernel.fn.__name__, found[1]))
                done(found[0])
        if self._left:
            _log.warning("%d kernels were not compiled ahead; this process compiles them", len(self._left))
        return sorted(made, key=lambda one: -one[1])

    def close(self) -> None:
        """End the processes; each that still compiles ends when it has."""
        self._link.close()
        self._process.terminate()
        self._process.wait()

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # no room now; or nobody is there, which `wait` will notice
            while self._waiting:
                self._link.send(self._waiting[0])
                self._waiting.popleft()

    def _receive(self) -> tuple[Variant, float] | None:
        """Take a message: a variant and its seconds, or None. Raises: EOFError: nobody is there any more."""
        try:
            message = self._link.recv(LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if not message:
            raise EOFError
        number, seconds, error = json.loads(message)
        if number is None:
            self._dead += 1
            return None
        variant = self._added[number]
        self._left.discard(number)
        if error:
            _log.debug("%s: %s", variant.kernel.fn.__name__, error)
        return variant, seconds


class StandIn:
    """Stands where Triton expects the driver of a device, knows the target, and builds launchers if `real` can."""

    def __init__(self, target: Any, real: Any) -> None:
        self._target = target
        self._real = real

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Unused(types.ModuleType):
    """Stands for torch where kernels are compiled and never launched: whatever is asked of it is itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__ = __call__  # in annotations


def serve(link_number: int, workers: int, backend: str) -> None:
    """The foundry's process: import what compiling needs, fork the workers, and tell when one has died."""
    link = socket.socket(fileno=link_number)
    if backend == "cuda":  # Triton's code for AMD does ask torch
        sys.modules["torch"] = Unused("torch")
    cache = importlib.import_module("triton.runtime.cache")
    drivers: list[Any] = []
    threads = [threading.Thread(target=_build_driver, args=(backend, drivers))]  # a C compiler works for half a second
    if hasattr(cache, "triton_key"):
        threads.append(threading.Thread(target=cache.triton_key))  # hashes 400 MB, once for all workers
    for thread in threads:
        thread.start()
    from .. import kernels

    for found in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{found.name}")
    for thread in threads:
        thread.join()
    gc.freeze()
    for _ in range(workers):
        if not os.fork():
            try:
                _work(link, drivers[0] if drivers else None)
            finally:
                os._exit(0)
    with contextlib.suppress(ChildProcessError, OSError):
        while True:
            if os.waitstatus_to_exitcode(os.wait()[1]):
                link.send(json.dumps([None, 0, "died"]).encode())


def _build_driver(backend: str, found: list[Any]) -> None:
    """Make Triton's own driver, which builds a module in C and asks nothing of a device."""
    with contextlib.suppress(Exception):  # no C compiler, no library of the vendor: the process with the device says so
        found.append(importlib.import_module("triton.backends").backends[BACKENDS[backend]].driver())


def _work(link: socket.socket, real: Any) -> None:
    """A worker: compile what comes until there is nobody left to send."""
    while message := link.recv(LONGEST):
        began = time.perf_counter()
        number, *job = json.loads(message)
        try:
            _compile(*job, real)
            error = ""
        except Exception as problem:
            error = repr(problem)[:1000]
        link.send(json.dumps([number, time.perf_counter() - began, error]).encode())


def _compile(module: str, name: str, data: str, backend: str, arch: Any, lanes: int, real: Any) -> None:
    """Compile one variant into the cache on disk, and build its launcher where Triton has one for every signature."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from ..kernels.launch import settle_key

    if not isinstance(driver._active, StandIn):
        driver.set_active(StandIn(GPUTarget(backend, arch, lanes), real))
    kernel = getattr(importlib.import_module(module), name)
    settle_key(kernel)
    compiled = kernel.preload(data)
    if real is not None:
        driver.active.launcher_cls(compiled.src, compiled.metadata)
