"""Blocks of GGUF files in the bits that they have there (kernels/packed_planes.py), where a byte a code would be large.

Codes of 3, 5 and 6 bits are kept in 4 and 8, and scales of K-quants spelled out, as long as the whole file still takes
little more memory than it has bytes: kernels read those with fewer instructions. A file that is mostly made of such
blocks, as those called Q5_K_M and Q6_K are, would take a third more; its linear layers and its table are kept so, its
experts are not.

Before: codes.py, kernels/packed_planes.py.  After: grouped.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.launch import choose
from ..kernels.packed import Packed, packed_dense
from ..kernels.packed_planes import Planes, in_planes, packed_planes, planes_dense
from .codes import Scheme
from .format import Fused

MOST_ROWS = 64  # above, a product takes longer than the reading of its codes


def to_planes(
    codes: list[Tensor],
    scheme: Scheme,
    scales: Tensor,
    zeros: Tensor | None,
    inner: Tensor | None,
    outer: Tensor | None,
) -> Planes:
    """Put the codes of a layer's parts, [n, K] each, on top of each other.

    Args: scales: [N, G].   zeros: [N, G], what is added.   inner, outer: what both are made of, or None (codes.py).
    """
    middle = 0 if scheme.added or scheme.values else 2 ** (scheme.fine - 1)
    shift = middle if codes[0].dtype == torch.int8 else 0
    table = None if scheme.values is None else torch.tensor(scheme.values, dtype=torch.float32, device=scales.device)

    def counted(part: Tensor) -> Tensor:
        return part + shift if table is None else torch.searchsorted(table, part.float(), out_int32=True)

    parts = [in_planes(counted(part).to(torch.uint8), scheme.fine, scheme.width) for part in codes]
    low, high = (None if words[0] is None else torch.cat(words) for words in zip(*parts, strict=True))
    added = zeros.to(scales.dtype) if scheme.added and inner is None else None
    scales = scales if inner is None else inner
    return Planes(low, high, scales, added, codes[0].shape[1], scheme.fine, scheme.width, middle, outer, table)


def product(x: Tensor, layer: Fused, parts: bool) -> Tensor:
    """The product on a GPU: [T, outputs], or with `parts` as many as packed_planes.py likes, to be added up."""
    weight = layer.packed
    shape = {"inputs": layer.inputs, "outputs": layer.outputs, "bits": weight.bits}
    if x.shape[0] <= choose("planes_product", x, {"PLANES_ROWS": MOST_ROWS}, **shape)["PLANES_ROWS"]:
        return packed_planes(x, weight, layer.bias, parts=parts)
    return F.linear(x, planes_dense(weight, x.dtype), layer.bias)


def dense(weight: Packed | Planes, dtype: torch.dtype) -> Tensor:
    """The numbers of a matrix, however it is packed."""
    return planes_dense(weight, dtype) if isinstance(weight, Planes) else packed_dense(weight, dtype)
