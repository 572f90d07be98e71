"""Several answers to one prompt: n requests with seeds of their own, which the rest of the engine treats as strangers.

They meet again in one stream, told apart by `Output.index`, and they share the prompt's blocks through the prefix
cache like any requests that begin alike and arrive together: the scheduler computes the common beginning once. It
therefore knows nothing of n.

Before: request.py.  After: intake.py (which calls this last), beam.py (where one prompt makes many requests in turn).
"""

from __future__ import annotations

from attrs import evolve

from ..request import Request, Usage


def child_seed(seed: int, index: int) -> int:
    """Seed of answer `index`: seed + index, wrapped around at the ends of int64."""
    return (seed + index + 2**63) % 2**64 - 2**63


def children(request: Request) -> tuple[Request, ...]:
    """One request for each of the `sampling.n` answers; ids are those of the parent with the index behind it."""
    n = request.sampling.n
    if n == 1:
        return (request,)
    params = evolve(request.sampling, n=1, seed=None)
    return tuple(
        evolve(request, id=f"{request.id}.{index}", sampling=params, seed=child_seed(request.seed, index))
        for index in range(n)
    )


def total_usage(usages: list[Usage]) -> Usage:
    """Usage of all answers to one prompt: the prompt counts once, and so do its cached tokens."""
    return Usage(
        prompt_tokens=usages[0].prompt_tokens,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=usages[0].cached_tokens,
    )
