"""Checkpoints of the cases, written once: TOK with the template T0, and TINY."""

import gc

import pytest

from .harness import Oracle, write_tiny, write_tokenizer


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def freeze():
    """Each engine collects garbage when it closes: half a second each time, unless the libraries are left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
