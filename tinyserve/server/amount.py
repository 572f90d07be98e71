"""How much a JSON body holds, known before it is parsed: its strings, and the marks between them.

The parser holds the interpreter for as long as it works: 16 MB of text take it 10 ms, 16 MB of numbers 250, a million
different keys a second. So values are counted first, in short slices between which the loop gets its turn, and a body
with too many is refused. Most bodies are cleared by the plain count of bytes; only where a text is full of such
characters are strings told apart, with numpy, which lets others run meanwhile.

Before: nothing.  After: fields.py.
"""

from __future__ import annotations

import numpy as np

from .errors import TooLarge

SLICE = 2**18  # bytes; 1 ms at most
MAX_MESSAGES = 10_000  # of a conversation
BYTES_PER_VALUE = 32  # of --max-body-bytes: with 16 MB, half a million numbers
_WEIGHTS = {b",": 1, b":": 6, b"{": 4, b"[": 2}  # what parsing each costs; a number in a list is 1, a quote too
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def check_amount(body: bytes, max_bytes: int) -> None:
    """Refuse a body that would take the parser too long. Slow for a large one: call it off the loop.

    Raises: TooLarge.
    """
    most = max_bytes // BYTES_PER_VALUE
    if _at_most(body) > most and _outside_strings(body) > most:
        raise TooLarge(
            f"The body holds too many values: more than {most} numbers, or {most // 3} texts, or {most // 9} keys. "
            "Send less in one request, or have the server started with a larger --max-body-bytes."
        )
    overlap, mark = len(b'"role"') - 1, b'"role"'
    roles = sum(body.count(mark, max(0, at - overlap), at + SLICE) for at in range(0, len(body), SLICE))
    if roles > MAX_MESSAGES:
        raise TooLarge(f"The request has more than {MAX_MESSAGES} messages.", param="messages")


def check_messages(given: list[object]) -> None:
    """Refuse a conversation of more messages than a template should see. Raises: TooLarge."""
    if len(given) > MAX_MESSAGES:
        raise TooLarge(f"messages has {len(given)} entries; at most {MAX_MESSAGES} are allowed.", param="messages")


def _at_most(body: bytes) -> int:
    """The amount if all of the body stood outside of strings."""
    marks, slices = {**_WEIGHTS, b'"': 1}, range(0, len(body), SLICE)
    return sum(weight * body.count(mark, at, at + SLICE) for at in slices for mark, weight in marks.items())


def _outside_strings(body: bytes) -> int:
    """The amount outside of strings."""
    amount, inside, backslashes = 0, 0, 0
    for at in range(0, len(body), SLICE):
        data = np.frombuffer(body, np.uint8, min(SLICE, len(body) - at), at)
        flips, backslashes = _real_quotes(data, backslashes)
        within = (np.cumsum(flips) + inside) & 1
        inside = int(within[-1])
        amount += int(np.count_nonzero(flips))
        for mark, weight in _WEIGHTS.items():
            amount += weight * int(np.count_nonzero((data == mark[0]) & (within == 0)))
    return amount


def _real_quotes(data: np.ndarray, before: int) -> tuple[np.ndarray, int]:
    """Where quotes are that no backslash escapes, and how many backslashes end `data`.

    before: how many end the slice before.
    """
    quotes = data == _QUOTE
    place = np.arange(len(data))
    last_other = np.maximum.accumulate(np.where(data == _BACKSLASH, -1 - before, place))
    run = place - last_other  # backslashes up to and with each place
    escaped = np.empty(len(data), bool)
    escaped[0], escaped[1:] = before & 1, run[:-1] & 1
    return quotes & ~escaped, int(run[-1])
