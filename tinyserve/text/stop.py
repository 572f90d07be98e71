"""Stop strings in a stream of text that is cut anywhere.

A stop string is defined on text, not on tokens: it may begin inside one token and end inside another. What may go out
is everything that cannot be the beginning of one any more; so exactly the longest tail that is still a prefix of a
stop string waits, and not a character more.

    stop "DEFGHIJ"      text  ABC  DEF  G  H  I  X  K
                        out   ABC                DEFGHIX  K

Of several matches the one that ends first counts (it is the first that a reader of single characters would see), of
those the first in the list.

Before: detokenize.py.  After: engine/streams.py.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds the stop strings of one answer.

    Args:
        stops: none of them empty.
        include: the stop string itself belongs to the answer; then nothing has to wait at all.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._first = frozenset(stop[0] for stop in self._stops)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tail = ""  # the longest end of the text so far that begins a stop string

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take new text.

        Args: armed: whether a stop string that ends in this text counts; where it begins does not matter.
        Returns: text that may go out, and the stop string that was completed, if any. After a match the answer is
            over: the text is cut before the stop string (behind it with `include`), the rest is dropped.
        """
        if not self._stops:
            return text, None
        seen = self._tail + text
        match = self._match(seen) if armed else None
        if match is not None:
            end, stop = match
            old = len(self._tail) if self._include else 0
            self._tail = ""
            return seen[old : end if self._include else end - len(stop)], stop
        tail = self._beginning(seen)
        out = text if self._include else seen[: len(seen) - len(tail)]
        self._tail = tail
        return out, None

    def _match(self, seen: str) -> tuple[int, str] | None:
        """End and text of the match that ends first, of those that end in the new text."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = seen.find(stop, max(0, len(self._tail) + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = start + len(stop), stop
        return best

    def _beginning(self, seen: str) -> str:
        """The longest end of `seen` that is a beginning of a stop string."""
        for start in range(max(0, len(seen) - self._reach), len(seen)):
            if seen[start] in self._first:
                tail = seen[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return tail
        return ""

    def finish(self) -> str:
        """What still waits, when the answer ended without a stop string."""
        rest, self._tail = ("" if self._include else self._tail), ""
        return rest
