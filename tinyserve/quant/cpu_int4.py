"""Four-bit blocks on the CPU, multiplied as they are: weights in groups of 32, each with a scale and a zero.

    w = (code - 8) * scale + zero          code 0 .. 15; scale and zero in bf16

GGUF's Q4_0 and Q4_1 are exactly this: blocks of 32 codes with `d * (code - 8)`, or `d * code + m`, which is scale = d
and zero = m + 8 d. Codes are taken over as they stand, nothing is quantised again; only d and m are rounded, from fp16
to bf16 (0.04 % of perplexity on SmolLM2). torch's product wants inputs in bf16 (with fp32 it is a hundred times slower)
and is good for a few rows only (quant/cpu.py has the times).

Before: quant/format.py, quant/cpu_dense.py.  After: quant/cpu.py chooses it, layers/linear.py calls it.

Source of the block layout: the GGUF specification; block_q4_0 and block_q4_1 of ggml.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_dense import cast
from .format import Fused, Stored

GROUP = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20}  # d, (m,) fp16; then 16 bytes: codes 0..15 in the low halves, 16..31 in the high
INNER = 1  # torch's layout parameter; the CPU ignores it


def available() -> bool:
    """Whether torch has the product here (it needs AVX2 at least to be fast)."""
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return fast and hasattr(torch, "_weight_int4pack_mm_for_cpu")


def takes(layer: Fused, stored: tuple[Stored, ...]) -> bool:
    """Whether all parts of a layer are blocks that map onto this format; torch wants outputs in multiples of 16."""
    blocks = all(tensor.qtype in BLOCK_BYTES for tensor in stored)
    return blocks and layer.outputs % 16 == 0 and layer.inputs % GROUP == 0


def unpack(blocks: Tensor, qtype: str) -> tuple[Tensor, Tensor]:
    """Split raw blocks uint8 [N, K/32 * bytes] into codes int32 [N, K] and (scale, zero) bf16 [N, K/32, 2]."""
    blocks = blocks.unflatten(1, (-1, BLOCK_BYTES[qtype]))  # [N, K/32, bytes]
    halves = blocks[..., -GROUP // 2 :]
    codes = torch.cat((halves & 15, halves >> 4), dim=-1).flatten(1).to(torch.int32)
    d, *rest = blocks[..., : -GROUP // 2].contiguous().view(torch.float16).float().unbind(-1)
    zero = rest[0] + 8 * d if rest else torch.zeros_like(d)
    return codes, torch.stack((d, zero), dim=-1).to(torch.bfloat16)


class Int4:
    """Q4_0 and Q4_1 blocks in torch's int4 layout."""

    names = ("weight",)

    def create(self, layer: Fused) -> None:
        """Register `nibbles` int32 [N, K] and `scales` bf16 [K/32, N, 2]."""
        outputs, inputs = layer.outputs, layer.inputs
        layer.register_buffer("nibbles", torch.empty(outputs, inputs, dtype=torch.int32))
        layer.register_buffer("scales", torch.empty(inputs // GROUP, outputs, 2, dtype=torch.bfloat16))

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Take one tensor's blocks apart."""
        rows = layer.rows(part)
        codes, scales = unpack(stored.blocks(), stored.qtype)
        layer.nibbles[rows] = codes
        layer.scales[:, rows] = scales.transpose(0, 1)

    def finish(self, layer: Fused) -> None:
        """Pack two codes to a byte."""
        layer.nibbles = torch._convert_weight_to_int4pack_for_cpu(layer.nibbles, INNER)

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs] in x.dtype; the product is computed from bf16."""
        half = cast(x, torch.bfloat16).contiguous()
        y = cast(self.multiply(half, layer), x.dtype)
        return y if layer.bias is None else y.add_(layer.bias)

    @staticmethod
    def multiply(half: Tensor, layer: Fused) -> Tensor:
        """The product alone: bf16 [T, inputs], contiguous, to bf16 [T, outputs]."""
        return torch._weight_int4pack_mm_for_cpu(half, layer.nibbles, GROUP, layer.scales)
