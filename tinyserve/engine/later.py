"""Answers of a call with many that are not queued yet: no more of them wait in the scheduler than can run.

Before: intake.py.  After: streams.py, admission.py (queues them).
"""

from __future__ import annotations

from attrs import define

from ..request import FinishReason, Output, Usage
from .intake import Prepared


@define
class Later:
    """Answers of a call that are not queued yet: `next` .. `end` - 1. aborted: they never will be. error: why not."""

    prepared: Prepared
    next: int
    end: int
    aborted: bool = False
    error: Exception | None = None

    def __len__(self) -> int:
        return self.end - self.next

    def ended(self) -> Output:
        """The only output of the next one, when it was aborted before it was queued."""
        index, prompt = self.next, self.prepared.requests[0].prompt_ids
        self.next += 1
        usage = Usage(prompt_tokens=len(prompt))
        return Output(
            request_id=self.prepared.name,
            index=index,
            finish_reason=FinishReason.ABORT,
            usage=usage,
            error=self.error,
        )
