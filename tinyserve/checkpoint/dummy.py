"""Weights made of noise, for measuring a model whose files one does not have.

Numbers are drawn once and repeated from a different place for each tensor, so that filling a large model costs memory
bandwidth of the device that it is on, not random numbers. They are the same for the same seed and name, on every
machine. Matrices keep the size of what they multiply and norms scatter around one, so logits stay finite at any depth.

Before: load.py, which asks for every tensor that the model wants.  After: load.py fills them in.
"""

from __future__ import annotations

import zlib
from functools import cache
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError

POOL = 1048573  # prime, so that no matrix gets equal rows


@cache
def pool(seed: int) -> Tensor:
    """Return POOL normal numbers."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(seed))


@cache
def scaled(seed: int, mean: float, spread: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the pool twice in a row, as numbers of this mean and spread; a model of experts asks 10,000 times."""
    return (pool(seed) * spread + mean).to(dtype).repeat(2).to(device)


@frozen(eq=False)
class Noise:
    """One tensor of noise (a `Stored` of quant/format.py). Args: mean, spread: of the normal numbers."""

    name: str
    shape: tuple[int, ...]
    seed: int
    device: torch.device
    mean: float = 0.0
    spread: float = 0.02
    qtype: str | None = None

    @property
    def nbytes(self) -> int:
        return 0

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers; see Stored."""
        count = prod(self.shape)
        start = zlib.crc32(self.name.encode()) % POOL
        numbers = scaled(self.seed, self.mean, self.spread, dtype, self.device)[start : start + POOL]
        return (numbers if count <= POOL else numbers.repeat(-(-count // POOL)))[:count].view(self.shape)

    def blocks(self) -> Tensor:
        """Noise has no GGUF blocks. Raises: CheckpointError: always."""
        raise CheckpointError(f"{self.name}: noise has no GGUF blocks.")


def noise(name: str, shape: tuple[int, ...], seed: int, neutral: float | None, device: torch.device) -> Noise:
    """Return a tensor of sane scale. Args: neutral: centre of a norm's weight; None for matrices and biases."""
    if neutral is not None:
        return Noise(name, shape, seed, device, mean=neutral, spread=0.1)
    return Noise(name, shape, seed, device, spread=shape[-1] ** -0.5 if len(shape) > 1 else 0.02)
