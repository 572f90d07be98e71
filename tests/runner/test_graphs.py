"""runner/graphs.py on the CPU: a recorder that runs the recorded work again stands in for a device."""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from attrs import evolve

from tests.scripted import VOCAB, ScriptModel
from tinyserve.device import Device, Memory
from tinyserve.grammar.mask import Masks, Placed
from tinyserve.kernels.launch import once
from tinyserve.runner import runner as runner_module
from tinyserve.runner.batch import Shape
from tinyserve.runner.graphs import CROWD_PROMPTS, MIXED_PROMPTS, Eager, Recorded, Wanted, decode_sizes, first_sizes
from tinyserve.runner.hands import Hands, by_graph
from tinyserve.runner.runner import Limits, Runner
from tinyserve.runner.warmup import check_rings, every_step, graph_bytes, rehearse, warm_up
from tinyserve.sampling.sampler import Sampler
from tinyserve.step import Decodes, RowParams, SeqSlice, SlotOpening, StepInput, TableEdit

LIMITS = Limits(rows=12, max_seqs=12, max_tokens=64, max_model_len=64, block_size=8, groups=1, depth=2)
WANTED = Wanted(decodes=(1, 2, 4, 12), mixed=((0, 16), (0, 32), (4, 16)))


class Again:
    """A graph: runs the work once more and leaves the results where they were."""

    def __init__(self, work, result):
        self.work, self.result, self.replays = work, result, 0

    def replay(self):
        self.replays += 1
        with torch.inference_mode():
            new = self.work()
            if self.result is not None:
                self.result.hidden.copy_(new.hidden)
                self.result.logits.copy_(new.logits)


class Recorder:
    """The part of a device that records. It runs the work, for which the runner's batches hold what was sent last."""

    batches = None

    def graph_pool(self):
        return None

    def record(self, work, pool):
        if self.batches is not None:
            self.batches.turn.fill_(self.batches.slot)
        result = work()
        return Again(work, result), result


class Told(ScriptModel):
    """Logits that depend on the position and the token there, so that a wrong row shows."""

    def forward(self, batch):
        places = once(batch.memo, ("places",), batch.positions.float)  # what layers share
        return torch.stack([places, batch.tokens.float()], dim=1)

    def logits(self, hidden):
        phase = torch.arange(VOCAB) * (1 + hidden[:, :1]) + 7 * hidden[:, 1:]
        return 5 * torch.sin(phase)


@pytest.fixture
def make():
    made = []

    def build(graphs=None):
        sampler = Sampler(LIMITS.rows, VOCAB, LIMITS.max_model_len, torch.device("cpu"))
        runner = Runner(Told(), sampler, LIMITS, Device("cpu"), graphs)
        if isinstance(graphs, Recorded):
            graphs._device.batches = runner.batches
        made.append(runner)
        return runner

    yield build
    for runner in made:
        runner.close()


def traffic():
    """Prompts that come one after the other, chunks, and decodes between them: every kind of step."""
    kinds = (
        RowParams(temperature=0.0),
        RowParams(temperature=0.8, seed=5),
        RowParams(temperature=0.9, top_p=0.8, top_k=9, seed=6),
        RowParams(temperature=0.0, logprobs=2),
        RowParams(temperature=0.0, repetition_penalty=1.3, prompt_logprobs=0),
    )
    ends, step = {}, 0
    for wave, lengths in enumerate([[3], [7, 1], [12, 2, 2], [30], [5] * 5]):
        opened, pieces = [], [SeqSlice(slot, end, 1) for slot, end in ends.items()]
        for slot in ends:
            ends[slot] += 1
        for length in lengths:
            slot = len(ends)
            prompt = tuple(range(slot, slot + length))
            opened.append(SlotOpening(slot, length, prompt, kinds[(slot + wave) % len(kinds)]))
            pieces.insert(0, SeqSlice(slot, 0, length))
            ends[slot] = length
        yield StepInput(step_id=step, opened=tuple(opened), slices=tuple(pieces))
        for _ in range(2):
            step += 1
            yield StepInput(step_id=step, slices=tuple(SeqSlice(slot, end, 1) for slot, end in ends.items()))
            ends = {slot: end + 1 for slot, end in ends.items()}
    long = tuple(range(40))
    few = tuple(SeqSlice(slot, end, 1) for slot, end in list(ends.items())[:3])
    row = len(ends) - 1
    yield StepInput(
        step_id=90,
        closed=(row,),
        opened=(SlotOpening(row, 40, long, kinds[0]),),
        slices=(*few, SeqSlice(row, 0, 9, (), False)),
    )
    yield StepInput(step_id=91, slices=(SeqSlice(row, 9, 31),))


def outputs(runner):
    return [runner.launch(step).landing.result(10).slices for step in traffic()]


def test_graphs_change_nothing(make):
    """The same steps, in their own shapes and in the padded ones of graphs: equal tokens, logprobs and rows.

    The model shares its positions by the batch's memo, as layers do: a graph that found there what the run before its
    recording had made would read memory that is no longer its own.
    """
    plain, graphed = make(), make(Recorded(Recorder(), WANTED))
    for runner in (plain, graphed):
        warm_up(runner)
    while graphed.improve():
        pass

    assert outputs(graphed) == outputs(plain)
    assert torch.equal(graphed.rows.tokens[:-1], plain.rows.tokens[:-1])
    replayed = {shape for shape, (graph, _) in graphed.graphs._graphs.items() if graph.replays}
    assert {shape.is_decode for shape in replayed} == {True, False} and len(replayed) >= 4


@pytest.mark.parametrize("most", [1, 2, 8])
def test_steps_of_as_many_tokens_as_sequences_can_be_warmed_up(most):
    """--max-num-batched-tokens may be as small as --max-num-seqs; no step of the start may hold more tokens."""
    limits = evolve(LIMITS, rows=most, max_seqs=most, max_tokens=most)
    graphs = Recorded(Recorder(), Wanted.usual(most, most, small=True))
    sampler = Sampler(limits.rows, VOCAB, limits.max_model_len, torch.device("cpu"))
    runner = Runner(Told(), sampler, limits, Device("cpu"), graphs)
    graphs._device.batches = runner.batches
    try:
        rehearse(runner)
        every_step(runner)
        warm_up(runner)
        slices = (SeqSlice(0, 0, 1, (), True),)
        opened = (SlotOpening(0, 1, (3,), RowParams(temperature=0.0)),)
        assert runner.launch(StepInput(step_id=0, opened=opened, slices=slices)).landing.result(10).slices[0].tokens
    finally:
        runner.close()


@pytest.mark.parametrize("most", [256, 1000])
def test_crowds_that_come_to_a_small_model_get_graphs(most):
    """20 prompts of 50 tokens beside 100 decodes: a graph of 1024 beside 256, if the model is small; and of 400 decodes
    beside one of 1000. Only the 5 with at most 512 tokens and no decodes are recorded at a start."""
    small, other = (Wanted.usual(most, 8192, small=small) for small in (True, False))
    graphs = Recorded(Recorder(), small)
    graphs._graphs = dict.fromkeys(small.shapes())
    step = Shape.of([SeqSlice(0, 9, 1)] * 100 + [SeqSlice(0, 0, 50)] * 20, adapted=False)
    more = Shape.of([SeqSlice(0, 9, 1)] * 400 + [SeqSlice(0, 0, 50)] * 20, adapted=False)

    assert graphs.fit(step) == Shape(256 + 1024, 256 + CROWD_PROMPTS, 256)
    assert graphs.fit(more) == (Shape(2024, 1032, 1000) if most == 1000 else more)
    assert small.early() == other.early() and small.shapes()[: small.early()] == other.shapes()[: small.early()]
    assert set(small.shapes()) - set(other.shapes()) == {
        s for s in small.shapes() if s.seqs - s.decodes == CROWD_PROMPTS
    }
    assert len(set(small.shapes())) == len(small.shapes())


def test_large_steps_launched_aside_change_nothing(make):
    """Steps with a graph launched here, the others by a thread, two in flight: the outputs of one thread, in order."""
    plain, aside = make(), make(Recorded(Recorder(), WANTED))
    warm_up(plain)
    aside._hands = Hands()
    aside._is_quick = lambda step: by_graph(step, aside.graphs, aside.rows, aside.sampler)
    aside.launch_aside()
    warm_up(aside)
    threads = set()
    enqueue = aside._enqueue
    aside._enqueue = lambda step: threads.add(threading.get_ident()) or enqueue(step)

    found, flying = [], deque()
    for step in traffic():
        flying.append(aside.launch(step).landing)
        if len(flying) == 2:
            found.append(flying.popleft().result(10).slices)
    found += [landing.result(10).slices for landing in flying]

    assert found == outputs(plain)
    assert len(threads) == 2 and threading.get_ident() in threads


def opened_aside(make):
    """A runner with a thread beside it that takes every step for a quick one; row 0 has computed a prompt of 3."""
    runner = make(Recorded(Recorder(), WANTED))
    runner._hands = Hands()
    runner._is_quick = lambda step: True
    warm_up(runner)
    runner.launch_aside()
    runner.launch(StepInput(step_id=0, opened=(opening(0),), slices=(SeqSlice(0, 0, 3),))).landing.result(10)
    return runner


def opening(row):
    return SlotOpening(row, 3, (1, 2, 3), RowParams(temperature=0.0))


def landed(flight):
    """What it gives to a loop that awaits it."""

    async def work():
        return await flight

    return asyncio.run(work())


def test_nobody_waits_for_masks_where_steps_are_launched(make):
    """A step behind another, and one alone: both calls return while masks are computed, and their tokens obey them."""
    runner = opened_aside(make)
    bits = [Future(), Future()]
    behind, alone = (Masks([(0, None)], lambda *_, future=future: future) for future in bits)

    first = runner.launch(StepInput(step_id=1, slices=(SeqSlice(0, 3, 1),), masks=behind)).landing
    behind.begin()
    bits[0].set_result(only(9))
    assert first.result(10).slices[0].tokens == (9,)
    alone.begin()
    second = runner.launch(StepInput(step_id=2, slices=(SeqSlice(0, 4, 1),), masks=alone)).landing
    assert not second.done()
    bits[1].set_result(only(4))
    assert second.result(10).slices[0].tokens == (4,)


def test_with_masks_that_are_there_the_choice_is_launched_by_who_brings_them(make):
    """No other thread has to be woken: 1 choice behind a forward, in the thread that asked for the masks."""
    runner = opened_aside(make)
    threads, finish = [], runner._finish
    runner._finish = lambda begun: threads.append(threading.get_ident()) or finish(begun)
    there = Future()
    there.set_result(only(9))
    masks = Masks([(0, None)], lambda *_: there)
    flight = runner.launch(decodes((0,), [3], 1, masks=masks)[0])
    assert not threads and not flight.landed
    masks.begin(waited=True)
    assert threads == [threading.get_ident()]
    assert landed(flight).slices[0].tokens == (9,)
    reports = Masks([(0, None)], lambda *_: there)  # a step of other slices may report on prompts: not here
    flight = runner.launch(StepInput(step_id=2, slices=(SeqSlice(0, 4, 1),), masks=reports)).landing
    reports.begin(waited=True)
    assert flight.result(10).slices[0].tokens == (9,) and threads[1] != threading.get_ident()


def test_steps_in_grammars_repeat_and_the_loop_lands_them(make, monkeypatch):
    """8 steps of a row: the first is worked out, 7 only differ in positions; one with a new block is worked out again,
    and no other thread is woken, but for the last, which has too few rows. Tokens and rows equal those of a runner that
    launches everything."""
    aside, plain = opened_aside(make), make()
    plain.launch(StepInput(step_id=0, opened=(opening(0),), slices=(SeqSlice(0, 0, 3),))).landing.result(10)
    while aside.improve():
        pass
    begins, threads, told, begin, land = [], [], [], aside._begin, runner_module.land
    aside._begin = lambda step: begins.append(step.step_id) or begin(step)
    noted = lambda one: (runner is aside and threads.append(threading.get_ident())) or land(one)
    monkeypatch.setattr(runner_module, "land", noted)
    draw, slots = np.random.default_rng(3), (0,)
    for place in range(3, 11):
        monkeypatch.setattr(runner_module, "WATCHED_ROWS", 1 + (place == 10))
        bits = draw.integers(-(2**31), 2**31, (1, -(-VOCAB // 32)), dtype=np.int32) | 1
        there = Future()
        there.set_result(bits)
        edits = (TableEdit(0, 0, 1, (5,)),) if place == 8 else ()
        tokens = []
        for runner in (plain, aside):
            masks = Masks([(0, None)], lambda *_, there=there: there, told.append)
            first = np.full(1, 3, dtype=np.int32)
            step = StepInput(step_id=place, slices=Decodes(slots, first, place - 3), masks=masks, edits=edits)
            flight = runner.launch(step)
            masks.begin(waited=True)
            tokens.append(landed(flight).slices[0].tokens)
        assert tokens[0] == tokens[1]
    assert begins == [3, 8]
    assert told == [True] * 8, "this device has always done what it was given: it waits for each choice"
    assert set(threads[:7]) == {threading.get_ident()} != {threads[7]}
    assert torch.equal(aside.rows.tokens[0, :12], plain.rows.tokens[0, :12])
    (without,) = decodes((0,), [11], 1)
    assert landed(aside.launch(without)).slices[0].tokens == landed(plain.launch(without)).slices[0].tokens


def test_what_brings_an_adapter_is_launched_aside(make):
    """Hundreds of copies are not quick, whatever graph holds the step."""
    graphs = Recorded(Recorder(), WANTED)
    runner = make(graphs)
    runner.device, graphs.holds = Device("cuda"), lambda shape: True
    step = decodes((0,), [3], 1)[0]
    assert runner._is_quick(step) and not runner._is_quick(evolve(step, moves=(object(),)))
    runner.device = Device("cpu")


def scattered(bits, draw):
    """The same masks among three others, which forbid everything."""
    places = draw.permutation(len(bits) + 3)[: len(bits)]
    board = np.zeros((len(bits) + 3, bits.shape[1]), dtype=np.int32)
    board[places] = bits
    return Placed(board, places, lambda rows, width: np.empty((rows, width), dtype=np.int32))


def held(seed, choices):
    """Decodes of 1 to 12 rows in which grammars hold all rows, in order or not, or all but the first; masks of every
    second step are where processes have put them."""
    draw, kinds = np.random.default_rng(seed), [RowParams(temperature=0.0), RowParams(temperature=0.9, seed=3)]
    kinds += [RowParams(temperature=0.8, top_k=5, seed=4)] * 2
    for count in (1, 3, 4, 7, 12):
        if count == 7 and not choices:
            kinds.append(RowParams(temperature=0.7, seed=8, presence_penalty=0.5, logprobs=1))
        rows = [kinds[row % len(kinds)] for row in range(count)]
        opened = tuple(SlotOpening(row, 2, (row, row + 5), kind) for row, kind in enumerate(rows))
        yield StepInput(step_id=0, opened=opened, slices=tuple(SeqSlice(row, 0, 2) for row in range(count)))
        for place in range(2, 8):
            slots = tuple(range(count))
            some = slots if choices or place % 3 == 0 else slots[::-1] if place % 3 == 1 else slots[1:] or slots
            bits = draw.integers(-(2**31), 2**31, (len(some), -(-VOCAB // 32)), dtype=np.int32)
            bits[:, 4] |= 1
            there = Future()
            there.set_result(scattered(bits, draw) if place % 2 else bits)
            masks = Masks([(slot, None) for slot in some], lambda *_, there=there: there)
            masks.begin()
            yield StepInput(step_id=0, slices=Decodes(slots, np.full(count, place, dtype=np.int32)), masks=masks)
        yield StepInput(step_id=0, closed=tuple(range(count)))


@pytest.mark.parametrize("choices", [True, False])
def test_a_recorded_choice_obeys_grammars_as_a_launched_one(make, choices):
    """30 steps of 1 to 12 rows in graphs of 1 to 12: equal tokens, and the rows hold them; where not all rows are held
    in their order, or one asks for more, the choice is launched. Breaks by tokens that a grammar forbids."""
    plain, graphed = make(), make(Recorded(Recorder(), WANTED))
    for runner in (plain, graphed):
        warm_up(runner)
    while graphed.improve():
        pass
    for graph in graphed.graphs._choices.values():
        graph.replays = 0
    found = [
        [runner.launch(step).landing.result(10).slices for step in held(7, choices)] for runner in (plain, graphed)
    ]

    assert found[0] == found[1]
    assert torch.equal(graphed.rows.tokens[:-1], plain.rows.tokens[:-1])
    replays = {shape.seqs: graph.replays for shape, graph in graphed.graphs._choices.items()}
    assert replays == ({1: 6, 2: 0, 4: 12, 12: 12} if choices else {1: 6, 2: 0, 4: 4, 12: 0})


def masked(seed):
    """The traffic, of rows that ask for nothing else, with masks for some of those that get a token."""
    draw = np.random.default_rng(seed)
    for step in traffic():
        plain = {"logprobs": None, "prompt_logprobs": None, "repetition_penalty": 1.0}
        opened = tuple(evolve(one, params=evolve(one.params, **plain)) for one in step.opened)
        some = [piece.slot for piece in step.slices if piece.samples and draw.integers(4)]
        draw.shuffle(some)
        bits = draw.integers(-(2**31), 2**31, (len(some), -(-VOCAB // 32)), dtype=np.int32)
        bits[:, 4] |= 1
        there = Future()
        there.set_result(scattered(bits, draw) if seed % 2 and some else bits)
        masks = Masks([(slot, None) for slot in some], lambda *_, there=there: there)
        masks.begin()
        yield evolve(step, opened=opened, masks=masks if some else None)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prompts_in_grammars_are_graphs_too(make, seed):
    """17 steps of prompts, chunks and decodes, masks for three quarters of the rows: equal tokens and rows, and the
    forwards of all but 2, which fit none, were graphs. They were launched kernel by kernel: 40 ms in the place of 5 on
    an H200."""
    plain, graphed = make(), make(Recorded(Recorder(), WANTED))
    for runner in (plain, graphed):
        warm_up(runner)
    while graphed.improve():
        pass
    for graph, _ in graphed.graphs._graphs.values():
        graph.replays = 0
    found = [[runner.launch(step).landing.result(10).slices for step in masked(seed)] for runner in (plain, graphed)]
    assert found[0] == found[1]
    assert torch.equal(graphed.rows.tokens[:-1], plain.rows.tokens[:-1])
    steps = sum(1 for _ in traffic())
    assert sum(graph.replays for graph, _ in graphed.graphs._graphs.values()) == steps - 2
    with_prompts = [graph.replays for shape, (graph, _) in graphed.graphs._graphs.items() if not shape.is_decode]
    assert sum(with_prompts) >= 5


def test_choices_that_do_not_obey_are_launched(make, caplog):
    """A device whose graphs of choices do nothing: found out at the start, and answers are right."""

    class Forgetful(Recorder):
        def record(self, work, pool):
            graph, result = super().record(work, pool)
            return (graph if result is not None else Again(lambda: None, None)), result

    runner = make(Recorded(Forgetful(), WANTED))
    warm_up(runner)
    assert "do not obey masks" in caplog.text
    plain = make()
    for step, other in zip(held(7, True), held(7, True), strict=True):
        assert runner.launch(step).landing.result(10).slices == plain.launch(other).landing.result(10).slices


@pytest.mark.parametrize("fault", ["trial", "recording"])
def test_a_choice_that_cannot_be_recorded_costs_no_other_graph(make, monkeypatch, caplog, fault):
    """The trial run of a choice fails, or its recording: all 7 graphs of forwards are there, and answers are right."""
    fails = {"trial": 1, "recording": 2}[fault]
    calls = []

    def failing(*_):
        calls.append(None)
        if len(calls) >= fails:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("tinyserve.runner.held.token_mask", failing)
        runner = make(Recorded(Recorder(), WANTED))
        warm_up(runner)
        while runner.improve():
            pass
    assert [record.message for record in caplog.records if "one by one" in record.message] and len(calls) == fails
    assert len(runner.graphs._graphs) == 7 and not runner.graphs._choices
    plain = make()
    for step, other in zip(held(7, True), held(7, True), strict=True):
        assert runner.launch(step).landing.result(10).slices == plain.launch(other).landing.result(10).slices


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("word", [0, -1])
def test_a_start_notices_choices_that_do_not_obey_when_launched(make, monkeypatch, graphs, word):
    """Launched ones do not see one word of a mask, the first or the last: no start."""
    make_mask = runner_module.GrammarMask.of

    def wrong(bits, *rest):
        bits = bits.copy()
        bits[:, word] = 0
        return make_mask(bits, *rest)

    monkeypatch.setattr(runner_module.GrammarMask, "of", wrong)
    if graphs:
        monkeypatch.setattr("tinyserve.runner.held.token_mask", lambda *_: None)
    with pytest.raises(RuntimeError, match="do not obey masks"):
        warm_up(make(Recorded(Recorder(), WANTED) if graphs else None))


def test_a_model_without_numbers_says_nothing_of_masks(make):
    """All logits are NaN: each request gets that error, and the start is not refused for another reason."""
    runner = make()
    runner.model.logits = lambda hidden: torch.full((len(hidden), VOCAB), torch.nan)
    warm_up(runner)


def only(token):
    """The mask of one row that leaves one token."""
    row = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    row[0, token // 32] = 1 << token % 32
    return row


def test_what_is_launched_at_once_is_a_graphs(make):
    """Prompts beside a row with penalties or log-probabilities have no graph: the loop launched 3 such steps."""
    runner = make(Recorded(Recorder(), WANTED))
    warm_up(runner)
    while runner.improve():
        pass

    def replays():
        return sum(graph.replays for graph, _ in runner.graphs._graphs.values())

    found = []
    for step in traffic():
        told, before = by_graph(step, runner.graphs, runner.rows, runner.sampler), replays()
        runner.launch(step).landing.result(10)
        found.append((told, replays() > before))
    assert (True, False) not in found
    assert found.count((True, True)) >= 8 and found.count((False, True)) <= 1


def decodes(rows, starts, steps, **more):
    """Steps of the same rows, as a convoy plans them."""
    return [StepInput(step_id=k, slices=Decodes(rows, np.array(starts, np.int32), k), **more) for k in range(steps)]


def test_repeated_steps_give_what_they_would_alone(make):
    """3 rows decode 12 times in a graph of 4, then a block comes, two more, a row ends, another comes, 2 rows decode:
    the tokens of steps that are never alike, and 15 of them were launched by looking at nothing but positions. On a CPU
    those that enter a block of 8 are not repeated."""
    plain, steady, graphed = make(Eager()), make(), make(Recorded(Recorder(), WANTED))
    graphed._hands = Hands()
    for runner in (plain, steady, graphed):
        warm_up(runner)
    kinds = RowParams(temperature=0.0), RowParams(temperature=0.8, seed=5), RowParams(temperature=0.7, top_k=3, seed=2)
    opened = tuple(SlotOpening(slot, 4, (slot, 1, 2, slot), kind) for slot, kind in enumerate(kinds))
    rows, two = (0, 1, 2), (3, 1)
    steps = [StepInput(step_id=0, opened=opened, slices=tuple(SeqSlice(slot, 0, 4) for slot in rows))]
    steps += decodes(rows, [4, 4, 4], 12)
    steps += decodes(rows, [16, 16, 16], 1, edits=(TableEdit(1, 0, 2, (9,)),)) + decodes(rows, [17, 17, 17], 2)
    new = SlotOpening(3, 2, (7, 8), kinds[1])
    steps.append(StepInput(step_id=0, closed=(0,), opened=(new,), slices=(SeqSlice(3, 0, 2), SeqSlice(1, 19, 1))))
    steps += decodes(two, [2, 20], 3)
    repeated = {runner: [] for runner in (plain, steady, graphed)}
    for runner, noted in repeated.items():
        runner._repeat = lambda step, runner=runner, noted=noted: noted.append(step) or Runner._repeat(runner, step)

    def tokens(runner):
        landed = [runner.launch(step).landing.result(10) for step in steps]
        return [[piece.tokens for piece in output.slices] for output in landed]

    assert tokens(steady) == tokens(graphed) == tokens(plain)
    assert torch.equal(steady.rows.tokens[:4], plain.rows.tokens[:4])
    assert torch.equal(graphed.rows.tokens[:4], plain.rows.tokens[:4])
    assert [len(noted) for noted in repeated.values()] == [0, 10 + 2 + 2, 11 + 2 + 2]
    first, again = decodes(two, [5, 23], 2)
    graphed.launch(first).landing.result(10)
    graphed.graphs.close()
    with pytest.raises(KeyError):  # a step of old results would go unnoticed
        graphed.launch(again)


def test_a_start_records_a_few_and_idle_time_the_rest(make):
    """4 decode sizes and 3 mixed shapes are 7 graphs; 1, 2, 4 and the two without decodes come first."""
    runner = make(Recorded(Recorder(), WANTED))

    warm_up(runner)

    assert {(s.tokens, s.decodes) for s in runner.graphs._graphs} == {(1, 1), (2, 2), (4, 4), (16, 0), (32, 0)}
    assert sum(iter(runner.improve, False)) == 2
    assert not runner.improve()


def test_the_next_larger_graph_serves_until_its_own_is_there(make):
    runner = make(Recorded(Recorder(), WANTED))
    warm_up(runner)
    graphs = runner.graphs
    three = Shape.of([SeqSlice(slot, 5, 1) for slot in range(3)], adapted=False)
    chunk = Shape.of([SeqSlice(0, 5, 20)], adapted=False)

    assert graphs.fit(three).seqs == 4
    assert graphs.fit(chunk).tokens == 32
    five = Shape.of([SeqSlice(slot, 5, 1) for slot in range(5)], adapted=False)
    assert graphs.fit(five) == five
    crowd = Shape.of([SeqSlice(slot, 5, 2) for slot in range(MIXED_PROMPTS + 1)], adapted=False)
    assert graphs.fit(crowd) == crowd


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1024])
def test_sizes_cover_every_batch_with_little_padding(most):
    """Up to 16 sequences a batch may double; beyond, at most a third of it is padding."""
    sizes = decode_sizes(most)

    assert sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(min(size for size in sizes if size >= seqs) <= max(16, 1.5 * seqs) for seqs in range(1, most + 1))
    assert set(first_sizes(sizes)) <= set(sizes)


def test_a_model_that_cannot_be_recorded_runs_without_graphs(make, caplog):
    """The second graph fails: one warning, no further attempt, and steps still give their tokens."""

    class Once(Recorder):
        left = 1

        def record(self, work, pool):
            if not self.left:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.left -= 1
            return super().record(work, pool)

    runner = make(Recorded(Once(), WANTED))
    warm_up(runner)

    assert not runner.improve()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "capturing" in caplog.text
    opened = (SlotOpening(0, 2, (5, 6), RowParams(temperature=0.0)),)
    output = runner.launch(StepInput(step_id=1, opened=opened, slices=(SeqSlice(0, 0, 2),))).landing.result(10)
    assert len(output.slices[0].tokens) == 1 and not output.slices[0].bad


def test_the_memory_of_all_graphs_is_told_by_two(make):
    """Free bytes 1000, after the largest graph 700, after the smallest 690, its choice 680: 300 + 20 for each of 7."""

    class Shrinking(Recorder):
        free, taken = 1000, 0

        def record(self, work, pool):
            self.taken = 10 if self.taken else 300
            self.free -= self.taken
            return super().record(work, pool)

        def memory(self):
            return Memory(self.free, 2000)

        def release_unused(self, **_): ...

    recorder = Shrinking()
    runner = make(Recorded(recorder, WANTED))
    runner.device, device = recorder, runner.device
    recorder.use, recorder.is_cpu = device.use, True

    assert graph_bytes(runner) == 300 + 7 * 20
    assert runner.graphs.next() is not None
    runner.device = device


@pytest.mark.parametrize("fault", ["reads", "writes", "turns"])
def test_a_start_notices_rings_that_do_not_work(make, monkeypatch, fault):
    """The device reads another slot than the host wrote, writes no tokens, or does not move on."""
    runner = make()
    check_rings(runner)
    if fault == "reads":
        monkeypatch.setattr("tinyserve.runner.batch.fetch", lambda mail, turn, out: out.copy_(mail[0, : len(out)] * 0))
    else:
        ring = torch.zeros_like(runner.batches.home if fault == "writes" else runner.batches.turn)
        keep = runner_module.keep_tokens

        def wrong(*args, **options):
            args = list(args)
            args[6 if fault == "writes" else 7] = ring.clone()
            keep(*args, **options)

        monkeypatch.setattr(runner_module, "keep_tokens", wrong)

    with pytest.raises(RuntimeError, match="do not see each other"):
        check_rings(runner)
