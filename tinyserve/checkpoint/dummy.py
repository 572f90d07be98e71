"""Weights made of noise, for measuring a model whose files one does not have.

Numbers are drawn once and repeated from a different place for each tensor, so that filling a large model costs memory
bandwidth of the device that it is on, not random numbers. They are the same for the same seed and name, on every
machine. Matrices keep the size of what they multiply and norms scatter around one, so logits stay finite at any depth.

Quantised matrices are random codes, with the scales that give them the same size; no number is ever rounded.

Before: load.py, which asks for every tensor that the model wants.  After: load.py fills them in.
"""

from __future__ import annotations

import zlib
from functools import cache
from math import log2, prod

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError
from ..quant.codes import Codes, Scheme

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


@cache
def pooled_codes(seed: int, scheme: Scheme) -> tuple[Tensor, float, int]:
    """Return POOL random codes twice in a row, the root mean square of what they stand for, and their zero point."""
    numbers = pool(seed)
    if scheme.bits == 8 and scheme.name.startswith(("fp8", "mxfp8")):
        codes, zero = (numbers * 64).clamp(-448, 448).to(torch.float8_e4m3fn), 0
    elif scheme.bits == 8:
        codes, zero = (numbers * 32).round().clamp(-127, 127).to(torch.int8), 0
    else:
        zero = 0 if scheme.table else 2 ** (scheme.bits - 1)
        spread = zero / 2 if zero else 4.0
        codes = (numbers * spread + zero).round().clamp(0, 2**scheme.bits - 1).to(torch.uint8)
    found = codes.float() - zero if scheme.table is None else torch.tensor(scheme.table)[codes.int()]
    return torch.cat((codes, codes)), float(found.square().mean().sqrt()), zero


@frozen(eq=False)
class NoiseCodes:
    """A quantised matrix of noise (a `Stored` of quant/format.py, with codes as quant/stored.py has them)."""

    name: str
    shape: tuple[int, ...]
    seed: int
    scheme: Scheme
    nbytes: int = 0

    @property
    def qtype(self) -> str:
        return self.scheme.name

    def codes(self) -> Codes:
        """Return random codes, and scales that make numbers of sane size of them."""
        rows, columns = self.shape
        pooled, size, zero = pooled_codes(self.seed, self.scheme)
        start = zlib.crc32(self.name.encode()) % POOL
        codes = pooled[start : start + POOL]
        bytes_of = codes.view(torch.uint8) if codes.is_floating_point() else codes  # float8 has no `repeat`
        codes = bytes_of.repeat(-(-rows * columns // POOL))[: rows * columns].view(codes.dtype).view(rows, columns)
        count = -(-columns // self.scheme.width) if self.scheme.width else 1
        factor = columns**-0.5 / size
        power = self.scheme.table is not None and self.scheme.width == 32  # of MXFP4, which has no others
        scales = torch.full((rows, count), 2.0 ** round(log2(factor)) if power else factor).half().float()
        zeros = torch.full((rows, count), zero, dtype=torch.uint8) if zero else None
        static = self.scheme.inputs is not None and self.scheme.inputs.static
        return Codes(self.scheme, codes, scales, zeros, input_scale=torch.tensor(0.05) if static else None)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return plain numbers; see Stored."""
        return self.codes().dense(dtype)

    def blocks(self) -> Tensor:
        """Noise has no GGUF blocks. Raises: CheckpointError: always."""
        raise CheckpointError(f"{self.name}: noise has no GGUF blocks.")


def noise(name: str, shape: tuple[int, ...], seed: int, neutral: float | None, device: torch.device) -> Noise:
    """Return a tensor of sane scale. Args: neutral: centre of a norm's weight; None for matrices and biases."""
    if neutral is not None:
        return Noise(name, shape, seed, device, mean=neutral, spread=0.1)
    return Noise(name, shape, seed, device, spread=shape[-1] ** -0.5 if len(shape) > 1 else 0.02)
