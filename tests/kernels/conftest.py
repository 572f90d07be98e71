"""One test, two machines: fixtures that run a kernel test in the interpreter on the CPU, and on a GPU if there is one.

A test that asks for `device` runs once per device; one that asks for `device` and `dtype` once per pair that works
there: float32 and float16 on the CPU (the interpreter is wrong in bfloat16), bfloat16 as well on a GPU; a
module whose kernel does not take them all names those that it does in `ONLY_DTYPES`. While a CPU
test runs, launchers choose the kernel; the reference is called by its own name. What they allocate starts as NaN.
"""

import pytest
import torch

from tests.kernels.harness import interpreting, nan_outputs

DTYPES = {
    "cpu": (torch.float32, torch.float16),
    "gpu": (torch.float32, torch.float16, torch.bfloat16),
}


def gpu() -> torch.device | None:
    """The first GPU, of whatever vendor."""
    return torch.accelerator.current_accelerator(check_available=True)


def pytest_generate_tests(metafunc):
    if "device" not in metafunc.fixturenames:
        return
    only_gpu = metafunc.definition.get_closest_marker("gpu")
    places = ([] if only_gpu else ["cpu"]) + (["gpu"] if gpu() or only_gpu else [])
    marks = {"cpu": (), "gpu": pytest.mark.gpu}
    if "dtype" in metafunc.fixturenames:
        pairs = [
            pytest.param(place, dtype, marks=marks[place], id=f"{place}-{str(dtype).removeprefix('torch.')}")
            for place in places
            for dtype in DTYPES[place]
            if dtype in getattr(metafunc.module, "ONLY_DTYPES", DTYPES[place])
        ]
        metafunc.parametrize(("device", "dtype"), pairs, indirect=["device"])
    else:
        metafunc.parametrize("device", [pytest.param(place, marks=marks[place]) for place in places], indirect=True)


@pytest.fixture
def device(request):
    """A torch device on which launchers take the kernel."""
    if request.param == "gpu":
        with nan_outputs():
            yield gpu()
    else:
        with interpreting(), nan_outputs():
            yield torch.device("cpu")
