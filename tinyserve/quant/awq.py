"""AWQ checkpoints: 4 bits in groups of columns, with zero points, in the layout of AutoAWQ's "gemm" kernels.

    qweight  int32 [K, N / 8]    eight outputs to a word, in the order 0 2 4 6 1 3 5 7 from the lowest bits
    qzeros   int32 [G, N / 8]    the same order
    scales   [G, N]

The smoothing of activations that gives the method its name is folded into the norms before, so nothing of it is seen.

Before: stored.py.  After: detect.py.

Source: AWQ, arXiv:2306.00978; the layout as AutoAWQ publishes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..errors import UnsupportedModel, shown
from .codes import Codes, Scheme, from_words
from .format import Stored
from .gptq import checked_bits, group_size
from .stored import QuantizedTensor

PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble holds output 0, 1, 2 ...


@frozen
class AWQ:
    """How AWQ matrices are read. Args: group: columns that share a scale; 0: all."""

    group: int
    title: str = "awq"
    kinds: tuple[str, ...] = ("qweight", "qzeros", "scales")
    marks: tuple[str, ...] = ("qweight",)

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        inputs, words = tensors["qweight"].shape
        width = 0 if self.group >= inputs else self.group
        scheme = Scheme(f"4-bit awq in groups of {width or inputs}", 4, width)
        return QuantizedTensor(module, (words * 8, inputs), scheme, tensors, self.decode)

    def decode(self, own: QuantizedTensor) -> Codes:
        """Read codes, zero points and scales."""
        outputs, _ = own.shape
        codes = in_order(own.tensor("qweight", torch.int32), outputs).t().contiguous()
        scales = own.tensor("scales", torch.float32).t()
        zeros = own.maybe("qzeros", torch.int32)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if zeros is None else in_order(zeros, outputs).t()
        return Codes(own.scheme, codes, scales, zeros)


def in_order(words: Tensor, outputs: int) -> Tensor:
    """Return the nibbles of words [rows, N / 8] in the order of outputs, uint8 [rows, N]."""
    return from_words(words, 4, outputs).unflatten(1, (-1, 8))[..., list(PLACE)].flatten(1)


def read_awq(config: Mapping[str, Any]) -> AWQ:
    """Read a quantization_config with quant_method awq. Raises: UnsupportedModel, CheckpointError."""
    checked_bits(config.get("bits", config.get("w_bit", 4)), (4,))
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModel(
            f"quantization_config: AWQ in the layout of {shown(version)} is not implemented; gemm is. Save it again "
            "with AutoAWQ and version GEMM."
        )
    return AWQ(group_size(config, "group_size", "q_group_size"))
