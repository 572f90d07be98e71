"""runner/foundry.py: kernels compiled by other processes, and what happens when these fail."""

import os
import subprocess
import sys
import time

import pytest
import torch
import triton
from triton.runtime import driver

from tests.kernels.harness import TARGETS, CompileDriver, replaced
from tests.kernels.test_launch import _fill_kernel
from tinyserve.kernels import launch
from tinyserve.runner import expected
from tinyserve.runner import foundry as foundry_module
from tinyserve.runner.early import Gpu
from tinyserve.runner.foundry import Foundry, NoFoundry

pytestmark = pytest.mark.skipif(launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")

ALONE, NAME = "TINYSERVE_TEST_ALONE", "test_what_is_expected_is_compiled_before_it_is_asked_for"


@pytest.fixture
def named(monkeypatch, tmp_path):
    """Three variants of a kernel for a GPU that is not here, and an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    out = torch.empty(128, device="meta")
    with replaced(driver, _active=CompileDriver(TARGETS["sm_90"].gpu)):
        _fill_kernel.device_caches.clear()
        with launch.noting() as variants:
            for size in (32, 64, 128):
                _fill_kernel.warmup(out, 1.0, BLOCK=size, grid=(1,))
        yield variants
        _fill_kernel.device_caches.clear()


def compiled_here(variants):
    """How many of them this process had to compile itself."""
    hits = []
    with replaced(triton.knobs.compilation, listener=lambda *, cache_hit, **_: hits.append(cache_hit)):
        loading = launch.Loading(2)
        for variant in variants:
            loading.add(variant)
        assert loading.finish() == len(variants)
    return hits.count(False)


def test_what_a_foundry_has_compiled_is_read_from_the_cache(named):
    """3 variants on 2 processes, and one that cannot be compiled: none is left for this process."""
    foundry, done = Foundry(2), []
    try:
        foundry.add(launch.Variant(_fill_kernel, "{}"))
        for variant in named:
            foundry.add(variant)
        made = foundry.wait(done.append)
    finally:
        foundry.close()

    assert [name for name, _ in made] == ["_fill_kernel"] * 4
    assert set(named) < set(done)
    assert compiled_here(named) == 0


def test_what_is_expected_is_compiled_before_it_is_asked_for(named, monkeypatch):
    """On an H200 both kernels that draw a token are there, and both of one decode's attention: no job was needed for
    them."""
    if ALONE not in os.environ:  # what other tests compiled in this process changes what is named
        again = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"{__file__}::{NAME}"]
        found = subprocess.run(again, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
        return
    jobs = [("sample", "bfloat16", 1000, False), ("attention", "bfloat16", 4, 2, 128, 64, 1, [1])]
    monkeypatch.setattr(foundry_module, "expected", lambda *_: jobs)
    facts = launch.DeviceFacts("NVIDIA H200", "cuda", launch.SAFE_SHARED, 132, overlaps=True, arch=90)
    with replaced(launch, facts=lambda device: facts):
        variants = [variant for job in jobs for variant in expected.named(*job)]
    foundry = Foundry(1)
    try:
        foundry.expect(Gpu("NVIDIA H200", 90, 132, launch.SAFE_SHARED), {}, "auto", 64)
        foundry.add(named[0])  # by the same process, so afterwards
        foundry.wait(lambda variant: None)
        done = []
        for variant in variants:
            foundry.add(variant)
        made = foundry.wait(done.append)
    finally:
        foundry.close()

    assert sorted(name for name, _ in made) == ["_fill_kernel", "expected attention", "expected sample"]
    assert len(variants) == 4
    assert set(variants) == set(done) - {named[0]}
    assert compiled_here(variants) == 0
    for variant in variants:
        variant.kernel.device_caches.clear()


@pytest.mark.parametrize("dies", ["before", "after"])
def test_without_its_processes_a_start_goes_on(named, dies, caplog):
    """Breaks by waiting for ever. All 3 variants are compiled here."""
    foundry = Foundry(1)
    for part in (0, 1):
        if part == (dies == "after"):
            foundry._process.kill()
            foundry._process.wait()
        for variant in named[2 * part : 2 * part + 2]:
            foundry.add(variant)
    assert foundry.wait(lambda variant: None) == []
    foundry.close()

    assert "3 kernels were not compiled ahead" in caplog.text
    assert compiled_here(named) == 3


@pytest.mark.timeout(60)
def test_a_worker_that_ends_by_an_error_is_not_waited_for(named, caplog):
    """Breaks by waiting for ever: a message that no worker can read ends the one that gets it; the other goes on."""
    foundry = Foundry(2)
    lost = foundry_module._Job("lost", variants=[named[0]])
    foundry._jobs.append(lost)
    foundry._link.setblocking(True)
    foundry._link.send(b"no message")
    foundry._link.setblocking(False)
    foundry.add(named[1])
    try:
        made = foundry.wait(lambda variant: None)
    finally:
        foundry.close()

    assert [name for name, _ in made] in (["_fill_kernel"], [])  # whichever comes first
    assert "kernels were not compiled ahead" in caplog.text


def test_closing_ends_every_process(named):
    """Workers that wait, one that compiles, and the one that forked them: the group is gone within 5 s."""
    foundry = Foundry(3)
    for variant in named[:2]:
        foundry.add(variant)
    foundry.wait(lambda variant: None)
    foundry.add(named[2])
    foundry.close()

    for _ in range(500):
        try:
            os.killpg(foundry._process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("processes are left")


def test_no_foundry_leaves_everything_to_others(named):
    nobody = NoFoundry()
    nobody.add(named[0])

    assert nobody.wait(lambda variant: None) == []
    nobody.close()
