"""Checkpoints of NVIDIA ModelOpt: FP8 with one scale a tensor, and NVFP4.

What is quantised stands in hf_quant_config.json, or in config.json with quant_method "modelopt". Modules that were left
out simply have plain weights.

Before: fp8.py, fp4.py.  After: detect.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ..errors import UnsupportedModel, shown
from .codes import Codes, Inputs
from .format import Stored
from .fp4 import NVFP4, nvfp4
from .fp8 import FP8
from .stored import QuantizedTensor

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")


@frozen
class ModelOptNVFP4:
    """How NVFP4 matrices of ModelOpt are read."""

    title: str = "modelopt NVFP4"
    kinds: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    marks: tuple[str, ...] = ("weight_scale_2",)

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        rows, packed = tensors["weight"].shape
        return QuantizedTensor(module, (rows, 2 * packed), NVFP4, tensors, self.decode)

    def decode(self, own: QuantizedTensor) -> Codes:
        """Read codes and both scales."""
        return nvfp4(own, "weight", times="weight_scale_2")


def read_modelopt(config: Mapping[str, Any]) -> FP8 | ModelOptNVFP4:
    """Read ModelOpt's description. Raises: UnsupportedModel: another algorithm."""
    own = config.get("quantization", config)
    algorithm = own.get("quant_algo") if isinstance(own, Mapping) else None
    if algorithm == "FP8":
        return FP8(None, Inputs("fp8", static=True), title="modelopt FP8")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return FP8(None, Inputs("fp8"), title="modelopt FP8")
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return ModelOptNVFP4()
    raise UnsupportedModel(
        f"hf_quant_config.json: quant_algo {shown(algorithm)} is not implemented; {', '.join(ALGORITHMS)} are."
    )
