"""What device.py promises on every machine."""

import mmap
import sys

import numpy as np
import pytest
import torch

from tinyserve import device
from tinyserve.device import HUGE_PAGE, Device


def test_a_cpu_computes_with_the_threads_that_are_asked_for():
    """Breaks if --cpu-threads has no effect in a notebook that has imported torch before."""
    before = torch.get_num_threads()
    try:
        Device.pick("cpu", before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")
def test_memory_keeps_what_it_holds_when_it_goes_into_huge_pages():
    """Breaks if a page is lost on the way; a system that has no huge pages to give leaves all as it is."""
    held = bytes(range(256)) * (8 * HUGE_PAGE // 256)
    with mmap.mmap(-1, len(held), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room[:] = held
        Device.pick("cpu").settle()
        assert room[:] == held


def test_only_memory_that_small_pages_fill_is_asked_for(monkeypatch):
    """Breaks if holes of a heap get filled, or if pages of files or of other processes are touched."""

    class Library:
        def __init__(self, name):
            self.madvise = lambda place, size, advice: asked.append(place // HUGE_PAGE)

    asked = []
    monkeypatch.setattr(device.ctypes, "CDLL", Library)
    kinds = [("rw-p", 0, 8192, 0), ("rw-p", 0, 6000, 0), ("rw-p", 0, 8192, 6144), ("rw-p", 7, 8192, 0)]
    kinds += [("rw-s", 0, 8192, 0), ("r--p", 0, 8192, 0)]
    maps = ""
    for number, (mode, inode, held, huge) in enumerate(kinds):
        start = (10 * number + 1) * HUGE_PAGE - 4096  # a page before a border, as most begin
        maps += f"{start:x}-{start + 4 * HUGE_PAGE:x} {mode} 00000000 00:00 {inode}      [name]\nRss:    {held} kB\n"
        maps += f"Anonymous:    {held} kB\nAnonHugePages:    {huge} kB\nVmFlags: rd wr\n"
    device._use_huge_pages(maps)
    assert asked == [1, 2, 3]


def test_the_cpu_reads_memory_of_other_processes_as_its_own():
    """And has nothing that would run beside it."""
    cpu = Device.pick("cpu")
    assert cpu.share(np.zeros(4, dtype=np.uint8))() is None
    with cpu.beside()():
        pass


@pytest.mark.gpu
def test_a_gpu_copies_from_memory_of_other_processes_beside_its_work():
    """4 MB that nobody pinned when it was made: shared, they are read without a copy on the way, while a product runs
    that what comes afterwards waits for; let go of, they can be shared again."""
    gpu = Device.pick("cuda")
    memory = np.frombuffer(mmap.mmap(-1, 1 << 22), dtype=np.uint8)
    memory[:] = 7
    release = gpu.share(memory)
    beside, host = gpu.beside(), torch.from_numpy(memory)
    assert host.is_pinned()
    there, large = torch.zeros(1 << 22, dtype=torch.uint8, device=gpu.torch), torch.ones(4096, 4096, device=gpu.torch)
    for value in (1, 2, 3):
        memory[:] = value
        result = large @ large
        with beside():
            there.copy_(host, non_blocking=True)
        total = there.sum(dtype=torch.int64)
        assert int(total) == value << 22 and float(result[0, 0]) == 4096
    release()
    assert not torch.from_numpy(memory).is_pinned()
    gpu.share(memory)()
