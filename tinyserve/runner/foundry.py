"""Kernels compiled by processes of their own, while this one loads weights and names further kernels.

Half of a compilation is Python and holds the interpreter, so threads that compile wait for each other: 16 of them took
11 s for what is 2 s of work for 16 processes (Qwen3-0.6B on an H200).

    this process                      foundry: imports once          its forks, one a core
    expect(config) ---- socket -----------------------------------> what every model needs (expected.py)
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
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from attrs import astuple, define, field

from ..config import environment
from .early import Gpu
from .expected import expected, named, shadow_of_new

if TYPE_CHECKING:
    from ..kernels.launch import Variant

_log = logging.getLogger(__name__)
LONGEST = 1 << 17  # bytes of a message: a variant's description is 2 to 4 KB
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # it is to be forked
BACKENDS = {"cuda": "nvidia", "hip": "amd"}  # how Triton calls a device, and the code that serves it


class Compilers(Protocol):
    """What a start asks of a foundry."""

    def expect(self, gpu: Gpu, config: Mapping[str, Any], dtype: str, page: int) -> None:
        """Begin with what a model of this config will need whatever else it needs; see `expected`."""
        ...

    def add(self, variant: Variant) -> None:
        """Have a variant compiled; returns at once."""
        ...

    def wait(self, done: Callable[[Variant], None]) -> list[tuple[str, float]]:
        """Wait until all that was added is done, and tell of each that is; more may be added afterwards.

        Returns: the name and seconds of each job, the longest first.
        """
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class NoFoundry:
    """Leaves everything to the threads of this process."""

    def expect(self, gpu: Gpu, config: Mapping[str, Any], dtype: str, page: int) -> None:
        """Nothing."""

    def add(self, variant: Variant) -> None:
        """Nothing."""

    def wait(self, done: Callable[[Variant], None]) -> list[tuple[str, float]]:
        """Nothing was added."""
        return []

    def close(self) -> None:
        """There are no processes."""


@define
class _Job:
    """What one worker does. variants: that this process waits for; seconds: it took, None while it has not ended."""

    name: str
    variants: list[Variant] = field(factory=list)
    seconds: float | None = None


class Foundry:
    """Processes that fill Triton's cache on disk. Used from one thread at a time.

    Args:
        workers: processes that compile.
        backend: Triton's name of the kind of device, "cuda" or "hip".
    """

    def __init__(self, workers: int, backend: str = "cuda") -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        self._waiting: deque[bytes] = deque()  # what the socket does not take yet
        self._jobs: list[_Job] = []
        self._named: dict[tuple[str, ...], _Job] = {}  # what is expected, by its description
        self._dead = 0
        self._gone = False
        call = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
        with theirs:
            command = [sys.executable, "-c", f"{call}; serve({theirs.fileno()}, {workers}, {backend!r})"]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment(**ONE_THREAD), process_group=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def expect(self, gpu: Gpu, config: Mapping[str, Any], dtype: str, page: int) -> None:
        """Begin with what a model of this config will need whatever else it needs; see `expected`."""
        for what, *rest in expected(config, dtype, page):
            self._give(_Job(f"expected {what}"), "expected", astuple(gpu), what, *rest)

    def add(self, variant: Variant) -> None:
        """Have a variant compiled for the device of this thread; returns at once."""
        from triton.runtime import driver

        self._receive()
        description = described(variant)
        job = self._named.get(description)
        if job is None:
            target = driver.active.get_current_target()
            job = _Job(variant.kernel.fn.__name__)
            self._give(job, "variant", *description, target.backend, target.arch, target.warp_size)
        job.variants.append(variant)

    def wait(self, done: Callable[[Variant], None]) -> list[tuple[str, float]]:
        """Wait until all that was added is done, and tell of each that is; see Compilers."""
        told: set[int] = set()
        while True:
            wanted = [job for job in self._jobs if job.variants]
            for job in wanted:
                if job.seconds is not None and id(job) not in told:
                    told.add(id(job))
                    for variant in job.variants:
                        done(variant)
            left = sum(job.seconds is None for job in wanted)
            if self._gone or left <= self._dead:  # a process that died had at most one
                break
            self._send()
            select.select([self._link], [self._link] if self._waiting else [], [])
            self._receive()
        if left:
            _log.warning("%d kernels were not compiled ahead; this process compiles them", left)
        made = [(job.name, job.seconds) for job in wanted if job.seconds is not None]
        return sorted(made, key=lambda one: -one[1])

    def close(self) -> None:
        """End the processes, also those that still compile; waits for none of them."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        threading.Thread(target=self._process.wait, name="tinyserve-foundry", daemon=True).start()

    def _give(self, job: _Job, *message: Any) -> None:
        self._waiting.append(json.dumps([len(self._jobs), *message]).encode())
        self._jobs.append(job)
        self._send()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # no room now; or nobody is there, which `_receive` notices
            while self._waiting:
                self._link.send(self._waiting[0])
                self._waiting.popleft()

    def _receive(self) -> None:
        """Take in what has come."""
        while not self._gone:
            try:
                message = self._link.recv(LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._gone = True
                return
            number, seconds, text = json.loads(message)
            if number is None:
                self._dead += 1
            elif seconds is None:
                self._named |= {tuple(description): self._jobs[number] for description in text}
            else:
                self._jobs[number].seconds = seconds
                if text:
                    _log.debug("%s: %s", self._jobs[number].name, text)


def described(variant: Variant) -> tuple[str, str, str]:
    """Where the kernel of a variant is defined, its name, and Triton's description: all that another process needs."""
    function = variant.kernel.fn
    return function.__module__, function.__name__, variant.data


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
    """Stands for torch, and what is in it, where kernels are compiled and never launched."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = Unused(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __str__(self) -> str:
        return self.__name__  # Triton reads a type from its name

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__ = __call__  # in annotations


def serve(link_number: int, workers: int, backend: str) -> None:
    """The foundry's process: import what compiling needs, fork the workers, and tell when one has died."""
    link = socket.socket(fileno=link_number)
    if backend == "cuda":  # Triton's code for AMD does ask torch
        sys.modules["torch"] = nothing = Unused("torch")
        nothing.empty = shadow_of_new
    from triton.runtime import cache, jit

    drivers: list[Any] = []
    threads = [threading.Thread(target=_build_driver, args=(backend, drivers))]  # a C compiler works for half a second
    if hasattr(cache, "triton_key"):
        threads.append(threading.Thread(target=cache.triton_key))  # hashes 400 MB, once for all workers
    for thread in threads:
        thread.start()
    from .. import kernels
    from ..kernels.launch import settle_key

    for found in pkgutil.iter_modules(kernels.__path__):
        for kernel in vars(importlib.import_module(f"{kernels.__name__}.{found.name}")).values():
            if isinstance(kernel, jit.JITFunction):
                settle_key(kernel)  # what every worker would do, and nothing else is to be done yet
    for thread in threads:
        thread.join()
    gc.freeze()
    for _ in range(workers):
        if not os.fork():
            status = 1
            try:
                _work(link, drivers[0] if drivers else None)
                status = 0
            finally:
                os._exit(status)  # what ends otherwise has died, and somebody waits for what it had
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `close` ends the workers; they are taken leave of here
    with contextlib.suppress(ChildProcessError):
        while True:
            died = os.waitstatus_to_exitcode(os.wait()[1])
            with contextlib.suppress(OSError):
                if died:
                    link.send(json.dumps([None, 0, "died"]).encode())


def _build_driver(backend: str, found: list[Any]) -> None:
    """Make Triton's own driver, which builds a module in C and asks nothing of a device.

    Where it has launchers in C for each signature, half of the time of compiling goes there. A compiler that reads both
    -O3 and -O1 obeys the second; it needs two thirds of the time then, for code that only passes arguments on.
    """
    with contextlib.suppress(Exception):  # no C compiler, no library of the vendor: the process with the device says so
        vendor = importlib.import_module("triton.backends").backends[BACKENDS[backend]].driver
        home = sys.modules[vendor.__module__]
        found.append(vendor())
        home.compile_module_from_src = partial(home.compile_module_from_src, ccflags=["-O1"])


def _work(link: socket.socket, real: Any) -> None:
    """A worker: do what comes until there is nobody left to send."""

    def tell(*message: Any) -> None:
        link.send(json.dumps(message).encode())

    while message := link.recv(LONGEST):
        began = time.perf_counter()
        number, kind, *job = json.loads(message)
        error = ""
        try:
            if kind == "variant":
                _compile(*job, real)
            else:
                found = _expect(real, *job)
                tell(number, None, [described(variant) for variant in found])
                for variant in found:
                    _finish(variant.kernel, variant.data, real)
        except Exception as problem:
            error = repr(problem)[:1000]
        tell(number, time.perf_counter() - began, error)


def _compile(module: str, name: str, data: str, backend: str, arch: Any, lanes: int, real: Any) -> None:
    """Compile one variant into the cache on disk."""
    _stand_in(backend, arch, lanes, real)
    _finish(getattr(importlib.import_module(module), name), data, real)


def _expect(real: Any, gpu: Sequence[Any], *what: Any) -> list[Variant]:
    """Name what is expected. gpu: the values of a Gpu."""
    from ..kernels import launch

    name, arch, processors, shared = gpu
    _stand_in("cuda", arch, 32, real)
    facts = launch.DeviceFacts(name, "cuda", shared, processors, overlaps=arch >= 90, arch=arch)
    launch.facts = lambda device: facts
    return named(*what)


def _stand_in(backend: str, arch: Any, lanes: int, real: Any) -> None:
    """Tell Triton what to compile for, in place of a driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if not isinstance(driver._active, StandIn):
        driver.set_active(StandIn(GPUTarget(backend, arch, lanes), real))


def _finish(kernel: Any, data: str, real: Any) -> None:
    """Compile a variant, and build its launcher where Triton has one for every signature."""
    from triton.runtime import driver

    from ..kernels.launch import settle_key

    settle_key(kernel)
    compiled = kernel.preload(data)
    if real is not None:
        driver.active.launcher_cls(compiled.src, compiled.metadata)
