"""Steps that nobody asked for: the largest one, whose memory is measured, and those that make everything ready.

Ready means that no kernel compiles afterwards. Triton compiles a kernel anew for every combination of types and of
numbers that are 1 or multiples of 16, so the steps below are chosen for those, and each sampling feature is used once.
They run on rows that are closed again, and all block tables of these rows name the null block: what is written there
is never read as data.

Before: runner.py.  After: engine/assemble.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve

from ..kernels.launch import Loading, noting
from ..step import RowParams, SeqSlice, SlotOpening, StepInput, StepOutput
from .batch import Shape
from .foundry import Compilers
from .graphs import MIXED_TOKENS, decode_sizes
from .runner import Runner

_log = logging.getLogger(__name__)
GREEDY = RowParams(temperature=0.0)
EDITED = RowParams(
    temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1,
    repetition_penalty=1.1, min_tokens=2, bias=((1, 1.0),), masked=(0,), bad_words=((0, 1),), allowed=(0, 1, 2),
)  # fmt: skip
WORN = evolve(GREEDY, adapter=1)  # whose weights are zeros while nothing is loaded
PENALISED = evolve(EDITED, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
REPORTED = tuple(
    evolve(params, logprobs=count, prompt_logprobs=count, logprob_ids=(0, 1))
    for params, count in ((GREEDY, 0), (GREEDY, 1), (EDITED, 5), (EDITED, 20))
)


def rehearse(runner: Runner) -> None:
    """Run one step of the largest size, so that its memory can be measured."""
    limits = runner.limits
    share, rest = divmod(limits.max_tokens, limits.max_seqs)
    counts = [min(share + (seq < rest), limits.max_model_len) for seq in range(limits.max_seqs)]
    _steps(runner, [count for count in counts if count], [RowParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=5)])


def graph_bytes(runner: Runner) -> int:
    """What all graphs of a runner will take: two are recorded, measured and dropped again.

    The largest shows what its kernels work in, which the others share; a small one shows what a graph itself takes.
    """
    shapes, taken = sorted(runner.graphs.shapes(), key=lambda shape: (shape.seqs, shape.tokens)), []
    for shape in shapes[-1:] + shapes[:1]:
        runner.device.release_unused(garbage=False)
        before = runner.device.memory().free_bytes
        runner.record(shape)
        runner.device.release_unused(garbage=False)
        taken.append(max(before - runner.device.memory().free_bytes, 0))
    return taken[0] + taken[-1] * runner.graphs.reset() if shapes else 0


def compile_kernels(runner: Runner, threads: int, foundry: Compilers) -> int:
    """Compile what the steps below need, all at once; returns how many variants of kernels there were.

    Args: threads: of this process, which load kernels, and compile those that the foundry has not.
    """
    times = [time.perf_counter()]
    with noting(foundry.add) as variants, _shortened(runner.model):
        every_step(runner)
    times.append(time.perf_counter())
    loading = Loading(threads, runner.device.select)
    made = foundry.wait(loading.add)
    times.append(time.perf_counter())
    for variant in variants:  # those that are left
        loading.add(variant)
    count = loading.finish()
    times.append(time.perf_counter())
    seconds = [end - start for start, end in itertools.pairwise(times)]
    _log.info("kernels: %d variants named in %.2f s, waited for %.2f s, loaded in %.2f s", count, *seconds)
    if made:
        longest = ", ".join(f"{name} {spent:.2f}" for name, spent in made[:3])
        _log.info("kernels: %.1f s in processes of their own; longest: %s", sum(one for _, one in made), longest)
    return count


def _shortened(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Where a model can leave out layers that are like others, it does so inside a `with`."""
    return model.shortened() if hasattr(model, "shortened") else contextlib.nullcontext()


def every_step(runner: Runner) -> None:
    """Launch a step of every kind that a kernel may be chosen by; what they compute is not looked at.

    Those with the kernels that take longest to compile come first: drawing with top-k, top-p and min-p.
    """
    rehearse(runner)
    _all_kinds(runner)
    worn = (False, True) if runner.adapters.places else (False,)
    decodes = [Shape(size, size, size, adapted) for size in decode_sizes(runner.limits.max_seqs) for adapted in worn]
    shapes = runner.graphs.shapes() or decodes
    most = max(shape.decodes for shape in shapes)
    for shape in shapes:  # what large mixed ones launch follows from the kinds of their two halves
        if shape.tokens - shape.decodes <= MIXED_TOKENS or shape.decodes in (0, most):
            runner.try_shape(shape)
    runner.batches.follow()


def warm_up(runner: Runner) -> None:
    """Run what libraries load when it is first used, and record the graphs that a start waits for."""
    longest = max(1, min(runner.limits.max_tokens, runner.limits.max_model_len - 2))
    for counts, params in (([longest], GREEDY), (_pairs(runner, 16), EDITED), (_pairs(runner, 3), REPORTED[-1])):
        _steps(runner, counts, [params], decodes=1)
    while (shape := runner.graphs.next(early=True)) is not None:
        runner.record(shape)
    runner.device.synchronize()
    check_rings(runner)
    check_masks(runner)


def _pairs(runner: Runner, most: int) -> list[int]:
    """Counts of so many prompts of two tokens, or of as many as one step takes; of one token if it takes only that."""
    limits = runner.limits
    return [2] * min(most, limits.max_seqs, limits.max_tokens // 2) or [1]


def check_rings(runner: Runner) -> None:
    """See that numbers pass between host and device, before anybody's tokens do.

    Raises: RuntimeError: the device does not see what the host writes, or the other way round.
    """
    runner.batches.home.fill_(-1)
    rounds = 2 * runner.limits.depth + 2  # the ring has depth + 1 slots
    outputs = _steps(runner, _pairs(runner, 1), [GREEDY], decodes=max(min(rounds, runner.limits.max_model_len - 3), 0))
    tokens = [token for output in outputs for piece in output.slices for token in piece.tokens]
    if min(tokens) < 0 or not runner.batches.agrees():
        raise RuntimeError(
            "Host and device do not see each other's writes to pinned memory; steps would give old tokens."
        )


def check_masks(runner: Runner) -> None:
    """See that choices obey grammars, before anybody's do; if recorded ones do not, they are launched one by one.

    Raises: RuntimeError: launched ones do not obey either.
    """
    if _obeys(runner):
        return
    if runner.graphs.no_choices():
        _log.warning("recorded choices do not obey masks on this device; they are launched one by one")
        if _obeys(runner):
            return
    if any(piece.bad for piece in _steps(runner, [1], [GREEDY])[0].slices):
        return  # the model gives no numbers, which is told to each request
    raise RuntimeError("Tokens do not obey masks on this device; answers would break the grammars they are held to.")


def _obeys(runner: Runner) -> bool:
    """Whether one row, and some, get the only token that a mask leaves: in its first word, and in its last."""
    vocab = runner.model.vocab_size
    words = runner.limits.words or -(-vocab // 32)
    last = min(32 * words, vocab) - 1
    for few in sorted({1, min(runner.limits.max_seqs, 3)}):
        for tokens in ([1 + row for row in range(few)], [last - row for row in range(few)]):
            given = _steps(runner, [1] * few, [GREEDY], masks=_Masks(few, words, tokens))[0].slices
            if [piece.tokens for piece in given] != [(token,) for token in tokens]:
                return False
    return True


def _all_kinds(runner: Runner) -> None:
    """A step of every kind: prompts of lengths that make kernels choose other tiles, batches, mixtures, samplers."""
    limits = runner.limits
    longest = min(limits.max_tokens, limits.max_model_len - 2)
    crowds = sorted({min(count, limits.max_seqs) for count in (2, 8, 33, 64, 257)})
    shapes = [([2] * count, (kind,)) for kind in (EDITED, PENALISED) for count in (1, 3, 16)]
    shapes += [([count], (GREEDY,)) for count in (1, 2, 3, 5, 9, 16, 17, 33, 65, 255, longest)]
    shapes += [([length] * count, (GREEDY,)) for length in (2, 4, 8, 16) for count in crowds]
    shapes += [([1, *rest], (GREEDY,)) for rest in ([2], [15, 16], [17] * 16)]
    shapes += [([2] * 4, kinds) for kind in REPORTED for kinds in ((kind,), (kind, GREEDY))]
    few = min(3, limits.max_seqs)
    _steps(runner, [1] * few, (GREEDY,), masks=_Masks(few, -(-runner.model.vocab_size // 32)))
    if runner.adapters.places:  # products are not folded into their neighbours then
        shapes += [(counts, (WORN,)) for counts, kinds in shapes if kinds == (GREEDY,)]
    for counts, kinds in shapes:
        if len(counts) <= limits.max_seqs and sum(counts) <= longest:
            _steps(runner, counts, kinds, decodes=int(max(counts) <= 2))


class _Masks:
    """Masks of some rows that allow everything, or one token each."""

    begun = there = True

    def __init__(self, rows: int, words: int, only: Sequence[int] = ()) -> None:
        self.slots = tuple(range(rows))
        self._bits = np.full((rows, words), 0 if only else -1, dtype=np.int32)
        for row, token in enumerate(only):
            self._bits.view(np.uint32)[row, token // 32] = 1 << token % 32

    def result(self) -> np.ndarray:
        return self._bits

    def placed(self) -> tuple[np.ndarray, None]:
        return self._bits, None


def _steps(
    runner: Runner, counts: Sequence[int], kinds: Sequence[RowParams], decodes: int = 0, masks: Any = None
) -> list[StepOutput]:
    """One sequence of each count computed together, a few decode steps of them, and their rows closed again.

    kinds: of the rows, one after the other, and again from the first.   masks: of grammars, in the first step.
    """
    pieces = tuple(SeqSlice(slot, 0, count) for slot, count in enumerate(counts))
    rows = zip(counts, itertools.cycle(kinds), strict=False)
    opened = tuple(SlotOpening(slot, count, (0,) * count, kind) for slot, (count, kind) in enumerate(rows))
    steps = [StepInput(step_id=0, opened=opened, slices=pieces, masks=masks)]
    for k in range(decodes):
        steps.append(StepInput(step_id=0, slices=tuple(SeqSlice(p.slot, p.count + k, 1) for p in pieces)))
    steps.append(StepInput(step_id=0, closed=tuple(piece.slot for piece in pieces)))
    return [runner.launch(step).landing.result() for step in steps]
