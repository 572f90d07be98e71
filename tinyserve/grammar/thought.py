"""A thought before the answer: nothing is constrained inside it, and it may be limited to a number of tokens.

    UNDECIDED --<think>--> THINKING --</think>--> ANSWER
        '--anything else--> ANSWER      '--budget--> FORCING --> ANSWER    the end of the thought is written for it

Before: structured.py (Thought).  After: matcher.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from ..structured import Thought


class Mode(enum.Enum):
    """Where an answer stands."""

    UNDECIDED = "undecided"
    THINKING = "thinking"
    FORCING = "forcing"
    ANSWER = "answer"


class Gate:
    """Tells tokens of the thought from those of the answer.

    Args: encode: ids of a text.
    Attributes: first: the token that begins a thought, while UNDECIDED.
    """

    def __init__(self, thought: Thought, encode: Callable[[str], list[int]]) -> None:
        self._ends = tuple(end.encode() for end in thought.ends)
        self._longest = max(map(len, self._ends))
        self._budget = thought.budget
        self._force = tuple(encode(thought.force or thought.ends[0]))
        begin = encode(thought.begin) if thought.begin else []
        self.first = begin[0] if len(begin) == 1 else -1
        self.mode = Mode.UNDECIDED if self.first >= 0 else Mode.ANSWER  # a mark of several tokens cannot be offered
        if thought.opened:
            self.mode = Mode.THINKING
        self._tail = b""
        self._count = 0
        self._written = 0  # of what is forced
        self._check_budget()

    @property
    def state(self) -> tuple[Mode, bytes, int, int]:
        """All of it, to come back to."""
        return self.mode, self._tail, self._count, self._written

    @state.setter
    def state(self, state: tuple[Mode, bytes, int, int]) -> None:
        self.mode, self._tail, self._count, self._written = state

    @property
    def forced(self) -> int:
        """The token that has to come, while FORCING."""
        return self._force[self._written]

    def takes(self, token: int, data: bytes) -> bool:
        """Note the next token; whether it belongs to the thought or its marks."""
        if self.mode is Mode.ANSWER:
            return False
        if self.mode is Mode.UNDECIDED:
            self.mode = Mode.THINKING if token == self.first else Mode.ANSWER
            self._check_budget()
            return self.mode is not Mode.ANSWER
        if self.mode is Mode.FORCING:
            self._written += 1
            if self._written == len(self._force):
                self.mode = Mode.ANSWER
            return True
        self._tail = self._tail[-self._longest :] + data
        self._count += 1
        if any(end in self._tail for end in self._ends):
            self.mode = Mode.ANSWER
        else:
            self._check_budget()
        return True

    def _check_budget(self) -> None:
        if self.mode is Mode.THINKING and self._budget is not None and self._count >= self._budget:
            self.mode = Mode.FORCING
