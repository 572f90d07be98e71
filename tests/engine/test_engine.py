"""engine/engine.py: one output under many schedules, and every way in which a request or an engine can end."""

import asyncio
import contextlib
import random
import time

import pytest

from tests.fakes import FakeRunner
from tinyserve.errors import EngineDead, NumericsError, Overloaded
from tinyserve.kv.groups import KVGroup
from tinyserve.request import FinishReason, SamplingParams

from .toy import EOS, ToyRunner, answer, assert_idle, letters, script, settle, start

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def run(work):
    """Run a test's coroutine, with a limit."""
    return asyncio.run(asyncio.wait_for(work, 30))


PROMPTS = ["x", "a longer prompt that fills more than two blocks", "xyz" * 20, "same start, " * 3, "same start, " * 4]


async def all_answers(**options):
    engine = await start(letters, **options)
    found = await asyncio.gather(*(answer(engine.generate(prompt, GREEDY)) for prompt in PROMPTS))
    await settle(engine)
    assert_idle(engine)
    preemptions = engine.stats().preemptions
    await engine.close()
    return [(texts[0], ids[0]) for texts, ids, _, _ in found], preemptions


def test_one_output_under_many_schedules():
    """Depth 1 or 2, chunks of 8 tokens, a pool of 9 blocks, one sequence at a time: the same 12 ids for each prompt."""
    expected, _ = run(all_answers(depth=1))
    for options in (
        {"depth": 2},
        {"depth": 3, "max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"blocks": 10, "scheduler_reserve_full_isl": False, "max_num_batched_tokens": 32, "max_num_seqs": 5},
        {"max_num_seqs": 1},
    ):
        found, _ = run(all_answers(**options))

        assert found == expected, options


def test_a_tiny_pool_preempts_and_changes_nothing():
    """C18: 6 blocks of 16 for four requests of 16 + 40 tokens, which need 4 each: preemptions > 0, texts as alone."""
    params = SamplingParams(temperature=0, max_tokens=40)

    async def texts(together, **options):
        engine = await start(letters, **options)
        calls = [answer(engine.generate([letter] * 16, params)) for letter in range(65, 69)]
        found = await asyncio.gather(*calls) if together else [await call for call in calls]
        await settle(engine)
        preemptions = engine.stats().preemptions
        told = engine.metrics.exposition()[0].decode()
        assert f'request_num_preemptions_sum{{engine="0",model_name="model"}} {preemptions:.1f}' in told
        assert_idle(engine)
        await engine.close()
        return [ids[0] for _, ids, _, _ in found], preemptions

    alone, none = run(texts(False))
    together, some = run(texts(True, blocks=7))

    assert together == alone
    assert (none, some > 0) == (0, True)


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_at_random_moments_leave_nothing_behind(depth):
    """40 requests, aborted by name, by leaving the iterator, by cancelling the task, or not at all: 0 blocks held.

    The fake device checks each step: no row reads or writes a block that is another's, none is opened twice.
    """

    async def work():
        draw = random.Random(depth)
        groups = (KVGroup(0, None, (0,)),)
        device = FakeRunner(groups, 24, 16, vocab=250)
        engine = await start(letters, blocks=24, max_num_seqs=8, depth=depth, runner=device)

        async def one(number):
            await asyncio.sleep(draw.random() * 0.02)
            name, way = f"r{number}", draw.choice(["abort", "leave", "cancel", "read", "read"])
            outputs = engine.generate("q" * draw.randrange(1, 60), GREEDY, request_id=name)
            reader = asyncio.ensure_future(answer(outputs))
            await asyncio.sleep(draw.random() * 0.01)
            if way == "abort":
                engine.abort(name)
            if way == "cancel":
                reader.cancel()
            if way == "leave":
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
                async for _ in (again := engine.generate("again", GREEDY)):
                    break
                await again.aclose()
            with contextlib.suppress(asyncio.CancelledError):
                _, ids, last, _ = await reader
                assert len(ids[0]) == 12 or last[0].finish_reason is FinishReason.ABORT

        await asyncio.gather(*(one(number) for number in range(40)))
        await settle(engine)
        assert_idle(engine)
        _, control, _, _ = await answer(engine.generate("x", GREEDY))
        await engine.close()
        return list(control[0]), device.answer(b"x", 12)

    found, right = run(work())
    assert found == right


def test_leaving_the_iterator_frees_within_a_step():
    """C17: after the third of 200 outputs the reader goes away; one step later nothing runs."""

    async def work():
        engine = await start(letters, runner=ToyRunner(letters, seconds=0.02))
        outputs = engine.generate("x", SamplingParams(temperature=0, max_tokens=200))
        for _ in range(3):
            await anext(outputs)
        await outputs.aclose()
        await asyncio.sleep(0.1)
        assert_idle(engine)
        await engine.close()

    run(work())


def test_an_abandoned_iterator_is_aborted_too():
    """`async for ...: break` without aclose: the garbage collector's hook ends it; 0 sequences run afterwards."""

    async def work():
        engine = await start(letters, runner=ToyRunner(letters, seconds=0.005))
        async for _ in engine.generate("x", SamplingParams(temperature=0, max_tokens=200)):
            break
        await asyncio.sleep(0.1)
        assert_idle(engine)
        await engine.close()

    run(work())


def test_a_queued_request_that_leaves_never_starts():
    """C17 (c): one row only; the second request is cancelled while it waits, and its 32 prompt tokens are never run."""

    async def work():
        runner = ToyRunner(letters, seconds=0.01)
        engine = await start(letters, runner=runner, max_num_seqs=1)
        first = asyncio.ensure_future(answer(engine.generate("x", GREEDY)))
        await asyncio.sleep(0.03)
        second = asyncio.ensure_future(answer(engine.generate("y" * 32, GREEDY)))
        await asyncio.sleep(0.02)
        assert engine.stats().waiting == 1
        second.cancel()
        await first
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return runner.steps

    assert run(work()) <= 14


def test_a_failing_runner_ends_everybody_with_the_cause():
    """Step 4 raises: three readers get EngineDead, health says so, and the next request is refused at once."""

    async def work():
        engine = await start(letters, runner=ToyRunner(letters, fail_at=4))
        calls = [answer(engine.generate(prompt, GREEDY)) for prompt in PROMPTS[:3]]
        found = await asyncio.gather(*calls, return_exceptions=True)

        assert [type(error) for error in found] == [EngineDead] * 3
        assert "fell off the bus" in str(found[0]) and isinstance(found[0].__cause__, RuntimeError)
        with pytest.raises(EngineDead):
            engine.check_health()
        with pytest.raises(EngineDead):
            await anext(engine.generate("x", GREEDY))
        with pytest.raises(EngineDead):
            await engine.wait_closed()
        text = engine.metrics.exposition()[0].decode()  # started = ended, also then
        assert 'request_success_total{engine="0",finished_reason="error",model_name="model"} 3.0' in text
        assert 'num_requests_running{engine="0",model_name="model"} 0.0' in text
        await asyncio.wait_for(engine.close(), 5)

    run(work())


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_errors_that_asyncio_takes_for_its_own_end_everybody_too(error):
    """Breaks if such an error of a step is lost on its way: readers waited for ever, or the loop of all ended."""

    class Odd(ToyRunner):
        def run(self, step):
            if self.steps == 3:
                raise error
            time.sleep(0.01)
            return super().run(step)

    async def work():
        engine = await start(letters, runner=Odd(letters))
        with pytest.raises(EngineDead, match=type(error).__name__):
            await asyncio.wait_for(answer(engine.generate("x", GREEDY)), 5)
        await asyncio.wait_for(engine.close(), 5)

    run(work())


def test_a_bad_row_fails_its_own_request_only():
    """C22: NaN at step 2 of the first: two good tokens, then an ERROR output; the second answer is unchanged."""

    async def work():
        runner = ToyRunner(letters, bad={(ord("N"), 2)})
        engine = await start(letters, runner=runner, depth=1)
        bad, good = await asyncio.gather(*(answer(engine.generate(text, GREEDY)) for text in ("N", "x")))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return bad, good

    (_, bad_ids, bad_last, _), (good_texts, _, _, _) = run(work())

    assert (len(bad_ids[0]), bad_last[0].finish_reason) == (2, FinishReason.ERROR)
    assert isinstance(bad_last[0].error, NumericsError)
    assert good_texts[0] == run(all_answers())[0][0][0]


async def busy(sampling):
    """An engine of 5 ms a step, its runner, and an answer whose first tokens are there."""
    runner = ToyRunner(letters, seconds=0.005)
    engine = await start(letters, runner=runner)
    running = asyncio.ensure_future(answer(engine.generate("x", sampling)))
    while runner.steps < 4:
        await asyncio.sleep(0.002)
    return engine, runner, running


def test_pause_abort_ends_what_runs_and_refuses_until_resume():
    async def work():
        engine, _, running = await busy(SamplingParams(temperature=0, max_tokens=200))
        await engine.pause("abort")
        assert_idle(engine)
        _, ids, last, _ = await running
        assert last[0].finish_reason is FinishReason.ABORT and 0 < len(ids[0]) < 200
        with pytest.raises(Overloaded):
            await anext(engine.generate("x", GREEDY))
        engine.resume()
        assert len((await answer(engine.generate("x", GREEDY)))[1][0]) == 12
        await engine.close()

    run(work())


@pytest.mark.parametrize("earlier", ["none", "keep"])
def test_pause_wait_lets_running_requests_finish(earlier):
    """All 12 tokens, and then nothing runs. It waited for ever for what an earlier pause kept."""

    async def work():
        engine, _, running = await busy(GREEDY)
        if earlier == "keep":
            await engine.pause("keep")
        await asyncio.wait_for(engine.pause("wait"), 5)
        assert_idle(engine)
        assert len((await running)[1][0]) == 12 and engine.is_paused
        with pytest.raises(Overloaded):
            await anext(engine.generate("x", GREEDY))
        await engine.close()

    run(work())


def test_a_pause_that_is_undone_returns():
    """It waited for requests that came after `resume`, and then called an open engine paused."""

    async def work():
        engine, _, first = await busy(SamplingParams(temperature=0, max_tokens=200))
        pausing = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        engine.resume()
        later = asyncio.ensure_future(answer(engine.generate("x", SamplingParams(temperature=0, max_tokens=200))))
        await asyncio.wait_for(pausing, 1)
        assert not engine.is_paused and not first.done() and not later.done()
        await asyncio.gather(first, later)
        await engine.close()

    run(work())


def test_a_pause_may_follow_another():
    """From any kind to any other; the last one counts. It was refused, as a request would be."""

    async def work():
        engine, _, running = await busy(SamplingParams(temperature=0, max_tokens=200))
        for mode in ("keep", "keep"):
            await engine.pause(mode)
        waiting = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        await engine.pause("abort")
        await asyncio.wait_for(waiting, 1)
        assert (await running)[2][0].finish_reason is FinishReason.ABORT and engine.is_paused
        await engine.pause("abort")
        engine.resume()
        assert len((await answer(engine.generate("x", GREEDY)))[1][0]) == 12
        await engine.close()
        with pytest.raises(Overloaded):
            await engine.pause()

    run(work())


def test_pause_keep_freezes_and_goes_on_where_it_was():
    """No step runs during 50 ms of pause; a request made meanwhile queues; both give their usual 12 tokens."""

    async def work():
        engine, runner, first = await busy(GREEDY)
        await engine.pause("keep")
        steps = runner.steps
        second = asyncio.ensure_future(answer(engine.generate("x", GREEDY)))
        await asyncio.sleep(0.05)
        assert (runner.steps, engine.stats().waiting, engine.stalled_seconds) == (steps, 1, 0.0)
        engine.resume()
        texts = [(await call)[0][0] for call in (first, second)]
        await engine.close()
        return texts

    texts = run(work())
    assert texts == [run(all_answers())[0][0][0]] * 2


def test_close_while_running_ends_readers_and_gives_the_memory_back():
    async def work():
        engine, runner, running = await busy(SamplingParams(temperature=0, max_tokens=200))
        await engine.close()
        _, _, last, _ = await running
        assert last[0].finish_reason is FinishReason.ABORT
        assert runner.closed and engine.machine.runner is None and engine.parts.model is None
        with pytest.raises(Overloaded):
            await anext(engine.generate("x", GREEDY))
        await engine.close()

    run(work())


def test_close_tells_those_that_have_not_begun_to_come_back():
    """One row: the first reader gets what it has and ABORT; the two that wait get Overloaded, which is a 503."""

    async def work():
        engine = await start(letters, max_num_seqs=1, runner=ToyRunner(letters, seconds=0.005))
        running = engine.generate("a", SamplingParams(max_tokens=200))
        await anext(running)
        waiting = [asyncio.ensure_future(answer(engine.generate("b", SamplingParams(n=n)))) for n in (1, 100)]
        await asyncio.sleep(0.02)
        await engine.close()
        *_, last = [output async for output in running]
        return last, [(await task)[2] for task in waiting]

    last, (one, many) = run(work())
    assert last.finish_reason == "abort" and last.error is None
    assert isinstance(one[0].error, Overloaded)
    assert len(many) == 100 and {type(output.error) for output in many.values()} == {Overloaded}


def test_close_drains_when_told_to():
    """12 tokens of 5 ms fit into a drain of 5 s, so the reader gets all of them."""

    async def work():
        engine, _, running = await busy(GREEDY)
        await engine.close(drain_seconds=5)
        return await running

    _, ids, last, _ = run(work())
    assert (len(ids[0]), last[0].finish_reason) == (12, FinishReason.LENGTH)


def test_two_engines_live_on_one_loop():
    async def work():
        one, two = await start(script(97, 98)), await start(script(99, 100))
        found = await asyncio.gather(*(answer(engine.generate("x", GREEDY)) for engine in (one, two, one)))
        await one.close()
        texts = (await answer(two.generate("x", GREEDY)))[0]
        await two.close()
        return [texts_of[0] for texts_of, *_ in found], texts[0]

    assert run(work()) == (["ab", "cd", "ab"], "cd")


def test_the_loop_keeps_serving_during_a_slow_forward():
    """Steps of 50 ms on the runner's thread; a task that wakes every 5 ms never waits longer than 100 ms."""

    async def work():
        engine = await start(letters, runner=ToyRunner(letters, seconds=0.05), depth=1)
        reader = asyncio.ensure_future(answer(engine.generate("x", GREEDY)))
        gap, last = 0.0, time.monotonic()
        while not reader.done():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gap, last = max(gap, now - last), now
        await engine.close()
        return gap

    assert run(work()) < 0.1


def test_an_idle_engine_does_not_spin():
    """While nothing runs, the loop's task wakes for nothing: process time over 200 ms stays below 50 ms."""

    async def work():
        engine = await start(letters)
        await answer(engine.generate("x", GREEDY))
        await settle(engine)
        start_cpu = time.process_time()
        await asyncio.sleep(0.2)
        used = time.process_time() - start_cpu
        await engine.close()
        return used

    assert run(work()) < 0.05


def test_a_stuck_step_shows_in_stalled_seconds():
    async def work():
        runner = ToyRunner(letters)
        runner.gate.clear()
        engine = await start(letters, runner=runner)
        assert engine.stalled_seconds == 0
        reader = asyncio.ensure_future(answer(engine.generate("x", GREEDY)))
        await asyncio.sleep(0.1)
        stalled = engine.stalled_seconds
        runner.gate.set()
        await reader
        await engine.close()
        return stalled

    assert run(work()) >= 0.09


def test_end_tokens_stop_and_are_counted():
    """C24: `a`, then the end token: text `a`, two completion tokens, stop reason None."""

    async def work():
        engine = await start(script(97))
        texts, ids, last, _ = await answer(engine.generate("x", GREEDY))
        await engine.close()
        return texts[0], ids[0], last[0]

    text, ids, last = run(work())
    assert (text, ids, last.finish_reason, last.stop_reason) == ("a", (97, EOS), FinishReason.STOP, None)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, 2)


def test_metrics_count_requests_and_tokens():
    """Two requests of 12 tokens: 24 generated, 2 ended by length, 0 running."""

    async def work():
        engine = await start(letters)
        for _ in range(2):
            await answer(engine.generate("x", GREEDY))
        await settle(engine)
        text = engine.metrics.exposition()[0].decode()
        await engine.close()
        return text

    text = run(work())
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tinyserve:"))
    labels = 'engine="0",model_name="model"'
    assert float(values[f"tinyserve:generation_tokens_total{{{labels}}}"]) == 24
    assert float(values['tinyserve:request_success_total{engine="0",finished_reason="length",model_name="model"}']) == 2
    assert float(values[f"tinyserve:num_requests_running{{{labels}}}"]) == 0
