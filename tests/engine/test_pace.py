"""Readers are woken for every token, unless the device waits for the loop."""

import asyncio
from types import SimpleNamespace

import pytest

from bench.streams import engine_of
from tinyserve import config
from tinyserve.engine.pace import CROWD, EVIDENT, LONGEST, MANY, MOST, PATIENCE, WINDOW, Pace
from tinyserve.engine.streams import Choir
from tinyserve.request import RequestOutputKind, SamplingParams

from .toy import answer, letters, settle, start


class Step:
    def __init__(self, waited, landed=True, watched=0.0, starved=False):
        self.waited, self.landed, self.watched, self.starved = waited, landed, watched, starved


IDLE, BUSY = Step(waited=False), Step(waited=True)


@pytest.fixture
def clock(monkeypatch):
    """A step a millisecond."""
    now = [0.0, 0.0]
    monkeypatch.setattr("tinyserve.engine.pace.time.monotonic", lambda: now[0])
    monkeypatch.setattr("tinyserve.engine.pace.time.thread_time", lambda: now[1])
    return now


def windows(pace, clock, count, *, flight=IDLE, behind=(), streams=MANY, seconds=0.001, share=0.5):
    for _ in range(count):
        steps(pace, clock, WINDOW, flight=flight, behind=behind, streams=streams, seconds=seconds, share=share)
    return pace.together


def steps(pace, clock, count, *, flight=IDLE, behind=(), streams=MANY, seconds=0.001, share=0.5):
    for _ in range(count):
        clock[0] += seconds
        clock[1] += seconds * share
        pace.note(flight, behind, streams)
    return pace.together


def test_an_idle_device_makes_readers_wait(clock):
    """2, 4, 8, 16, 32 steps together, after two idle steps each; back by half after 16 windows without any."""
    pace = Pace()

    assert [steps(pace, clock, EVIDENT) for _ in range(6)] == [2, 4, 8, 16, MOST, MOST]
    assert windows(pace, clock, PATIENCE - 1, flight=BUSY) == MOST
    assert windows(pace, clock, 1, flight=BUSY) == MOST // 2
    assert windows(pace, clock, PATIENCE, flight=BUSY) == MOST // 4


def test_a_busy_device_does_not(clock):
    """The step had landed, but the next one is under way: nothing waits for the loop, unless all that is missing of it
    is the choice of tokens, which the loop has to launch."""
    assert windows(Pace(), clock, 9, behind=[Step(waited=False, landed=False)]) == 1
    assert windows(Pace(), clock, 9, behind=[Step(waited=False, landed=False, starved=True)]) > 1


def test_a_busy_loop_makes_readers_wait(clock):
    """The device is not idle as far as the loop can see, but the loop works 85 % of the time; at 70 % it stays."""
    pace = Pace()

    assert [windows(pace, clock, 1, flight=BUSY, share=0.85) for _ in range(3)] == [2, 4, 8]
    assert windows(pace, clock, 3 * PATIENCE, flight=BUSY, share=0.7) == 8
    assert windows(pace, clock, PATIENCE, flight=BUSY, share=0.5) == 4


@pytest.mark.parametrize("gap, together", [(0.0005, 2), (0.003, 1)])
def test_a_crowd_that_comes_makes_readers_wait(clock, gap, together):
    """16 clients within 8 ms take the loop longer than that, whatever it and the device do; within 48 ms not."""
    pace = Pace()
    for _ in range(CROWD // 2):
        pace.came += 2
        steps(pace, clock, 1, flight=BUSY, seconds=2 * gap, share=0.1)

    assert (pace.together, pace.crowded) == (together, together > 1)
    steps(pace, clock, EVIDENT, flight=BUSY, seconds=0.01, share=0.1)
    assert not pace.crowded


def test_to_watch_the_device_is_no_work(clock):
    """The thread is busy all of the time, 40 % of it with asking whether a step has landed: readers do not wait."""
    assert windows(Pace(), clock, 3, flight=Step(waited=True, watched=0.0004), share=1.0) == 1


def test_few_readers_get_every_token(clock):
    pace = Pace()
    windows(pace, clock, 3)

    assert windows(pace, clock, 1, streams=MANY - 1) == 1


def test_nobody_waits_long(clock):
    """Steps of 100 ms: 2 go together, never 4."""
    assert 2 * 0.1 <= LONGEST < 4 * 0.1
    assert windows(Pace(), clock, 9, seconds=0.1) == 2


def test_nobody_waits_long_when_steps_become_slow(clock):
    """32 steps of 1 ms together, then steps of 250 ms (long prompts): after two of them every token goes out alone."""
    pace = Pace()
    windows(pace, clock, 5)
    assert pace.together == MOST
    for _ in range(2):
        clock[0] += 0.25
        pace.note(IDLE, (), MANY)

    assert pace.together == 1


def test_readers_who_are_what_steps_wait_for_are_made_to_wait(clock):
    """1000 readers of 233 us each: a step of 8 ms takes 241 at first, and 2 of them would be longer than 0.3 s. After
    10 decisions it takes 15, and a reader gets 32 tokens in 0.5 s; it was one in 0.24 s, for ever."""
    pace = Pace()
    for _ in range(20):
        readers = 0.233 / pace.together
        steps(pace, clock, 1, flight=Step(waited=readers < 0.008), streams=1000, seconds=0.008 + readers, share=0.2)

    assert pace.together == 32


def test_somebody_alone_waits_for_nobody(clock):
    """All but one of many have gone: their pace has gone with them at the next step."""
    pace = Pace()
    windows(pace, clock, 5)
    clock[0] += 0.001
    pace.note(BUSY, (), 1)

    assert pace.together == 1


def test_turns_are_spread(clock):
    """With 8 steps together and 40 streams, each step wakes 5, and 8 steps wake everybody once."""
    pace = Pace()
    steps(pace, clock, 3 * EVIDENT)
    woken = []
    for _ in range(8):
        pace.note(BUSY, (), MANY)
        woken.append([number for number in range(40) if pace.turn(number)])

    assert pace.together == 8
    assert [len(numbers) for numbers in woken] == [5] * 8
    assert sorted(number for numbers in woken for number in numbers) == list(range(40))


@pytest.mark.parametrize("flying, waiting, plans", [([BUSY], 15, 0), ([BUSY], 16, 1), ([], 1, 1)])
def test_a_step_for_a_crowd_waits_until_there_are_enough_of_it(flying, waiting, plans):
    """15 that wait are no reason for another step while one is under way, 16 are; where none is, one is."""

    async def run():
        engine = await engine_of(config.build({"model": "script", "disable_log_stats": True}))
        scheduler, planned = engine.machine.scheduler, []
        engine.machine.scheduler = SimpleNamespace(num_waiting=waiting, plan=planned.append)
        engine.streams.pace.crowded = True
        engine._plan(flying)
        engine.machine.scheduler = scheduler
        await engine.close()
        return planned

    assert len(asyncio.run(run())) == plans


async def read(engine, stop):
    outputs = []
    params = SamplingParams(max_tokens=150, ignore_eos=True, stop=stop)
    async for output in engine.generate([1, 2, 3], params):
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_nothing_is_lost_and_the_first_token_is_not_kept(stop):
    """48 readers of 150 tokens of a model that costs nothing, with and without stop strings: fewer outputs than
    tokens, the first of one token, all of the text."""

    async def run():
        engine = await engine_of(config.build({"model": "script", "disable_log_stats": True, "max_num_seqs": 64}))
        try:
            return await asyncio.gather(*(read(engine, stop) for _ in range(48)))
        finally:
            await engine.close()

    for outputs in asyncio.run(run()):
        assert len(outputs) < 100
        assert len(outputs[0].token_ids) == 1
        assert "".join(output.text for output in outputs) == "a" * 150
        assert sum(len(output.token_ids) for output in outputs) == outputs[-1].usage.completion_tokens == 150


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_a_pause_keeps_no_tokens_from_readers(stop):
    """48 readers who get the tokens of several steps at once: what was computed has been read when all is frozen. Up to
    15 tokens of each were kept until `resume`."""

    async def run():
        engine = await engine_of(config.build({"model": "script", "disable_log_stats": True, "max_num_seqs": 64}))
        got = [0] * 48

        async def reader(number):
            params = SamplingParams(max_tokens=4000, ignore_eos=True, stop=stop)
            async for output in engine.generate([1, 2, 3], params):
                got[number] += len(output.token_ids)

        tasks = [asyncio.create_task(reader(number)) for number in range(48)]
        try:
            while engine.streams.pace.together < 4:
                await asyncio.sleep(0.01)
            await engine.pause("keep")
            await asyncio.sleep(0.05)
            known = [one.known - 3 for one in engine.look(sequences=99, blocks=1).sequences]
            before = list(got)
            engine.resume()
            while sum(got) < sum(before) + 480:
                await asyncio.sleep(0.01)
            return before, known
        finally:
            for task in tasks:
                task.cancel()
            await engine.close()

    before, known = asyncio.run(run())
    assert before == known and min(before) > 0


def test_whoever_waits_for_a_turn_finds_every_token_of_its_own(monkeypatch):
    """12 answers of 20 to 130 letters that differ, one in a form of its own (stop, once, every 3 tokens), while turns
    come every 1 to 16 steps and change every 5: all ids are right, and each token is counted once."""
    quiet, take = [], Choir.take
    monkeypatch.setattr(Choir, "take", lambda self, *rest: quiet.append(len(self.speaking)) or take(self, *rest))
    kinds = [{}, {}, {"stop": ["never"]}, {"output_kind": RequestOutputKind.FINAL_ONLY}, {"detokenize": False}]

    def note(self, flight, flying, streams):
        self._step += 1
        self.together = (1, 4, 2, 8, 1, 16)[self._step // 5 % 6]

    async def run():
        monkeypatch.setattr(Pace, "note", note)
        engine = await start(letters, max_num_seqs=12, stream_interval=1)
        calls = [
            engine.generate([97 + i] * 3, SamplingParams(temperature=0, max_tokens=20 + 10 * i, **kinds[i % 5]))
            for i in range(12)
        ]
        found = await asyncio.gather(*map(answer, calls))
        await settle(engine)
        counted = sum(step.generated for step in engine.meter.steps)
        await engine.close()
        return found, counted

    found, counted = asyncio.run(run())
    for i, (texts, ids, last, pieces) in enumerate(found):
        right = [97 + i] * 3
        while len(right) < 3 + 20 + 10 * i:
            scores = letters(right, 3)
            right.append(max(scores, key=scores.get))
        assert list(ids[0]) == right[3:] and last[0].usage.completion_tokens == len(ids[0])
        assert texts[0] in ("", bytes(right[3:]).decode())
        assert last[0].metrics.num_generation_tokens == len(ids[0])
        assert 1 <= len(pieces) < 20 + 10 * i
    assert counted == sum(len(ids[0]) for _, ids, _, _ in found)
    assert sum(quiet) > 100
