"""What is reported beside the tokens: log-probabilities of the chosen token and of the most likely ones.

Numbers stay on the device until somebody asks for `records`; by then the runner has copied them. Rows of one batch may
ask for different numbers of alternatives: all get the largest number, and each record is cut to what its row asked.

Before: kernels/logprobs.py.  After: sampler.py; the records go to the scheduler in step.py's words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ..kernels.logprobs import logprobs, top_tokens
from ..step import TokenLogprobs
from .params import upload

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@frozen(eq=False)
class TokenReports:
    """R reported tokens.

    Args:
        rows: the logit row of each, for the host.   counts: how many alternatives each record shows.
        tokens: [R] int.   values: [R] float32, log-probability (or logit, by mode).   ranks: [R] int32, 1 = best.
        top_ids: [R, k] int32.   top_values: [R, k] float32, best first; k is the largest count.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    ranks: Tensor = field(repr=False)
    top_ids: Tensor = field(repr=False)
    top_values: Tensor = field(repr=False)

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> TokenReports:
        """The same with the tensors on another device."""
        names = ("tokens", "values", "ranks", "top_ids", "top_values")
        return evolve(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})

    def records(self) -> list[TokenLogprobs]:
        """One record per reported token, in the order of `rows`. Waits for the device if the tensors are not here."""
        return [
            TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(values[:count]))
            for count, token, value, rank, ids, values in zip(
                self.counts,
                self.tokens.tolist(),
                self.values.tolist(),
                self.ranks.tolist(),
                self.top_ids.tolist(),
                self.top_values.tolist(),
                strict=True,
            )
        ]


def report(
    logits: Tensor, tokens: Tensor, counts: Sequence[int], rows: Sequence[int] | None = None, *, normalised: bool = True
) -> TokenReports:
    """Report one token per row.

    Args:
        logits: [L, V] of any floating type; not changed.
        tokens: [R] int, the token to report in each row.
        counts: R numbers of alternatives, -1 for the whole vocabulary.
        rows: which R rows of the logits; None for all of them in order.
        normalised: report log-probabilities; False: the logits as they are.
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
        picked = torch.arange(L, device=logits.device) if index is None else index
        values, top_values = logits[picked, tokens.long()].float(), top.logits
    return TokenReports(
        tuple(range(L)) if rows is None else tuple(rows), counts, tokens, values, scores.rank, top.ids, top_values
    )
