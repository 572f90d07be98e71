"""runner/early.py: what NVIDIA's driver is asked before there is torch."""

import ctypes
import threading

import pytest

from tinyserve.runner import early


class Driver:
    """NVIDIA's driver, as far as it is asked. fails: the call that gives an error."""

    def __init__(self, fails=""):
        self.fails, self.contexts = fails, []

    def __getattr__(self, name):
        def call(*args):
            if name == "cuDeviceGet":
                args[0]._obj.value = args[1]
            if name == "cuDeviceGetName":
                args[0].value = b"NVIDIA H200"
            if name == "cuDeviceGetAttribute":
                args[0]._obj.value = {16: 132, 75: 9, 76: 0, 97: 232448}[args[1]]
            if name == "cuDevicePrimaryCtxRetain":
                self.contexts.append(args[1].value)
            return int(name == self.fails)

        return call


def test_the_driver_tells_what_is_there_and_makes_the_context(monkeypatch):
    one = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: one)

    assert early.look(1) == early.Gpu("NVIDIA H200", 90, 132, 232448)
    for thread in threading.enumerate():
        if thread.name == "tinyserve-context":
            thread.join()
    assert one.contexts == [1]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_is_nobody(monkeypatch, fails):
    one = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: one)

    assert early.look() is None and one.contexts == []


def test_without_the_driver_there_is_nothing(monkeypatch):
    monkeypatch.setattr(early, "LIBRARY", "libnobody.so.1")

    assert early.look() is None
