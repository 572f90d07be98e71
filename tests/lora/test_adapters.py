"""Which adapter has which place."""

import pytest

from tinyserve.errors import UnknownModel
from tinyserve.lora.adapters import LoadedAdapters, NoAdapters


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
