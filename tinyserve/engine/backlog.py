"""What answers have been given that nobody reads yet.

A reader who wants an answer once, or whose turn it is after some steps only (pace.py), need not be served at every
token, nor need the answer itself: while a convoy of sequences goes on (scheduling/convoy.py), all of its quiet answers
share a list of what each step gave, and each takes its own tokens out of it when it is looked at, at the latest when it
ends.

Before: scheduling/convoy.py.  After: answer.py, which takes its share; streams.py, which fills it.
"""

from __future__ import annotations

from attrs import define, field


@define(eq=False)
class Backlog:
    """Tokens of some answers, a list for each step; answer i of them has number places[i] of each list.

    last: time.monotonic() of the newest step.
    """

    steps: list[list[int]] = field(factory=list)
    last: float = 0.0

    def add(self, tokens: list[int], now: float) -> None:
        """One more token for everybody."""
        self.steps.append(tokens)
        self.last = now


@define(eq=False)
class Held:
    """What one answer has and has not shown: ids and their text, and its share of a backlog.

    unread: ids behind these, whose text has not been made.
    place: its number in each list.   taken: how many of them it has taken.   error: why their text could not be made.
    """

    ids: list[int] = field(factory=list)
    texts: list[str] = field(factory=list)
    unread: list[int] = field(factory=list)
    backlog: Backlog | None = None
    place: int = 0
    taken: int = 0
    error: Exception | None = None

    def share(self, backlog: Backlog, place: int) -> None:
        """Take part in a backlog from its next step on."""
        self.backlog, self.place, self.taken = backlog, place, len(backlog.steps)

    def claim(self) -> list[int]:
        """The answer's tokens that it has not taken yet, which it takes now."""
        place, taken, steps = self.place, self.taken, self.backlog.steps
        self.taken = len(steps)
        return [step[place] for step in steps[taken:]]
