"""The machine under the tensors: the only file that names a vendor.

A `Device` answers what the rest needs to know and do: how much memory is free, how a stream, an event or a pinned
buffer is made. Everywhere else code says `device.event()`, never `torch.cuda`. ROCm builds of torch answer to the name
cuda; XPU has the same calls under its own name; the CPU has none of them, and here gets objects that do nothing, so
that no caller needs a branch. (What kernels ask of the hardware, kernels/launch.py asks of Triton.)

Before: errors.py.  After: runner/memory.py (sizing), runner/runner.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import field, frozen

from .errors import ConfigError

HUGE_PAGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # of Linux, from 6.1 on: make these pages a huge one now
PORTABLE = 1  # of cudaHostRegister: for all threads and contexts
FIELDS = ("Anonymous", "AnonHugePages")  # of /proc/self/smaps: bytes that a piece of memory holds, in pages of any size

Result = TypeVar("Result")


@frozen
class Memory:
    """Bytes of one device: free now for anybody, and in all."""

    free_bytes: int
    total_bytes: int


class _Nothing:
    """Stands for a stream or event where the device has none: everything is already done."""

    def synchronize(self) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True


@frozen
class Device:
    """One device. kind: "cpu", "cuda" (NVIDIA and AMD) or "xpu"; index: number of the device of that kind."""

    kind: str
    index: int = 0
    _api: ModuleType | None = field(default=None, repr=False, eq=False)

    @classmethod
    def pick(cls, name: str = "auto", threads: int | None = None) -> Device:
        """The device called `name` ("auto", "cpu", "cuda", "cuda:1", "xpu"); auto takes an accelerator if there is one.

        Args: threads: that a CPU computes with, in the whole process, also if torch was imported long before.
        Raises: ConfigError: the device does not exist here.
        """
        kind, _, index = name.partition(":")
        found = [label for label in ("cuda", "xpu") if getattr(torch, label).is_available()]
        if kind == "auto":
            kind = found[0] if found else "cpu"
        if kind not in ("cpu", *found) or (index and not index.isdigit()):
            raise ConfigError(
                f"--device {name}: not available here. Choose one of: {', '.join(['auto', 'cpu', *found])}."
            )
        if kind == "cpu":
            if threads is not None:
                torch.set_num_threads(threads)
            return cls("cpu")
        api = getattr(torch, kind)
        number = int(index or 0)
        if number >= api.device_count():
            raise ConfigError(f"--device {name}: there are only {api.device_count()} {kind} devices.")
        return cls(kind, number, api)

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def memory(self) -> Memory:
        """Free and total bytes; on the CPU those of the machine (or of its container, if that is less)."""
        if self._api is None:
            return _host_memory()
        free, total = self._api.mem_get_info(self.index)
        return Memory(free, total)

    def peak_bytes(self) -> int:
        """Most bytes that tensors held at once since `reset_peak`; 0 on the CPU, where nobody counts."""
        return self._api.max_memory_allocated(self.index) if self._api else 0

    def allocated_bytes(self) -> int:
        """Bytes that live tensors hold now; 0 on the CPU."""
        return self._api.memory_allocated(self.index) if self._api else 0

    def reset_peak(self) -> None:
        if self._api:
            self._api.reset_peak_memory_stats(self.index)

    def release_unused(self, *, garbage: bool = True) -> None:
        """Give cached memory back to the system; garbage: of what Python can collect too, which takes 90 ms."""
        if garbage:
            gc.collect()
        if self._api:
            self._api.synchronize(self.index)
            self._api.empty_cache()

    def settle(self) -> None:
        """All weights are loaded: let what this process holds lie in huge pages, where that is for the CPU to care.

        torch asks for them for large tensors only. The weights of a small model are thousands of small ones, and
        libraries pack theirs into memory of their own; a core reads both a quarter faster from huge pages.
        """
        if self.is_cpu:
            with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux, or an older one
                _use_huge_pages(Path("/proc/self/smaps").read_text(errors="replace"))

    def event(self) -> Any:
        """An event whose `synchronize` sleeps (not spins) and lets other Python threads run."""
        return self._api.Event(blocking=True) if self.kind == "cuda" else self._api.Event() if self._api else _Nothing()

    def current_stream(self) -> Any:
        return self._api.current_stream(self.index) if self._api else _Nothing()

    def synchronize(self) -> None:
        if self._api:
            self._api.synchronize(self.index)

    def select(self) -> None:
        """Make this the current device of the calling thread, for good."""
        if self._api:
            self._api.set_device(self.index)

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the current device inside a `with`; needed on every thread that launches."""
        return self._api.device(self.index) if self._api else contextlib.nullcontext()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A host tensor that copies to and from this device without waiting: pinned, except for the CPU itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._api is not None)

    def beside(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """A `with` for copies: what is queued inside runs beside the current stream, which waits for it afterwards."""
        if self._api is None:
            return contextlib.nullcontext
        stream = self._api.Stream(self.index)

        @contextlib.contextmanager
        def beside() -> Iterator[None]:
            with self._api.stream(stream):
                yield
            self.current_stream().wait_stream(stream)

        return beside

    def share(self, memory: np.ndarray) -> Callable[[], None] | None:
        """Let this device read memory of the host, which other processes may hold, as it does `host_buffer`'s.

        Returns: what ends that, before the memory goes; None: it cannot.
        """
        if self._api is None:
            return lambda: None
        if self.kind != "cuda":
            return None
        runtime, address = self._api.cudart(), memory.ctypes.data
        with self.use():
            if int(runtime.cudaHostRegister(address, memory.nbytes, PORTABLE)):
                return None

        def release() -> None:
            self.synchronize()  # what reads it
            runtime.cudaHostUnregister(address)

        return release

    @property
    def has_graphs(self) -> bool:
        """Whether a sequence of launches can be recorded and replayed."""
        return self.kind == "cuda"

    def graph_pool(self) -> Any:
        """Memory that several graphs share, and the stream they are recorded on: of one pool, one may run at a time.

        One stream for all, because libraries keep working memory of tens of MB for every stream that they meet.
        """
        return self._api.graph_pool_handle(), self._api.Stream(self.index)

    def record(self, work: Callable[[], Result], pool: Any) -> tuple[Any, Result]:
        """Record what `work` launches, without running it; everything that it uses must have run once before.

        Returns: a graph, whose `replay()` launches it all again on the current stream, and what `work` returned. Its
            tensors may be overwritten by the next replay of any graph of the pool.
        """
        graph, (handle, side) = self._api.CUDAGraph(), pool
        side.wait_stream(self.current_stream())
        with self._api.stream(side):
            graph.capture_begin(pool=handle, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        self.current_stream().wait_stream(side)
        return graph, result

    def described(self) -> str:
        """What it is, for people: its maker's name and its architecture."""
        if self._api is None:
            return "cpu"
        properties = self._api.get_device_properties(self.index)
        arch = getattr(properties, "gcnArchName", "").split(":")[0]
        if not arch and hasattr(properties, "major"):
            arch = f"sm_{properties.major}{properties.minor}"
        return f"{properties.name} ({arch})" if arch else properties.name


def _host_memory() -> Memory:
    """Free and total bytes of the machine, or what its control group still allows, whichever is less."""
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        facts[key] = int(rest.split()[0]) * 1024
    total, free = facts["MemTotal"], facts["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return Memory(free, total)


def _use_huge_pages(maps: str) -> None:
    """Ask for huge pages wherever small ones fill nearly all of a piece of memory: what is empty of it gets filled.

    What the system refuses stays as it is.

    Args: maps: as Linux describes the process's memory in /proc/self/smaps.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for piece in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.MULTILINE)[1:]:
        start, end, mode, inode = re.match(r"(\w+)-(\w+) (\S+) \S+ \S+ (\d+)", piece).groups()
        start, end = int(start, 16), int(end, 16)
        held, huge = (int(re.search(rf"^{name}: +(\d+) kB", piece, re.MULTILINE)[1]) << 10 for name in FIELDS)
        if mode == "rw-p" and inode == "0" and held > max(huge + HUGE_PAGE, 0.9 * (end - start)):
            for place in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                advise(place, HUGE_PAGE, MADV_COLLAPSE)


class _Borrowed:
    """Device memory as other libraries describe it to each other: an address, a shape and a type of its size."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A view that does not keep the memory: for results of a graph, whose pool stays as long as the graph does.

    With an ordinary reference the pool could not give the same memory to the next graph that is recorded.
    """
    if tensor.is_cpu or not tensor.numel():
        return tensor
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device).view(tensor.dtype)
