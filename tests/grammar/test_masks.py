"""mask.py, and what a matcher knows without the library: nothing that may come differs from what the library says."""

import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLExecutor

from tests.scripted import EOT, THINK
from tinyserve.grammar import mask
from tinyserve.grammar.mask import MaskPool
from tinyserve.runner.workers import Workers
from tinyserve.structured import Thought

from .harness import allowed, matcher

RECORD = {"type": "object", "properties": {"kind": {"enum": ["DEF", "DEAL", "}}"]}, "on": {"type": "boolean"}}}
RECORD |= {"required": ["kind", "on"], "additionalProperties": False}
FORMS = [
    {"json": RECORD},
    {"json": {"type": "array", "items": RECORD}, "disable_any_whitespace": True},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"choice": ["DEFDEF", "DEFEAT", "short"]},
    {"regex": "DE(FDE){2}[ab]}}}"},
]
THOUGHTS = [None, Thought(begin="<think>", ends=("</think>",)), Thought(begin="<think>", ends=("</think>",), budget=2)]


class NothingForced:
    """The library's matcher, which never says that tokens have to come: each mask is computed."""

    def __init__(self, match):
        self._match = match

    def compute_ff_tokens(self):
        return []

    def __getattr__(self, name):
        return getattr(self._match, name)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    form=st.sampled_from(FORMS), thought=st.sampled_from(THOUGHTS), stop=st.sampled_from([(), (), (EOT,), (97, 34)]),
    min_tokens=st.sampled_from([0, 0, 5, 30]), moves=st.lists(st.integers(0, 999), min_size=10, max_size=40),
)  # fmt: skip
def test_what_has_to_come_is_what_the_mask_leaves(form, thought, stop, min_tokens, moves):
    """Random walks of 10 to 40 tokens, some taken back: every mask equals the library's own, also where stop ids,
    a number's length, min_tokens or a thought change it. Breaks by a token that the grammar forbids."""
    quick, slow = (matcher(thought, stop=stop, min_tokens=min_tokens, **form) for _ in range(2))
    assert slow.width  # and it has begun
    slow._match = NothingForced(slow._match)
    count = 0
    for move in moves:
        may = allowed(quick)
        assert may == allowed(slow)
        if move % 10 == 9 and count:
            back = min(count, move % 4)
            for one in (quick, slow):
                one.rollback(back)
            count -= back
            continue
        if quick.ended or quick.error:
            break
        token = sorted(may)[move % len(may)]
        for one in (quick, slow):
            one.advance(token)
        count += 1
        assert (quick.ended, str(quick.error)) == (slow.ended, str(slow.error))


def test_more_than_half_of_a_record_needs_no_mask():
    """{"kind": "DEAL", "on": true}: of 28 tokens 17 follow without a look at the vocabulary."""
    match, free = matcher(json=RECORD), 0
    for token in b'{"kind": "DEAL", "on": true}':
        free += match.compiled() is None
        assert token in allowed(match)
        match.advance(token)
    assert free == 17


def test_masks_are_computed_at_once_unless_they_take_long(monkeypatch):
    """What waits for the device gets them before `begin` returns, but for first masks; after a slow step the thread has
    the next 15."""
    pool = MaskPool(Workers("test-mask"))
    rows = [(3, matcher(json=RECORD)), (5, matcher(choice=["ab", "b"]))]
    first = pool.masks(rows)
    assert not any(match.usual for _, match in rows)
    held = threading.Event()
    pool._thread.submit(held.wait)
    first.begin(waited=True)
    assert not first.there
    held.set()
    first.result()
    for _, match in rows:  # a busy machine may have taken long
        match.note(quick=True)
    now = pool.masks(rows)
    now.begin(waited=True)
    assert now.there and now.slots == (3, 5)
    expected = now.result().copy()  # the next step's masks take their place
    assert bits(expected[1]) == {97, 98} and bits(expected[0]) == {123}
    monkeypatch.setattr(mask, "LOOP_SECONDS", 1e-9)
    monkeypatch.setattr(mask, "MOST_ASIDE", 15)
    late = pool.masks(rows)
    late.begin(waited=True)  # one row here, the other by the thread
    assert (late.result() == expected).all()
    monkeypatch.setattr(mask, "LOOP_SECONDS", 10.0)
    aside = 0
    while True:
        masks = pool.masks(rows)
        held.clear()
        pool._thread.submit(held.wait)
        masks.begin(waited=True)
        there = masks.there
        held.set()
        if there:
            break
        assert (masks.result() == expected).all()
        aside += 1
    assert aside == 15
    pool.close()


@pytest.mark.parametrize("slow", ["first", "last", "long"])
def test_the_loop_computes_no_mask_that_may_take_long(slow):
    """A first mask, one whose last took 20 ms, one of a grammar with a text of 40 KB: the thread computes the step."""
    pool = MaskPool(Workers("test-mask"))
    usual, other = matcher(json=RECORD), matcher(choice=["ab", "x" * (40_000 if slow == "long" else 2)])
    for match in (usual, other):
        match.note(quick=True)
    if slow == "first":
        other.note(quick=False)
    if slow == "last":
        assert other.width  # and it has begun
        other._match = Sleepy(other._match)
        masks = pool.masks([(0, usual), (1, other)])
        masks.begin(waited=True)
        assert masks.there
        pool._aside, other._match = 0, other._match._match
    threads = []
    pool._thread.submit(lambda: threads.append(threading.current_thread()))
    compiled, other.compiled = other.compiled, lambda: threads.append(threading.current_thread()) or compiled()
    masks = pool.masks([(0, usual), (1, other)])
    masks.begin(waited=True)
    masks.result()
    assert threads[0] is threads[1] is not threading.current_thread()
    pool.close()


@pytest.mark.parametrize("several", [False, True])
def test_one_thread_takes_the_rows_that_share_a_lexer(monkeypatch, several):
    """4 rows of a grammar by one thread, which no other waits for at the lexer's lock; of two grammars by all threads,
    those of a grammar one after the other. Every mask is its row's."""
    made = []

    class Counting:
        def __init__(self, threads):
            made.append(threads)
            self._library = LLExecutor(threads)

        def unsafe_compute_mask_ptr(self, asked, *where):
            made.append([row for _, row in asked])
            self._library.unsafe_compute_mask_ptr(asked, *where)

    monkeypatch.setattr(mask, "LLExecutor", Counting)
    pool = MaskPool(Workers("test-mask"))
    forms = ["[a-m]+z", "[k-y]{9}" if several else "[a-m]+z"] * 2
    rows = [matcher(regex=form) for form in forms]
    rows[2].advance(97)
    found = pool.masks(list(enumerate(rows)))
    found.begin()
    for row, match in zip(found.result(), rows, strict=True):
        assert bits(row) == allowed(match)
    assert made[0] == (None if several else 1)
    assert made[1] in ([[0, 2, 1, 3], [1, 3, 0, 2]] if several else [[0, 1, 2, 3]])
    pool.close()


def test_a_mask_that_cannot_be_made_is_one_answers_fault():
    """Breaks if what a matcher raises before its mask ends the step of both."""
    pool = MaskPool(Workers("test-mask"))
    for waited in (False, True):
        good, bad = matcher(json=RECORD), matcher(choice=["ab"])
        for match in (good, bad):
            match.note(quick=True)
        bad.compiled = lambda: 1 / 0
        masks = pool.masks([(0, bad), (1, good)])
        masks.begin(waited=waited)
        assert bits(masks.result()[1]) == {123} and good.error is None
        assert isinstance(bad.error, ZeroDivisionError)
    pool.close()


class Sleepy(NothingForced):
    """The library's matcher, of which a mask takes 20 ms."""

    def unsafe_compute_mask_ptr(self, *where):
        time.sleep(0.02)
        self._match.unsafe_compute_mask_ptr(*where)


def test_a_mask_holds_nothing_of_the_step_before():
    """Rows of buffers are used again: 30 steps of two matchers in turn equal those of a buffer of their own."""
    pool = MaskPool(Workers("test-mask"), lambda rows, width: np.full((rows, width), -1, dtype=np.int32))
    pair = [matcher(regex="(a|b){40}"), matcher(THOUGHTS[2], choice=["abab"])]
    tokens = {0: 97, 1: THINK}
    for step in range(30):
        masks = pool.masks(list(enumerate(pair)))
        masks.begin(waited=bool(step % 2))
        for row, match in zip(masks.result(), pair, strict=True):
            assert bits(row) == allowed(match)
        for number, match in enumerate(pair):
            may = sorted(allowed(match))
            match.advance(tokens[number] if tokens[number] in may else may[-1])
    pool.close()


def bits(row):
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
