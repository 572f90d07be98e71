"""Log-probabilities of prompt tokens, for the rows that ask for them.

    hidden states of a piece of a prompt -> logits, some rows at a time -> reports of the tokens that follow

Before: slots.py (who asks), sampling/sampler.py (makes reports).  After: runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..step import SeqSlice
from .slots import Rows

PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits exist at once: 256 x 152k x 4 bytes = 156 MB


def scored(pieces: Sequence[SeqSlice], rows: Rows) -> list[int]:
    """Which pieces hold prompt positions whose next token's log-probability was asked for."""
    return [
        i
        for i, piece in enumerate(pieces if rows.scored else ())
        if piece.slot in rows.scored
        and max(piece.start, rows.params[piece.slot].scores_from()) < min(piece.end, rows.prompt_lens[piece.slot] - 1)
    ]


def score_all(
    hidden: torch.Tensor, pieces: Sequence[SeqSlice], order: Sequence[int], rows: Rows, model: Any, sampler: Any
) -> dict[int, list[Any]]:
    """The reports of all pieces that have any, by the slice that they are of: order[index of the piece]."""
    return {order[i]: _score(hidden, pieces, i, rows, model, sampler) for i in scored(pieces, rows)}


def _score(
    hidden: torch.Tensor, pieces: Sequence[SeqSlice], index: int, rows: Rows, model: Any, sampler: Any
) -> list[Any]:
    """Log-probabilities of the prompt tokens that follow the positions of piece `index`, some rows at a time.

    hidden: [T, H] or longer, the positions of all pieces one after the other.
    """
    piece = pieces[index]
    params = rows.params[piece.slot]
    stop = min(piece.end, rows.prompt_lens[piece.slot] - 1)
    offset = sum(before.count for before in pieces[:index]) - piece.start
    scores = []
    for start in range(max(piece.start, params.scores_from()), stop, PROMPT_LOGPROB_ROWS):
        end = min(start + PROMPT_LOGPROB_ROWS, stop)
        logits = model.logits(hidden[offset + start : offset + end])
        targets = rows.tokens[piece.slot, start + 1 : end + 1]
        before = max(0, params.prompt_start - start)  # positions here whose row was not asked for
        ids = [()] * before + list(params.prompt_ids[start + before - params.prompt_start :][: end - start - before])
        report = sampler.prompt_logprobs(logits, targets, params.prompt_logprobs or 0, ids if any(ids) else ())
        scores.append(report if hidden.is_cpu else report.to("cpu", non_blocking=True))
    return scores
