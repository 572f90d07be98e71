"""What a sequence's next token must obey: nothing, unless the request asks for structured output.

Before: request.py (what was asked: request.Constraint).  After: scheduling/scheduler.py (waits for it, advances it).
"""

from __future__ import annotations

from typing import Protocol

from ..errors import RequestError
from ..request import Request


class Constraint(Protocol):
    """The state of one sequence in its grammar."""

    @property
    def ready(self) -> bool:
        """Whether it is compiled; a request waits, and others pass it, until then."""

    def advance(self, token: int) -> None:
        """Note that `token` was accepted as the next one."""


class Unconstrained:
    """Every token may come next."""

    ready = True

    def advance(self, token: int) -> None:
        pass


UNCONSTRAINED = Unconstrained()  # has no state, so all sequences share it


def unconstrained(request: Request) -> Constraint:
    """Return the constraint of a request that has none.

    Raises: RequestError: the request asks for structured output, which must not be ignored silently.
    """
    if request.constraint is not None:
        raise RequestError(
            f"Structured output ({request.constraint.kind}) is not available in this version; ask for plain text.",
            param="response_format",
        )
    return UNCONSTRAINED
