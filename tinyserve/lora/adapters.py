"""Which adapters there are, and how many fit into one step: none, unless some are loaded.

Before: request.py (Request.adapter).  After: scheduling/scheduler.py (asks when a request arrives and is admitted).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from ..errors import UnknownModel


class Adapters(Protocol):
    """What the scheduler asks about adapters."""

    def identity(self, name: str | None) -> str:
        """Return what distinguishes this adapter's weights in the prefix cache, "" for the base model.

        Raises: UnknownModel: no adapter of that name is loaded.
        """

    def fits(self, name: str | None, active: Set[str]) -> bool:
        """Whether a request with this adapter may run beside the `active` ones."""


class NoAdapters:
    """Only the base model: a request that names an adapter is refused."""

    def identity(self, name: str | None) -> str:
        if name is not None:
            raise UnknownModel(name, ())
        return ""

    def fits(self, name: str | None, active: Set[str]) -> bool:
        return True
