"""The table that turns token ids into vectors.

On a GPU a table that a GGUF file keeps in blocks stays codes, as linear layers do (quant/grouped.py): the codes of the
step's tokens are gathered and made numbers. A tied head multiplies by the same codes.

Before: kernels/embedding.py, quant/grouped.py.  After: models/decoder.py; a tied head multiplies by the same table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels.embedding import embed
from ..kernels.packed import Packed
from ..kernels.packed_planes import Planes
from ..quant.format import Stored, WeightFormat, place
from ..quant.grouped import Grouped
from ..quant.planes import dense

if TYPE_CHECKING:
    from .linear import Linear


class Embedding(nn.Module):
    """One vector a token.

    Args:
        vocab_size: rows of the table.
        hidden: its columns.
        scale: factor on the vectors; Gemma's sqrt(hidden). It is rounded to the dtype of the table first, because that
            is how those models were trained.
    """

    names = ("weight",)
    bias = None

    def __init__(self, vocab_size: int, hidden: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.parts = (vocab_size,)
        self.hidden = hidden
        self.scale = scale
        self.kept: Grouped | None = None
        self.packed: Packed | Planes | None = None
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden, device="meta"), False)

    def shape(self, name: str, part: int) -> tuple[int, ...]:
        """Return the shape that the stored table must have."""
        return (*self.parts, self.hidden)

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the table, uninitialised."""
        self.scale = torch.tensor(self.scale, dtype=dtype).item()
        rows = self.parts[0] if self.kept is None else 0
        self.weight = nn.Parameter(torch.empty(rows, self.hidden, dtype=dtype, device=device), False)
        if self.kept is not None:
            self.kept.create(self)

    @property
    def inputs(self) -> int:
        """Columns of the table, as formats call them."""
        return self.hidden

    @property
    def outputs(self) -> int:
        """Rows of the table, as formats call them."""
        return self.parts[0]

    def keep(self, format: WeightFormat) -> None:
        """Be told what was chosen for the table, before `allocate`: the codes of GGUF blocks stay codes."""
        self.kept = format if isinstance(format, Grouped) and format.scheme.blocks else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the vectors."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.weight.device

    def load(self, name: str, part: int, stored: Stored) -> None:
        """Fill the table."""
        if self.kept is None:
            place(self.weight, stored)
        else:
            self.kept.load(self, name, part, stored)

    def finish(self) -> None:
        """Pack the table if it is codes."""
        if self.kept is not None:
            self.kept.finish(self)

    def lend(self, head: Linear) -> None:
        """Let a tied head multiply by this table."""
        if self.packed is None:
            head.share(self.weight)
        else:
            head.borrow(self.kept, self)

    def forward(self, tokens: Tensor) -> Tensor:
        """[T] int -> [T, H]"""
        if self.packed is None:
            return embed(tokens, self.weight, scale=self.scale)
        known = (tokens >= 0) & (tokens < self.parts[0])
        rows = self.packed.take(torch.where(known, tokens, 0))
        vectors = dense(rows, torch.float32) * self.scale
        return vectors.masked_fill_(~known[:, None], float("nan")).to(self.dtype)


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
