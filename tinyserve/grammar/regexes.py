"""How large a regular expression is when its counted repeats are written out.

    (ab{3}){100}  ->  about 400 parts

The library writes them out where it has to, and finds only after seconds that (a{1000}){1000} is too much.

Before: numbers.py.  After: tags.py, asked.py.
"""

from __future__ import annotations

import re

from .numbers import Wrong

MAX_PARTS = 100_000  # where repeats are inside repeats
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(,?)(\d*)\}|.", re.DOTALL)


def check_repeats(pattern: str) -> None:
    """Refuse a pattern whose repeats inside others are too many. Raises: Wrong."""
    groups: list[list[tuple[int, bool]]] = [[]]  # of each open group: its parts' sizes, and whether they repeat
    largest = 0
    for piece in _PIECES.finditer(pattern):
        text, parts = piece.group(), groups[-1]
        if piece[1] is not None and parts:
            size, repeats = parts.pop()
            most = max(int((piece[3] or piece[1])[:9]), 1)
            parts.append((size * most, most > 1))
            largest = max(largest, size * most if repeats and most > 1 else 0)
        elif text == "(":
            groups.append([])
        elif text == ")" and len(groups) > 1:
            groups.pop()
            groups[-1].append((sum(size for size, _ in parts) or 1, any(repeats for _, repeats in parts)))
        elif text not in ("*", "+", "?", "|"):
            parts.append((1, False))
    if largest > MAX_PARTS:
        raise Wrong(
            f"the regex repeats what repeats itself: {largest} parts when written out, and at most {MAX_PARTS} are "
            "followed; make its counts smaller, or use * or +"
        )
