"""GPTQ checkpoints: 2, 3, 4 or 8 bits in groups of columns, with or without zero points, in any order of columns.

    qweight  int32 [K * bits / 32, N]   codes down the columns, lowest bits first
    qzeros   int32 [G, N * bits / 32]   zero points along the rows; version 1 of the layout stores each minus one
    scales   [G, N]
    g_idx    int32 [K]                  group of each column, if the order of quantisation was kept (act-order)

Codes of three bits follow each other without gaps, 32 of them in three words.

Before: stored.py.  After: detect.py.

Source: GPTQ, arXiv:2210.17323; the layout as AutoGPTQ and GPTQModel publish it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen

from ..errors import CheckpointError, UnsupportedModel, shown
from .codes import Codes, Scheme, from_words
from .format import Stored
from .stored import QuantizedTensor

BITS = (2, 3, 4, 8)
IN_MEMORY = {2: 2, 3: 4, 4: 4, 8: 8}  # three bits are kept in four
LAYOUTS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points


@frozen
class GPTQ:
    """How GPTQ matrices are read.

    Args:
        bits: of a code.
        group: columns that share a scale; 0: all.
        add: to stored zero points.
        rules: (pattern of module names, keys that replace the config's), first match wins.
    """

    bits: int
    group: int
    add: int
    rules: tuple[tuple[str, Mapping[str, Any]], ...] = field(default=(), eq=False)
    title: str = "gptq"
    kinds: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    marks: tuple[str, ...] = ("qweight",)

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module."""
        own = self
        for pattern, keys in self.rules:
            if re.match(pattern, module):
                bits, group = keys.get("bits", self.bits), keys.get("group_size", self.group)
                own = evolve(self, bits=checked_bits(bits, BITS), group=max(group, 0), rules=())
                break
        words, outputs = tensors["qweight"].shape
        inputs = words * 32 // own.bits
        width = 0 if own.group >= inputs else own.group
        groups = f"groups of {width}" if width else "rows"
        scheme = Scheme(f"{own.bits}-bit gptq in {groups}", IN_MEMORY[own.bits], width)
        return QuantizedTensor(module, (outputs, inputs), scheme, tensors, own.decode)

    def decode(self, own: QuantizedTensor) -> Codes:
        """Read codes, zero points and scales."""
        outputs, inputs = own.shape
        codes = from_words(own.tensor("qweight", torch.int32).t().contiguous(), self.bits, inputs)
        scales = own.tensor("scales", torch.float32)
        zeros = own.maybe("qzeros", torch.int32)
        if zeros is None:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.uint8)
        else:
            zeros = (from_words(zeros, self.bits, outputs) + self.add) & (2**self.bits - 1)
        order = own.maybe("g_idx", torch.int32)
        usual = torch.arange(inputs) // (own.scheme.width or max(inputs, 1))
        groups = None if order is None or torch.equal(order.long(), usual) else order.long()
        return Codes(own.scheme, codes, scales.t(), zeros.t(), groups)


def checked_bits(bits: Any, known: tuple[int, ...]) -> int:
    """Return bits. Raises: UnsupportedModel: not among `known`."""
    if bits not in known or isinstance(bits, bool):
        raise UnsupportedModel(
            f"quantization_config: {shown(bits)} bits are not implemented for this method; "
            f"{', '.join(map(str, known))} are."
        )
    return bits


def group_size(config: Mapping[str, Any], *names: str, default: int = 128) -> int:
    """Return the group size that a config names, 0 for "all columns". Raises: CheckpointError: it is no size."""
    size = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
        raise CheckpointError(f"quantization_config: {names[0]} is {shown(size)}, expected a size, or -1 for all.")
    return max(size, 0)


def read_gptq(config: Mapping[str, Any]) -> GPTQ:
    """Read a quantization_config with quant_method gptq. Raises: UnsupportedModel, CheckpointError."""
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in LAYOUTS:
        raise UnsupportedModel(
            f"quantization_config: GPTQ in checkpoint_format {shown(layout)} is not implemented; {', '.join(LAYOUTS)} "
            "are. Convert it with GPTQModel."
        )
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(keys, Mapping) for keys in rules.values()):
        raise CheckpointError(f"quantization_config: dynamic is {shown(rules)}, expected rules by name.")
    changed = tuple((name.removeprefix("+:"), keys) for name, keys in rules.items() if not name.startswith("-:"))
    for pattern, _ in changed:
        re.compile(pattern)
    bits = checked_bits(config.get("bits"), BITS)
    return GPTQ(bits, group_size(config, "group_size"), LAYOUTS[layout], changed)
