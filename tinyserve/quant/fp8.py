"""FP8 checkpoints (e4m3): one scale for a tensor, each row or each block of 128 x 128, and rounded activations.

    quant_method fp8          weight_scale_inv [N/128, K/128] (DeepSeek, Qwen), or weight_scale of the tensor or of rows
    quant_method fbgemm_fp8   weight_scale [N, 1], and a bound of the activations' scale
    quant_method modelopt     weight_scale of the tensor, input_scale

In spite of its name `weight_scale_inv` is what codes are multiplied by. Activations are rounded to fp8 too: by the
stored `input_scale`, or by a scale computed for each token (with blocks: for each 128 columns of a token). A computed
scale of a whole batch, which some configs mean by "dynamic", would make an answer depend on its neighbours; a token's
is at least as fine.

Before: stored.py.  After: detect.py.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3; "FP8 Formats for Deep Learning", arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError, UnsupportedModel, shown
from .codes import Codes, Inputs, Scheme, blocks_to_rows
from .format import Stored
from .stored import QuantizedTensor

E4M3 = torch.float8_e4m3fn
SCALES = ("weight_scale_inv", "weight_scale")


@frozen
class FP8:
    """How fp8 matrices are read.

    Args:
        block: rows and columns that share a scale; None: scales are of tensors or rows.
        inputs: how activations are rounded.
    """

    block: tuple[int, int] | None
    inputs: Inputs | None
    title: str = "fp8"
    kinds: tuple[str, ...] = ("weight", *SCALES, "input_scale", "activation_scale", "input_scale_ub")
    marks: tuple[str, ...] = SCALES

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        if "weight" not in tensors:
            raise CheckpointError(f"{module} has scales, but no weight.")
        shape = tensors["weight"].shape
        width = self.block[1] if self.block else 0
        scheme = Scheme(f"fp8 in blocks of {width}" if width else "fp8", 8, width, inputs=self.inputs)
        return QuantizedTensor(module, shape, scheme, tensors, self.decode)

    def decode(self, own: QuantizedTensor) -> Codes:
        """Read codes and scales."""
        static = self.inputs is not None and self.inputs.static
        given = next((name for name in ("input_scale", "activation_scale") if name in own.tensors), "input_scale")
        return Codes(
            own.scheme,
            own.tensor("weight", E4M3),
            row_scales(
                own, own.tensor(next(name for name in SCALES if name in own.tensors), torch.float32), self.block
            ),
            input_scale=own.tensor(given, torch.float32).amax() if static else None,
        )


def row_scales(own: QuantizedTensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return scales of a tensor, of rows, of groups or of blocks as [N, G]. Raises: CheckpointError: another shape."""
    rows, columns = own.shape
    if scales.numel() == 1 and block is None:
        return scales.reshape(1, 1).expand(rows, 1)
    if block is not None:
        wanted = (-(-rows // block[0]), -(-columns // block[1]))
        if tuple(scales.shape) != wanted:
            raise CheckpointError(
                f"{own.module}: scales {list(scales.shape)}, but blocks of {list(block)} need {list(wanted)}."
            )
        return blocks_to_rows(scales, rows, block[0])
    if scales.shape[0] != rows or scales.numel() % rows:
        raise CheckpointError(f"{own.module}: scales {list(scales.shape)} are not of a tensor or of {rows} rows.")
    return scales.reshape(rows, -1)


def read_fp8(config: Mapping[str, Any]) -> FP8:
    """Read a quantization_config with quant_method fp8. Raises: UnsupportedModel."""
    if (fmt := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(f"quantization_config: fp8 of format {shown(fmt)} is not implemented; e4m3 is.")
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, (list, tuple)) and len(block) == 2 and all(_size(b) for b in block)
    ):
        raise CheckpointError(f"quantization_config: weight_block_size is {shown(block)}, expected two sizes.")
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic", None):
        raise UnsupportedModel(f"quantization_config: activation_scheme {shown(scheme)} is not static or dynamic.")
    if scheme == "static" and block is not None:
        raise UnsupportedModel("quantization_config: static activation scales do not go with weight_block_size.")
    inputs = None if scheme is None else Inputs("fp8", static=scheme == "static", width=block[1] if block else 0)
    return FP8(tuple(block) if block else None, inputs)


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_fbgemm(config: Mapping[str, Any]) -> FP8:
    """Read a quantization_config with quant_method fbgemm_fp8."""
    limit = config.get("activation_scale_ub") or 0.0
    return FP8(None, Inputs("fp8", limit=float(limit)), title="fbgemm_fp8")
