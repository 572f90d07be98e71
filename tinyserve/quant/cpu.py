"""Which format the weights of a CPU model get when the user leaves the precision open (`--dtype auto`).

A checkpoint in fp32 stays what it is. One in bf16, fp16 or blocks is not exact in the first place, so its linear layers
are packed for the CPU's fast products, and activations are fp32: the stream is small, and nothing has to be converted
around norms, rotations and attention.

    integer products exact here (VNNI)?   Int8 for every layer, the head without a dense copy     (cpu_int8.py)
    else, blocks of Q4_0 / Q4_1?          Int4                                                     (cpu_int4.py)
    else                                  dense numbers in fp32

`--dtype float32` and `--dtype bfloat16` never come here: they mean plain numbers.

Before: cpu_int8.py, cpu_int4.py.  After: engine/parts.py hands the choice to models/registry.py::load_model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

from . import cpu_int4, cpu_int8
from .format import Fused, Stored, WeightFormat
from .plain import Plain

log = logging.getLogger(__name__)


def is_exact(stored: Stored) -> bool:
    """Whether a stored tensor is plain fp32 or wider: then it must not be rounded."""
    return stored.qtype is None and stored.nbytes >= 4 * prod(stored.shape)


def cpu_formats() -> Callable[[str, Fused, tuple[Stored, ...]], WeightFormat]:
    """Ask this CPU what it can do, and return the choice per layer: (path, layer, stored parts) -> format."""
    int8, int4 = cpu_int8.available(), cpu_int4.available()
    log.info("cpu: %s", "int8 products" if int8 else "int4 products for 4-bit blocks" if int4 else "dense products only")
    shared = {"plain": Plain(), "int8": cpu_int8.Int8(), "head": cpu_int8.Int8(dense=False), "int4": cpu_int4.Int4()}

    def choose(path: str, layer: Fused, stored: tuple[Stored, ...]) -> WeightFormat:
        if any(is_exact(tensor) for tensor in stored):
            return shared["plain"]
        if int8:
            return shared["head" if path == "head" else "int8"]
        return shared["int4" if int4 and cpu_int4.takes(layer, stored) else "plain"]

    return choose
