"""The GPU while torch is still being imported: what it is, and its context.

NVIDIA's driver needs no torch to answer, and making a context, which every library of a process shares, is 0.3 s of
waiting. So a start asks the driver first of all, and a thread of its own makes the context beside the import.

Before: nothing.  After: expected.py (what to compile for), engine/assemble.py (a start begins here).
"""

from __future__ import annotations

import ctypes
import threading

from attrs import frozen

LIBRARY = "libcuda.so.1"
PROCESSORS, MAJOR, MINOR, SHARED = 16, 75, 76, 97  # the driver's numbers of what may be asked


@frozen
class Gpu:
    """What kernels are chosen by, as of kernels/launch.py::DeviceFacts. arch: 90 for compute capability 9.0."""

    name: str
    arch: int
    processors: int
    shared: int


def look(index: int = 0) -> Gpu | None:
    """The GPU of that number, whose context is made from now on; None if NVIDIA's driver is not here, or has none."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    if driver.cuDeviceGetName(name, len(name), device):
        return None
    numbers = []
    for what in (MAJOR, MINOR, PROCESSORS, SHARED):
        numbers.append(number := ctypes.c_int())
        if driver.cuDeviceGetAttribute(ctypes.byref(number), what, device):
            return None
    major, minor, processors, shared = (number.value for number in numbers)
    threading.Thread(target=_open, args=(driver, device), name="tinyserve-context", daemon=True).start()
    return Gpu(name.value.decode(), 10 * major + minor, processors, shared)


def _open(driver: ctypes.CDLL, device: ctypes.c_int) -> None:
    """Keep the context that all of this process uses; what fails here fails again when torch asks, and is told."""
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)
