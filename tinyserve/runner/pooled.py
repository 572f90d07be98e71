"""Hidden states that requests want instead of a text: of the last token of their prompt.

The model has computed it to choose the next token; here it is only copied before the step's memory is used again. A
decoder looks back only, so its last token is the one that has seen the whole prompt.

Before: step.py (RowParams.pooled).  After: runner.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch

from ..step import SeqSlice


def wanted(pieces: Sequence[SeqSlice], slots: Collection[int]) -> list[int]:
    """Which pieces end a prompt of a row in `slots`."""
    return [index for index, piece in enumerate(pieces) if piece.slot in slots and piece.samples] if slots else []


def pooled(hidden: torch.Tensor, pieces: Sequence[SeqSlice], which: Sequence[int]) -> Mapping[int, torch.Tensor]:
    """For each of the pieces `which` its vector [H] float32, on its way to the host.

    hidden: [T, H] or longer, the positions of all pieces one after the other.
    """
    ends = list(accumulate(piece.count for piece in pieces))
    rows = torch.stack([hidden[ends[index] - 1] for index in which]).float().to("cpu", non_blocking=True)
    return dict(zip(which, rows, strict=True))
