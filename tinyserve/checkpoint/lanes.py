"""From a mapped file to a GPU at the speed of the bus: through pinned memory, two pieces at a time.

    file's pages --memcpy--> pinned piece A --device copies--> parameter
                 --memcpy--> pinned piece B --device copies--> parameter       while A is on its way

What is not pinned, the driver copies through a small buffer of its own, one caller after the other. Here every loading
thread has a lane: two pinned pieces and a stream. A lane has delivered when `carry` returns.

Before: quant/format.py (Stored).  After: load.py gives its threads lanes.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from ..quant.format import Stored

PIECE = 8 << 20  # bytes of pinned memory; two a thread
SMALL = 1 << 20  # bytes below which a tensor is copied as it is


class Lane:
    """One thread's way to a device."""

    def __init__(self, device: torch.device) -> None:
        self._api = torch.get_device_module(device)
        with self._api.device(device):
            self._stream = self._api.Stream(device)
            self._events = [self._api.Event() for _ in range(2)]
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def carry(self, numbers: Tensor, into: Tensor) -> None:
        """Copy a tensor of the host; both hold one type and lie without gaps. It is there when this returns."""
        source, target = (one.reshape(-1).view(torch.uint8) for one in (numbers, into))
        source = source.numpy()
        with self._api.stream(self._stream):
            for turn, start in enumerate(range(0, len(source), PIECE)):
                part = source[start : start + PIECE]
                piece, event = self._pieces[turn % 2], self._events[turn % 2]
                event.synchronize()
                np.copyto(piece.numpy()[: len(part)], part)  # one thread, without Python's lock
                target[start : start + len(part)].copy_(piece[: len(part)], non_blocking=True)
                event.record(self._stream)
        self._stream.synchronize()


class Lanes:
    """A lane for every thread that asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def mine(self) -> Lane:
        """The lane of the calling thread."""
        if not hasattr(self._own, "lane"):
            self._own.lane = Lane(self._device)
        return self._own.lane


@frozen(eq=False)
class Carried:
    """A stored tensor that travels in a lane. Everything else is as of `stored`."""

    stored: Stored
    lanes: Lanes

    def carry_to(self, into: Tensor) -> None:
        """Read the numbers in the type of `into`, and copy them there."""
        numbers = self.stored.read(into.dtype)
        if numbers.device != into.device and numbers.nbytes >= SMALL and into.is_contiguous():
            self.lanes.mine().carry(numbers.contiguous(), into)
        else:
            into.copy_(numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)
