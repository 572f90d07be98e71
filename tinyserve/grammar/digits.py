"""How many digits a number in JSON may have: a model that writes one may find no end.

Before: nothing.  After: matcher.py.
"""

from __future__ import annotations

import re

MAX_DIGITS, MAX_EXPONENT = 40, 2  # digits of one number; the longest 128-bit integer has 39
_NUMBER = re.compile(rb"[-+.0-9eE]*$")
_NUMERIC = frozenset(b"-+.0123456789eE")
_DIGITS = re.compile(rb"([eE][-+]?)?([0-9]*)$")


def number_behind(number: bytes, data: bytes) -> bytes:
    """The number at the end of a text, from the one at its end before `data` came."""
    if data:
        return _NUMBER.search(number[-MAX_DIGITS - 4 :] + data).group() if data[-1] in _NUMERIC else b""
    return number


def is_full(number: bytes) -> bool:
    """Whether it has as many digits as it may."""
    if len(number) < MAX_DIGITS and b"e" not in number and b"E" not in number:
        return False
    exponent, digits = _DIGITS.search(number).groups()
    return len(digits) >= (MAX_EXPONENT if exponent else MAX_DIGITS)
