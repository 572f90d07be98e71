"""What the device remembers of every running request, one row each.

    tokens   [N, W] int32    all tokens of the row: prompt, then output; position p of the row is tokens[row, p]
    tables   [G, N, B] int32 KV group g keeps positions p of the row in block tables[g, row, p // block_size]

The host writes prompts and block-table differences; the sampler writes output tokens on the device. That is why a step
can be launched before the host knows the tokens of the step before: its input token is already in the row, or will be
when the kernels of the earlier step have run.

N rows, W = max_model_len + 1 (the token after the last position may still be written), B blocks of the longest row.

Before: step.py (the differences).  After: runner/batch.py (reads the rows of one step).
"""

from __future__ import annotations

import numpy as np
import torch

from ..step import RowParams, StepInput


class Rows:
    """The per-request state on the device.

    Args:
        rows: N, how many requests can be open at once.
        max_model_len: most positions of a row.
        groups: G, number of KV groups.   block_size: positions of a block.
        device: where the tensors live.
    """

    def __init__(self, rows: int, max_model_len: int, groups: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.tokens = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)  # [N, W]
        blocks = -(-max_model_len // block_size)
        self.tables = torch.zeros(groups, rows, blocks, dtype=torch.int32, device=device)  # [G, N, B]
        self.prompt_lens = [0] * rows
        self.params: list[RowParams | None] = [None] * rows

    def apply(self, step: StepInput) -> None:
        """Take over a step's differences: rows closed and opened, blocks added."""
        for slot in step.closed:
            self.params[slot] = None
        for opening in step.opened:
            self.prompt_lens[opening.slot] = opening.prompt_len
            self.params[opening.slot] = opening.params
            self._put(self.tokens[opening.slot], 0, opening.tokens)
        if step.edits:
            self._edit_tables(step)

    def _put(self, row: torch.Tensor, start: int, values: tuple[int, ...]) -> None:
        row[start : start + len(values)] = torch.from_numpy(np.array(values, dtype=np.int32)).to(row.device)

    def _edit_tables(self, step: StepInput) -> None:
        """One scatter for all edits of the step: a decode batch adds a block to one row in `block_size`."""
        _, rows, width = self.tables.shape
        counts = [len(edit.blocks) for edit in step.edits]
        firsts = [(edit.group * rows + edit.slot) * width + edit.start for edit in step.edits]
        blocks = np.concatenate([np.array(edit.blocks, dtype=np.int32) for edit in step.edits])
        ends = np.cumsum(counts)
        where = np.arange(ends[-1]) + np.repeat(np.array(firsts, dtype=np.int64) - ends + counts, counts)
        device = self.tables.device
        self.tables.view(-1)[torch.from_numpy(where).to(device)] = torch.from_numpy(blocks).to(device)
