"""convoy.py: steps that are planned and booked together are those that would have been planned one by one."""

import random
from concurrent.futures import Future

import pytest

from tinyserve.errors import RequestError
from tinyserve.grammar.mask import Masks
from tinyserve.grammar.matcher import UNCONSTRAINED, Unconstrained
from tinyserve.scheduling.convoy import Convoy, Grown
from tinyserve.step import Decodes

from .harness import EOS, Lab, request


class Alone:
    """A drafter without a draft, which the scheduler does not know: its sequences never go together."""

    def propose(self, tokens, most):
        return ()


def requests(seed):
    draw = random.Random(seed)
    kinds = [{}, {}, {"eos": (EOS,)}, {"stop_token_ids": [7]}, {"min_tokens": 3, "eos": (7,)}]
    return [
        request(f"r{i}", draw.randrange(1, 20), draw.randrange(1, 40), **draw.choice(kinds)) for i in range(6)
    ]  # fmt: skip


def told(lab):
    """Everything that was reported, in order, step by step, and what each step was."""
    found = []
    for made in requests(lab.seed):
        lab.add(made)
    while lab.scheduler.has_work:
        while len(lab.flying) < lab.depth and (step := lab.plan()):
            found.append((tuple(step.slices), step.opened, step.closed, step.edits))
        found.append([update._replace(logprobs=None, started=0.0, error=str(update.error)) for update in lab.commit()])
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"blocks": 24}, {"windows": (8, None)}, {"caching": False, "max_num_seqs": 6}])
def test_together_or_alone_the_same_steps_and_updates(depth, options, monkeypatch):
    """6 requests of 1..39 tokens over blocks of 4, also with too few blocks: every step and update equal."""
    landed = []
    land = Convoy.land
    monkeypatch.setattr(Convoy, "land", lambda self, tokens: landed.append(land(self, tokens)) or landed[-1])
    for seed in range(6):
        together, alone = (Lab(depth=depth, drafter=drafter, **options) for drafter in (None, Alone()))
        together.seed = alone.seed = seed
        if "windows" in options:  # what a window has passed may come back a few steps later
            told(together), told(alone)
            assert {k: a.tokens for k, a in together.answers.items()} == {k: a.tokens for k, a in alone.answers.items()}
        else:
            assert told(together) == told(alone)

    assert sum(landed) > 20, "hardly a step was booked together"


class Counted(Unconstrained):
    """A grammar that only counts: it ends, or fails, with its n-th token."""

    masks = True

    def __init__(self, ends, fails):
        self.ends, self.fails = ends, fails
        self.told = []

    def advance(self, token):
        self.told.append(token)
        self.ended = len(self.told) == self.ends
        self.error = RequestError("no way on") if len(self.told) == self.fails else None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{}, {"blocks": 24}, {"caching": False, "max_num_seqs": 6}])
def test_grammars_go_together_as_they_go_alone(depth, options):
    """6 requests, 4 of them in grammars that end or fail after 3..30 tokens: every step and update equal, and each
    grammar hears each token of its answer once. Breaks by tokens after the end, or an answer that never ends."""
    columns = 0
    for seed in range(6):
        heard = []
        for drafter in (None, Alone()):
            lab, draw, grammars = Lab(depth=depth, drafter=drafter, **options), random.Random(seed), {}
            lab.seed = seed
            kinds = {f"r{i}": Counted(draw.randrange(3, 30), draw.choice([0, draw.randrange(3, 30)])) for i in range(4)}
            grammars |= kinds
            lab.scheduler._constrain = lambda made, grammars=grammars: grammars.get(made.id, UNCONSTRAINED)
            lab.scheduler._make_masks = lambda rows: Masks(rows, lambda matchers, waited: Future())
            heard.append(told(lab))
            for name, grammar in grammars.items():
                answer = lab.answers[name]
                assert grammar.told[: len(answer.tokens)] == answer.tokens, name
                assert len(answer.tokens) <= grammar.ends and answer.reason is not None, name
            columns += sum(isinstance(step.slices, Decodes) and step.masks is not None for step in lab.runner.steps)

        assert heard[0] == heard[1]
    assert columns > 50, "hardly a step with a grammar was booked together"


def test_a_convoy_costs_nothing_a_sequence_until_something_happens():
    """12 steps of one sequence over blocks of 16: all planned as columns, two blocks, one break-up at the end."""
    lab = Lab(block_size=16)
    lab.add("a", prompt=5, max_tokens=13)
    kinds = []
    while lab.scheduler.has_work:
        step = lab.plan()
        kinds.append((type(step.slices), type(lab.commit())))

    assert [one for one, _ in kinds] == [tuple] + [Decodes] * 12
    assert [other for _, other in kinds] == [list] + [Grown] * 12


def test_whoever_asks_in_between_hears_the_truth():
    lab = Lab(depth=2)
    made = lab.add("a", prompt=5, max_tokens=30)
    for _ in range(9):
        lab.step()

    computed, _, prompt = lab.scheduler.progress("a")
    assert (computed, prompt) == (5, 5)
    facts = lab.scheduler.listing(1)[0]
    assert facts.known == 5 + len(lab.answers["a"].tokens) and facts.computed >= facts.known - 1
    lab.scheduler.check_integrity()
    assert lab.run()["a"].tokens == lab.right(made)


def test_whoever_asks_for_one_that_waits_disturbs_nobody():
    """Each waiting stream that tells its progress asks ten times a second; each time, the others went alone."""
    lab = Lab(depth=2, max_num_seqs=2)
    for name in ("a", "b", "c"):
        lab.add(name, prompt=5, max_tokens=30)
    for _ in range(9):
        lab.step()

    assert lab.scheduler.progress("c") == (0, 0, 5) and lab.scheduler.progress("d") is None
    assert lab.scheduler._tenants.convoy is not None
    assert lab.scheduler.progress("a")[0] == 5 and lab.scheduler._tenants.convoy is None


class Narrowed(Unconstrained):
    """A grammar that allows everything, and wants its masks nevertheless."""

    masks = True


@pytest.mark.parametrize("flying", [1, 2])
def test_masks_behind_a_convoy_begin_when_its_last_step_has_landed(flying):
    """Breaks by waiting for ever: a step with a grammar was launched behind one of a convoy, which begins it."""
    lab = Lab(depth=flying + 1)
    lab.scheduler._constrain = lambda made: Narrowed() if made.id == "c" else UNCONSTRAINED
    lab.scheduler._make_masks = lambda rows: Masks(rows, lambda matchers, waited: Future())
    for name in "ab":
        lab.add(name, prompt=3, max_tokens=40)
    for _ in range(4):
        lab.step()
    while len(lab.flying) < flying:
        assert isinstance(lab.plan().slices, Decodes)
    lab.add("c", prompt=3, max_tokens=5)
    step = lab.plan()

    assert step.masks is not None and not step.masks.begun
    for left in range(flying - 1, -1, -1):
        lab.commit()
        assert step.masks.begun is (left == 0)
