"""A thought before the answer: nothing is constrained inside it, and it may be limited to a number of tokens.

    UNDECIDED --<think>--> THINKING --</think>--> ANSWER
        '--anything else--> ANSWER      '--budget--> FORCING --> ANSWER    the end of the thought is written for it

A mark may be several tokens ("Here is my thought process:"): until it is whole, what came may also be the answer.

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
    Attributes: mode: where the answer stands.   tokens: of the thought so far, its marks included.
    """

    def __init__(self, thought: Thought, encode: Callable[[str], list[int]]) -> None:
        self._begins = tuple(begin.encode() for begin in (thought.begin, *thought.also) if begin)
        self._ends = tuple(end.encode() for end in thought.ends)
        self._longest = max(map(len, self._ends))
        self._budget = thought.budget
        self._encode = encode
        self._force = tuple(encode(thought.force or thought.ends[0]))
        self.mode = Mode.UNDECIDED if self._begins else Mode.ANSWER
        if thought.opened:
            self.mode = Mode.THINKING
        self._tail = b""  # all of the answer while UNDECIDED, then the last bytes of the thought
        self._count = 0
        self._written = 0  # of what is forced
        self._pending = 0  # tokens that may turn out to begin a thought
        self.tokens = 0
        self._check_budget()

    @property
    def state(self) -> tuple[Mode, bytes, int, int, int, int]:
        """All of it, to come back to."""
        return self.mode, self._tail, self._count, self._written, self._pending, self.tokens

    @state.setter
    def state(self, state: tuple[Mode, bytes, int, int, int, int]) -> None:
        self.mode, self._tail, self._count, self._written, self._pending, self.tokens = state

    @property
    def forced(self) -> int:
        """The token that has to come, while FORCING."""
        return self._force[self._written]

    @property
    def opening(self) -> tuple[int, bytes]:
        """While UNDECIDED: the token with which the usual mark goes on, and the bytes of it that are missing.

        -1 and nothing where another mark has begun instead.
        """
        seen = self._tail.lstrip()
        if not self._begins[0].startswith(seen):
            return -1, b""
        rest = self._begins[0][len(seen) :]
        try:
            return self._encode(rest.decode())[0], rest
        except (UnicodeDecodeError, IndexError):  # in the middle of a character
            return -1, rest

    def takes(self, data: bytes) -> bool:
        """Note the next token, by its bytes; whether it belongs to the thought or its marks, as far as is known."""
        if self.mode is Mode.ANSWER:
            return False
        if self.mode is Mode.UNDECIDED:
            return self._decide(data)
        self.tokens += 1
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

    def _decide(self, data: bytes) -> bool:
        self._tail += data
        self._pending += 1
        seen = self._tail.lstrip()
        if any(seen.startswith(begin) for begin in self._begins):
            self.mode, self._tail, self.tokens = Mode.THINKING, b"", self._pending
            self._check_budget()
            return True
        if not any(begin.startswith(seen) for begin in self._begins):
            self.mode = Mode.ANSWER
        return False

    def _check_budget(self) -> None:
        if self.mode is Mode.THINKING and self._budget is not None and self._count >= self._budget:
            self.mode = Mode.FORCING
