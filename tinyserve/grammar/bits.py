"""Masks as words of 32 bits, one bit a token: bit i % 32 of word i // 32 for token i.

Before: nothing.  After: compile.py, matcher.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


def width(size: int, end_ids: Iterable[int]) -> int:
    """Words of a mask for so many tokens, and one more where none of them ends an answer: it stands for the end."""
    return -(-(size + (not any(token < size for token in end_ids))) // 32)


def allow(row: np.ndarray, token: int) -> None:
    """Set a token's bit in `row` [W] int32, if it has one."""
    if token < 32 * len(row):
        row[token // 32] |= _BITS[token % 32]


def forbid(row: np.ndarray, token: int) -> None:
    """Clear a token's bit in `row` [W] int32, if it has one."""
    if token < 32 * len(row):
        row[token // 32] &= ~_BITS[token % 32]


def of_bytes(begins: np.ndarray, wanted: bytes) -> np.ndarray:
    """[W] int32 with the bits of those tokens whose first byte is wanted. Args: begins: [32 * W] uint8."""
    return np.packbits(np.isin(begins, list(wanted)), bitorder="little").view("<i4")
