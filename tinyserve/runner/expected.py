"""Kernels that every start needs, named before there is a tensor.

A start spends its first seconds importing torch and making the device's context, while the processes of the foundry
wait for something to do. How tokens are drawn depends on the vocabulary and the type of the logits alone, and the
kernel for it is the one that compiles longest. So the launchers run with shadows of tensors, which have a shape, a type
and an address that is a multiple of 16, and `noting` writes down what they would launch.

Before: kernels/sample.py, kernels/top_tokens.py.  After: foundry.py, whose workers compile it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from ..kernels.launch import Variant

ROWS = 2
SMI = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")


@frozen
class Guess:
    """The GPU that a start will most likely use. name: the vendor's; arch: 90 for compute capability 9.0."""

    name: str
    arch: int


def guess() -> Guess | None:
    """Ask the driver's own tool for the first GPU; None if it does not say."""
    try:
        said = subprocess.run(SMI, capture_output=True, text=True, check=True, timeout=2).stdout
        name, capability = said.splitlines()[0].rsplit(",", 1)
        return Guess(name.strip(), round(float(capability) * 10))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def expected(config: Mapping[str, Any], dtype: str) -> list[tuple[str, int, str, bool]]:
    """What can be expected of a model: arguments of `named`, one for each process, the longest first.

    Args: config: of the checkpoint.   dtype: that the user asks for, or "auto".
    """
    vocabulary = config.get("vocab_size")
    told = config.get("dtype") or config.get("torch_dtype") if dtype == "auto" else dtype
    if not isinstance(vocabulary, int) or vocabulary < 1 or told not in ("bfloat16", "float16", "float32"):
        return []
    found = [("sample", vocabulary, kind, filters) for filters in (True, False) for kind in (told, "float32")]
    return list(dict.fromkeys([*found, *(("top", vocabulary, told, rows) for rows in (False, True))]))


class Shadow:
    """What launchers and Triton ask of a tensor on a GPU, without its numbers."""

    is_cpu = False
    device = None

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def stride(self, dim: int) -> int:
        return prod(self.shape[dim % len(self.shape) + 1 :])

    def new_empty(self, *shape: int, dtype: Any = None) -> Shadow:
        return Shadow(shape, dtype or self.dtype)

    def view(self, dtype: Any) -> Shadow:
        return Shadow(self.shape, dtype)


def named(what: str, vocabulary: int, dtype: str, switch: bool) -> list[Variant]:
    """The variants of one thing that is expected; in a process that has set up Triton's driver and launch.facts.

    Args: what: "sample", where `switch` says whether rows may ask for filters; "top", whether rows are chosen.
    """
    import torch  # or what stands for it

    from ..kernels.launch import noting
    from ..kernels.sample import sample
    from ..kernels.top_tokens import top_tokens

    logits = Shadow((ROWS, vocabulary), getattr(torch, dtype))
    single, integers, seeds = (Shadow((ROWS,), kind) for kind in (torch.float32, torch.int32, torch.int64))
    with noting() as found:
        if what == "sample":
            sample(logits, single, seeds, integers, filters=(integers, single, single) if switch else None)
        else:
            top_tokens(logits, 5, integers if switch else None)
    return found
