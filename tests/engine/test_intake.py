"""intake.py: everything that is wrong is refused before anything is queued; everything left open is filled in."""

import asyncio
import time

import numpy
import pytest

from tinyserve.engine.fanout import child_seed
from tinyserve.engine.intake import INLINE_CHARACTERS, Call, Intake, Rules
from tinyserve.errors import ContextLengthExceeded, RequestError
from tinyserve.request import SamplingParams

from .toy import CONTEXT, VOCAB, ToyRunner, answer, assert_idle, letters, script, settle, start, tokenizer

RULES = Rules(vocab_size=VOCAB, max_model_len=CONTEXT, eos_ids=frozenset({260}), extra_eos_ids=frozenset({260, 261}))


def prepare(prompt, sampling=None, *, add_bos=False, seed=0, **fields):
    async def work():
        intake = Intake(tokenizer(add_bos), RULES, seed)
        try:
            return (await intake.prepare(Call(prompt=prompt, sampling=sampling, **fields))).requests
        finally:
            intake.close()

    return asyncio.run(work())


def request(prompt="ab", sampling=None, **options):
    return prepare(prompt, sampling, **options)[0]


def test_prompt_forms():
    """C15: a text, ids, and both dict forms are the same two tokens."""
    forms = ["ab", [97, 98], (97, 98), {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}]
    assert [request(form).prompt_ids for form in forms] == [(97, 98)] * 5
    assert request({"prompt": "ab", "cache_salt": "s"}).cache_salt == "s"
    assert request({"prompt": "text", "prompt_token_ids": [1]}).prompt == "text"


@pytest.mark.parametrize(
    "prompt",
    ["", [], {}, [97, -1], [97, VOCAB], [97, "98"], [97, 1.5], [True], None, 5, {"prompt": 5},
     {"prompt": "a", "multi_modal_data": {"image": 1}}, {"prompt": "a", "cache_salt": ""}],
)  # fmt: skip
def test_wrong_prompts_are_refused(prompt):
    with pytest.raises(RequestError):
        request(prompt)


@pytest.mark.parametrize("form", ["ab", {"prompt": "ab"}])
def test_text_is_held_to_the_vocabulary_of_the_model(form):
    """A tokenizer with more tokens than the model has rows: the id would end the forward pass of everybody."""

    async def work(**options):
        intake = Intake(tokenizer(), Rules(vocab_size=98, max_model_len=CONTEXT))
        try:
            return await intake.prepare(Call(prompt=form, **options))
        finally:
            intake.close()

    for options in ({}, {"truncate_prompt_tokens": 2}):
        with pytest.raises(RequestError, match="token id 98 is outside the vocabulary of 98"):
            asyncio.run(work(**options))


def test_numpy_integers_are_token_ids():
    assert request(numpy.array([97, 98])).prompt_ids == (97, 98)


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("ids", [True, False])
def test_a_prompt_without_room_is_refused_with_both_numbers(length, ids):
    """C14: 255 tokens leave room for one; 256 and 300 do not."""
    with pytest.raises(ContextLengthExceeded, match=rf"256 tokens, but the prompt has {length} tokens"):
        request([97] * length if ids else "a" * length)


def test_the_longest_prompt_leaves_one_token():
    assert request("a" * 255, SamplingParams(max_tokens=None)).sampling.max_tokens == 1


def test_a_very_long_text_is_not_tokenised_to_its_end():
    """The tokenizer stops at four contexts, 1025 tokens; the message says "at least"."""
    with pytest.raises(ContextLengthExceeded, match="at least 1025"):
        request("word " * INLINE_CHARACTERS)


def test_max_tokens_is_the_room_left():
    """C13: None and 10000 both become 256 - 2; 5 stays; 0 stays."""
    asked = [None, 10_000, 5, 0]
    assert [request("ab", SamplingParams(max_tokens=n)).sampling.max_tokens for n in asked] == [254, 254, 5, 0]
    assert request("ab").sampling.max_tokens == 16


def test_min_tokens_shrink_with_the_room():
    params = request("a" * 250, SamplingParams(min_tokens=50, max_tokens=60)).sampling
    assert (params.min_tokens, params.max_tokens) == (6, 6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {VOCAB: 5}}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"bad_words": [f"w{n}" for n in range(129)]}, "bad_words"),
    ],
)
def test_what_the_model_does_not_have_is_refused(fields, param):
    """C16 and the caps: id 320 of 320, 21 of 20 logprobs, 129 of 128 bad words."""
    with pytest.raises(RequestError) as caught:
        request("ab", SamplingParams(**fields))

    assert caught.value.param == param


def test_added_tokens_are_valid_ids():
    assert request("ab", SamplingParams(logit_bias={261: -100})).sampling.logit_bias == {261: -100.0}


def test_end_ids_are_told_apart():
    found = request()
    assert (found.eos_ids, found.extra_eos_ids) == ({260}, {261})


def test_seeds_are_the_callers_or_repeatable_draws():
    """The same engine seed draws the same seeds; another one does not; -1 means none."""
    assert request("ab", SamplingParams(seed=7)).seed == 7
    drawn = [request("ab", seed=s).seed for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert request("ab", SamplingParams(seed=-1)).seed == drawn[0]


def test_children_have_seeds_of_their_own():
    """n=3, seed 7: 7, 8, 9; at the end of int64 the seed wraps around."""
    found = prepare("ab", SamplingParams(n=3, seed=7))

    assert [child.seed for child in found] == [7, 8, 9]
    assert len({child.id for child in found}) == 3 and all(child.sampling.n == 1 for child in found)
    assert child_seed(2**63 - 1, 1) == -(2**63)


def test_one_bos():
    """C23: b 2 tokens, c 2 after de-duplication, d 2, e 1."""
    assert request("x", add_bos=True).prompt_ids == (259, 120)
    assert request("<|bos|>x", add_bos=True).prompt_ids == (259, 120)
    assert request("<|bos|>x", add_bos=True, add_special_tokens=False).prompt_ids == (259, 120)
    assert request([120], add_bos=True).prompt_ids == (120,)
    assert request("", add_bos=True).prompt_ids == (259,)


def test_bad_words_come_with_their_spaced_variant():
    """`}}` is one token, ` }}` two: only the bare one. `ab` is two tokens and ` ab` three: only the bare one."""
    assert request("x", SamplingParams(bad_words=["}}", "ab"])).bad_words_ids == ((258,), (97, 98))


def test_prompts_are_cut_from_the_left_when_asked():
    assert request("abcdef", truncate_prompt_tokens=2).prompt_ids == (101, 102)
    assert len(request("a" * 300, truncate_prompt_tokens=-1).prompt_ids) == 255
    with pytest.raises(RequestError):
        request("ab", truncate_prompt_tokens=257)


def test_two_answers_share_one_stream():
    """C04: n=2, seed 7: two texts that differ, equal to the single runs with seeds 7 and 8."""

    async def work():
        engine = await start(letters)
        params = {"temperature": 1, "max_tokens": 5}
        texts, _, last, _ = await answer(engine.generate("Hi", SamplingParams(n=2, seed=7, **params)))
        single = [(await answer(engine.generate("Hi", SamplingParams(seed=seed, **params))))[0][0] for seed in (7, 8)]
        await engine.close()
        return texts, single, last

    texts, single, last = asyncio.run(work())
    assert sorted(texts) == [0, 1] and [texts[0], texts[1]] == single and texts[0] != texts[1]
    assert [last[index].usage.completion_tokens for index in (0, 1)] == [5, 5]


def test_aborting_one_call_ends_all_its_answers():
    """C17 (d): n=2; leaving after one output leaves 0 running."""

    async def work():
        engine = await start(letters)
        outputs = engine.generate("Hi", SamplingParams(n=2, max_tokens=200))
        await anext(outputs)
        await outputs.aclose()
        await asyncio.wait_for(engine._landed.wait(), 5)
        assert_idle(engine)
        await engine.close()

    asyncio.run(work())


def test_a_refused_call_queues_nothing():
    """One row, and room for one waiting request: n=3 is refused as a whole, and 0 of its answers stay behind."""

    async def work():
        engine = await start(script(97), max_num_queued_reqs=1, max_num_seqs=1)
        await engine.pause("keep")
        with pytest.raises(Exception, match="Retry later"):
            await anext(engine.generate("x", SamplingParams(n=3, temperature=1)))
        assert_idle(engine)
        await engine.close()

    asyncio.run(work())


def test_a_prompt_that_can_never_fit_the_pool_is_refused():
    """C14 (d): 7 usable blocks hold 112 tokens; a prompt of 200 is a 400, not a wait."""

    async def work():
        engine = await start(letters, blocks=8)
        with pytest.raises(ContextLengthExceeded):
            await anext(engine.generate("a" * 200))
        assert_idle(engine)
        await engine.close()

    asyncio.run(work())


def test_answers_share_a_long_prompt():
    """n=4 over a prompt of 40 tokens: computed once, and 32 tokens (two blocks) found three times."""

    async def work():
        engine = await start(letters)
        params = SamplingParams(n=4, seed=1, max_tokens=5)
        texts, _, last, _ = await answer(engine.generate("p" * 40, params))
        alone, *_ = await answer(engine.generate("p" * 40, SamplingParams(seed=3, max_tokens=5)))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return texts, alone, [last[index].usage.cached_tokens for index in range(4)]

    texts, alone, cached = asyncio.run(work())
    assert texts[2] == alone[0]
    assert cached == [0, 32, 32, 32]


def test_answers_that_wait_for_the_prompt_end_with_their_call():
    """n=4, aborted while answer 0 still computes the prompt: all four end, and none is queued later."""

    async def work():
        runner = ToyRunner(letters)
        runner.gate.clear()
        engine = await start(letters, runner=runner)
        reader = asyncio.ensure_future(answer(engine.generate("p" * 40, SamplingParams(n=4), request_id="r")))
        await asyncio.sleep(0.02)
        assert engine.abort("r") == 4
        runner.gate.set()
        _, _, last, _ = await reader
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return [last[index].finish_reason for index in range(4)], runner.steps

    reasons, steps = asyncio.run(work())
    assert reasons == ["abort"] * 4 and steps <= 2


async def longest_gap(work):
    """Seconds that the loop was away at most while `work` ran, and what it gave."""
    worst, last, task = 0.0, time.monotonic(), asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        worst, last = max(worst, time.monotonic() - last), time.monotonic()
    return worst, await task


def test_sixteen_thousand_answers_never_hold_the_loop():
    """n = 16384 took the loop 1.3 s to queue and 0.3 s to abort; now 0.1 s at most, and no prompt is copied ahead."""

    async def leave_early(engine):
        outputs = engine.generate("p" * 40, SamplingParams(n=16384, max_tokens=3))
        async for output in outputs:
            if output.index >= 100:
                break
        held = engine.machine.scheduler.num_running + engine.machine.scheduler.num_waiting
        other, *_ = await answer(engine.generate("y", SamplingParams(max_tokens=3, temperature=0)))
        await outputs.aclose()
        return held, other

    async def abort(engine):
        reader = asyncio.ensure_future(answer(engine.generate("x", SamplingParams(n=16384), request_id="r")))
        await asyncio.sleep(0.02)
        count = engine.abort("r")
        return count, (await reader)[2]

    async def work():
        engine = await start(letters, blocks=400)
        first, (held, other) = await longest_gap(leave_early(engine))
        await settle(engine)
        assert_idle(engine)
        second, (count, last) = await longest_gap(abort(engine))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return max(first, second), held, other, count, last

    worst, held, other, count, last = asyncio.run(work())
    assert worst < 0.1
    assert 0 < held <= 64 and len(other[0]) == 3
    assert len(last) == 16384 and count > 16000
    assert {output.finish_reason for index, output in last.items() if index > 400} == {"abort"}


def test_all_of_many_answers_come_once():
    """n=300 with 5 rows: indexes 0..299, each ended by length, equal to the same seeds asked for one by one."""

    async def work():
        engine = await start(letters, max_num_seqs=5)
        texts, _, last, _ = await answer(engine.generate("x", SamplingParams(n=300, seed=7, max_tokens=2)))
        alone, *_ = await answer(engine.generate("x", SamplingParams(seed=7 + 299, max_tokens=2)))
        await settle(engine)
        assert_idle(engine)
        await engine.close()
        return texts, last, alone

    texts, last, alone = asyncio.run(work())
    assert sorted(last) == list(range(300)) and {output.finish_reason for output in last.values()} == {"length"}
    assert texts[299] == alone[0]
