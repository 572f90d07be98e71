"""The choice of tokens of a step in which grammars hold every row, recorded as a graph of its own.

    forward of step k+1      ================ graph ================
    masks                          tokens of step k -> masks -> bits
    choice                                                         '-> copy, == graph ==   masks, draw, tokens kept

The choice behind a forward is four kernels. One by one they take the host half a millisecond, a third of a step of a
small model; replayed, next to nothing. The graph reads masks from a place of its own, one for each logit row, so it
serves decodes whose rows are all held, in the order of the step, and ask for nothing else. Others are launched.

Before: graphs.py, sampling/sampler.py.  After: runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.token_mask import token_mask
from ..sampling.sampler import Sampler
from .batch import Shape, Views
from .graphs import Computed, Graphs


class HeldChoice:
    """Masks where graphs find them.

    Args:
        sampler, graphs: the runner's.   device: of the logits.
        words: W, of 32 tokens each, in a mask; 0: as many as the sampler's vocabulary has.
    """

    def __init__(self, sampler: Sampler, graphs: Graphs, words: int, device: torch.device) -> None:
        self._sampler = sampler
        self._graphs = graphs
        most = max((shape.seqs for shape in graphs.shapes() if shape.is_decode), default=0)
        words = words or -(-sampler.vocab_size // 32)
        self._bits = torch.full((most, words), -1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, dtype=torch.int32, device=device)

    def choice(self, views: Views, keep: Callable[..., None]) -> Callable[[Computed], None]:
        """What a graph is to do behind a forward of these buffers, with the masks sent last; it edits the logits.

        keep: ends the step with tokens, Runner._keep.
        """
        bits, rows = (part[: views.shape.seqs] for part in (self._bits, self._rows))

        def choose(computed: Computed) -> None:
            token_mask(computed.logits, bits, rows)
            tokens, bad = self._sampler.choose(computed.logits, views.values, views.seq_lens, filters=True)
            keep(tokens, bad, views, late=True)

        return choose

    def replay(self, masks: Any, slots: Sequence[int], shape: Shape) -> bool:
        """Queue the graph of the choice behind a forward of `shape`, for these rows. False: none fits, nothing is done.

        masks: grammar/mask.Masks; waited for.
        """
        if masks is None or not self._graphs.chooses(shape) or self._sampler.asks(slots).more:
            return False
        bits = masks.result()
        if masks.slots != tuple(slots) or bits.shape[1] != self._bits.shape[1]:
            return False
        self._bits[: len(bits)].copy_(torch.from_numpy(bits), non_blocking=True)
        self._graphs.choose(shape)
        return True
