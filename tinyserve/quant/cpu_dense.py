"""A dense copy of a weight, packed for oneDNN: what the other CPU formats use from a handful of rows on.

oneDNN likes a weight in tiles of its own. Packed once at load instead of in every product, a bf16 weight is multiplied
up to twice as fast for small batches. One AMD EPYC (Zen 4) core, all linear layers of SmolLM2-135M without the head, in
milliseconds, beside the other formats (`int8`: as cpu_int8.py does it, two limbs):

    rows             1      2      4      8     16     32     64    200    512
    bf16, packed  15.9   17.9   13.6   17.5   23.9   40.3   75.1    211    516
    bf16          27.0   25.8   29.1   32.2   39.4   54.7   86.9    221    539
    fp32          34.2   54.9   45.2   54.5   72.5    105    189
    int4           6.4    7.9   11.1   21.5   41.8   81.8    167
    int8           6.9    7.2    9.1   14.4   23.3   41.6           (and 0.05 for each layer's limbs)

Before: torch.  After: cpu_int4.py, cpu_int8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dense_dtype() -> torch.dtype:
    """bf16 where the processor multiplies it, else fp32 (emulated bf16 is slower than fp32)."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def pack(weight: Tensor) -> Tensor:
    """Return weight [N, K] in oneDNN's layout, or as it is where this torch cannot pack its dtype."""
    if weight.dtype == torch.bfloat16 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return weight


def product(x: Tensor, packed: Tensor) -> Tensor:
    """Return x [T, K] times a packed weight, computed in the weight's dtype: [T, N] in x.dtype."""
    inputs = x.to(packed.dtype)
    if packed.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(inputs, packed, None, "none", [], "").to(x.dtype)
    return F.linear(inputs, packed).to(x.dtype)
