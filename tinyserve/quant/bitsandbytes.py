"""Checkpoints of bitsandbytes: NF4 and FP4 with scales that may be quantised themselves, and int8 rows.

    weight                        uint8 [N * K / 2, 1]: two columns to a byte, the first in the high half
    weight.absmax                 one scale for each `blocksize` numbers in a row: fp32, or uint8 codes of scales,
    weight.nested_absmax ...      which are table[code] * nested_absmax[block] + offset
    weight.quant_map              the 16 numbers that codes stand for
    weight.quant_state.bitsandbytes__nf4   JSON in bytes: shape, block sizes, offset

    weight int8 [N, K], SCB [N]   LLM.int8: W = code * SCB / 127

LLM.int8 multiplies columns with outliers in fp16 and rounds the others; here activations are not rounded at all.

Before: stored.py.  After: detect.py.

Source: QLoRA, arXiv:2305.14314 (NF4, double quantisation); LLM.int8(), arXiv:2208.07339.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError, UnsupportedModel
from .codes import Codes, Scheme
from .format import Stored
from .stored import QuantizedTensor

STATE = "weight.quant_state.bitsandbytes__"
TABLES = ("nf4", "fp4")
# NF4 in blocks of 64, as it mostly is, for weights that are not there; files bring the table of their own.
NORMAL = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
USUAL = Scheme("nf4 in groups of 64", 4, 64, table=NORMAL)


@frozen
class NF4:
    """How 4-bit matrices of bitsandbytes are read."""

    title: str = "bitsandbytes in 4 bits"
    kinds: tuple[str, ...] = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(STATE + table for table in TABLES),
    )
    marks: tuple[str, ...] = ("weight.absmax",)

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        table = next((table for table in TABLES if STATE + table in tensors), None)
        if table is None or "weight.quant_map" not in tensors:
            raise CheckpointError(f"{module}: bitsandbytes codes without {STATE}nf4 (or fp4) and weight.quant_map.")
        state = state_of(tensors[STATE + table])
        shape, width = tuple(state["shape"]), state["blocksize"]
        if len(shape) != 2 or shape[1] % width:
            raise UnsupportedModel(
                f"{module}: {list(shape)} numbers in blocks of {width} that cross rows are not implemented."
            )
        numbers = tuple(tensors["weight.quant_map"].read(torch.float32).tolist())
        scheme = Scheme(f"{table} in groups of {width}", 4, width, table=numbers)
        return QuantizedTensor(module, shape, scheme, tensors, decode4)


def state_of(stored: Stored) -> dict[str, Any]:
    """Return the JSON that a tensor of bytes holds. Raises: CheckpointError."""
    try:
        state = json.loads(bytes(stored.read(torch.uint8).tolist()))
        if state["blocksize"] > 0 and all(size > 0 for size in state["shape"]):
            return state
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"A quant_state of bitsandbytes cannot be read: {error!r}") from error
    raise CheckpointError(f"A quant_state of bitsandbytes describes no matrix: {state}")


def decode4(own: QuantizedTensor) -> Codes:
    """Read codes of 4 bits and their scales."""
    state = state_of(next(stored for name, stored in own.tensors.items() if name.startswith(STATE)))
    rows, columns = own.shape
    packed = own.tensor("weight", torch.uint8).reshape(-1)
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).reshape(rows, columns)
    return Codes(own.scheme, codes, absmax(own, state).reshape(rows, columns // own.scheme.width))


def absmax(own: QuantizedTensor, state: Mapping[str, Any]) -> Tensor:
    """Return the scales of all blocks, float32, undoing the second quantisation if there is one."""
    if "weight.nested_absmax" not in own.tensors:
        return own.tensor("weight.absmax", torch.float32)
    table = own.tensor("weight.nested_quant_map", torch.float32)
    codes = own.tensor("weight.absmax", torch.uint8).reshape(-1)
    outer = own.tensor("weight.nested_absmax", torch.float32).repeat_interleave(state["nested_blocksize"])
    return table[codes.int()] * outer[: len(codes)] + state["nested_offset"]


@frozen
class Int8:
    """How LLM.int8 matrices are read."""

    title: str = "bitsandbytes in 8 bits"
    kinds: tuple[str, ...] = ("weight", "SCB", "weight_format")
    marks: tuple[str, ...] = ("SCB",)

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        scheme = Scheme("int8, one scale a row", 8)
        return QuantizedTensor(module, tensors["weight"].shape, scheme, tensors, self.decode)

    def decode(self, own: QuantizedTensor) -> Codes:
        """Read codes and scales. Raises: UnsupportedModel: codes in the order of some GPU."""
        order = own.maybe("weight_format", torch.uint8)
        if order is not None and int(order.max()) != 0:
            raise UnsupportedModel(f"{own.module}: weight_format {int(order.max())} is not rows; save it again.")
        return Codes(own.scheme, own.tensor("weight", torch.int8), own.tensor("SCB", torch.float32)[:, None] / 127)


def read_bitsandbytes(config: Mapping[str, Any]) -> NF4 | Int8:
    """Read a quantization_config with quant_method bitsandbytes. Raises: CheckpointError."""
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        return NF4()
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Int8()
    raise CheckpointError("quantization_config: bitsandbytes with neither load_in_4bit nor load_in_8bit.")
