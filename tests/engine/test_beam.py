"""beam.py against brute force: every continuation of a tiny model is scored, and the beams must be the best ones."""

import asyncio
import itertools
import math
import random

import pytest

from tinyserve.errors import ContextLengthExceeded, EngineError, Overloaded, RequestError
from tinyserve.request import BeamSearchParams, FinishReason, Output, Usage

from .toy import EOS, ToyRunner, assert_idle, settle, start

ALPHABET = [*range(97, 101), EOS]  # four letters and the end token
PROMPT = "xy"


def tiny(tokens, _prompt_len):
    """A model of five tokens whose probabilities depend on everything before."""
    weights = [random.Random(hash((tuple(tokens), token))).random() + 0.05 for token in ALPHABET]
    total = sum(weights)
    return {token: math.log(weight / total) for token, weight in zip(ALPHABET, weights, strict=True)}


def brute_force(length, *, penalty=1.0, ignore_eos=False):
    """(score, new tokens) of every ended or full-length continuation, best first."""
    found = {}
    for tokens in itertools.product(ALPHABET, repeat=length):
        if not ignore_eos and EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
        total, before = 0.0, [*PROMPT.encode()]
        for token in tokens:
            total += tiny(before, 2)[token]
            before.append(token)
        found[tokens] = total / len(tokens) ** penalty
    return sorted(((score, tokens) for tokens, score in found.items()), reverse=True)


def search(prompt=PROMPT, **params):
    async def work():
        engine = await start(tiny)
        try:
            return (await engine.beam_search(prompt, BeamSearchParams(**params))).sequences
        finally:
            await settle(engine)
            assert_idle(engine)
            await engine.close()

    return asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_beam_as_wide_as_the_tree_finds_the_best_answers(penalty, ignore_eos):
    """Width 125 over 5^3 continuations misses none: the order is that of brute force."""
    beams = search(beam_width=125, max_tokens=3, length_penalty=penalty, ignore_eos=ignore_eos)

    best = brute_force(3, penalty=penalty, ignore_eos=ignore_eos)[: len(beams)]
    assert [tuple(beam.tokens[2:]) for beam in beams] == [tokens for _, tokens in best]
    for beam, (score, tokens) in zip(beams, best, strict=True):
        assert beam.cum_logprob / len(tokens) ** penalty == pytest.approx(score)
        assert beam.finish_reason == ("stop" if EOS in tokens and not ignore_eos else "length")


def test_a_narrow_beam_keeps_the_best_of_each_step():
    """Width 2, three steps, by the definition: the two best live ones of 2 x 4 candidates each step."""
    live, completed = [((), 0.0)], []
    for _ in range(3):
        grown = []
        for tokens, total in live:
            scores = sorted(tiny([*PROMPT.encode(), *tokens], 2).items(), key=lambda pair: -pair[1])[:4]
            grown += [((*tokens, token), total + score) for token, score in scores]
        completed += [one for one in grown if one[0][-1] == EOS]
        live = sorted((one for one in grown if one[0][-1] != EOS), key=lambda one: -one[1])[:2]
    expected = sorted([*completed, *live], key=lambda one: -one[1] / len(one[0]))[:2]

    beams = search(beam_width=2, max_tokens=3)

    assert [tuple(beam.tokens[2:]) for beam in beams] == [tokens for tokens, _ in expected]
    assert [len(beam.logprobs) for beam in beams] == [len(tokens) for tokens, _ in expected]


def test_texts_leave_the_end_token_out_unless_asked():
    ended = next(beam for beam in search(beam_width=125, max_tokens=3) if beam.finish_reason == "stop")
    letters = bytes(ended.tokens[2:-1]).decode()
    assert (ended.text, ended.answer) == (PROMPT + letters, letters)

    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    found = next(beam for beam in search(beam_width=125, max_tokens=3, **shown) if beam.tokens == ended.tokens)
    assert found.answer == letters + "<|eos|>"


def test_only_allowed_tokens_are_followed():
    """Raw log-probabilities do not know the mask, so the search has to: with two allowed ids, 2^3 answers exist."""
    beams = search(beam_width=8, max_tokens=3, allowed_token_ids=[97, 100])

    assert len(beams) == 8 and all(set(beam.tokens[2:]) <= {97, 100} for beam in beams)
    assert all(set(entry) == {97, 100} for beam in beams for entry in beam.logprobs)  # and not of all 98 ids


def test_more_allowed_tokens_than_can_be_reported_are_refused():
    """Each beam asked for the log-probability of the whole vocabulary at each token, one dict of all of them."""
    with pytest.raises(RequestError, match="129 ids"):
        BeamSearchParams(beam_width=2, max_tokens=3, allowed_token_ids=range(129))


def test_a_bad_prompt_is_refused_before_anything_runs():
    with pytest.raises(ContextLengthExceeded):
        search("x" * 300, beam_width=2, max_tokens=3)
    with pytest.raises(RequestError):
        search([5000], beam_width=2, max_tokens=3)


def test_a_cancelled_search_ends_its_requests():
    async def work():
        engine = await start(tiny)
        task = asyncio.ensure_future(engine.beam_search(PROMPT, BeamSearchParams(beam_width=8, max_tokens=200)))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(engine)
        assert_idle(engine)
        await engine.close()

    asyncio.run(work())


async def running(**params):
    """An engine of 2 ms a step, and a search of three beams, some of whose tokens are there."""
    runner = ToyRunner(tiny, seconds=0.002)
    engine = await start(tiny, runner=runner)
    asked = BeamSearchParams(beam_width=3, ignore_eos=True, **params)
    task = asyncio.ensure_future(engine.beam_search(PROMPT, asked, request_id="b"))
    while runner.steps < 6:
        await asyncio.sleep(0.002)
    return engine, task


@pytest.mark.parametrize("how", ["all", "name", "pause", "close"])
def test_an_aborted_search_ends_with_the_beams_that_it_has(how):
    """Its steps were aborted under it: a cancellation that nobody had asked for, and an answer of 0 bytes. By its
    name it could not be aborted at all (0 answers instead of 3)."""

    async def work():
        engine, task = await running(max_tokens=200)
        if how == "pause":
            await engine.pause("abort")
        elif how == "close":
            await engine.close()
        else:
            assert engine.abort("b" if how == "name" else None) == 3
        beams = (await task).sequences
        assert len(beams) == 3 and {beam.finish_reason for beam in beams} == {"abort"}
        assert {len(beam.logprobs) for beam in beams} < {*range(1, 100)}
        if how != "close":
            await settle(engine)
            assert_idle(engine)
            await engine.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_an_abort_that_meets_a_failed_step_ends_the_search():
    """The last output told of the failure, and was not read before the abort: "no next token", an error of 500."""

    async def work():
        engine = await start(tiny)

        async def outputs(_):
            engine.abort("b")
            usage = Usage(prompt_tokens=2, completion_tokens=0)
            yield Output(request_id="b", usage=usage, finish_reason=FinishReason.ERROR, error=EngineError("no"))

        engine.outputs = outputs
        beams = (
            await engine.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=3), request_id="b")
        ).sequences
        await engine.close()
        return [beam.finish_reason for beam in beams]

    assert asyncio.run(work()) == ["abort"]


@pytest.mark.parametrize("how", ["pause", "close"])
def test_a_search_that_runs_is_waited_for_and_goes_on(how):
    """Pausing and draining took its own steps for new requests, and refused them: 503 instead of 40 tokens."""

    async def work():
        engine, task = await running(max_tokens=40)
        await (engine.pause("wait") if how == "pause" else engine.close(20.0))
        assert [len(beam.logprobs) for beam in (await asyncio.wait_for(task, 0.1)).sequences] == [40] * 3
        with pytest.raises(Overloaded):
            await engine.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=40))
        await engine.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_full_queue_refuses_new_searches_but_not_the_steps_of_one():
    """With one row and no queue, a width of 3 has two steps waiting at once."""

    async def work():
        engine = await start(tiny, max_num_seqs=1, max_num_queued_reqs=1)
        params = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
        return (await engine.beam_search(PROMPT, params)).sequences, await engine.close()

    assert [len(beam.logprobs) for beam in asyncio.run(asyncio.wait_for(work(), 30))[0]] == [20] * 3
