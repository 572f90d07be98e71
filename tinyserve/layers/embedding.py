"""The table that turns token ids into vectors.

Before: kernels/embedding.py.  After: models/decoder.py; a tied head multiplies by the same table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.embedding import embed
from ..quant.format import Stored, place


class Embedding(nn.Module):
    """One vector a token.

    Args:
        vocab_size: rows of the table.
        hidden: its columns.
        scale: factor on the vectors; Gemma's sqrt(hidden). It is rounded to the dtype of the table first, because that
            is how those models were trained.
    """

    names = ("weight",)

    def __init__(self, vocab_size: int, hidden: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.parts = (vocab_size,)
        self.hidden = hidden
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden, device="meta"), False)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored table must have."""
        return tuple(self.weight.shape)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the table, uninitialised."""
        self.scale = torch.tensor(self.scale, dtype=dtype).item()
        self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=dtype, device=device), False)

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the table."""
        place(self.weight, stored)

    def finish(self) -> None:
        """Nothing to pack."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[T] int -> [T, H]"""
        return embed(tokens, self.weight, scale=self.scale)


class Positions(nn.Module):
    """A learned vector for each position, added to the embedded tokens.

    Args:
        count: positions.
        hidden: size of the stream.
        unused: rows of the stored table before that of position 0.
    """

    def __init__(self, count: int, hidden: int, *, unused: int = 0) -> None:
        super().__init__()
        self.table = Embedding(count + unused, hidden)
        self.unused = unused

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, H], [T] int -> [T, H]"""
        return x + self.table(positions + self.unused)
