"""Which adapter has which place."""

import random
import weakref

import pytest
from attrs import evolve

from tests.scheduling.harness import Lab, request
from tinyserve.errors import UnknownModel
from tinyserve.lora.adapters import LoadedAdapters, NoAdapters
from tinyserve.request import FinishReason


def three(places=2):
    known = LoadedAdapters(places)
    return known, *(known.load(name, f"/{name}", 8, None) for name in "abc")


def moved(known):
    return [(move.place, move.adapter.name) for move in known.moves()]


def test_the_one_admitted_longest_ago_makes_room():
    """b was admitted before a was again, so c takes b's place; nothing moves for one that is there."""
    known, a, b, c = three()
    assert [known.place(a, [a]), known.place(b, [a, b]), known.place(a, [a])] == [1, 2, 1]
    assert moved(known) == [(0, "a"), (1, "b")]

    assert known.place(c, [None, c]) == 2
    assert moved(known) == [(1, "c")] and moved(known) == []


def test_one_that_runs_keeps_its_place():
    known, a, b, c = three()
    known.place(a, [a]), known.place(b, [a, b])

    assert not known.fits(c, [a, b, None])
    assert known.fits(a, [a, b]) and known.fits(None, [a, b])
    assert known.fits(c, [a, a, None]) and known.place(c, [a, c]) == 2


def test_a_name_given_again_is_another_adapter():
    known, a, *_ = three()
    known.unload("a")
    assert known.find("a") is None and [one.name for one in known.loaded] == ["b", "c"]

    again = known.load("a", "/a", 8, None)
    assert again.identity != a.identity and known.identity(None) == ""
    assert (known.place(a, [a]), known.place(again, [a, again])) == (1, 2)


def test_without_adapters_every_one_is_unknown():
    with pytest.raises(UnknownModel, match="mine"):
        NoAdapters().identity("mine")
    assert NoAdapters().identity(None) == "" and NoAdapters().place(None, ()) == 0


def test_a_long_queue_for_adapters_without_a_place_is_looked_at_once_for_each():
    """300 requests wait for two adapters that have no place: 2 looks at what runs in a step; it was one for each."""
    known, *three_ = three(1)
    looks = []
    fits = known.fits
    known.fits = lambda adapter, active: looks.append(adapter) or fits(adapter, active)
    lab = Lab(adapters=known, blocks=200)
    for number in range(301):
        plain = request(f"r{number}", prompt=(number, 1), max_tokens=6)
        lab.add(evolve(plain, adapter=three_[0 if not number else 1 + number % 2]))
    lab.step()
    looks.clear()
    lab.step()
    assert len(looks) == 2 and lab.scheduler.num_running == 1


@pytest.mark.parametrize(("places", "most"), [(1, 4), (2, 3)])
def test_an_adapter_gets_its_place_however_much_others_are_asked_for(places, most):
    """One step in which the places' adapters have nothing running, and one request of another: it ran after all others,
    however many came. It now waits for as many as may run together, and what they take to end."""
    known, *kinds = three(places)
    lab = Lab(adapters=known, blocks=200, max_num_seqs=most)
    late = None
    for number in range(80):
        plain = request(f"r{number}", prompt=(number, 1), max_tokens=5)
        lab.add(evolve(plain, adapter=kinds[number % places]))
        if number == 6:
            late = lab.add(evolve(request("late", prompt=(900, 1), max_tokens=5), adapter=kinds[-1]))
            base = lab.add(request("base", prompt=(901, 1), max_tokens=5))
        lab.step()
    order = [one for one, answer in lab.answers.items() if answer.reason is not None]
    assert lab.answers[late.id].reason is not None and lab.answers[base.id].reason is not None, order
    lab.run()
    assert len(lab.answers) == 82 and all(answer.reason is not None for answer in lab.answers.values())


def test_a_request_that_was_passed_is_not_kept():
    """Its prompt, of any length, stayed in memory until another one had to wait."""
    known, a, b, _ = three(1)
    turn = known.turn(lambda: [a], 4)
    late = evolve(request("late", prompt=range(9)), adapter=b)
    assert not turn.fits(late)
    turn.entered(evolve(request("other"), adapter=a))
    gone = weakref.ref(late)
    del turn, late
    assert known.passed == ("late", 1) and gone() is None


def test_two_adapters_that_share_a_place_take_turns_by_the_batch():
    """100 requests that alternate between two adapters: 4 at a time, where strict order would run each alone."""
    known, a, b, _ = three(1)
    lab = Lab(adapters=known, blocks=200, max_num_seqs=4)
    for number in range(100):
        lab.add(evolve(request(f"r{number}", prompt=(number, 1), max_tokens=4), adapter=(a, b)[number % 2]))
    lab.run()
    assert lab.scheduler._steps < 100 / 4 * 5 * 1.5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("depth", "blocks"), [(1, 60), (2, 9)])
def test_in_any_schedule_each_row_computes_with_its_own_adapter(seed, depth, blocks):
    """Five adapters on two places, preemptions, depth 2, aborts: what a place holds when a step runs, by the moves."""
    chosen = random.Random(seed)
    known = LoadedAdapters(2)
    kinds = [None, *(known.load(name, "", 8, None) for name in "abcde")]
    lab = Lab(adapters=known, depth=depth, blocks=blocks, max_num_batched_tokens=9, scheduler_reserve_full_isl=False)
    wanted, place_of, held = {}, {}, {}
    plan = lab.scheduler.plan

    def checked():
        step = plan()
        if step is None:
            return None
        held.update({move.place + 1: move.adapter for move in step.moves})
        for opening in step.opened:
            place_of[opening.slot] = opening.params.adapter
            wanted[opening.slot, "row"] = wanted[opening.tokens[0]]
        for piece in step.slices:
            assert held.get(place_of[piece.slot]) is wanted[piece.slot, "row"]
        return step

    lab.scheduler.plan = checked
    made = []
    for number in range(30):
        kind = chosen.choice(kinds)
        prompt = (1000 + number, *range(chosen.randrange(1, 12)))
        wanted[prompt[0]] = kind
        plain = request(f"r{number}", prompt=prompt, max_tokens=chosen.randrange(1, 14))
        made.append(lab.add(evolve(plain, adapter=kind)))
        for _ in range(chosen.randrange(3)):
            lab.step()
        if chosen.random() < 0.2:
            gone = chosen.choice(made)
            lab.scheduler.finish(gone.id, FinishReason.ABORT)
            if gone.id in lab.answers and lab.answers[gone.id].reason is None:
                del lab.answers[gone.id]
    answers = lab.run()

    for one in made:
        if one.id in answers:
            assert answers[one.id].tokens == lab.right(one)
    assert bool(lab.preemptions) == (blocks < 60)
