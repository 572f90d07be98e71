"""Steps that nobody asked for: the largest one, whose memory is measured, and those that make everything ready.

Ready means that no kernel compiles afterwards. Triton compiles a kernel anew for every combination of types and of
numbers that are 1 or multiples of 16, so the steps below are chosen for those, and each sampling feature is used once.
They run on rows that are closed again, and all block tables of these rows name the null block: what is written there
is never read as data.

Before: runner.py.  After: engine/assemble.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.launch import compile_together, noting
from ..step import RowParams, SeqSlice, SlotOpening, StepInput
from .runner import Runner

GREEDY = RowParams(temperature=0.0)
EVERYTHING = RowParams(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    seed=1,
    min_tokens=2,
    logprobs=5,
    prompt_logprobs=1,
    logprob_ids=(0, 1),
    bias=((1, 1.0),),
    masked=(0,),
    bad_words=((0, 1),),
)
KINDS = (
    RowParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    RowParams(temperature=0.0, logprobs=0),
    RowParams(temperature=0.0, logprobs=5),
    RowParams(temperature=0.7, logprobs=20),
    RowParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    RowParams(temperature=0.0, allowed=(0, 1)),
    EVERYTHING,
)


def rehearse(runner: Runner) -> None:
    """Run one step of the largest size, so that its memory can be measured."""
    limits = runner.limits
    share, rest = divmod(limits.max_tokens, limits.max_seqs)
    counts = [min(share + (seq < rest), limits.max_model_len) for seq in range(limits.max_seqs)]
    _steps(runner, [count for count in counts if count], RowParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=5))


def graph_bytes(runner: Runner) -> int:
    """What all graphs of a runner will take: two are recorded, measured and dropped again.

    The largest shows what its kernels work in, which the others share; a small one shows what a graph itself takes.
    """
    shapes, taken = runner.graphs.samples(), []
    for shape in shapes:
        runner.device.release_unused()
        before = runner.device.memory().free_bytes
        runner.record(shape)
        runner.device.release_unused()
        taken.append(max(before - runner.device.memory().free_bytes, 0))
    return taken[0] + taken[-1] * runner.graphs.reset() if shapes else 0


def compile_kernels(runner: Runner, threads: int) -> int:
    """Compile what the steps below need, all at once; returns how many variants of kernels there were."""
    with noting() as variants:
        rehearse(runner)
        _all_kinds(runner)
    return compile_together(variants, threads)


def warm_up(runner: Runner) -> None:
    """Load every kernel that a step may need, and record the graphs that a start waits for."""
    _all_kinds(runner)
    while (shape := runner.graphs.next(early=True)) is not None:
        runner.record(shape)
    runner.device.synchronize()


def _all_kinds(runner: Runner) -> None:
    """A step of every kind."""
    limits = runner.limits
    longest = min(limits.max_tokens, limits.max_model_len - 2)
    shapes = [[count] for count in (1, 2, 16, 17, 255, longest) if count <= longest]
    shapes += [[1] * count for count in (2, 3, 8, 16, 17) if count <= limits.max_seqs]
    shapes += [[1, *rest] for rest in ([2], [15, 16], [17] * 16) if len(rest) < limits.max_seqs and sum(rest) < longest]
    for counts in shapes:
        _steps(runner, counts, GREEDY, decodes=1)
    for params in KINDS:
        for counts in ([2], [2] * min(16, limits.max_seqs), [2] * min(3, limits.max_seqs)):
            _steps(runner, counts, params, decodes=1)


def _steps(runner: Runner, counts: Sequence[int], params: RowParams, decodes: int = 0) -> None:
    """One sequence of each count computed together, a few decode steps of them, and their rows closed again."""
    pieces = tuple(SeqSlice(slot, 0, count) for slot, count in enumerate(counts))
    opened = tuple(SlotOpening(slot, count, (0,) * count, params) for slot, count in enumerate(counts))
    steps = [StepInput(step_id=0, opened=opened, slices=pieces)]
    for k in range(decodes):
        steps.append(StepInput(step_id=0, slices=tuple(SeqSlice(p.slot, p.count + k, 1) for p in pieces)))
    steps.append(StepInput(step_id=0, closed=tuple(piece.slot for piece in pieces)))
    for step in steps:
        runner.launch(step).landing.result()
