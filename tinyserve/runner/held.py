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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..device import Device
from ..kernels.token_mask import token_mask
from ..sampling.params import upload
from ..sampling.sampler import Sampler
from .batch import Shape, Views
from .graphs import Computed, Graphs


class HeldChoice:
    """Masks where graphs find them.

    Args:
        sampler, graphs: the runner's.   device: of the logits, which gets masks while the forward still runs.
        words: W, of 32 tokens each, in a mask; 0: as many as the sampler's vocabulary has.
    """

    def __init__(self, sampler: Sampler, graphs: Graphs, words: int, device: Device) -> None:
        self._sampler = sampler
        self._graphs = graphs
        most = max((shape.seqs for shape in graphs.shapes() if shape.is_decode), default=0)
        words = words or -(-sampler.vocab_size // 32)
        self._beside = device.beside()
        self._bits = torch.full((most, words), -1, dtype=torch.int32, device=device.torch)
        self._apart = torch.empty_like(self._bits)  # masks that are not in the order of the step
        self._places: Any = None
        self._order = torch.zeros(0, dtype=torch.int32, device=device.torch)  # the same on the device
        self._rows = torch.arange(most, dtype=torch.int32, device=device.torch)

    def choice(self, views: Views, keep: Callable[..., None]) -> Callable[[Computed], None]:
        """What a graph is to do behind a forward of these buffers, with the masks sent last; it edits the logits.

        keep: ends the step with tokens, Runner._keep.
        """
        bits, rows = (part[: views.shape.seqs] for part in (self._bits, self._rows))

        return lambda computed: self._choose(computed, views, bits, rows, keep)

    def replay(self, masks: Any, slots: Sequence[int], shape: Shape) -> bool:
        """Queue the graph of the choice behind a forward of `shape`, for these rows. False: none fits, nothing is done.

        masks: grammar/mask.Masks; waited for.
        """
        if masks is None or not self._graphs.chooses(shape) or self._sampler.asks(slots).more:
            return False
        bits, places = masks.placed()
        if masks.slots != tuple(slots) or bits.shape[1] != self._bits.shape[1]:
            return False
        if len(bits) > len(self._bits):
            bits, places = masks.result(), None
        with self._beside():  # who read the masks of the step before has ended: its tokens are known
            ordered = self._bits if places is None else self._apart
            ordered[: len(bits)].copy_(torch.from_numpy(bits), non_blocking=True)
            if places is not None:
                self._gather(places)
        self._graphs.choose(shape)
        return True

    def launch(
        self, masks: Any, places: Mapping[int, int], computed: Computed, views: Views, keep: Callable[..., None]
    ) -> None:
        """Launch what such a graph does, behind one of a forward of prompts, too. places: of each row's logits."""
        bits = torch.from_numpy(masks.result())
        there = bits.clone() if computed.logits.is_cpu else bits.to(computed.logits.device, non_blocking=True)
        self._choose(computed, views, there, upload([places[slot] for slot in masks.slots], there.device), keep)

    def _choose(self, computed: Computed, views: Views, bits: torch.Tensor, rows: torch.Tensor, keep: Any) -> None:
        token_mask(computed.logits, bits, rows)
        tokens, bad = self._sampler.choose(computed.logits, views.values, views.seq_lens, filters=True)
        keep(tokens, bad, views, late=True)

    def _gather(self, places: np.ndarray) -> None:
        """Put masks in order; the places change with the rows of a step, and are sent then."""
        if places is not self._places:
            self._places, self._order = places, upload(places.tolist(), self._bits.device)
        torch.index_select(self._apart, 0, self._order, out=self._bits[: len(places)])
