"""Checkpoints in the compressed-tensors format, which llm-compressor writes: fp8, integers of 2 to 8 bits, fp4.

    weight, weight_scale                     fp8 or int8 codes; scales of the tensor, of rows, groups or blocks
    weight_packed, weight_shape              integers in int32 words along the columns, stored plus 2**(bits - 1)
    weight_packed uint8                      fp4, two to a byte (fp4.py)
    weight_zero_point                        of asymmetric weights; packed like the codes, but along the rows
    weight_g_idx                             group of each column (act-order)
    input_scale, input_zero_point            of activations with one fixed scale

`config_groups` gives each group of modules a description of its own, by class ("Linear"), by name, or by regular
expression ("re:..."). Which modules are quantised at all is what the file shows; `ignore` says the same in words.

Before: stored.py, fp4.py.  After: detect.py.

Source: the compressed-tensors library's published format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError, UnsupportedModel, shown
from .codes import Codes, Inputs, Scheme, from_words
from .format import Stored
from .fp4 import MXFP4, NVFP4, mxfp4, nvfp4, powers
from .fp8 import E4M3, row_scales
from .gptq import checked_bits
from .stored import QuantizedTensor

INTEGERS = (2, 3, 4, 5, 6, 7, 8)
ALL = {"Linear", "LinearBase"}
SUPPORTED = "fp8, int8, packed integers of 2 to 8 bits, nvfp4 and mxfp4"


@frozen
class Group:
    """One entry of config_groups.

    Args:
        targets: which modules it describes.
        kind: "int" or "float".   bits: of a weight.
        width: columns that share a scale; 0: all.
        block: rows and columns that share a scale, or None.
        symmetric: weights have no zero points.
        inputs: how activations are rounded.
    """

    targets: tuple[str, ...]
    kind: str
    bits: int
    width: int
    block: tuple[int, int] | None
    symmetric: bool
    inputs: Inputs | None

    def names(self, module: str) -> bool:
        """Whether a target names this module, other than by its class."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else module == target for target in self.targets
        )

    def fp4(self, own: QuantizedTensor) -> Codes:
        """Read fp4 codes."""
        if own.scheme is NVFP4:
            return nvfp4(own, "weight_packed", divided="weight_global_scale")
        return mxfp4(own, "weight_packed")

    def packed(self, own: QuantizedTensor) -> Codes:
        """Read integers in words."""
        rows, columns = own.shape
        words = own.tensor("weight_packed", torch.int32)
        if words.shape[1] != -(-columns * self.bits // 32):
            raise CheckpointError(
                f"{own.module}: {words.shape[1]} words a row do not hold {columns} codes of {self.bits} bits without "
                "gaps; an older library wrote them. Save the checkpoint again with a newer compressed-tensors."
            )
        codes = from_words(words, self.bits, columns)
        scales = row_scales(own, own.tensor("weight_scale", torch.float32), None)
        zeros = None
        if not self.symmetric:
            zeros = from_words(own.tensor("weight_zero_point", torch.int32).t().contiguous(), self.bits, rows).t()
            zeros = zeros.expand(rows, scales.shape[1])
        elif self.bits == 8:
            codes = (codes ^ 0x80).view(torch.int8)
        else:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.uint8)
        return self.made(own, codes, scales, zeros)

    def whole(self, own: QuantizedTensor) -> Codes:
        """Read one code a byte."""
        codes = own.tensor("weight", E4M3 if self.kind == "float" else torch.int8)
        stored = own.tensors["weight_scale"]
        exponents = self.kind == "float" and self.width == 32 and stored.nbytes == stored.shape[0] * stored.shape[-1]
        scales = (
            powers(own.tensor("weight_scale", torch.uint8)) if exponents else own.tensor("weight_scale", torch.float32)
        )
        scales = row_scales(own, scales, self.block)
        zeros = None if self.symmetric else own.tensor("weight_zero_point", torch.int8)
        return self.made(own, codes, scales, None if zeros is None else row_scales(own, zeros, self.block))

    def made(self, own: QuantizedTensor, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Codes:
        """Put codes together with what else the module may have."""
        static = self.inputs is not None and self.inputs.static
        order = own.maybe("weight_g_idx", torch.int32)
        groups = None if order is None or bool((order < 0).any()) or scales.shape[1] == 1 else order.long()
        zero = own.maybe("input_zero_point", torch.float32) if static else None
        scale = own.tensor("input_scale", torch.float32) if static else None
        return Codes(own.scheme, codes, scales, zeros, groups, scale, zero)


@frozen
class Compressed:
    """How matrices of a compressed-tensors checkpoint are read. Args: groups: as the config lists them."""

    groups: tuple[Group, ...]
    title: str = "compressed-tensors"
    kinds: tuple[str, ...] = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
    )
    marks: tuple[str, ...] = ("weight_packed", "weight_scale")

    def group(self, module: str) -> Group:
        """Return the description of a module: the one that names it, else the one for all linear layers."""
        for group in self.groups:
            if group.names(module):
                return group
        for group in self.groups:
            if ALL & set(group.targets):
                return group
        raise CheckpointError(f"{module} is quantised, but no entry of config_groups describes it.")

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        group = self.group(module)
        if group.kind == "float" and group.bits == 4:
            rows, packed = tensors["weight_packed"].shape
            scheme = NVFP4 if "weight_global_scale" in tensors else MXFP4
            return QuantizedTensor(module, (rows, 2 * packed), scheme, tensors, group.fp4)
        width = group.block[1] if group.block else group.width
        words = f"{'fp' if group.kind == 'float' else 'int'}{group.bits}" + (f" in groups of {width}" if width else "")
        if "weight_packed" not in tensors:
            scheme = Scheme(words, 8, width, inputs=group.inputs)
            return QuantizedTensor(module, tensors["weight"].shape, scheme, tensors, group.whole)
        bits = 2 if group.bits == 2 else 4 if group.bits <= 4 else 8
        if "weight_shape" not in tensors or tensors["weight_shape"].shape != (2,):
            raise CheckpointError(f"{module}: weight_packed needs a weight_shape of two numbers.")
        shape = tuple(tensors["weight_shape"].read(torch.int64).tolist())
        return QuantizedTensor(module, shape, Scheme(words, bits, width, inputs=group.inputs), tensors, group.packed)


def read_inputs(config: Any) -> Inputs | None:
    """Read `input_activations`. Raises: UnsupportedModel."""
    if not config or config.get("num_bits") == 4:  # fp4 activations: see fp4.py
        return None
    strategy, kind = config.get("strategy") or "tensor", config.get("type", "int")
    if config.get("num_bits") != 8 or strategy not in ("tensor", "token", "group") or kind not in ("int", "float"):
        raise UnsupportedModel(
            f"config_groups: activations of {shown(config.get('num_bits'))} bits {kind} by {strategy} are not "
            "implemented; 8 bits by tensor, token or group are."
        )
    return Inputs(
        "fp8" if kind == "float" else "int8",
        static=config.get("dynamic", False) is False,
        width=(config.get("group_size") or 0) if strategy == "group" else 0,
        symmetric=bool(config.get("symmetric", True)),
    )


def read_group(name: str, config: Mapping[str, Any]) -> Group:
    """Read one entry of config_groups. Raises: UnsupportedModel: what it describes is not implemented."""
    weights = config.get("weights")
    if not isinstance(weights, Mapping) or not isinstance(config.get("targets"), list):
        raise CheckpointError(f"config_groups.{name} has no targets, or describes no weights.")
    if config.get("output_activations"):
        raise UnsupportedModel(f"config_groups.{name}: rounded outputs (output_activations) are not implemented.")
    for target in config["targets"]:
        re.compile(str(target).removeprefix("re:") if str(target).startswith("re:") else "")
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if kind == "float" and bits in (4, 8):
        pass
    elif kind == "int":
        checked_bits(bits, INTEGERS)
    else:
        raise UnsupportedModel(f"config_groups.{name}: {shown(bits)}-bit {shown(kind)} is not one of {SUPPORTED}.")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise UnsupportedModel(f"config_groups.{name}: strategy {shown(strategy)} is not implemented.")
    block = tuple(weights["block_structure"]) if strategy == "block" else None
    return Group(
        targets=tuple(map(str, config["targets"])),
        kind=kind,
        bits=bits,
        width=int(weights.get("group_size") or 0) if "group" in strategy else 0,
        block=block,
        symmetric=bool(weights.get("symmetric", True)),
        inputs=read_inputs(config.get("input_activations")),
    )


def read_compressed(config: Mapping[str, Any]) -> Compressed:
    """Read a quantization_config with quant_method compressed-tensors. Raises: UnsupportedModel, CheckpointError."""
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense" or config.get("format") in ("marlin-24", "sparse-24-bitmask", "sparse-bitmask"):
        raise UnsupportedModel(
            f"quantization_config: sparse weights ({sparse}, {config.get('format')}) are not implemented; save them "
            "dense with llm-compressor."
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("quantization_config: compressed-tensors without config_groups.")
    if config.get("transform_config"):
        raise UnsupportedModel("quantization_config: transforms (rotated weights) are not implemented.")
    return Compressed(tuple(read_group(name, group) for name, group in groups.items()))
