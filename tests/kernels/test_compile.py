"""Every kernel compiles for GPUs that are not here, through its own launcher, and fits their shared memory."""

import pytest

from tests.kernels.harness import TARGETS, cases_of, compile_only, modules_with_cases, over_safe
from tinyserve.kernels import launch


@pytest.mark.skipif(launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("module", modules_with_cases())
def test_kernels_compile_and_fit(module, target):
    """Breaks with the kernel's name and its bytes of shared memory if one is refused or too large."""
    cases = cases_of(module)

    with compile_only(target) as built:
        for case in cases:
            case()

    assert len(built) >= len(cases), "a case launched no kernel"
    if over_safe(built):
        print(f"{target}: more than 99 KiB of shared memory: {over_safe(built)}")
