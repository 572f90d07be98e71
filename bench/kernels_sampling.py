"""The sampler over 151936 tokens: greedy, sampled, with filters; penalties, masks and log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from kernel_timing import Case

from tinyserve.kernels.logprobs import logprobs
from tinyserve.kernels.penalties import penalties
from tinyserve.kernels.sample import sample
from tinyserve.kernels.threshold import threshold
from tinyserve.kernels.token_mask import token_mask
from tinyserve.kernels.top_tokens import top_tokens

V = 151936
BATCHES = (1, 32, 256)
# temperature, (top_k, top_p, min_p), spread of the logits
SAMPLERS = {
    "greedy": (0.0, None, 3.0),
    "sampled": (0.6, None, 3.0),
    "no row filters": (0.6, (0, 1.0, 0.0), 3.0),
    "top-k 20, top-p 0.95": (0.6, (20, 0.95, 0.0), 3.0),
    "top-p 0.95, peaked": (0.6, (0, 0.95, 0.0), 3.0),
    "min-p 0.05": (1.0, (0, 1.0, 0.05), 3.0),
    "top-p 0.9, flat": (1.0, (0, 0.9, 0.0), 0.5),
}


def cases() -> Iterator[Case]:
    for batch in BATCHES:
        copies = max(2, 3 * 32 // batch) if batch < 256 else 2  # of the logits: more than the device's cache holds
        for name, (temperature, filters, spread) in SAMPLERS.items():
            logits = torch.randn(copies, batch, V).mul_(spread).to(torch.bfloat16)
            row = torch.full((batch,), temperature)
            seeds, positions = torch.arange(batch), torch.arange(batch, dtype=torch.int32)
            asked = None
            if filters is not None:
                asked = tuple(
                    torch.full((batch,), x, dtype=torch.int32 if i == 0 else torch.float32)
                    for i, x in enumerate(filters)
                )
            calls = [lambda x=x, r=row, s=seeds, p=positions, f=asked: sample(x, r, s, p, filters=f) for x in logits]
            yield Case("sample", f"{name}, {batch} rows", calls, moved=2 * V * batch)
            if asked is not None and filters[0]:
                calls = [lambda x=x, r=row, f=asked: threshold(x, r, *f) for x in logits]
                yield Case("threshold", f"{name}, {batch} rows", calls, moved=2 * V * batch)
        yield from _edits(batch)


def _edits(batch: int) -> Iterator[Case]:
    logits = torch.randn(batch, V)
    tokens = torch.randint(0, V, (batch, 2048), dtype=torch.int32)
    slots = torch.arange(batch, dtype=torch.int32)

    def full(x: float) -> torch.Tensor:
        return torch.full((batch,), x)

    counts = torch.zeros(batch, V, dtype=torch.int32)
    length, prompt = slots * 0 + 1500, slots * 0 + 500
    for name, repetition in (("no row asks", 1.0), ("1500 tokens", 1.1)):
        given = (logits, tokens, slots, prompt, length, full(repetition), full(0.0), full(0.0), counts)
        yield Case("penalties", f"{name}, {batch} rows", [lambda g=given: penalties(*g)], moved=4 * 1500 * batch)
    masks = torch.randint(-(2**31), 2**31 - 1, (batch, V // 32), dtype=torch.int32)
    yield Case("token_mask", f"{batch} rows", [lambda: token_mask(logits, masks, slots)], moved=2.125 * V * batch)
    yield Case("logprobs", f"{batch} rows", [lambda: logprobs(logits, slots)], moved=4 * V * batch)
    yield Case("top_tokens", f"20 of {batch} rows", [lambda: top_tokens(logits, 20)], moved=4 * V * batch)


def variants(case: Case) -> Iterator[dict]:
    return iter(())


@contextlib.contextmanager
def using(options: dict) -> Iterator[None]:
    yield
