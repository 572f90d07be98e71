"""Run kernels without a GPU: in Triton's interpreter (right numbers, slow) or through its compilers (no numbers).

    with interpreting():                 # CPU tensors; @triton.jit kernels run as Python, program after program
        rms_norm(x, weight, 1e-6)
    with compile_only("sm_90") as built: # meta or CPU tensors; launchers run, kernels are compiled, nothing is launched
        rms_norm(x, weight, 1e-6)

A kernel's test module adds itself to the compile test by a function `compile_cases()` that yields callables without
arguments; each calls a real launcher. They run with "meta" as the default device, so `torch.empty(...)` costs nothing.

In the interpreter bfloat16 arithmetic is wrong and conversion to it truncates: float32 and float16 are tested there,
bfloat16 on a device. A program costs about a millisecond, so tests use few and large ones.
"""

import contextlib
import functools
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from attrs import frozen
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tinyserve.kernels import launch

# Largest difference allowed between a kernel and its reference when both compute in float32 and round once:
# two units in the last place, and room for another order of summation.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


@frozen
class Target:
    """A device to compile for. Attributes: name; gpu: Triton's description; shared: bytes one program may take."""

    name: str
    gpu: GPUTarget
    shared: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),
        Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
        Target("sm_100", GPUTarget("cuda", 100, 32), 227 * 1024),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
        Target("gfx1100", GPUTarget("hip", "gfx1100", 32), 64 * 1024),
    )
}


@frozen
class Built:
    """One compiled kernel. Attributes: name; shared: bytes of shared memory; kernel: Triton's CompiledKernel."""

    name: str
    shared: int
    kernel: object


@contextlib.contextmanager
def replaced(owner: object, **attributes: object) -> Iterator[None]:
    """Set attributes of a class or module, and put the old ones back at the end."""
    old = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def kept(*owners: object) -> Iterator[None]:
    """Put back every attribute of these modules and classes that changed in between."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, old in zip(owners, before, strict=True):
            for name, value in dict(vars(owner)).items():
                if name not in old:
                    delattr(owner, name)
                elif old[name] is not value:
                    setattr(owner, name, old[name])


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Run every @triton.jit kernel in Triton's interpreter, and make launchers choose it for CPU tensors.

    The interpreter works by replacing functions of triton.language, and does not put all of them back; `kept` does, so
    that kernels compile again afterwards.
    """
    interpreted = functools.cache(InterpretedFunction)
    builder = interpreter.InterpreterBuilder
    create_splat = builder.create_splat

    def call(self, *args, **kwargs):  # one @triton.jit function calls another; the language is replaced by then
        return interpreted(self.fn).rewrite()(*args, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        return interpreted(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    def splat(self, shape, scalar):
        # The result of a comparison still carries the type of what was compared, so a scalar one that meets a tile
        # becomes a tile of int32 here; triton 3.9 then refuses it as a mask.
        handle = create_splat(self, shape, scalar)
        if scalar.data.dtype == np.bool_:
            handle = interpreter.TensorHandle(handle.data.astype(np.bool_), tl.int1)
        return handle

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        # For a bound of a loop triton 3.6 has NumPy make a number of an array of one, which it refuses from 2.4 on.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    with (
        np.errstate(all="ignore"),  # on a GPU, overflow to infinity is silent
        kept(*owners),
        replaced(JITFunction, __call__=call, run=run),
        replaced(builder, create_splat=splat),
        replaced(launch, CPU_RUNS_KERNELS=True),
        replaced(interpreter, _patch_lang_tensor=patch) if triton.__version__ < "3.7" else contextlib.nullcontext(),
    ):
        interpreter._patch_lang(tl.zeros.fn)  # for triton's own functions, which reach the language as `core`
        yield


class CompileDriver:
    """Stands where Triton expects a GPU driver, and knows nothing but the target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextlib.contextmanager
def compile_only(target: str) -> Iterator[list[Built]]:
    """Let launchers run for a GPU that is not there: each kernel is compiled and noted in the list, none is launched.

    Raises:
        AssertionError: at the end, if a kernel takes more shared memory than the target has.
    """
    goal, built, seen, run = TARGETS[target], [], set(), JITFunction.run
    arch = goal.gpu.arch if goal.gpu.backend == "cuda" else 0
    facts = launch.DeviceFacts(target, goal.gpu.backend, goal.shared, 132, arch >= 90, goal.gpu.warp_size, arch)

    def compile_it(self, *args, grid, warmup, **kwargs):
        if self not in seen:  # a kernel keeps what it compiled by device number, and that is 0 for every target
            self.device_caches.clear()
            seen.add(self)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        built.append(Built(self.fn.__name__, kernel.metadata.shared, kernel))
        return kernel

    with (
        replaced(driver, _active=CompileDriver(goal.gpu)),
        replaced(JITFunction, run=compile_it),
        replaced(launch, CPU_RUNS_KERNELS=True, facts=lambda device: facts),
        torch.device("meta"),
    ):
        try:
            yield built
        finally:
            for kernel in seen:
                kernel.device_caches.clear()

    too_large = sorted({(one.name, one.shared) for one in built if one.shared > goal.shared})
    assert too_large == [], f"{target} has {goal.shared} bytes of shared memory for a program"


def over_safe(built: list[Built]) -> list[tuple[str, int]]:
    """(kernel, bytes) of those that a device with 99 KiB of shared memory cannot run."""
    return sorted({(one.name, one.shared) for one in built if one.shared > launch.SAFE_SHARED})


def local_memory(one: Built) -> int:
    """Bytes of local memory that a thread of a kernel for NVIDIA takes: what found no room in registers, mostly."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(one.kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", told))


def modules_with_cases() -> list[str]:
    """Names of the test modules of this folder that define `compile_cases`."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    return [file.stem for file in files if "def compile_cases(" in file.read_text()]


def cases_of(module: str) -> list[Callable[[], object]]:
    """The compile cases of one test module, by its file name without the suffix."""
    return list(importlib.import_module(f"tests.kernels.{module}").compile_cases())


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, scale: float = 1.0) -> None:
    """Equal in shape, type and NaN-ness, and in value within TOLERANCE[type] * scale."""
    limits = {name: value * scale for name, value in TOLERANCE.get(expected.dtype, {"rtol": 0, "atol": 0}).items()}
    torch.testing.assert_close(actual, expected, equal_nan=True, **limits)


def randn(
    *shape: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0, spread: float = 1.0
) -> torch.Tensor:
    """Normal numbers, the same on every device: drawn on the CPU in float32, then rounded and moved."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread
    return drawn.to(dtype).to(device)


def gapped(tensor: torch.Tensor, *, gap: int = 3) -> torch.Tensor:
    """The same values, with `gap` NaN columns after each row: a kernel that ignores the row stride reads NaN."""
    wide = nan_like(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + gap))
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def nan_like(tensor: torch.Tensor, *, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor full of NaN (the largest value for integers), so that a cell nobody wrote shows."""
    fill = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    return torch.full(tensor.shape if shape is None else shape, fill, dtype=tensor.dtype, device=tensor.device)


@contextlib.contextmanager
def nan_outputs() -> Iterator[None]:
    """Fill what launchers allocate (`torch.empty`, `new_empty`, ...) with NaN, so that unwritten cells show."""
    old = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(old[0])
        torch.utils.deterministic.fill_uninitialized_memory = old[1]


def forget_compiled():
    """Empty the caches of all kernels: what an earlier test compiled in this process would not be named again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tinyserve.kernels."):
            for found in list(vars(module).values()):
                if hasattr(found, "device_caches"):
                    found.device_caches.clear()
