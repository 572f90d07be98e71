"""Plain matrices as tensors of the compressed-tensors format: what `tinyserve quantize` writes.

    fp8    weight float8 [N, K], weight_scale [N, 1]; activations to be rounded to fp8, token by token
    int8   weight int8 [N, K], weight_scale [N, 1]; activations to be rounded to int8, token by token
    int4   weight_packed int32 [N, K / 8], weight_scale [N, G], weight_shape [2]; activations stay as they are

Scales of int4 are rounded to the type of the checkpoint before codes are made, so that codes make up for it.

Before: codes.py, compensate.py.  After: cli/quantize.py; compressed.py reads it again.

Source: the compressed-tensors library's published format.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from .codes import Inputs, Scheme, pack, quantise
from .compensate import compensated, output_error

LAYOUTS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}


@frozen
class Encoded:
    """A matrix as it is saved. Args: tensors: by name within its module; error: |W - Q| / |W|, or of products."""

    tensors: dict[str, Tensor]
    error: float

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def scheme_of(name: str, group: int) -> Scheme:
    """The scheme of "fp8", "int8" or "int4". Args: group: columns of int4 that share a scale."""
    if name == "int4":
        return Scheme(f"int4 in groups of {group}", 4, width=group)
    return Scheme(f"{name}, one scale a row", 8, inputs=Inputs(name))


def encode(weight: Tensor, scheme: Scheme, dtype: torch.dtype, inputs: Tensor | None = None) -> Encoded:
    """Round a matrix [N, K].

    Args:
        dtype: of the checkpoint, in which scales of groups are kept.
        inputs: of a calibration, for groups of integers (compensate.py); the error is then that of its products.
    """
    wide = weight.float()
    if inputs is None:
        codes = quantise(wide, scheme, scale_dtype=dtype if scheme.width else torch.float32)
        error = float((codes.dense(torch.float32) - wide).norm() / wide.norm().clamp(min=1e-30))
    else:
        wide = wide.to(inputs.device)
        codes = compensated(wide, inputs, scheme, dtype)
        error = output_error(wide, codes.dense(torch.float32), inputs)
        codes = evolve(codes, codes=codes.codes.cpu(), scales=codes.scales.cpu())
    if scheme.bits == 8:
        return Encoded({"weight": codes.codes, "weight_scale": codes.scales}, error)
    words = pack(codes.codes, scheme.bits)
    words = torch.nn.functional.pad(words, (0, -words.shape[1] % 4)).contiguous().view(torch.int32)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return Encoded({"weight_packed": words, "weight_scale": codes.scales.to(dtype), "weight_shape": shape}, error)


def fits(shape: tuple[int, ...], scheme: Scheme) -> bool:
    """Whether a matrix of this shape can be saved in the scheme: other readers want whole groups."""
    return len(shape) == 2 and not (scheme.width and shape[1] % scheme.width)


def config_of(name: str, scheme: Scheme, ignored: Iterable[str]) -> dict[str, Any]:
    """Return the quantization_config. Args: ignored: modules that stay as they were."""
    kind = "float" if name == "fp8" else "int"
    weights = {"num_bits": scheme.bits, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": scheme.width} if scheme.width else {"strategy": "channel"}
    inputs = None
    if scheme.inputs is not None:
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUTS[name],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }
