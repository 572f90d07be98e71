"""What the engine tells telemetry.py, gathered in one place so that the loop stays readable.

Before: answer.py, telemetry.py.  After: engine.py calls it after each plan and commit, streams.py after each output.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from ..config import SchedulerOptions
from ..errors import NumericsError, Overloaded
from ..grammar.line import Crowded
from ..grammar.trial import NoChild
from ..request import FinishReason, Output
from ..scheduling.scheduler import SchedulerStats
from ..step import StepInput
from ..telemetry import NoMetrics, RequestStats
from .answer import Answer

STEPS_KEPT = 2000  # for the dashboard; 0.3 MB


class StepRecord(NamedTuple):
    """One finished step. start, end: time.monotonic() of its launch and its commit. prompt: tokens of prompts."""

    start: float
    end: float
    tokens: int
    prompt: int
    sequences: int
    generated: int


class Meter:
    """Turns steps and outputs into metrics. Args: metrics: telemetry.Metrics, or NoMetrics."""

    def __init__(self, metrics: NoMetrics) -> None:
        self.metrics = metrics
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._flying: deque[tuple[float, int, int, int]] = deque()
        self._preemptions = 0
        self._stats: SchedulerStats | None = None
        self._gaps: list[float] = []  # of this step: seconds since each answer's token before
        self._generated = 0  # tokens of this step that belong to answers

    def launched(self, step: StepInput) -> None:
        """A step takes off."""
        self._flying.append((time.monotonic(), step.num_tokens, step.prompt_tokens, len(step.slices)))

    def landed(self, stats: SchedulerStats) -> None:
        """The oldest step has been committed, and its outputs were given to `output`."""
        if self._gaps:
            self.metrics.later_tokens(self._gaps)
            self._gaps = []
        start, tokens, prompt, sequences = self._flying.popleft()
        self.steps.append(StepRecord(start, time.monotonic(), tokens, prompt, sequences, self._generated))
        self.metrics.step(tokens=tokens, prompt_tokens=prompt, generation_tokens=self._generated)
        self._generated = 0
        if stats.preemptions > self._preemptions:
            self.metrics.preempted(stats.preemptions - self._preemptions)
            self._preemptions = stats.preemptions
        self.queues(stats)

    def queues(self, stats: SchedulerStats) -> None:
        """The scheduler's numbers of the moment; in most steps they are those of the one before."""
        if stats != self._stats:
            self._stats = stats
            self.metrics.queues(stats)

    def started(self, answers: int) -> None:
        """Answers were queued."""
        self.metrics.started(answers)

    def refused(self, error: BaseException, options: SchedulerOptions, waiting: int) -> None:
        """The scheduler did not take a request; counts only what was refused because too much waits."""
        if isinstance(error, Overloaded):
            full = options.max_num_queued_reqs is not None and waiting >= options.max_num_queued_reqs
            queue = "queue_reqs" if full else "queue_tokens"
            self.metrics.rejected("queue_grammars" if isinstance(error, Crowded | NoChild) else queue)

    def no_template(self) -> None:
        """A request's own chat template could not be rendered now."""
        self.metrics.rejected("queue_templates")

    def more(self, answer: Answer, tokens: int, before: float) -> None:
        """An answer grew by tokens that are shown later; not its first ones."""
        self._generated += tokens
        if tokens:
            self._gaps.append(answer.timing.last_token_ts - before)

    def grew(self, gaps: list[float]) -> None:
        """Answers grew by a token each, shown later; after so many seconds."""
        self._generated += len(gaps)
        self._gaps += gaps

    def grew_alike(self, answers: int, gap: float) -> None:
        """So many answers did, all after the same time."""
        self._generated += answers
        self.metrics.later_tokens([gap], answers)

    def output(self, answer: Answer, output: Output, before: float | None, held: int = 0) -> None:
        """An answer grew. before: when its token before this one came, None for the first. held: tokens told of."""
        timing = answer.timing
        self._generated += len(output.token_ids) - held
        nothing_asked = output.finish_reason is FinishReason.LENGTH and not output.usage.completion_tokens
        if before is None and (output.token_ids or nothing_asked):
            self.metrics.admitted(
                prompt_tokens=output.usage.prompt_tokens, cached_tokens=output.usage.cached_tokens
            )  # fmt: skip
        if len(output.token_ids) > held and timing.last_token_ts is not None:
            if before is None:
                self.metrics.first_token(timing.last_token_ts - timing.queued_ts)
            else:
                self._gaps.append(timing.last_token_ts - before)
        if output.finished:
            self.ended(answer, output)

    def call_ended(self, answer: Answer, longest: int) -> None:
        """The last answer of a call has ended. longest: tokens of the longest one."""
        self.metrics.call_ended(n=answer.siblings, longest=longest)

    def ended(self, answer: Answer, output: Output) -> None:
        """An answer ended, for whatever reason."""
        timing = answer.timing
        if output.finish_reason is FinishReason.ERROR and isinstance(output.error, NumericsError):
            self.metrics.corrupted()
        self.metrics.finished(
            RequestStats(
                reason=str(output.finish_reason),
                prompt_tokens=output.usage.prompt_tokens,
                generation_tokens=output.usage.completion_tokens,
                cached_tokens=output.usage.cached_tokens,
                max_tokens=answer.request.sampling.max_tokens,
                preemptions=answer.preemptions,
                arrival=timing.queued_ts,
                scheduled=timing.scheduled_ts or 0.0,
                first_token=timing.first_token_ts or 0.0,
                last_token=timing.last_token_ts or 0.0,
                finished=time.monotonic(),
            )
        )
