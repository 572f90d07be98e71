"""What device.py promises on every machine."""

import torch

from tinyserve.device import Device


def test_a_cpu_computes_with_the_threads_that_are_asked_for():
    """Breaks if --cpu-threads has no effect in a notebook that has imported torch before."""
    before = torch.get_num_threads()
    try:
        Device.pick("cpu", before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
