"""runner/hands.py: who works does not matter for what comes first."""

import threading

import pytest

from tinyserve.runner.hands import Hands, done


def test_work_is_done_in_the_order_of_the_calls():
    """A slow job, then five quick ones: 0 1 2 3 4 5, the quick ones behind it by its thread, the next one at once."""
    hands, gate, found = Hands(), threading.Event(), []
    hands.start()

    def work(number):
        found.append((number, threading.get_ident()))
        return number

    slow = hands.do(False, lambda: gate.wait(10) and work(0))
    behind = [hands.do(True, work, number) for number in range(1, 6)]
    gate.set()
    assert [done(job) for job in (slow, *behind)] == [0, 1, 2, 3, 4, 5]
    assert hands.do(True, work, 6) == 6

    assert [number for number, _ in found] == [0, 1, 2, 3, 4, 5, 6]
    here = [thread == threading.get_ident() for _, thread in found]
    assert here == [False] * 6 + [True]
    hands.close()


def test_what_fails_aside_fails_where_it_is_asked_for():
    """One error, told by `done`; the thread goes on."""
    hands = Hands()
    assert hands.do(False, int, "1") == 1  # before `start`: at once
    hands.start()
    job = hands.do(False, int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        done(job)
    assert done(hands.do(False, int, "2")) == 2
    hands.close()
