"""Choose the next token of every row of a step.

    logits --grammar mask--> raw --transforms--> processed --threshold--> --temperature, draw--> tokens
                              |                      |
                              +--- raw_logprobs      +--- processed_logprobs        (what is reported, by mode)

The host's part is to know which rows ask for what; it is worked out when the batch changes, and reused while it stays
the same. Everything that depends on tokens (penalties, min_tokens, bad words) is read on the device from the token
table, so a step can be launched before the host has seen the tokens of the one before, and a request that was preempted
and came back is treated as if nothing had happened.

Nothing here waits for the device, except `Sampled.to_host`.

Before: transforms.py, logprobs.py, kernels/threshold.py, kernels/sample.py.  After: runner/runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from ..kernels.sample import sample
from ..kernels.threshold import threshold
from ..kernels.token_mask import token_mask
from ..step import RowParams, TokenLogprobs
from .logprobs import MODES, NamedIds, TokenReports, report
from .params import ParamTable, RowValues, upload
from .transforms import Context, Transform, standard


@frozen(eq=False)
class GrammarMask:
    """What grammars allow now: bits [R, ceil(V / 32)] int32, set = allowed, for the logit rows `rows` [R] int."""

    bits: Tensor
    rows: Tensor

    @classmethod
    def of(cls, bits: np.ndarray, masked: Sequence[int], slots: Sequence[int], device: torch.device) -> GrammarMask:
        """From the masks [M, W] of the request rows `masked`, for logits of the request rows `slots`, M of them these.

        Nothing waits for the device, and bits in pinned memory are not copied on the way.
        """
        place = {slot: row for row, slot in enumerate(slots)}
        rows = upload([place[slot] for slot in masked], device)
        host = torch.from_numpy(bits)
        there = host.clone() if device.type == "cpu" else host.to(device, non_blocking=True)
        return cls(there, rows)


@frozen(eq=False)
class Sampled:
    """The tokens of a step, still on the device.

    Args:
        tokens: [L] int32.   bad: [L] bool, the row held NaN, +inf or nothing above -inf; its token must not be used.
        reports: log-probabilities of the rows that asked; None if none did.
    """

    tokens: Tensor
    bad: Tensor
    reports: TokenReports | None = None

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Sampled:
        """The same on another device; with `non_blocking` the caller waits for the copies before `to_host`."""
        move = {"device": device, "non_blocking": non_blocking}
        reports = self.reports.to(**move) if self.reports is not None else None
        return evolve(self, tokens=self.tokens.to(**move), bad=self.bad.to(**move), reports=reports)

    def to_host(self) -> tuple[list[int], list[bool], list[TokenLogprobs | None]]:
        """Tokens, bad flags and records, one each per row; a record is None for rows that did not ask or are bad."""
        bad = self.bad.tolist()
        records: list[TokenLogprobs | None] = [None] * len(bad)
        if self.reports is not None:
            for row, record in zip(self.reports.rows, self.reports.records(), strict=True):
                records[row] = None if bad[row] else record
        return self.tokens.tolist(), bad, records


@frozen
class Asks:
    """What a batch asks for. filters: top-k, top-p or min-p; more: edits of logits or log-probabilities."""

    filters: bool
    more: bool


@frozen(eq=False)
class _Plan:
    """What the rows of a batch ask for: for each transform in use its logit rows, and who wants log-probabilities."""

    uses: tuple[tuple[Transform, tuple[int, ...]], ...]
    filters: bool
    asked: tuple[int, ...]
    counts: tuple[int, ...]
    named: NamedIds | None


class Sampler:
    """Sampling for all request rows of an engine.

    Args:
        slots: number of request rows.   vocab_size: V, columns of the logits.
        max_model_len: most tokens of a row.   device: where logits and token table are.
        logprobs_mode: one of raw_logprobs, processed_logprobs, raw_logits, processed_logits.
        custom: more transforms, applied last.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        max_model_len: int,
        device: str | torch.device,
        *,
        logprobs_mode: str = "raw_logprobs",
        custom: Sequence[Transform] = (),
    ) -> None:
        if logprobs_mode not in MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(MODES)}, got {logprobs_mode!r}")
        device = torch.device(device)
        self._device = device
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._processed = logprobs_mode.startswith("processed")
        self._normalised = logprobs_mode.endswith("logprobs")
        self._table = ParamTable(slots, device)
        self._transforms = [*standard(vocab_size, device), *custom]
        self._params: list[RowParams | None] = [None] * slots
        self._special: set[int] = set()  # open rows that ask for more than a draw
        self._filtered: set[int] = set()  # and those that ask for top-k, top-p or min-p
        self._plan_slots: tuple[int, ...] | None = None
        self._plan: _Plan | None = None

    def open(self, slot: int, prompt_len: int, params: RowParams) -> None:
        """Row `slot` starts, or comes back after a preemption, with `prompt_len` prompt tokens. Seen by the next step.

        Raises:
            ValueError: the prompt does not fit a row.
        """
        if not 0 < prompt_len <= self.max_model_len:
            raise ValueError(f"prompt_len must be in [1, {self.max_model_len}], got {prompt_len}")
        self.close(slot)
        self._table.write(slot, prompt_len, params)
        self._params[slot] = params
        for transform in self._transforms:
            if transform.wants(params):
                transform.open(slot, params)
        if self._is_special(params):
            self._special.add(slot)
        if params.temperature > 0 and self._filters(params):
            self._filtered.add(slot)

    def close(self, slot: int) -> None:
        """Forget row `slot`; nothing happens if it is not open."""
        self._params[slot] = None
        self._plan = None
        self._special.discard(slot)
        self._filtered.discard(slot)
        for transform in self._transforms:
            transform.close(slot)

    @property
    def table(self) -> Tensor:
        """[C, slots + 1] int32, every row's numbers (params.COLUMNS), up to date after `flush`; the last is zeros."""
        return self._table.table

    def flush(self) -> None:
        """Bring what `open` staged to the device."""
        self._table.flush()

    def special(self, slots: Sequence[int], opened: Sequence[RowParams] = ()) -> bool:
        """Whether a row of `slots`, or one that will be `opened`, asks for `more`; may be called by any thread."""
        return not self._special.isdisjoint(slots) or any(map(self._is_special, opened))

    def _is_special(self, params: RowParams) -> bool:
        return params.logprobs is not None or any(transform.wants(params) for transform in self._transforms)

    def asks(self, slots: Sequence[int]) -> Asks:
        """What the open rows `slots` ask for: without `more`, `choose` is all of the sampling."""
        plan = self._plan_of(tuple(slots))
        return Asks(plan.filters, bool(plan.uses or plan.asked))

    def choose(self, logits: Tensor, values: RowValues, positions: Tensor, *, filters: bool) -> tuple[Tensor, Tensor]:
        """Draw one token per row; nothing here depends on which rows they are, so a device graph may hold it.

        Args: logits [L, V], positions [L] as of `sample`; values: the rows' numbers; filters: whether they are looked
            at for top-k, top-p and min-p.
        Returns: tokens [L] int32, bad [L] bool.
        """
        cuts = (values.top_k, values.top_p, values.min_p) if filters else None
        return sample(logits, values.temperature, values.seeds, positions, filters=cuts)

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int] | Tensor,
        tokens: Tensor,
        grammar: GrammarMask | None = None,
        values: RowValues | None = None,
    ) -> Sampled:
        """Choose one token per row.

        Args:
            logits: [L, V], any floating type; given away: float32 logits may be edited in place.
            slots: the open request row of each logit row.
            positions: L numbers, where each new token will stand: how many tokens its row has.
            tokens: [request rows, max_model_len] int32, the token table, known up to the positions.
            grammar: what grammars allow, applied first.
            values: the rows' numbers, if they have been gathered already.
        """
        slots = tuple(slots)
        plan = self._plan_of(slots)
        values = self._table.gather(slots) if values is None else values
        if not isinstance(positions, Tensor):
            positions = upload(positions, logits.device)
        if grammar is not None:
            token_mask(logits, grammar.bits, grammar.rows)
        raw = logits
        if plan.uses:
            keep_raw = bool(plan.asked) and not self._processed
            logits = logits.to(torch.float32, copy=keep_raw)
            context = Context(slots, values, positions, tokens)
            for transform, rows in plan.uses:
                transform.apply(logits, rows, context)
        chosen, bad = self.choose(logits, values, positions, filters=plan.filters)
        if not plan.asked:
            return Sampled(chosen, bad)
        return Sampled(chosen, bad, self._report(plan, raw, logits, values, chosen))

    def prompt_logprobs(
        self, logits: Tensor, targets: Tensor, count: int, ids: Sequence[Sequence[int]] = ()
    ) -> TokenReports:
        """Report prompt tokens: `targets` [R] are the tokens that follow the positions of `logits` [R, V].

        ids: R lists of tokens that are reported besides, -1 for none; () when there are none at all.

        They are never processed: penalties and temperature have no meaning for tokens that were given.
        """
        named = NamedIds.of(ids, logits.device)
        return report(logits, targets, [count] * len(logits), normalised=self._normalised, named=named)

    def _plan_of(self, slots: tuple[int, ...]) -> _Plan:
        if self._plan is not None and slots == self._plan_slots:
            return self._plan
        params = [self._params[slot] for slot in slots]
        if None in params:
            raise ValueError(f"row {slots[params.index(None)]} is not open")
        self._plan_slots = slots
        filters = not self._filtered.isdisjoint(slots)
        if self._special.isdisjoint(slots):
            self._plan = _Plan((), filters, (), (), None)
            return self._plan
        uses = ((t, tuple(row for row, p in enumerate(params) if t.wants(p))) for t in self._transforms)
        asked = tuple(row for row, p in enumerate(params) if p.logprobs is not None)
        self._plan = _Plan(
            uses=tuple((transform, rows) for transform, rows in uses if rows),
            filters=filters,
            asked=asked,
            counts=tuple(params[row].logprobs for row in asked),
            named=NamedIds.of([params[row].logprob_ids for row in asked], self._device),
        )
        return self._plan

    def _filters(self, params: RowParams) -> bool:
        return params.top_p < 1 or params.min_p > 0 or 0 < params.top_k < self.vocab_size

    def _report(self, plan: _Plan, raw: Tensor, logits: Tensor, values: RowValues, chosen: Tensor) -> TokenReports:
        rows: tuple[int, ...] | None = plan.asked
        if len(rows) < len(chosen):
            chosen = chosen[upload(rows, chosen.device)]
        source = _processed(logits, values, plan.filters) if self._processed else raw
        return report(source, chosen, plan.counts, rows, normalised=self._normalised, named=plan.named)


def _processed(logits: Tensor, values: RowValues, filters: bool) -> Tensor:
    """[L, V] float32: logits over temperature, -inf for what the filters drop; greedy rows keep their logits."""
    temperature = values.temperature
    out = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if filters:
        bounds = threshold(logits, temperature, values.top_k, values.top_p, values.min_p)
        smallest, last_tie = (part[:, None] for part in bounds)
        ids = torch.arange(logits.shape[1], device=logits.device)
        out.masked_fill_((logits < smallest) | ((logits == smallest) & (ids > last_tie)), float("-inf"))
    return out
