"""Noticing that an answer goes round in circles, at a price that does not grow with its length.

The last tokens are a pattern of p tokens, c times in a row, exactly when each of the last p * (c - 1) tokens equals the
one p places before it. So for each p one number is enough: how many of the last tokens do.

    p = 2     a  b  x  a  b  a  b  a  b          the run is 4 = 2 * (3 - 1): a b stands there three times
    run       .  .  0  0  0  1  2  3  4          (x breaks it: it is not the a two places before)

A run of p goes on only if the new token stood p places before, so a token touches just its own earlier places within
the longest pattern; every other run is broken and forgotten.

Before: request.py (what is asked).  After: sequence.py, which pushes each new token.
"""

from __future__ import annotations

from collections import defaultdict, deque

from ..request import RepetitionDetectionParams

REPETITION = "repetition_detected"  # the stop_reason


class RepetitionFinder:
    """Watches the tokens of one answer. Args: see RepetitionDetectionParams."""

    __slots__ = ("_count", "_length", "_longest", "_places", "_runs", "_shortest", "_window")

    def __init__(self, shortest: int, longest: int, count: int) -> None:
        self._shortest, self._longest, self._count = shortest, longest, count
        self._length = 0
        self._window: deque[int] = deque()  # the last `longest` tokens
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)  # where each of them stands
        self._runs: dict[int, int] = {}  # pattern length -> how many of the last tokens equal the one that far before

    @classmethod
    def of(cls, asked: RepetitionDetectionParams | None) -> RepetitionFinder | None:
        """The finder that a request asks for; None when it asks for none."""
        if asked is None or asked.max_pattern_size == 0:
            return None
        return cls(max(asked.min_pattern_size, 1), asked.max_pattern_size, asked.min_count)

    def push(self, token: int) -> bool:
        """Take the next token; whether the answer now ends in a pattern that was repeated often enough."""
        places, runs, shortest, length = self._places[token], {}, self._shortest, self._length
        found = False
        for place in places:
            pattern = length - place
            if pattern >= shortest:
                runs[pattern] = run = self._runs.get(pattern, 0) + 1
                found = found or run >= pattern * (self._count - 1)
        self._runs = runs
        places.append(length)
        self._window.append(token)
        self._length = length + 1
        if len(self._window) > self._longest:
            gone = self._window.popleft()
            self._places[gone].popleft()
            if not self._places[gone]:
                del self._places[gone]
        return found
