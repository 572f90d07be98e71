"""What every launcher asks before it launches: does the kernel run here, and in which block sizes?

A tensor on the CPU takes the reference; any other device takes the Triton kernel. Block sizes come from a table that
was measured on this very device (`tuned/<device>.json`), and from a formula of the launcher when no row fits, so that
an unknown device is slower at worst, never wrong. Shared memory is the one limit that can refuse a launch outright:
`shared_memory` tells a launcher what one program may take, and `SAFE_SHARED` is what all but the smallest devices have.

Overlap: on NVIDIA GPUs from sm_90 on, a kernel can be launched while the one before it still runs (programmatic
dependent launch). It may then do only what does not depend on any kernel of the step, such as loading a tile of
weights, until it calls `wait_inputs`; after that everything written before is visible. `start_next` says when the next
kernel may be launched in turn. A kernel that takes part launches with `**overlap(tensor)` and calls `wait_inputs(PDL)`
in every program before its first load of an activation and before its first store; kernels that do not take part are
unharmed, they simply start when the one before has ended. It saves 0.7 to 1.5 us a kernel in a graph, 5 % of a step of
an 8B model and 20 % of one of a 0.6B model (H200).

A tuned file is one object, `{kernel: [{"when": {name: [low, high]}, "use": {option: value}}, ...]}`: the first row
whose ranges (both ends included) hold for the shape is used; a name that a row does not mention is not looked at.

Before: `device.py`, which device this is.  After: every kernel file of this folder.
"""

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import field, frozen
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import build, driver
from triton.runtime.jit import JITCallable

TUNED = Path(__file__).parent / "tuned"
# Bytes of shared memory for one program on sm_86, sm_89 and sm_120; sm_90 has 227 KiB, AMD's gfx9 and gfx11 64 KiB.
SAFE_SHARED = 99 * 1024

# In Triton's interpreter a kernel runs on CPU tensors too. Triton reads the variable while it decorates a kernel, so
# the answer is settled once, here; the test harness sets it for the length of a `with`.
CPU_RUNS_KERNELS = bool(triton.knobs.runtime.interpret)

# What `choose` found for a shape, with the rows that it looked through: a microsecond instead of one for each row.
_FOUND: dict[tuple, tuple[list, dict[str, int]]] = {}
_HASHING = threading.Lock()
_NOTING = threading.Lock()  # one thread at a time changes Triton's ways
_LINKING = threading.Lock()


@frozen
class DeviceFacts:
    """What block sizes depend on.

    Attributes:
        name: the vendor's name of the device, such as "NVIDIA H200"; names the tuned file.
        backend: Triton's name of the code generator: "cuda", "hip", "xpu", or "cpu" for the interpreter.
        shared: bytes of shared memory that one program may take.
        processors: multiprocessors, that is programs which run at once if each needs a whole one.
        overlaps: whether kernels may be launched before the one in front has ended.
        lanes: threads of a warp: 32, but 64 on AMD's gfx9, which also has twice the registers of gfx11.
        arch: of NVIDIA's devices the number behind sm_, 0 of others: says which matrix instructions there are.
    """

    name: str
    backend: str
    shared: int
    processors: int
    overlaps: bool = False
    lanes: int = 32
    arch: int = 0


@frozen
class Variant:
    """One kernel for one combination of types and constants, not compiled yet. data: Triton's own description."""

    kernel: Any = field(eq=id)  # Triton's own hash of a kernel is slow, and waits for `settle_key`
    data: str


@contextlib.contextmanager
def noting(tell: Callable[[Variant], None] | None = None) -> Iterator[list[Variant]]:
    """Inside, this thread compiles and launches no kernel; variants that are not compiled are in the list, once.

    Args: tell: called with each of them when it is found.

    Steps of zeros run this way name the variants that real steps need; a `Loading` then makes them all at once, where
    one launch after the other would wait for each. Those that are compiled already (by another engine of this
    process) are left out too: what they would read, others have not written.
    """
    found: list[Variant] = []
    stubs: list[tuple[dict, Any]] = []
    mine = threading.get_ident()

    def hook(**launch: Any) -> bool:
        if threading.get_ident() != mine:  # another engine of this process
            return bool(before and before(**launch))
        kernel, asked = launch["fn"].jit_function, launch["compile"]
        found.append(Variant(kernel, asked["specialization_data"]))
        if tell is not None:
            tell(found[-1])
        compiled = kernel.device_caches[asked["device"]][0]
        compiled[launch["key"]] = "named"  # found quickly when it is asked for again
        stubs.append((compiled, launch["key"]))
        return True

    def find(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        """Triton's `run`, which with `warmup` ends where it would launch."""
        return run(kernel, *args, warmup=warmup or threading.get_ident() == mine, **options)

    runtime = triton.knobs.runtime
    with _NOTING:
        before, run = runtime.jit_cache_hook, triton.JITFunction.run
        runtime.jit_cache_hook, triton.JITFunction.run = hook, find
        try:
            yield found
        finally:
            runtime.jit_cache_hook, triton.JITFunction.run = before, run
            for compiled, key in stubs:
                del compiled[key]


def settle_key(kernel: Any) -> None:
    """Have Triton hash what a kernel calls before the kernel itself.

    A kernel's place in the cache on disk follows from constants of the functions that it calls, and Triton leaves out
    those of functions that it has not hashed yet. So the place depended on the order in which kernels were first seen,
    and a second start, or another process, compiled some of them again.
    """
    with _HASHING:
        _settle(kernel, set())


def _settle(kernel: Any, met: set[int]) -> None:
    if id(kernel) in met:
        return
    met.add(id(kernel))
    names = kernel.fn.__code__.co_names
    values = [kernel.__globals__.get(name) for name in names]
    inside = [getattr(one, name, None) for one in values if isinstance(one, ModuleType) for name in names]
    for callee in (*values, *inside):
        if isinstance(callee, JITCallable):
            _settle(callee, met)
    _ = kernel.cache_key  # computed when it is read, once


def _undisturbed(compile_kernel: Callable[[], Any], most: int = 20) -> Any:
    """Compile, and try again where another thread disturbed the parser.

    Before Python 3.11.8 and 3.12.2, threads that parse at once share a counter, and one of them may get a SystemError
    ("AST constructor recursion depth mismatch", cpython issue 106905).
    """
    for _ in range(most - 1):
        try:
            return compile_kernel()
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return compile_kernel()


def _apart(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """Triton's way to load a module in C from a path, so that each load gives a module of its own.

    All launchers have one name. When a file is loaded that has been loaded before (kernels of one signature share a
    launcher), Python gives out the module of that name, whichever launcher's it is, with this file's functions in it.
    A thread that has just loaded another one then takes the wrong function: its kernel is launched with arguments that
    it does not have. So one thread loads at a time, and the name is forgotten before the next.
    """

    def alone(name: str, path: str) -> ModuleType:
        with _LINKING:
            sys.modules.pop(name, None)
            try:
                return load(name, path)
            finally:
                sys.modules.pop(name, None)

    return alone


if hasattr(build, "_load_module_from_path"):
    build._load_module_from_path = _apart(build._load_module_from_path)


class Loading:
    """Threads that compile variants, or read them from Triton's cache on disk, and load them on a device.

    Args:
        threads: how many.
        select: makes the device that of a thread. None: loading is left to the first launch.
    """

    def __init__(self, threads: int, select: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, "compile", select)
        self._load = select is not None
        self._jobs: dict[Variant, Future[None]] = {}

    def add(self, variant: Variant) -> None:
        """Begin with a variant, unless it has been added before."""
        if variant not in self._jobs:
            self._jobs[variant] = self._pool.submit(self._make, variant)

    def finish(self) -> int:
        """Wait for all; returns how many there were. Raises: what is wrong with a kernel, or its compiler."""
        with self._pool:
            for job in self._jobs.values():
                job.result()
        return len(self._jobs)

    def _make(self, variant: Variant) -> None:
        settle_key(variant.kernel)
        kernel = _undisturbed(lambda: variant.kernel.preload(variant.data))
        if self._load:
            kernel.run  # noqa: B018  where Triton loads it, with a little module in C for its signature


def cdiv(count: int, size: int) -> int:
    """How many pieces of `size` cover `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least `count` (1 for counts below 1); Triton's blocks must be one."""
    return 1 << (count - 1).bit_length() if count > 1 else 1


def use_kernel(tensor: torch.Tensor) -> bool:
    """True if the Triton kernel serves this tensor: on any device but the CPU, and there when Triton is interpreted."""
    return CPU_RUNS_KERNELS or not tensor.is_cpu


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32. Asking first is cheaper than a conversion that has nothing to do."""
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def once(memo: dict | None, key: tuple, make: Callable[[], Any]) -> Any:
    """What a step's layers would all compute alike: the first one makes it, `memo` keeps it for the others.

    Mostly for references, because on the CPU every tensor operation of every layer costs as much as a small product.

    Args:
        memo: belongs to one computation of a step (`Batch.memo`); None: make it now.
        key: says what it is, and for which of the step's tensors.
        make: computes it; must not return None.
    """
    if memo is None:
        return make()
    found = memo.get(key)
    if found is None:
        found = memo[key] = make()
    return found


@cache
def facts(device: torch.device) -> DeviceFacts:
    """Ask the device once. The CPU and meta devices answer with the safe sizes of the interpreter."""
    if device.type in ("cpu", "meta"):
        return DeviceFacts("cpu", "cpu", SAFE_SHARED, 1)
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    target = driver.active.get_current_target()
    return DeviceFacts(
        name=module.get_device_name(index),
        backend=target.backend,
        shared=properties["max_shared_mem"],
        processors=properties["multiprocessor_count"],
        overlaps=target.backend == "cuda" and target.arch >= 90,
        lanes=target.warp_size,
        arch=target.arch if target.backend == "cuda" else 0,
    )


def overlap(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that takes part in overlap: its constexpr PDL, and where it is on, the launch flag."""
    return {"PDL": True, "launch_pdl": True} if facts(tensor.device).overlaps else {"PDL": False}


def speaks_ptx(tensor: torch.Tensor) -> bool:
    """True on NVIDIA GPUs from sm_90 on: a kernel may hold PTX of that version, and convert fp8 by instructions."""
    return facts(tensor.device).overlaps


def groups_warps(tensor: torch.Tensor) -> bool:
    """True on Hopper, whose matrix instructions are four warps', with one side in their registers."""
    return facts(tensor.device).arch // 10 == 9


@triton.jit
def wait_inputs(PDL: tl.constexpr):
    """Wait until all kernels launched before have ended and their results are visible. Nothing if PDL is off."""
    if PDL:
        gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """This program no longer minds the next kernel being launched beside it; it is once no program does."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def publish(PDL: tl.constexpr):
    """What has been written so far can be seen by kernels that start later and do not wait. Nothing if PDL is off."""
    if PDL:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def warm_rows(ptr, row, stride, LINES: tl.constexpr, PDL: tl.constexpr):
    """Ask for the first LINES cache lines (128 bytes) of 2-byte rows to be brought to L2; where overlap is on."""
    if PDL and LINES > 0:
        place = ptr + row[:, None].to(tl.int64) * stride + (tl.arange(0, LINES) * 64)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def shared_memory(tensor: torch.Tensor) -> int:
    """Bytes of shared memory that one program may take on the tensor's device."""
    return facts(tensor.device).shared


def choose(kernel: str, tensor: torch.Tensor, default: dict[str, int], **shape: int) -> dict[str, int]:
    """The launch options of `kernel` for this device and shape.

    Args:
        kernel: key in the tuned files; the launcher's name.
        tensor: any argument of the kernel; says which device.
        default: what the launcher's formula says: meta-parameters, num_warps, num_stages. Not changed.
        shape: the numbers that rows are chosen by, such as `head_dim=128`.

    Returns:
        `default`, overlaid by the first row of the tuned file that fits.

    Raises:
        ValueError: a row sets an option that the launcher does not have, or asks for a number it does not give.
    """
    rows = tuned_rows(facts(tensor.device).name).get(kernel)
    if not rows:
        return default
    key = (id(rows), *shape.items())
    found = _FOUND.get(key)
    if found is None or found[0] is not rows:
        found = _FOUND[key] = (rows, _first_fit(kernel, rows, default, shape))
    return default | found[1]


def _first_fit(kernel: str, rows: list[dict], default: dict[str, int], shape: dict[str, int]) -> dict[str, int]:
    """What the first row that fits sets; nothing if none does."""
    for row in rows:
        unknown = (row["use"].keys() - default.keys()) | (row["when"].keys() - shape.keys())
        if unknown:
            raise ValueError(f"{kernel}: a tuned row names {sorted(unknown)}; known: {sorted([*default, *shape])}")
        if all(low <= shape[name] <= high for name, (low, high) in row["when"].items()):
            return row["use"]
    return {}


def tuned_path(device_name: str) -> Path:
    """The tuned file of a device: "NVIDIA H200" -> tuned/nvidia_h200.json."""
    return TUNED / (re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json")


@cache
def tuned_rows(device_name: str) -> dict[str, list[dict]]:
    """The rows measured on this device, by kernel; none if nobody has measured there."""
    path = tuned_path(device_name)
    return json.loads(path.read_text()) if path.exists() else {}


def row_warps(block: int, *, most: int = 16) -> int:
    """Warps for a program that holds one row of `block` numbers: about eight numbers a thread, 1 to `most` warps."""
    return min(max(block // 256, 1), most)


def check_rows(name: str, tensor: torch.Tensor, columns: int | None = None) -> None:
    """Refuse what a row kernel cannot read: it wants [rows, columns] with neighbours adjacent; rows may lie apart.

    Raises:
        ValueError: with the shape and the strides.
    """
    if tensor.dim() != 2 or (columns is not None and tensor.shape[1] != columns):
        wanted = "columns" if columns is None else columns
        raise ValueError(f"{name}: expected [rows, {wanted}], got {list(tensor.shape)}")
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, strides are {tensor.stride()}")


def check_attention(name: str, q, k_cache, v_cache, scale, extras, out) -> None:
    """Refuse what the attention kernels cannot read.

    Raises:
        ValueError: with shapes and strides.
    """
    heads, head_dim = q.shape[1:]
    kv_heads, page = k_cache.shape[1:3]
    if k_cache.shape[3] != head_dim or heads % kv_heads:
        raise ValueError(f"{name}: q {list(q.shape)} does not fit a cache of {list(k_cache.shape)}")
    if page & (page - 1):
        raise ValueError(f"{name}: blocks of {page} tokens; the number must be a power of two")
    if v_cache.shape != k_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(
            f"{name}: both caches must be contiguous and {list(k_cache.shape)}, v is {list(v_cache.shape)}"
        )
    if q.stride(2) != 1 or (out is not None and (out.shape != q.shape or out.stride(2) != 1)):
        raise ValueError(f"{name}: q and out must agree and be contiguous in the last dimension; q is {list(q.shape)}")
    if not scale > 0:
        raise ValueError(f"{name}: scale must be positive, is {scale}")
    for what, extra in zip(("sinks", "alibi_slopes"), extras, strict=True):
        if extra is not None and extra.shape != (heads,):
            raise ValueError(f"{name}: {what} must be [{heads}], is {list(extra.shape)}")
