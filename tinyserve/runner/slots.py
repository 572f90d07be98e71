"""What the device remembers of every running request, one row each.

    tokens   [N, W] int32    all tokens of the row: prompt, then output; position p of the row is tokens[row, p]
    adapters [N] int32       place of the adapter that the row wears, + 1; 0 for none
    tables   [G, N, B] int32 KV group g keeps positions p of the row in block tables[g, row, p // block_size]

The host writes prompts and block-table differences; the sampler writes output tokens on the device. That is why a step
can be launched before the host knows the tokens of the step before: its input token is already in the row, or will be
when the kernels of the earlier step have run.

All lie in one piece of memory, so that all differences of a step are pairs (place, number) that one scatter applies.

N rows, the last one spare: padding of a batch reads and writes there. W = max_model_len + 1 (the token after the last
position may still be written), B blocks of the longest row.

Before: step.py (the differences).  After: runner/batch.py (brings them to the device, reads the rows of one step).
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from ..step import RowParams, StepInput

ALIGN = 16  # numbers: kernels are compiled anew for pointers that are not at a multiple of 16 bytes


@frozen(eq=False)
class Differences:
    """Numbers to write: where [n] int64, places in `Rows.state`; values [n] int32. No place occurs twice."""

    where: np.ndarray
    values: np.ndarray


class Rows:
    """The per-request state on the device.

    Args:
        rows: N - 1, how many requests can be open at once.
        max_model_len: most positions of a row.
        groups: G, number of KV groups.   block_size: positions of a block.
        device: where the tensors live.
    """

    def __init__(self, rows: int, max_model_len: int, groups: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.spare = rows
        count, width, blocks = rows + 1, max_model_len + 1, -(-max_model_len // block_size)
        self._tables_at = -(-count * width // ALIGN) * ALIGN
        self._adapters_at = self._tables_at + groups * count * blocks
        self.state = torch.zeros(self._adapters_at + count, dtype=torch.int32, device=device)
        self.tokens = self.state[: count * width].view(count, width)  # [N, W]
        self.tables = self.state[self._tables_at : self._adapters_at].view(groups, count, blocks)  # [G, N, B]
        self.adapters = self.state[self._adapters_at :]  # [N]
        self._worn = [0] * count  # what the device has there
        self.prompt_lens = [0] * (rows + 1)
        self.params: list[RowParams | None] = [None] * rows
        self.scored: set[int] = set()  # rows that ask about their prompt
        self.pooled: set[int] = set()  # rows that want a hidden state
        self.adapted: set[int] = set()  # rows that wear an adapter

    def take(self, step: StepInput) -> Differences | None:
        """Book what the host itself remembers of rows; return what the device must be told, None if nothing."""
        for slot in step.closed:
            self.params[slot] = None
            self.scored.discard(slot)
            self.pooled.discard(slot)
            self.adapted.discard(slot)
        if not (step.opened or step.edits):
            return None
        width, (_, rows, blocks) = self.tokens.shape[1], self.tables.shape
        if not step.opened:  # a few blocks: Python is faster than numpy with so little
            where, values = [], []
            for edit in step.edits:
                first = self._tables_at + (edit.group * rows + edit.slot) * blocks + edit.start
                where += range(first, first + len(edit.blocks))
                values += edit.blocks
            return Differences(np.array(where, dtype=np.int64), np.array(values, dtype=np.int32))
        firsts, parts = [], []
        for opening in step.opened:
            self.prompt_lens[opening.slot] = opening.prompt_len
            self.params[opening.slot] = opening.params
            if opening.params.scores_from() is not None:
                self.scored.add(opening.slot)
            if opening.params.pooled:
                self.pooled.add(opening.slot)
            firsts.append(opening.slot * width)
            parts.append(opening.tokens)
            if opening.params.adapter:
                self.adapted.add(opening.slot)
            if opening.params.adapter != self._worn[opening.slot]:
                self._worn[opening.slot] = opening.params.adapter
                firsts.append(self._adapters_at + opening.slot)
                parts.append((opening.params.adapter,))
        for edit in step.edits:
            firsts.append(self._tables_at + (edit.group * rows + edit.slot) * blocks + edit.start)
            parts.append(edit.blocks)
        counts = np.fromiter(map(len, parts), np.int64, len(parts))
        ends = np.cumsum(counts)
        where = np.arange(ends[-1]) + np.repeat(np.array(firsts, dtype=np.int64) - ends + counts, counts)
        return Differences(where, np.concatenate([np.array(part, dtype=np.int32) for part in parts]))

    def write(self, differences: Differences | None) -> None:
        """Apply differences that come from the host by themselves, through pinned memory on a device."""
        if differences is None:
            return
        where, values = torch.from_numpy(differences.where), torch.from_numpy(differences.values)
        if not self.state.is_cpu:
            where, values = (part.pin_memory().to(self.state.device, non_blocking=True) for part in (where, values))
        self.scatter(where, values)

    def scatter(self, where: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [n] int32 at where [n] int64, both on the device."""
        self.state.scatter_(0, where, values)
