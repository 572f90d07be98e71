"""The sampling numbers of every request row, on the device, written in batches.

A row's numbers are written once, when its request starts, and read every step. They live in one int32 table [columns,
slots] (floats as their bits, the seed as two words), so that all rows opened since the last step travel in ONE copy,
and the numbers of a step's rows are ONE gather: the runner's, together with all else that a step reads of its rows, or
`gather` here, whose tensors are reused while the batch stays the same.

Lists of any length (bias, allowed ids, bad words) are not here: `transforms.py` keeps them, for rows that have them.

Before: step.py (RowParams).  After: transforms.py and sampler.py, which read `RowValues`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from ..step import RowParams

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
COLUMNS = (*FLOATS, "top_k", "prompt_len", "seed_low", "seed_high")
TOP_K_MAX = 2**31 - 1


def upload(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Integers to the device as int32, without waiting for it: through pinned memory, unless the device is the CPU."""
    host = torch.from_numpy(np.asarray(values, dtype=np.int32))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@frozen(eq=False)
class RowValues:
    """The numbers of a step's L rows, in order, all [L]: slots, top_k, prompt_len int32, seeds int64, else float32."""

    slots: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    top_k: Tensor
    prompt_len: Tensor
    seeds: Tensor

    @classmethod
    def of(cls, slots: Tensor, columns: Tensor, seeds: Tensor) -> RowValues:
        """Views of gathered columns [C - 2, L] int32, in the order of COLUMNS; nothing is read yet."""
        return cls(slots, *columns[: len(FLOATS)].view(torch.float32), *columns[len(FLOATS) :], seeds)


class ParamTable:
    """One column of numbers per request row, and a last one of zeros for rows of padding: those are greedy.

    Args:
        slots: number of request rows.   device: where the table lives.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.table = torch.zeros(len(COLUMNS), slots + 1, dtype=torch.int32, device=device)
        self._staged: dict[int, np.ndarray] = {}
        self._last_slots: tuple[int, ...] | None = None
        self._last: RowValues | None = None

    def write(self, slot: int, prompt_len: int, params: RowParams) -> None:
        """Stage a row's numbers; the next `gather` sees them."""
        column = np.empty(len(COLUMNS), dtype=np.int32)
        column[: len(FLOATS)] = np.array([getattr(params, name) for name in FLOATS], dtype=np.float32).view(np.int32)
        column[len(FLOATS) : -2] = min(params.top_k, TOP_K_MAX), prompt_len
        column[-2:] = np.array([params.seed], dtype="<i8").view("<i4")
        self._staged[slot] = column

    def gather(self, slots: tuple[int, ...]) -> RowValues:
        """The numbers of these rows, in this order. The tensors must not be changed."""
        if not self._staged and slots == self._last_slots and self._last is not None:
            return self._last
        self.flush()
        L = len(slots)
        # Padded to 16 bytes: Triton compiles a kernel anew when a pointer's alignment changes, so it must not follow L.
        index = upload(slots + (0,) * (-L % 4), self.table.device)
        rows = self.table.index_select(1, index)[:, :L]  # [columns, L]
        low, high = rows[-2:]
        seeds = (high.long() << 32) | (low.long() & 0xFFFFFFFF)
        self._last_slots, self._last = slots, RowValues.of(index[:L], rows[:-2], seeds)
        return self._last

    def flush(self) -> None:
        """Bring what was staged to the device: row numbers and columns in one copy."""
        if not self._staged:
            return
        packed = np.vstack([np.fromiter(self._staged, dtype=np.int32), np.stack(list(self._staged.values()), axis=1)])
        block = upload(packed, self.table.device)
        self.table.index_copy_(1, block[0].long(), block[1:])
        self._staged.clear()
        self._last = None
