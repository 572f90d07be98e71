"""Whose grammar is compiled next, for whom, and for whom no longer."""

import threading
import traceback

import pytest

from tests.scripted import EOS, VOCAB
from tinyserve.errors import EngineError, Overloaded, RequestError, UnknownModel, retold
from tinyserve.grammar import compile, line
from tinyserve.grammar.compile import Grammars
from tinyserve.grammar.line import Compiled, Crowded, Line
from tinyserve.grammar.trial import TooMuch
from tinyserve.runner.workers import Workers
from tinyserve.structured import StructuredOutputsParams

from .harness import TOKENIZER


def choice(text):
    return StructuredOutputsParams(choice=[text]).constraint()


@pytest.fixture
def own():
    """Grammars whose threads begin when `gate` is set, and `tried`: the texts that they tried."""
    grammars = Grammars(TOKENIZER, VOCAB, {EOS}, quick=Workers("own-quick"), slow=Workers("own-slow"))
    grammars.gate, grammars.tried = threading.Event(), []
    compiling = grammars._compile

    def noted(wanted, seconds, slow):
        assert grammars.gate.wait(60)
        grammars.tried.append((wanted.value[0], seconds))
        if wanted.value[0].startswith("heavy"):
            raise TooMuch("it takes too long")
        return compiling(wanted, seconds, slow)

    grammars._compile = noted
    yield grammars
    grammars.gate.set()
    grammars.close()


def test_memory_of_grammars_in_use_is_bounded(monkeypatch):
    """100 grammars of 87 MB, each good in itself, were 11 GB: the bound was asked before they were compiled."""
    monkeypatch.setattr(compile, "CACHED_BYTES", 20 * 2**20)
    monkeypatch.setattr(compile, "MOST_BYTES", 40 * 2**20)
    for patient in (False, True):
        own = Grammars(
            TOKENIZER, VOCAB, {EOS}, quick=Workers("own-quick"), slow=Workers("own-slow"), patient=patient
        )  # fmt: skip
        try:
            texts = [f"{number}" + "x" * 40_000 for number in range(5)]
            used = [own.hold(choice(text)) for text in texts]
            assert used[0].result(60) is not None and used[0].bytes > 8 * 2**20
            small = own.hold(choice("small"))
            if patient:
                while sum(each.done() for each in used) < 2:
                    used[1].result(60)
                assert not used[4].done()
            else:
                assert isinstance(used[4].exception(60), Overloaded) and small.result(60) is not None
            for each in used[:4]:
                own.release(each)
            again = used[4] if patient else own.hold(choice("again" + texts[4]))
            assert again.result(60) is not None
            assert sum(each.bytes for each in own._cache.values()) <= 40 * 2**20
        finally:
            own.close()


def test_a_child_that_starts_slowly_is_no_grammars_fault(own, monkeypatch):
    """On a stopped machine who came first was told to make it simpler, though the trial had not begun."""
    starting, ready = threading.Event(), own._trial(False).make_ready

    def slowly():
        starting.set()
        assert own.gate.wait(60)
        return ready()

    monkeypatch.setattr(own._trial(False), "make_ready", slowly)
    first = own.hold(choice("first"))
    assert starting.wait(60)
    monkeypatch.setattr(line, "WAIT_SECONDS", 0.0)
    assert isinstance(first.late(choice("first")), Overloaded)
    own.gate.set()
    assert first.result(60) is not None and isinstance(first.late(choice("first")), RequestError)


def test_any_number_waits_where_all_are_of_one_user():
    """A program with 700 schemas failed as a whole: others than its own were said to be first."""
    waiting = Line(tries=1, bounded=False)
    assert all(waiting.enter(Compiled(), choice(f"{number}")) for number in range(2 * line.MOST))


def test_a_grammar_for_which_nobody_waits_is_not_compiled(own):
    """150 clients that had left kept everybody's new grammars waiting for minutes: each was tried for 3.3 s."""
    first = own.hold(choice("first"))
    left = [own.hold(choice(f"left {number}")) for number in range(150)]
    shared, size = own.hold(choice("left 7")), len(own._cache)
    for each in left:
        own.release(each)
    assert len(own._cache) == size - 149, "what is there is not forgotten for them"
    assert shared is left[7] and len(own._line) <= 2 and not left[7].dropped
    last = own.hold(choice("last"))
    again = own.hold(choice("left 9"))
    own.gate.set()
    assert all(each.result(60) is not None for each in (first, shared, last, again))
    assert [text for text, _ in own.tried] == ["first", "left 7", "last", "left 9"]
    assert sum(each.dropped and each.cancelled() for each in left) == 149
    own.release(shared)
    assert own.hold(choice("left 7")) is shared, "what is there stays"


def test_one_that_takes_long_is_dropped_too_when_nobody_waits(own):
    """In the line of the slow thread nobody took it back either; whoever asks again has it compiled again."""
    heavy, other = own.hold(choice("heavy")), own.hold(choice("other"))
    own.release(heavy)
    own.gate.set()
    other.result(60)
    again = own.hold(choice("heavy"))
    assert again is not heavy or not heavy.dropped
    with pytest.raises(RequestError, match="it takes too long"):
        again.result(60)
    trials = [seconds for text, seconds in own.tried if text == "heavy"]
    assert trials[-3:] == [compile.QUICK_SECONDS, compile.LONGER_SECONDS, compile.SECONDS] and len(trials) <= 4


def test_those_that_were_tried_less_are_first():
    waiting = Line(tries=3)
    made = [Compiled() for _ in range(4)]
    for number, tried in enumerate((2, 1, 2, 1)):
        waiting.enter(made[number], choice(str(number)), tried)
    assert [waiting.take((1, 2))[0] for _ in made] == [made[1], made[3], made[0], made[2]]
    assert waiting.take((0, 1, 2)) is None


def test_no_more_wait_than_may(monkeypatch):
    """1,000 requests with texts of 256 KB each: what they asked for was held until their turn, so many they were."""
    monkeypatch.setattr(line, "MOST", 3)
    monkeypatch.setattr(line, "MOST_CHARACTERS", 100)
    waiting = Line(tries=1)
    made = [Compiled() for _ in range(3)]
    for each in made:
        waiting.enter(each, choice("a"))
    with pytest.raises(Crowded, match="Retry later") as caught:
        waiting.enter(Compiled(), choice("b"))
    assert caught.value.retry_after >= 1
    assert waiting.take((0,))[0] is made[0]
    with pytest.raises(Crowded):
        waiting.enter(Compiled(), choice("x" * 100))
    waiting.enter(Compiled(), choice("x"))


def test_who_is_told_to_come_back_finds_the_place_kept(monkeypatch):
    """After a wait for others the place in the queue stays for KEPT_SECONDS, and no longer: 0.2 s here."""
    waiting, made, wanted = Line(tries=1), Compiled(), choice("a")
    waiting.enter(made, wanted)
    assert waiting.hold(made)
    assert isinstance(made.late(wanted), Overloaded)
    waiting.release(made)
    assert len(waiting) == 1 and waiting.hold(made)
    made.kept = 0.0
    waiting.release(made)
    assert made.dropped and not waiting.hold(made) and not len(waiting)
    lost = Compiled()
    waiting.enter(lost, wanted)
    waiting.hold(lost), lost.late(wanted), waiting.release(lost)
    lost.kept = 1e-9
    assert waiting.take((0,)) is None and lost.dropped


def test_what_is_held_stays_in_the_cache(own, monkeypatch):
    """Answers of one call that are queued later found theirs gone after 512 other grammars, and nobody woke them."""
    monkeypatch.setattr(compile, "CACHED", 2)
    own.gate.set()
    held, free = own.hold(choice("held")), own.compiled(choice("free"))
    held.result(60), free.result(60)
    for number in range(3):
        own.compiled(choice(f"another {number}")).result(60)
    assert own.compiled(choice("held")) is held and own.compiled(choice("free")) is not free
    own.release(held)
    own.compiled(choice("free")).result(60), own.compiled(choice("more")).result(60), own.compiled(choice("last"))
    assert own.compiled(choice("held")) is not held


def test_each_who_is_told_of_an_error_has_one_of_his_own():
    """The one exception of a grammar held the frames of the first who was told: an LLM, its model and its threads."""
    made = Compiled()
    made.set_exception(RequestError("no", param="field", code="x"))
    seen = []
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^no$") as caught:
            made.result()
        seen.append(caught.value)
        assert (caught.value.param, caught.value.code) == ("field", "x")
        assert len(list(traceback.walk_tb(caught.value.__traceback__))) == 2
    assert seen[0] is not seen[1] and made.exception() not in seen
    assert kept_error(made).__traceback__ is None
    caused = EngineError("why")
    caused.__cause__ = OSError(24, "no descriptors")
    twin = retold(caused)
    assert (twin.args, twin.__cause__) == (caused.args, caused.__cause__)
    assert retold(OSError(24, "x")).errno == 24
    for error in (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), KeyError("k"), UnknownModel("a", ("b",))):
        assert (type(retold(error)), str(retold(error))) == (type(error), str(error))


def kept_error(made):
    return super(Compiled, made).exception()
