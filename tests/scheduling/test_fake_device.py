"""tests/fakes.py::FakeRunner notices what a real device would silently turn into wrong text."""

import asyncio
from collections import deque

import pytest
from attrs import evolve

from tests.fakes import FakeRunner
from tinyserve.step import SeqSlice, SlotOpening, StepInput, TableEdit

from .harness import Lab, kv_groups

PROMPT = (5, 6, 7, 8, 9, 10)


def device(windows=(None,)):
    return FakeRunner(kv_groups(windows), 10, 4, slots=4)


def first_step(slot=0, blocks=(1, 2), *, step_id=1, tokens=PROMPT):
    """Prefill of a six-token prompt into two blocks."""
    return StepInput(
        step_id=step_id,
        opened=(SlotOpening(slot, len(tokens), tokens),),
        edits=(TableEdit(slot, 0, 0, blocks),),
        slices=(SeqSlice(slot, 0, len(tokens)),),
    )


def decode(start, *, step_id=2, slot=0, edits=(), closed=()):
    return StepInput(step_id=step_id, slices=(SeqSlice(slot, start, 1),), edits=edits, closed=closed)


def test_a_right_schedule_gives_the_right_tokens():
    runner = device()

    tokens = [
        runner.launch(step).output.slices[0].tokens[0] for step in (first_step(), decode(6), decode(7, step_id=3))
    ]

    assert tokens == runner.answer(PROMPT, 3)


WRONG = {
    "a row that is not open": (decode(6, slot=3), KeyError),
    "a row that is open": (first_step(step_id=2, blocks=(3, 4)), "in use"),
    "a missing block": (decode(8), "gap"),
    "a table that is too short": (decode(6, edits=(TableEdit(0, 0, 1, (0,)),)), "full group"),
    "a block that another row uses": (first_step(1, (3, 2), step_id=2), "another row uses"),
    "the null block": (first_step(1, (3, 0), step_id=2), "full group"),
    "another block in the middle": (decode(6, edits=(TableEdit(0, 0, 0, (5,)),)), "reads"),
    "two slices of one row": (evolve(decode(6), slices=(SeqSlice(0, 6, 1), SeqSlice(0, 6, 1))), "two slices"),
    "a position that nobody sampled": (evolve(decode(6), slices=(SeqSlice(0, 6, 2),)), "nobody has sampled"),
    "a last token that is not sampled": (evolve(decode(6), slices=(SeqSlice(0, 6, 1, (), False),)), "samples"),
    "a table of an idle row": (evolve(decode(6), edits=(TableEdit(3, 0, 0, (5,)),)), "does nothing"),
    "a closed row": (decode(6, closed=(0,)), KeyError),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_refuses(case):
    runner = device()
    runner.launch(first_step())
    step, error = WRONG[case]

    if isinstance(error, str):
        with pytest.raises(AssertionError, match=error):
            runner.launch(step)
    else:
        with pytest.raises(error):
            runner.launch(step)


def test_it_refuses_a_hit_on_what_has_not_landed():
    """Blocks 1 is full when the first step is launched, but may turn out bad until that step lands."""
    hit = StepInput(
        step_id=2,
        opened=(SlotOpening(1, 6, PROMPT),),
        edits=(TableEdit(1, 0, 0, (1, 3)),),
        slices=(SeqSlice(1, 4, 2),),
    )
    early, right = device(), device()
    early.launch(first_step())
    right.launch(first_step()).output  # noqa: B018 (looking at it lands it)

    with pytest.raises(AssertionError, match="not landed"):
        early.launch(hit)
    assert right.launch(hit).output.slices[0].tokens == tuple(right.answer(PROMPT, 1))


def test_it_refuses_to_lose_a_block_that_the_window_still_sees():
    """W = 4: position 6 sees 3..6, so block 0 (0..3) may go only once position 7 is the next."""
    runner = device(windows=(4,))
    runner.launch(first_step()).output  # noqa: B018

    with pytest.raises(AssertionError, match="still seen"):
        runner.launch(decode(6, edits=(TableEdit(0, 0, 0, (0,)),)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_loop_of_the_engine_in_small(depth):
    """The loop as DESIGN draws it, with awaited flights."""
    lab = Lab(blocks=8, depth=depth, max_num_batched_tokens=7)
    made = [lab.add(f"r{i}", prompt=4 + i, max_tokens=9) for i in range(5)]
    tokens = {one.id: [] for one in made}

    async def loop():
        flying = deque()
        while lab.scheduler.has_work:
            while len(flying) < depth and (step := lab.scheduler.plan()):
                flying.append(lab.runner.launch(step))
            for update in lab.scheduler.commit(await flying.popleft()):
                tokens[update.request_id] += update.token_ids

    asyncio.run(loop())

    assert tokens == {one.id: lab.right(one) for one in made}
    assert lab.preemptions > 0
