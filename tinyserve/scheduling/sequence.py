"""A request while it is being answered: its tokens, and how far each of three counters has come.

    0 ......... computed ......... scheduled ......... known ......... known + in_flight
    |  landed   |    in flights    |  not planned yet  |  on the device only, the host   |
    |  K and V  |                  |                   |  learns them at commit          |

`plan` moves `scheduled` towards known + in_flight, `commit` moves `computed` towards `scheduled` and appends what was
sampled to `tokens`. Prefill, chunked prefill, decode and recomputing after a preemption are this one chase; nothing
asks which of them a sequence is in.

Before: request.py, kv/cache.py.  After: queue.py, scheduler.py (the only one who changes a Sequence).
"""

from __future__ import annotations

import enum

from ..grammar.matcher import Constraint
from ..kv.cache import SequenceKV
from ..request import FinishReason, Request
from ..step import TokenLogprobs
from .repetition import REPETITION, RepetitionFinder
from .update import SequenceFacts


class State(enum.Enum):
    """Where a sequence stands. One that left RUNNING may keep its row and blocks while flights still use them."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class EndRules:
    """When a sequence ends by itself, made ready for one look per token.

    Args:
        limit: prompt and output tokens together never exceed it.

    Attributes:
        ids: tokens that may end the sequence.
        simple: others than these and the last one need no look, and none is reported on.

    End tokens count only once `min_tokens` exist (the sampler masks them until then); on the last token an end token
    beats the limit, as a grammar that is complete does, and the limit beats a repetition.
    """

    __slots__ = ("_floor", "_repetition", "_request", "ids", "limit", "simple")

    def __init__(self, request: Request, limit: int) -> None:
        sampling = request.sampling
        most = limit if sampling.max_tokens is None else len(request.prompt_ids) + max(1, sampling.max_tokens)
        eos = frozenset() if sampling.ignore_eos else request.eos_ids | request.extra_eos_ids
        self.limit = min(limit, most)
        self.ids = eos | frozenset(sampling.stop_token_ids)
        self._floor = len(request.prompt_ids) + sampling.min_tokens
        self._repetition = RepetitionFinder.of(sampling.repetition_detection)
        self._request = request
        asks = sampling.logprobs is not None or request.scores_prompt or request.pooling is not None
        self.simple = self._repetition is None and not asks

    def check(self, token: int, length: int) -> tuple[FinishReason, int | str | None] | None:
        """The finish and stop reason if the sequence ends with `token` as its `length`-th token, else None.

        Called once for every output token, in order.
        """
        if token in self.ids and length > self._floor:
            return FinishReason.STOP, self._request.stop_on(token)[1]
        if length >= self.limit:
            return FinishReason.LENGTH, None
        if self._repetition is not None and self._repetition.push(token) and length >= self._floor:
            return FinishReason.REPETITION, REPETITION
        return None

    def complete(self, token: int, length: int) -> tuple[FinishReason, int | None]:
        """The finish and stop reason of a sequence whose grammar is complete with its `length`-th token.

        One of the request's own stop tokens is the grammar's before min_tokens, and then no reason to stop.
        """
        own = token in self._request.sampling.stop_token_ids and length <= self._floor
        stop = token in self._request.eos_ids | self._request.extra_eos_ids or not own
        return FinishReason.STOP, self._request.stop_on(token)[1] if stop else None


class Sequence:
    """One request's progress.

    Attributes:
        tokens: known ones, prompt first; they survive a preemption.
        computed, scheduled: positions, see the drawing above.
        in_flight: tokens sampled by flights that have not been committed.   flights: those that cover this sequence.
        slot: row on the device; None when it holds neither a row nor blocks.
        cached: tokens that the first admission found in the prefix cache, None before it.
        prompt_logprobs: by position of the prompt, None when not asked or already delivered.
        rank: place in the queue, smaller is earlier.
        started: time.monotonic() of the first admission, 0 before it.
    """

    __slots__ = (
        "cached",
        "computed",
        "constraint",
        "ends",
        "flights",
        "in_flight",
        "kv",
        "prompt_logprobs",
        "rank",
        "request",
        "scheduled",
        "slot",
        "started",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, kv: SequenceKV, constraint: Constraint, limit: int) -> None:
        self.request = request
        self.kv = kv
        self.constraint = constraint
        self.ends = EndRules(request, limit)
        self.tokens = list(request.prompt_ids)
        self.computed = self.scheduled = 0
        self.in_flight = self.flights = 0
        self.slot: int | None = None
        self.state = State.WAITING
        self.cached: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.scores_prompt:
            self.prompt_logprobs = [None] * len(request.prompt_ids)
        self.rank: tuple[float, float, int] = (0, 0, 0)
        self.started = 0.0

    @property
    def simple(self) -> bool:
        """Whether a decode gives a token and nothing else, which nobody but the end rules and a grammar looks at."""
        return self.ends.simple

    @property
    def reads_cache(self) -> bool:
        """Whether cached positions may stand in for computing: not while their log-probabilities are still owed."""
        return self.request.reads_cache and self.prompt_logprobs is None

    def to_compute(self) -> int:
        """Positions that may be planned now; none (<= 0) when all are, or when tokens in flight reach the limit.

        With drafts in flight, `scheduled` is beyond what is certain, so nothing is planned until they are judged.
        """
        total = len(self.tokens) + self.in_flight
        return total - self.scheduled if total < self.ends.limit else 0

    def forget_progress(self) -> None:
        """Nothing of it is in the cache any more; everything known must be computed again."""
        self.computed = self.scheduled = 0

    def progress(self) -> tuple[int, int, int] | None:
        """Tokens of the prompt: computed or found, found in the cache, all of them; None while its grammar is not
        there, and may yet be refused."""
        size = len(self.request.prompt_ids)
        return (min(self.computed, size), self.cached or 0, size) if self.constraint.ready else None

    def facts(self) -> SequenceFacts:
        """What people may see of it."""
        request = self.request
        return SequenceFacts(
            id=request.id,
            running=self.state is State.RUNNING,
            prompt=len(request.prompt_ids),
            known=len(self.tokens),
            computed=self.computed,
            blocks=sum(map(len, self.kv.tables)),
            started=self.started,
            arrival=request.arrival,
            adapter=getattr(request.adapter, "name", ""),
        )

    def check_integrity(self) -> None:
        """Assert the order of the counters."""
        known = len(self.tokens)
        assert 0 <= self.computed <= self.scheduled, self
        assert self.flights or self.scheduled <= known, self
        assert 0 <= self.in_flight <= self.flights and self.computed <= known <= self.ends.limit, self
        assert (self.computed == self.scheduled) or self.flights, self

    def __repr__(self) -> str:
        return (
            f"<{self.request.id} {self.state.name}: computed {self.computed}, scheduled {self.scheduled}, "
            f"known {len(self.tokens)} + {self.in_flight} in {self.flights} flights, slot {self.slot}>"
        )
