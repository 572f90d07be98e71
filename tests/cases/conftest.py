"""Checkpoints of the cases, written once: TOK with the template T0, and TINY."""

import gc
import sys

import pytest

from tinyserve.cli.process import SWITCH_INTERVAL, keep_loaded

from .harness import Oracle, write_tiny, write_tokenizer


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def process():
    """What the serve command does to its process: short turns for busy threads, little work for the collector.

    Without the first, a thread with a template in it delays a stream tenfold; without the second, each engine that
    closes costs half a second, and one look at all that a thousand requests hold, which Python's own thresholds ask for
    every few seconds, holds the loop for 50 ms, in a run of all tests for twice that.
    """
    before = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_loaded()
    yield
    gc.unfreeze()
    gc.set_threshold(*before[1])
    sys.setswitchinterval(before[0])


@pytest.fixture(scope="session")
def tok(tmp_path_factory):
    """Folder with TOK, T0 and the end id 260."""
    return write_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder with TINY."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny):
    return Oracle(tiny)
