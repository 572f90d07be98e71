"""Which format the weights of a CPU model get when the user leaves the precision open (`--dtype auto`).

A checkpoint in fp32 stays what it is. One in bf16, fp16 or blocks is not exact in the first place, so its linear layers
are packed for the CPU's fast products, and activations are fp32: the stream is small, and nothing has to be converted
around norms, rotations and attention.

    blocks of Q4_0 or Q4_1    Int4 for up to INT4_ROWS rows, that is for one user or a few; Dense for more
    other blocks, bf16, fp16  Int8 for up to INT8_ROWS rows; Dense for more
    the head                  Int8: it sees few rows
    experts                   numbers in bf16 where the processor multiplies it: they are most of a model
    without int8 products     Int4 and Dense, or dense numbers in fp32

Int8 alone would do with one byte a weight instead of two beside the packed blocks, but prompts take a quarter longer.
`--dtype float32` and `--dtype bfloat16` never come here: they mean plain numbers. Times of all linear layers of
SmolLM2-135M without the head, in milliseconds, on one AMD EPYC (Zen 4) core:

    rows                            1      2      4      8     16     32     64    200    512
    int4                          6.4    7.9   11.1   21.5   41.8   81.8    167
    int8, two limbs               6.4    6.8    8.5   14.0   22.9   40.2           276    620    and some 0.05 a layer
    bf16, packed                 15.9   17.9   13.6   17.5   23.9   40.3   75.1    207    516
    fp32                         34.2   54.9   45.2   54.5   72.5    105    189

Before: cpu_int4.py, cpu_int8.py, cpu_dense.py.  After: engine/parts.py hands the choice to `load_model`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from . import cpu_dense, cpu_int4, cpu_int8
from .cpu_dense import Dense
from .cpu_int4 import Int4
from .cpu_int8 import Int8
from .cpu_int8 import packed_bytes as packed_bytes
from .experts import PlainExperts
from .format import Fused, Stored, WeightFormat
from .plain import Plain

log = logging.getLogger(__name__)

INT4_ROWS = 4
INT8_ROWS = 6


class ByRows:
    """Two formats side by side, each for the batches that it is fast for.

    Args:
        few: multiplies up to `most` rows.   many: multiplies more.
    """

    names = ("weight",)

    def __init__(self, few: WeightFormat, most: int, many: WeightFormat) -> None:
        self.few = few
        self.most = most
        self.many = many

    def create(self, layer: Fused) -> None:
        """Register what both need."""
        self.few.create(layer)
        self.many.create(layer)

    def load(self, layer: Fused, name: str, part: int, stored: Stored) -> None:
        """Read the tensor for both."""
        self.few.load(layer, name, part, stored)
        self.many.load(layer, name, part, stored)

    def finish(self, layer: Fused) -> None:
        """Pack both."""
        self.few.finish(layer)
        self.many.finish(layer)

    def matmul(self, x: Tensor, layer: Fused) -> Tensor:
        """Return x [T, inputs] @ weight.T + bias: [T, outputs] in x.dtype."""
        return (self.few if x.shape[0] <= self.most else self.many).matmul(x, layer)


def is_exact(stored: Stored) -> bool:
    """Whether a stored tensor is plain fp32 or wider: then it must not be rounded."""
    return stored.qtype is None and stored.nbytes >= 4 * prod(stored.shape)


def cpu_formats() -> Callable[[str, Fused, tuple[Stored, ...]], WeightFormat]:
    """Ask this CPU what it can do, and return the choice per layer: (path, layer, stored parts) -> format."""
    narrow = PlainExperts(cpu_dense.dense_dtype())
    int8, int4 = cpu_int8.available(), cpu_int4.available()
    log.info("cpu: int4 products %s, int8 products %s, others in %s", yes(int4), yes(int8), cpu_dense.dense_dtype())
    others = ByRows(Int8(), INT8_ROWS, Dense()) if int8 else Plain()
    head = Int8() if int8 else Plain()
    blocks = ByRows(Int4(), INT4_ROWS, Dense())

    def choose(path: str, layer: Fused, stored: tuple[Stored, ...]) -> WeightFormat:
        exact = any(is_exact(tensor) for tensor in stored)
        if hasattr(layer, "experts"):
            return PlainExperts() if exact else narrow
        if exact:
            return Plain()
        if path == "head":
            return head
        return blocks if int4 and cpu_int4.takes(layer, stored) else others

    return choose


def cached_dtype(model: nn.Module, own: torch.dtype) -> torch.dtype:
    """Return the type of cached keys and values: bf16 beside weights that were packed, else that of the activations.

    Attention reads all that is cached in every step, and rounding it changes less than rounding weights does.
    """
    packed = any(isinstance(getattr(module, "format", None), ByRows | Int8) for module in model.modules())
    return torch.bfloat16 if packed else own


def yes(able: bool) -> str:
    """For the log."""
    return "yes" if able else "no"
