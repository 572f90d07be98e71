"""One learned vector that is not the weight of a norm: attention sinks, the correction bias of a router.

Before: quant/format.py (Stored).  After: layers/attention.py, layers/routing.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..quant.format import Stored


class Vector(nn.Module):
    """A vector under a name of its own.

    Args:
        name: of the tensor inside its checkpoint module, such as "sinks".
        size: how many numbers.
        dtype: kept in this type whatever the activations are; None: in theirs.
        stored: the shape in the checkpoint, when it is not (size,).
    """

    def __init__(
        self, name: str, size: int, *, dtype: torch.dtype | None = None, stored: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.names = (name,)
        self.parts = (size,)
        self.dtype = dtype
        self.stored = stored or (size,)
        self.value: Tensor = nn.Parameter(torch.empty(size, device="meta"), False)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored vector must have."""
        return self.stored

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the vector, uninitialised."""
        self.value = nn.Parameter(torch.empty(self.parts, dtype=self.dtype or dtype, device=device), False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the vector."""
        self.value.copy_(stored.read(self.value.dtype).flatten())

    def finish(self) -> None:
        """Nothing to pack."""
