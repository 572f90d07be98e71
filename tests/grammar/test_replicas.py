"""replicas.py: masks of other processes are bit for bit the loop's, and nothing waits for them for long."""

import contextlib
import os
import pickle
import random
import signal
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.scripted import EOT, VOCAB
from tinyserve.grammar import replicas as module
from tinyserve.grammar.board import ASK, LONGEST, ORDERED, Board
from tinyserve.grammar.crew import Crew, Facts
from tinyserve.grammar.mask import MaskPool
from tinyserve.grammar.replicas import Replicas
from tinyserve.runner.workers import Workers

from .harness import GRAMMARS, TOKENIZER, allowed, matcher
from .test_masks import FORMS, THOUGHTS, bits

pytestmark = pytest.mark.skipif(not ORDERED, reason="this processor may show other processes writes in another order")


def shared(memory):
    return lambda: None


def until(what, seconds=60):
    """Wait for something that another process does."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


class Lab:
    """A pool with two workers, and answers in it; every step is short, and workers get the time that they need."""

    def __init__(self, monkeypatch, *, share=shared, most=24):
        monkeypatch.setattr(module, "STEP_SECONDS", 1e9)
        monkeypatch.setattr(module, "LATE_SECONDS", 20.0)
        monkeypatch.setattr(module, "FEWEST", 1)
        facts = Facts(tokenizer=TOKENIZER, size=VOCAB, words=lambda: GRAMMARS.words, most=most, share=share)
        self.replicas = Replicas(2, facts)
        self.pool = MaskPool(Workers("test-mask"), most=most, replicas=self.replicas)
        self.draw = random.Random(0)
        self.rows = []

    def begin(self):
        """Processes that take orders, and are of use."""
        for _ in range(module.WINDOW):
            self.replicas.note(starved=True)
        self.replicas.start()
        until(lambda: self.replicas.workers == 2)

    def add(self, count):
        for _ in range(count):
            form, thought = self.draw.choice(FORMS), self.draw.choice(THOUGHTS)
            stop, least = self.draw.choice([(), (), (EOT,), (97, 34)]), self.draw.choice([0, 0, 5, 30])
            self.rows.append((len(self.rows), matcher(thought, stop=stop, min_tokens=least, **form)))
        self.rows = list(self.rows)

    def step(self):
        """A step; every mask equals the loop's own. Returns: rows whose mask a worker made."""
        masks = self.pool.masks(self.rows)
        before = self.replicas._there
        masks.begin(waited=True)
        found = masks.result()
        for row, (_, match) in zip(found, self.rows, strict=True):
            assert match.error is not None or bits(row) == allowed(match)
        return int(self.replicas._there.sum()) if self.replicas._there is not before else 0

    def go_on(self):
        """A token for each answer; those that end make room for new ones."""
        ended = []
        for index, (_, match) in enumerate(self.rows):
            if match.ended or match.error is not None:
                ended.append(index)
                continue
            match.advance(self.draw.choice(sorted(allowed(match))))
        for index in reversed(ended):
            del self.rows[index]
        if ended:
            self.add(len(ended))

    def settle(self):
        """Steps until workers make every mask."""
        for _ in range(400):
            if self.step() == len(self.rows):
                return
            self.go_on()
            time.sleep(0.002)
        pytest.fail("some rows have no replica yet")

    def close(self):
        pids = [hand.process.pid for hand in self.replicas._crew._hands]
        self.pool.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture(params=[shared, lambda memory: None], ids=["direct", "copied"])
def lab(monkeypatch, request):
    made = Lab(monkeypatch, share=request.param)
    made.begin()
    yield made
    made.close()


def test_masks_of_workers_are_the_loops(lab):
    """20 answers of 5 grammars with thoughts, stop ids and least lengths, 150 steps in which some end, begin, go back,
    leave for a while (preempted) to stand before others or behind them, or swap rows: every mask of every step equals
    the loop's, most are a worker's."""
    lab.add(20)
    made = steps = 0
    for number in range(150):
        made, steps = made + lab.step(), steps + len(lab.rows)
        lab.go_on()
        if number % 7 == 3:  # back by up to three tokens
            _, match = lab.draw.choice(lab.rows)
            match.rollback(min(len(match._log), lab.draw.randint(1, 3)))
        if number % 11 == 5:
            lab.draw.shuffle(lab.rows)
            lab.rows = list(lab.rows)
        if number % 23 == 9:  # some stay away for longer than a place is kept
            away, lab.rows = lab.rows[:6], lab.rows[6:]
            for _ in range(12):
                lab.step()
                lab.go_on()
            lab.rows = away + lab.rows[2:] if number % 2 else lab.rows[2:] + away
            lab.add(2)  # who come when they come back
    assert made > steps / 2, (made, steps)


class Hands:
    """In place of a crew: takes orders, and does nothing."""

    direct = True

    def __init__(self, *_):
        self.board, self.orders = Board(2, 12, 4), []

    def __len__(self):
        return 2

    def born(self, index):
        return 1

    def order(self, index, message):
        self.orders.append(message)
        return True

    def wake(self):
        pass


def test_answers_that_nobody_can_follow_take_no_places(monkeypatch):
    """20 whose messages are too long stand before 4 others: all 16 places of a step were theirs, in every step, and
    masks that a worker had made there counted no more."""
    monkeypatch.setattr(module, "Crew", Hands)
    monkeypatch.setattr(module, "FEWEST", 1)
    monkeypatch.setattr(module, "STEP_SECONDS", 1e9)
    found = Replicas(2, None)
    found._wanted = True
    long, short = "x" * LONGEST, "x"
    rows = [
        (row, SimpleNamespace(replica=None, described=lambda *_, text=text: (text, ())))
        for row, text in enumerate([long] * 20 + [short] * 4)
    ]

    found.follow(rows)

    assert [match.replica is None for _, match in rows] == [True] * 20 + [False] * 4
    assert sorted(match.replica.place for _, match in rows[20:]) == [0, 1, 2, 3] and len(found._crew.orders) == 4
    os.close(found._crew.board.file)


def test_a_worker_that_reads_no_answer_is_ended(monkeypatch):
    """It waited for the ids of a text for ever, and was never started again."""
    crew, ended = Crew(1, SimpleNamespace(tokenizer=TOKENIZER)), []
    hand, (mine, theirs) = crew._hands[0], socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setblocking(False)
    hand.link, hand.process = mine, SimpleNamespace(kill=lambda: ended.append(True))
    theirs.send(ASK + b"a")
    crew._hear(hand, None)
    assert pickle.loads(theirs.recv(LONGEST)) == ("ids", TOKENIZER.encode("a")) and not ended
    with contextlib.suppress(BlockingIOError):
        while True:
            mine.send(b"x" * 1000)
    theirs.send(ASK + b"a")
    crew._hear(hand, None)
    assert ended
    for end in (mine, theirs, crew._bell, crew._ear):
        end.close()


def test_rows_beyond_the_places_are_the_loops(lab):
    """30 answers and 24 places: 6 rows are computed here, and the step's masks are all there."""
    lab.add(30)
    for _ in range(40):
        found = lab.step()
        lab.go_on()
        time.sleep(0.002)
    assert 0 < found <= 24


def test_a_worker_that_dies_is_missed_by_nobody(lab, monkeypatch):
    """Killed between two steps, and with tokens told that it will never read: its rows are computed here, the others
    are not waited for longer. A new one takes its place later."""
    monkeypatch.setattr(module, "LATE_SECONDS", 0.5)
    lab.add(12)
    lab.settle()
    hand = lab.replicas._crew._hands[0]
    os.kill(hand.process.pid, signal.SIGKILL)
    lab.go_on()
    start = time.monotonic()
    assert lab.step() <= 6
    assert time.monotonic() - start < 10
    until(lambda: lab.replicas.workers == 1)
    for _ in range(20):
        lab.step()
        lab.go_on()
    hand.died = -1e9
    lab.replicas._crew._bell.send(b".")
    until(lambda: lab.replicas.workers == 2)
    lab.settle()


def test_a_late_worker_is_not_waited_for_again(lab, monkeypatch):
    """Stopped for 100 steps: the first costs LATE_SECONDS, the others nothing; its rows come back when it goes on."""
    lab.add(12)
    lab.settle()
    monkeypatch.setattr(module, "LATE_SECONDS", 0.2)
    pid = lab.replicas._crew._hands[1].process.pid
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # else it might still make the next masks
    try:
        lab.go_on()
        lab.step()
        monkeypatch.setattr(module, "LATE_SECONDS", 30.0)  # whoever is waited for now is waited for for long
        start = time.process_time()
        stopped = [row for row, (_, match) in enumerate(lab.rows) if match.replica and match.replica.place % 2]
        for _ in range(100):
            lab.go_on()
            lab.step()
            assert time.process_time() - start < 8  # waiting is work
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stopped
    monkeypatch.setattr(module, "LATE_SECONDS", 20.0)
    lab.settle()


def test_no_process_is_started_before_it_is_of_use(monkeypatch):
    """For 16 rows in steps of less than 8 ms, and where the device waited for the loop in 8 of 32 steps. After 2048 of
    them the loop computes masks for 32, and goes on with that if the device does not wait."""
    lab = Lab(monkeypatch)
    begun, started = [], lab.replicas._crew
    monkeypatch.setattr(started, "start", lambda: begun.append(True))

    def steps(count, starved):
        for number in range(count):
            lab.replicas.note(number < starved)
        lab.step()
        return bool(begun) and begun.clear() is None

    monkeypatch.setattr(module, "FEWEST", 16)
    lab.add(15)
    assert not steps(32, 32)
    lab.add(1)
    assert steps(0, 0)
    monkeypatch.setattr(module, "STEP_SECONDS", 0.0)
    assert not steps(0, 0)
    monkeypatch.setattr(module, "STEP_SECONDS", 1e9)
    assert steps(2047, 0) and not steps(1, 0)
    assert not steps(32, 7) and not steps(31, 8) and steps(1, 0)
    lab.pool.close()


def test_no_mask_of_an_earlier_generation_is_taken():
    """A word that a worker may still write: of another answer at that place, or of tokens that were taken back."""
    from tinyserve.grammar.replicas import Replica

    board = Board(2, 3, 4)
    first = Replica(board, 3, 1 << 32)
    cell = board.cell(3)
    first.tell(7)
    made = int(board.told[cell])
    first.drop()
    board.made[cell] = made
    assert board.made[cell] != board.told[cell]
    second = Replica(board, 3, 2 << 32)
    second.tell(7)
    first.live = False
    first.tell(9)
    first.drop()
    assert board.told[cell] == 2 << 32 | 1 and board.made[cell] != board.told[cell]
    assert board.ring[cell * 64 + 1] == 1 << 32 | 7
    assert np.shares_memory(board.told, board.memory)
    os.close(board.file)


@pytest.mark.parametrize(("cores", "count"), [(0, 0), (1, 0), (7, 0), (8, 3), (16, 6), (128, 6)])
def test_as_many_workers_as_there_are_cores_to_spare(cores, count):
    """None beside the CPU device, or where --cpu-threads says so; three of eight cores, at most 6."""
    assert module.usual_workers(cores) == count
