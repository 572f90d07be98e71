"""Which format the weights of a CPU model get when the user leaves the precision open (`--dtype auto`).

A checkpoint in fp32 stays what it is. One in bf16, fp16 or blocks is not exact in the first place, so its linear layers
are packed for the CPU's fast products, and activations are fp32: the stream is small, and nothing has to be converted
around norms, rotations and attention.

    blocks of Q4_0 or Q4_1        Int4: the blocks as they are, and a dense copy       (cpu_int4.py)
    other blocks, bf16, fp16      Int8, and a dense copy                               (cpu_int8.py)
    the head                      Int8 without a dense copy: it sees few rows
    what this CPU cannot do fast  dense numbers in fp32

`--dtype float32` and `--dtype bfloat16` never come here: they mean plain numbers.

Before: cpu_int4.py, cpu_int8.py, cpu_dense.py.  After: engine/parts.py hands the choice to `load_model`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

from . import cpu_dense, cpu_int4, cpu_int8
from .cpu_int8 import packed_bytes as packed_bytes
from .format import Fused, Stored, WeightFormat
from .plain import Plain

log = logging.getLogger(__name__)


def is_exact(stored: Stored) -> bool:
    """Whether a stored tensor is plain fp32 or wider: then it must not be rounded."""
    return stored.qtype is None and stored.nbytes >= 4 * prod(stored.shape)


def cpu_formats() -> Callable[[str, Fused, tuple[Stored, ...]], WeightFormat]:
    """Ask this CPU what it can do, and return the choice per layer: (path, layer, stored parts) -> format."""
    int8, int4 = cpu_int8.available(), cpu_int4.available()
    log.info("cpu: int4 products %s, int8 products %s, others in %s", yes(int4), yes(int8), cpu_dense.dense_dtype())
    plain, narrow = Plain(), cpu_int4.Int4()
    wide, head = (cpu_int8.Int8(), cpu_int8.Int8(dense=False)) if int8 else (plain, plain)

    def choose(path: str, layer: Fused, stored: tuple[Stored, ...]) -> WeightFormat:
        if any(is_exact(tensor) for tensor in stored):
            return plain
        if path == "head":
            return head
        return narrow if int4 and cpu_int4.takes(layer, stored) else wide

    return choose


def yes(able: bool) -> str:
    """For the log."""
    return "yes" if able else "no"
