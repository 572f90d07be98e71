"""What is reported beside the tokens: log-probabilities of the chosen token and of the most likely ones.

Numbers stay on the device until somebody asks for `records`; by then the runner has copied them. Rows of one batch may
ask for different numbers of alternatives: all get the largest number, and each record is cut to what its row asked.

Before: kernels/{logprobs,top_tokens}.py.  After: sampler.py; the records go to the scheduler in step.py's words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ..kernels.logprobs import logprobs
from ..kernels.top_tokens import top_tokens
from ..step import TokenLogprobs
from .params import upload

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@frozen(eq=False)
class NamedIds:
    """Tokens that rows want reported at any rank: ids [R, E] int32, -1 for none; widths: how many each row named."""

    widths: tuple[int, ...]
    ids: Tensor = field(repr=False)

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], device: torch.device) -> NamedIds | None:
        """From one list of ids per row; None when all are empty."""
        widths = tuple(map(len, lists))
        if not any(widths):
            return None
        ids = np.full((len(lists), max(widths)), -1, dtype=np.int32)
        for row, named in zip(ids, lists, strict=True):
            row[: len(named)] = named
        return cls(widths, upload(ids, device))


@frozen(eq=False)
class Asked:
    """What NamedIds asked for: values [R, E] float32, -inf where no token was named."""

    widths: tuple[int, ...]
    values: Tensor = field(repr=False)

    def lists(self) -> list[tuple[float, ...]]:
        """The values of each row, in the order of its ids."""
        return [tuple(row[:width]) for row, width in zip(self.values.tolist(), self.widths, strict=True)]


@frozen(eq=False)
class TokenReports:
    """R reported tokens.

    Args:
        rows: the logit row of each, for the host.   counts: how many alternatives each record shows.
        tokens: [R] int.   values: [R] float32, log-probability (or logit, by mode).   ranks: [R] int32, 1 = best.
        top_ids: [R, k] int32.   top_values: [R, k] float32, best first; k is the largest count.
        asked: what the rows named themselves, None if no row did.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    ranks: Tensor = field(repr=False)
    top_ids: Tensor = field(repr=False)
    top_values: Tensor = field(repr=False)
    asked: Asked | None = None

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> TokenReports:
        """The same with the tensors on another device."""
        names = ("tokens", "values", "ranks", "top_ids", "top_values")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        if self.asked is not None:
            values = self.asked.values.to(device, non_blocking=non_blocking)
            moved["asked"] = evolve(self.asked, values=values)
        return evolve(self, **moved)

    def records(self) -> list[TokenLogprobs]:
        """One record per reported token, in the order of `rows`. Waits for the device if the tensors are not here."""
        return [
            TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]), asked)
            for count, token, value, rank, ids, values, asked in zip(
                self.counts,
                self.tokens.tolist(),
                self.values.tolist(),
                self.ranks.tolist(),
                self.top_ids.tolist(),
                self.top_values.tolist(),
                self.asked.lists() if self.asked is not None else [()] * len(self.rows),
                strict=True,
            )
        ]


def report(
    logits: Tensor,
    tokens: Tensor,
    counts: Sequence[int],
    rows: Sequence[int] | None = None,
    *,
    normalised: bool = True,
    named: NamedIds | None = None,
) -> TokenReports:
    """Report one token per row.

    Args:
        logits: [L, V] of any floating type; not changed.
        tokens: [R] int, the token to report in each row.
        counts: R numbers of alternatives, -1 for the whole vocabulary.
        rows: which R rows of the logits; None for all of them in order.
        normalised: report log-probabilities; False: the logits as they are.
        named: tokens of each of the R rows that are reported in any case.
    """
    L, V = logits.shape
    counts = tuple(V if count < 0 else min(count, V) for count in counts)
    every = rows is None or len(rows) == L
    index = None if every else upload(rows, logits.device)
    scores = logprobs(logits, tokens, index)
    top = top_tokens(logits, max(counts, default=0), index)
    if normalised:
        values, top_values = scores.logprob, top.logits - scores.log_z[:, None]
    else:
        values, top_values = _picked(logits, tokens[:, None], index)[:, 0], top.logits
    asked = None
    if named is not None:
        found = _picked(logits, named.ids, index)
        found = found - scores.log_z[:, None] if normalised else found
        asked = Asked(named.widths, found.masked_fill(named.ids < 0, float("-inf")))
    numbers = tuple(range(L)) if rows is None else tuple(rows)
    return TokenReports(numbers, counts, tokens, values, scores.rank, top.ids, top_values, asked)


def _picked(logits: Tensor, ids: Tensor, index: Tensor | None) -> Tensor:
    """[R, E] float32: the logits of ids [R, E] in the rows `index` [R] (None: all); of any id for what is none."""
    rows = torch.arange(len(logits), device=logits.device) if index is None else index
    return logits[rows[:, None], ids.long().clamp(0, logits.shape[1] - 1)].float()
