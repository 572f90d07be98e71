"""How attention learns where a token stands: rotary position embedding, or a bias that grows with the distance (ALiBi).

Rotary: which angle each pair of numbers of a head is turned by at each position.

Position p turns pair i by p * f_i. Plain RoPE has f_i = theta^(-2i/D); the kinds below change the f_i so that a model
reaches further than it was trained. All of them end in one table of cosines and sines, made once in fp32; the rotation
itself is part of the kernel that also writes the cache (kernels/rope.py).

    cos_sin [P, R]     row p = cos(p f_0) .. cos(p f_{R/2-1}), sin(p f_0) .. sin(p f_{R/2-1})

Before: models/config.py reads a RopeSpec from config.json.  After: layers/attention.py.

Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753; for "llama3" the reference code
of Llama 3.1; ALiBi, arXiv:2108.12409.
"""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor, nn

from ..errors import UnsupportedModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@frozen(kw_only=True)
class RopeSpec:
    """What config.json says about a rotation.

    Args:
        kind: one of KINDS.
        theta: base of the frequencies.
        dim: how many numbers of a head are rotated (R), even.
        interleaved: pairs are neighbours, instead of half a rotation apart.
        factor: by how much the context is stretched.
        original: context length of the training that `factor` refers to (dynamic, llama3, yarn, longrope).
        low, high: llama3: low and high frequency factor. yarn: beta_slow and beta_fast.
        amplitude: yarn, longrope: factor on cosines and sines (mscale).
        truncate: yarn: round the borders of the ramp to whole pairs.
        short, long: longrope: what each frequency is divided by, within and beyond the original length.
        turning: proportional: how many of the `dim` numbers turn; the others belong to pairs of frequency 0.
    """

    kind: str = "default"
    theta: float = 10000.0
    dim: int
    interleaved: bool = False
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    amplitude: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    turning: int = 0


class Rope(nn.Module):
    """The table of one rotation, shared by all layers that use it.

    Args:
        spec: the rotation.
        before_norm: heads of q and k are rotated first and normalised then, if they are normalised at all.
    """

    slopes = None  # of ALiBi

    def __init__(self, spec: RopeSpec, *, before_norm: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.interleaved = spec.interleaved
        self.before_norm = before_norm
        self.register_buffer("cos_sin", torch.empty(0, spec.dim, device="meta"), persistent=False)

    def allocate(self, positions: int, device: torch.device) -> None:
        """Compute the rows of positions 0 .. positions-1. Raises: UnsupportedModel: unknown kind."""
        self.cos_sin = table(self.spec, positions).to(device)

    def extra_repr(self) -> str:
        return f"{self.spec}"


class Alibi(nn.Module):
    """No rotation: instead each score gets slope * (key position - query position), one slope for each query head.

    Args:
        heads: query heads.
        factor: on all slopes.
    """

    cos_sin = None
    interleaved = before_norm = False

    def __init__(self, heads: int, *, factor: float = 1.0) -> None:
        super().__init__()
        self.values = [slope * factor for slope in alibi_slopes(heads)]
        self.register_buffer("slopes", torch.empty(heads, device="meta"), persistent=False)

    def allocate(self, positions: int, device: torch.device) -> None:
        """Make the slopes, which are the same at all positions."""
        self.slopes = torch.tensor(self.values, dtype=torch.float32, device=device)


def alibi_slopes(heads: int) -> list[float]:
    """Return 2^(-8 h / n) for h = 1..n, n the power of two at or below `heads`; the rest lie between, as if of 2 n."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    return slopes + [2 ** (-4 * head / power) for head in range(1, 2 * (heads - power), 2)]


def table(spec: RopeSpec, positions: int) -> Tensor:
    """Return cos_sin [positions, R] fp32."""
    steps = torch.arange(positions, dtype=torch.float32)
    angles = steps[:, None] * frequencies(spec, positions)  # [P, R/2]
    if spec.kind == "dynamic" and positions > spec.original:
        beyond = steps[spec.original :]
        angles[spec.original :] = beyond[:, None] * dynamic_frequencies(spec, beyond + 1)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * spec.amplitude


def frequencies(spec: RopeSpec, positions: int = 0) -> Tensor:
    """Return f_i of the kind, [R/2] fp32.

    Args: positions: longest sequence that is served. LongRoPE has one set of factors for models that are served within
        the original length and one for those beyond; keys of one sequence must not mix them.
    """
    plain = 1.0 / spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)
    if spec.kind in ("default", "dynamic"):
        return plain
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return llama3_frequencies(spec, plain)
    if spec.kind == "yarn":
        return yarn_frequencies(spec, plain)
    if spec.kind == "longrope":
        return plain / torch.tensor(spec.long if positions > spec.original else spec.short)
    if spec.kind == "proportional":
        return plain.where(torch.arange(spec.dim // 2) < spec.turning // 2, 0.0) / spec.factor
    raise UnsupportedModel(f"RoPE of kind {spec.kind!r} is not implemented; implemented are {', '.join(KINDS)}.")


def dynamic_frequencies(spec: RopeSpec, lengths: Tensor) -> Tensor:
    """NTK-aware scaling beyond the trained length: the base grows with the length, [P] -> [P, R/2].

    A key is rotated once, when it is written, so each position uses the base of a sequence that ends there. A decode
    one token at a time does exactly this.
    """
    growth = (spec.factor * lengths / spec.original - (spec.factor - 1)) ** (spec.dim / (spec.dim - 2))
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    return 1.0 / (spec.theta * growth)[:, None] ** exponents


def llama3_frequencies(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Waves much longer than the trained context are slowed by `factor`, short ones kept, between them a blend."""
    wavelengths = 2 * math.pi / plain
    blend = ((spec.original / wavelengths - spec.low) / (spec.high - spec.low)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def yarn_frequencies(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Pairs that turn often within the trained context are kept, slow ones divided by `factor`, a ramp between them."""

    def pair_of(turns: float) -> float:
        return spec.dim * math.log(spec.original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    start, end = pair_of(spec.high), pair_of(spec.low)
    if spec.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, spec.dim - 1)
    width = end - start or 0.001  # a ramp without width divides by zero
    slow = ((torch.arange(spec.dim // 2, dtype=torch.float32) - start) / width).clamp(0, 1)
    return plain / spec.factor * slow + plain * (1 - slow)


def yarn_amplitude(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Factor on cosines and sines that keeps the attention as sharp as it was before the stretch by `factor`."""

    def one(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return one(mscale) / one(mscale_all_dim) if mscale and mscale_all_dim else one(1.0)


def longrope_amplitude(factor: float, original: int) -> float:
    """Factor on cosines and sines of LongRoPE for a context `factor` times the original length."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
