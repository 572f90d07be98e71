"""Who proposes tokens ahead of the model: nobody, unless speculation is switched on.

Before: step.py (SeqSlice.drafts).  After: scheduling/scheduler.py (asks before it plans a slice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes likely next tokens of a sequence whose tokens are all known to the host."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return 0..most tokens that may follow `tokens` (prompt and output), most likely continuation first.

        Args: most: what budget and context leave room for; may be 0.
        """


class NoDrafts:
    """Speculation is off: every decode step computes one token."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        return ()
