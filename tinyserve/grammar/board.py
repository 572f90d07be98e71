"""Memory that the loop shares with the processes that compute masks: tokens go out, masks come back, nobody is asked.

    told[w, k]    generation and number of the last token told       the loop writes
    ring[w, k]    the last RING tokens, each with its number          the loop writes
    made[w, k]    as `told`, once the mask behind that token is there  the worker writes
    notes[w]      whether it sleeps, seconds and masks so far          the worker writes
    bits[p]       the mask of place p = k * workers + w                the worker writes

Each number is 8 bytes, written at once; a mask is there before `made` says so, on processors that keep the order of
writes (ORDERED). A mask counts if `made` equals `told`: a generation is one answer at one place, and never comes again.
The memory has no name, and goes with the last process that has it.

Before: bits.py.  After: replicas.py (the loop's end), mask_worker.py (the other one).
"""

from __future__ import annotations

import mmap
import os
import platform

import numpy as np

RING = 64  # tokens that a worker may be behind
ORDERED = platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")
NUMBER = 0xFFFF_FFFF  # of a told word: the tokens since its generation began; this one never comes
_LINE = 8  # words that processors hand over together
ASLEEP, NANOSECONDS, MASKS = 0, 1, 2  # of a worker's notes
LONGEST = 100_000  # bytes of a message between the two
READY, ASK, WAKE = b"!", b"?", b"."  # messages that are no order, or begin one that is not


class Board:
    """The shared memory.

    Args:
        workers: processes.   rows: places of each.   width: words of 32 bits in a mask.
        file: of a board that another process has made; None: make one.
    Attributes:
        file: its descriptor.   told, made: [workers * cells] int64.   ring: [workers * cells * RING] int64.
        notes: [workers, 8] int64.   bits: [workers * rows, width] int32.   memory: all of it, bytes.
    """

    def __init__(self, workers: int, rows: int, width: int, file: int | None = None) -> None:
        self.workers, self.rows = workers, rows
        self.cells = -(-rows // _LINE) * _LINE  # of a worker: what two processes write lies apart
        count = workers * self.cells
        words = 2 * count + count * RING + workers * _LINE
        head = -(-words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        size = head + workers * rows * width * 4
        self.file = os.memfd_create("tinyserve-masks") if file is None else file
        if file is None:
            os.ftruncate(self.file, size)
        self.memory = np.frombuffer(mmap.mmap(self.file, size), dtype=np.uint8)
        numbers = self.memory[: words * 8].view(np.int64)
        self.told, self.made, self.ring, notes = np.split(numbers, np.cumsum([count, count, count * RING]))
        self.notes = notes.reshape(workers, _LINE)
        self.bits = self.memory[head:].view(np.int32).reshape(workers * rows, width)

    def cell(self, place: int) -> int:
        """Where the numbers of a place are."""
        return place % self.workers * self.cells + place // self.workers
