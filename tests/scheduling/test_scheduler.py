"""scheduler.py, by hand: who gets how much of a step, who makes room, when a sequence ends."""

import time
from collections import deque

import pytest

from tinyserve.errors import ConfigError, ContextLengthExceeded, NumericsError, Overloaded, RequestError, UnknownModel
from tinyserve.lora.adapters import LoadedAdapters
from tinyserve.request import Constraint, FinishReason
from tinyserve.scheduling.budget import Crowd
from tinyserve.step import RowParams, SliceOutput, StepOutput

from .harness import EOS, Lab, request


def shape(step):
    """[(slot, start, count, samples)] of a step."""
    return [(piece.slot, piece.start, piece.count, piece.samples) for piece in step.slices]


def scripted(*script, then=7):
    """A device whose k-th answer token is script[k], whatever the prompt; FakeRunner.choose."""
    lengths = {}

    def choose(tokens, hashed):
        start = lengths.setdefault(tokens[0], len(tokens))
        index = len(tokens) - start
        return script[index] if index < len(script) else then

    return {"choose": choose}


class TestSharesOfAStep:
    def test_a_request_is_prefilled_then_decoded_one_token_a_step(self):
        lab = Lab()
        lab.add("a", prompt=5, max_tokens=3)

        shapes = []
        while lab.scheduler.has_work:
            shapes += shape(lab.plan())
            lab.commit()

        assert shapes == [(0, 0, 5, True), (0, 5, 1, True), (0, 6, 1, True)]

    @pytest.mark.parametrize("length", [5, 8, 9, 16, 17, 37])
    def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last(self, length):
        """Budget 8: 37 tokens take chunks of 8 8 8 8 5; a token comes only with the fifth."""
        lab = Lab(max_num_batched_tokens=8)
        made = lab.add("a", prompt=length, max_tokens=2)
        chunks = []
        while not lab.answers["a"].tokens:
            chunks += shape(lab.plan())
            lab.commit()

        assert [count for _, _, count, _ in chunks] == [8] * (length // 8) + [length % 8] * (length % 8 > 0)
        assert [samples for *_, samples in chunks] == [False] * (len(chunks) - 1) + [True]
        assert lab.run()["a"].tokens == lab.right(made)

    @pytest.mark.parametrize("crowd, prompts", [(Crowd(20, 8), [7, 7, 6]), (Crowd(100, 2), [7, 7])])
    def test_prompts_of_a_crowd_take_no_more_than_is_said(self, crowd, prompts):
        """Budget 64, 3 that decode, 9 prompts of 7: 20 tokens of prompts in a step, or 2 prompts, and the 3 go on."""
        lab = Lab(max_num_batched_tokens=64, max_num_seqs=16)
        made = {name: lab.add(name, prompt=5, max_tokens=30) for name in "abc"}
        lab.step()
        made |= {name: lab.add(name, prompt=7, max_tokens=3) for name in "defghijkl"}

        assert [count for _, _, count, _ in shape(lab.plan(crowd))] == [1, 1, 1, *prompts]
        lab.commit()
        later = shape(lab.plan(crowd))
        assert [count for _, _, count, _ in later if count > 1] == prompts
        while lab.scheduler.has_work:
            lab.commit()
            lab.plan(crowd)
        assert all(lab.answers[name].tokens == lab.right(request) for name, request in made.items())

    def test_running_sequences_get_their_tokens_before_new_prompts(self):
        """Budget 8, one decoding: the prompt of 20 gets 7 a step, and the decoding one a token each step."""
        lab = Lab(max_num_batched_tokens=8)
        lab.add("a", prompt=3, max_tokens=10)
        lab.step()
        lab.add("b", prompt=20, max_tokens=1)

        assert shape(lab.plan()) == [(0, 3, 1, True), (1, 0, 7, False)]
        lab.commit()
        assert shape(lab.plan()) == [(0, 4, 1, True), (1, 7, 7, False)]

    def test_a_running_sequence_without_budget_is_skipped_not_removed(self):
        """Budget 4: the more important prompt of 11 takes 3, then 4 and 4, while the other waits in its row."""
        lab = Lab(max_num_batched_tokens=4, scheduling_policy="priority")
        lab.add("low", prompt=3, max_tokens=9, priority=1)
        lab.step()
        lab.add("high", prompt=11, max_tokens=1, priority=0)
        shapes = []
        for _ in range(4):
            shapes.append([(slot, count) for slot, _, count, _ in shape(lab.plan())])
            lab.commit()

        assert shapes == [[(0, 1), (1, 3)], [(1, 4)], [(1, 4)], [(0, 1)]]

    def test_the_budget_holds_and_is_used_in_full(self):
        lab = Lab(max_num_batched_tokens=10, max_num_seqs=8)
        for name in "abcd":
            lab.add(name, prompt=6, max_tokens=4)

        assert lab.plan().num_tokens == 10

    def test_no_more_run_than_max_num_seqs(self):
        lab = Lab(max_num_seqs=2, max_num_batched_tokens=100)
        for name in "abc":
            lab.add(name)

        assert len(lab.plan().slices) == 2
        assert (lab.scheduler.num_running, lab.scheduler.num_waiting) == (2, 1)

    def test_the_long_prompt_threshold_counts_only_beside_others(self):
        lab = Lab(max_num_batched_tokens=16, long_prefill_token_threshold=4)
        lab.add("a", prompt=30, max_tokens=1)

        assert shape(lab.plan()) == [(0, 0, 16, False)]
        lab.commit()
        lab.add("b", prompt=9, max_tokens=1)
        assert shape(lab.plan()) == [(0, 16, 4, False), (1, 0, 4, False)]

    def test_without_chunks_a_prompt_waits_for_a_step_with_enough_budget(self):
        lab = Lab(enable_chunked_prefill=False, max_num_batched_tokens=20, context=20)
        lab.add("a", prompt=12, max_tokens=2)
        lab.add("b", prompt=12, max_tokens=2)

        assert shape(lab.plan()) == [(0, 0, 12, True)]
        lab.commit()
        assert shape(lab.plan()) == [(0, 12, 1, True), (1, 0, 12, True)]

    def test_without_chunks_the_budget_must_hold_the_longest_prompt(self):
        with pytest.raises(ConfigError, match="max-num-batched-tokens"):
            Lab(enable_chunked_prefill=False, max_num_batched_tokens=19, context=20)

    def test_nobody_skips_ahead_of_a_request_that_does_not_fit(self):
        """20 of 24 positions are taken: b (9) does not fit, so c (2), which would, waits behind it."""
        lab = Lab(blocks=6, max_num_batched_tokens=100)
        lab.add("a", prompt=20, max_tokens=4)
        lab.step()
        lab.add("b", prompt=9, max_tokens=1)
        lab.add("c", prompt=2, max_tokens=1)

        assert len(lab.plan().slices) == 1
        lab.commit()
        assert [name for name, answer in lab.run().items() if answer.reason] == ["a", "b", "c"]

    @pytest.mark.parametrize(("gate", "admitted"), [(True, 1), (False, 2)])
    def test_the_gate_admits_a_prompt_only_when_all_of_it_fits(self, gate, admitted):
        """8 blocks, a holds 4: b needs 5 for its prompt and 2 for its first chunk."""
        lab = Lab(blocks=8, max_num_batched_tokens=8, scheduler_reserve_full_isl=gate)
        lab.add("a", prompt=13, max_tokens=3)
        lab.step()
        lab.step()
        lab.add("b", prompt=20, max_tokens=1)

        assert len(lab.plan().slices) == admitted

    def test_the_watermark_keeps_blocks_free_while_others_run(self):
        """10 blocks, 30 % kept free: beside a (4 blocks), b (4 blocks) must wait; alone it need not."""
        lab = Lab(blocks=10, max_num_batched_tokens=100, watermark=0.3)
        lab.add("a", prompt=13, max_tokens=2)
        lab.add("b", prompt=13, max_tokens=2)

        assert len(lab.plan().slices) == 1
        lab.commit()
        lab.run()
        lab.add("c", prompt=38, max_tokens=1)
        assert len(lab.plan().slices) == 1

    def test_a_row_is_opened_with_prompt_and_parameters_and_closed_after_the_end(self):
        lab = Lab(rows=1, max_num_seqs=1)
        made = lab.add("a", prompt=5, max_tokens=1)
        (opening,) = lab.plan().opened
        lab.commit()
        lab.add("b", prompt=5, max_tokens=1)
        step = lab.plan()

        assert (opening.slot, opening.prompt_len, opening.tokens) == (0, 5, made.prompt_ids)
        assert opening.params == RowParams.of(made)
        assert step.closed == (0,) and step.opened[0].slot == 0


class TestPriority:
    def test_lower_priority_values_run_first_then_earlier_arrivals(self):
        lab = Lab(scheduling_policy="priority", max_num_seqs=1)
        for name, priority, arrival in (("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0)):
            lab.add(name, priority=priority, arrival=arrival, max_tokens=1)

        order = [update.request_id for _ in range(3) for update in lab.step()]

        assert order == ["c", "b", "a"]

    def test_fcfs_ignores_priority(self):
        lab = Lab(max_num_seqs=1)
        lab.add("a", priority=5, max_tokens=1)
        lab.add("b", priority=0, max_tokens=1)

        assert [update.request_id for _ in range(2) for update in lab.step()] == ["a", "b"]

    def test_the_least_important_makes_room_though_it_was_admitted_first(self):
        lab = Lab(blocks=4, scheduling_policy="priority", max_num_batched_tokens=100)
        lab.add("low", priority=9, prompt=7, max_tokens=9)
        lab.step()
        lab.add("high", priority=0, prompt=7, max_tokens=9)
        lab.step()
        while not lab.preemptions:
            lab.step()

        assert [seq.request.id for seq in lab.scheduler._tenants.running] == ["high"]
        assert all(len(answer.tokens) == 9 for answer in lab.run().values())


class TestPreemption:
    def four(self, **kwargs):
        """Case C18: a pool of 5 usable blocks of 16, four requests of 16 tokens that grow to 56 (4 blocks each)."""
        lab = Lab(blocks=5, block_size=16, max_num_batched_tokens=64, **kwargs)
        made = [lab.add(name, prompt=16, max_tokens=40) for name in "abcd"]
        return lab, made

    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_a_tiny_pool_changes_no_answer(self, depth, policy):
        lab, made = self.four(depth=depth, scheduling_policy=policy)

        answers = lab.run()

        assert lab.preemptions > 0
        for one in made:
            assert answers[one.id].tokens == lab.right(one) and len(answers[one.id].tokens) == 40

    def test_the_last_admitted_makes_room_and_goes_to_the_front_of_the_queue(self):
        lab = Lab(blocks=6, max_num_batched_tokens=100, max_num_seqs=3)
        for name in "abc":
            lab.add(name, prompt=7, max_tokens=9)
        lab.add("d", prompt=7, max_tokens=9)
        lab.step()
        lab.step()
        step = lab.plan()  # position 8 of a needs a third block: c gives up its two, b takes the second

        assert [piece.slot for piece in step.slices] == [0, 1] and not step.opened
        assert [seq.request.id for seq in lab.scheduler._waiting] == ["c", "d"]
        assert lab.preemptions == 1

    def test_the_front_is_before_requests_that_came_earlier_and_were_passed(self):
        lab = Lab(blocks=4, max_num_batched_tokens=100)
        plain = lab.scheduler._constrain
        lab.scheduler._constrain = lambda made: Slow() if made.id == "early" else plain(made)
        for name in ("early", "a", "b"):
            lab.add(name, prompt=7, max_tokens=8)
        while not lab.preemptions:
            lab.step()

        assert [seq.request.id for seq in lab.scheduler._waiting] == ["b", "early"]

    def test_output_tokens_are_kept_and_sent_again_when_the_row_reopens(self):
        lab = Lab(blocks=4, max_num_batched_tokens=100)
        lab.add("a", prompt=7, max_tokens=8)
        made = lab.add("b", prompt=7, max_tokens=8)
        openings = []
        while lab.scheduler.has_work:
            openings += lab.plan().opened
            lab.commit()
        again = openings[2]

        assert lab.preemptions == 1 and again.prompt_len == 7
        assert again.tokens == (*made.prompt_ids, *lab.right(made)[:2])

    def test_nobody_is_admitted_in_the_step_of_a_preemption(self):
        """c gives up three blocks, a and b take one each, and d would need just one; it waits for the next step."""
        lab = Lab(blocks=7, max_num_batched_tokens=100, scheduling_policy="priority")
        for name, prompt in (("a", 8), ("b", 8), ("c", 9)):
            lab.add(name, prompt=prompt, max_tokens=5, priority=ord(name))
        lab.step()
        lab.add("d", prompt=2, max_tokens=1, priority=0)
        step = lab.plan()

        assert lab.preemptions == 1 and len(step.slices) == 2 and not step.opened
        lab.commit()
        assert [seq.request.id for seq in lab.scheduler._waiting] == ["d", "c"]
        assert lab.plan().opened[0].prompt_len == 2

    def test_while_blocks_are_on_their_way_back_nobody_else_is_preempted(self):
        """Depth 2: a and b both need a third block. c's two are held by a flight: both wait for them, b is not hit."""
        lab = Lab(blocks=6, depth=2, max_num_batched_tokens=100)
        made = [lab.add(name, prompt=7, max_tokens=5) for name in "abc"]
        lab.plan()
        lab.plan()
        lab.commit()

        assert lab.plan() is None and lab.preemptions == 1
        lab.commit()
        assert [piece.slot for piece in lab.plan().slices] == [0, 1] and lab.preemptions == 1
        assert [lab.run()[one.id].tokens for one in made] == [lab.right(one) for one in made]

    def test_the_cached_count_is_that_of_the_first_admission(self):
        lab = Lab(blocks=4, max_num_batched_tokens=100)
        lab.add("a", prompt=7, max_tokens=8)
        lab.add("b", prompt=7, max_tokens=8)
        answers = lab.run()

        assert lab.preemptions > 0
        assert {update.cached_tokens for update in answers["b"].updates} == {0}

    def test_with_a_flight_the_blocks_come_back_when_it_lands_and_its_token_counts(self):
        lab = Lab(blocks=4, depth=2, max_num_batched_tokens=100)
        lab.add("a", prompt=7, max_tokens=8)
        made = lab.add("b", prompt=7, max_tokens=8)
        lab.plan()
        lab.plan()
        lab.commit()
        lab.plan()  # a needs a third block: b is preempted, but a flight still uses its blocks

        assert lab.preemptions == 1 and lab.scheduler._tenants.returning == 1 and lab.cache.num_free == 0
        assert len(lab.answers["b"].tokens) == 1
        lab.commit()
        assert lab.scheduler._tenants.returning == 0 and lab.cache.num_free == 2
        assert lab.answers["b"].tokens == lab.right(made)[:2]
        assert lab.run()["b"].tokens == lab.right(made)

    def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(self):
        lab = Lab(blocks=8, max_num_batched_tokens=6, scheduler_reserve_full_isl=False)
        lab.add("a", prompt=4, max_tokens=20)
        made = lab.add("b", prompt=22, max_tokens=2, prompt_logprobs=1)
        answer = lab.run()["b"]

        assert lab.preemptions > 0
        assert [entry and entry.token for entry in answer.updates[0].prompt_logprobs] == [None, *made.prompt_ids[1:]]
        assert [update.prompt_logprobs for update in answer.updates[1:]] == [None]


class TestPrefixHits:
    def test_the_second_of_two_equal_prompts_computes_one_block(self):
        lab = Lab(block_size=16, max_num_batched_tokens=100)
        lab.add("a", prompt=range(32), max_tokens=1)
        lab.run()
        lab.add("b", prompt=range(32), max_tokens=1)

        assert shape(lab.plan()) == [(0, 16, 16, True)] or shape(lab.runner.steps[-1]) == [(1, 16, 16, True)]
        assert lab.commit()[0].cached_tokens == 16
        stats = lab.scheduler.stats()
        assert (stats.prefix_queries, stats.prefix_hits) == (64, 16)

    def test_a_hit_shares_blocks_of_a_request_that_still_runs(self):
        lab = Lab(max_num_batched_tokens=100)
        lab.add("a", prompt=range(20), max_tokens=20)
        lab.step()
        lab.step()
        made = lab.add("b", prompt=range(20), max_tokens=20)
        answers = lab.run()

        assert answers["b"].updates[0].cached_tokens == 16 and answers["b"].tokens == lab.right(made)

    def test_equal_prompts_that_arrive_together_are_computed_once(self):
        """n = 3: 20 + 4 + 4 prompt tokens instead of 60; the request behind them does not wait."""
        lab = Lab(max_num_batched_tokens=100)
        made = [lab.add(name, prompt=range(20), max_tokens=2) for name in "abc"] + [lab.add("d", max_tokens=2)]

        assert shape(lab.plan()) == [(0, 0, 20, True), (1, 0, 5, True)]
        lab.commit()
        assert shape(lab.plan())[2:] == [(2, 16, 4, True), (3, 16, 4, True)]
        lab.commit()
        assert [lab.run()[one.id].tokens for one in made] == [lab.right(one) for one in made]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_whoever_waits_for_an_aborted_prompt_computes_it(self, depth):
        lab = Lab(depth=depth, max_num_batched_tokens=8)
        lab.add("a", prompt=range(30), max_tokens=2)
        made = lab.add("b", prompt=range(30), max_tokens=2)
        lab.step()
        lab.scheduler.finish("a", FinishReason.ABORT)
        answer = lab.run()["b"]

        assert answer.tokens == lab.right(made) and answer.updates[0].cached_tokens == 8 * depth

    def test_blocks_in_flight_are_not_found(self):
        """Depth 2: nothing of a's prompt has landed when b comes, so b waits, and what reads no cache computes all."""
        lab = Lab(depth=2, max_num_batched_tokens=100)
        lab.add("a", prompt=range(20), max_tokens=9)
        lab.plan()
        lab.add("b", prompt=range(20), max_tokens=1)
        lab.add("c", prompt=range(20), max_tokens=1, prompt_logprobs=0)

        assert shape(lab.plan()) == [(0, 20, 1, True), (1, 0, 20, True)]

    def test_a_follow_up_finds_prompt_and_answer(self):
        lab = Lab(max_num_batched_tokens=100)
        first = lab.add("a", prompt=10, max_tokens=7)
        answer = lab.run()["a"].tokens
        lab.add("b", prompt=(*first.prompt_ids, *answer, 1, 2, 3), max_tokens=1)

        assert lab.run()["b"].updates[0].cached_tokens == 16

    def test_prompt_logprobs_are_computed_and_not_read_from_the_cache(self):
        lab = Lab(max_num_batched_tokens=100)
        lab.add("a", prompt=range(20), max_tokens=1)
        lab.run()
        lab.add("b", prompt=range(20), max_tokens=1, prompt_logprobs=0)
        (update,) = lab.run()["b"].updates

        assert update.cached_tokens == 0 and [entry.token for entry in update.prompt_logprobs[1:]] == list(range(1, 20))

    def test_an_aborted_prompt_can_be_continued_from_the_cache(self):
        lab = Lab(max_num_batched_tokens=100)
        made = lab.add("a", prompt=18, max_tokens=50)
        for _ in range(3):
            lab.step()
        lab.scheduler.finish("a", FinishReason.ABORT)
        lab.add("b", prompt=(*made.prompt_ids, *lab.answers["a"].tokens), max_tokens=1)

        assert lab.run()["b"].updates[0].cached_tokens == 20

    def test_reset_preempts_what_runs_and_changes_no_answer(self):
        lab = Lab(max_num_batched_tokens=100)
        made = lab.add("a", prompt=18, max_tokens=8)
        for _ in range(3):
            lab.step()

        assert not lab.scheduler.reset_prefix_cache()
        assert lab.scheduler.reset_prefix_cache(preempt_running=True)
        assert lab.run()["a"].tokens == lab.right(made)


class TestDepth:
    def test_the_next_step_is_planned_before_the_token_is_known(self):
        lab = Lab(depth=3)
        lab.add("a", prompt=5, max_tokens=9)

        assert [shape(lab.plan()) for _ in range(3)] == [[(0, 0, 5, True)], [(0, 5, 1, True)], [(0, 6, 1, True)]]

    def test_no_step_is_wasted_on_an_end_that_the_limit_foretells(self):
        """max_tokens 2: after the prompt's step and one more, nothing is left to plan, though nothing has landed."""
        lab = Lab(depth=3)
        lab.add("a", prompt=5, max_tokens=2)

        assert lab.plan() and lab.plan() and lab.plan() is None
        lab.commit()
        assert lab.plan() is None

    def test_the_token_after_an_end_token_is_dropped_and_its_row_held_until_then(self):
        lab = Lab(depth=2, rows=1, max_num_seqs=1, device=scripted(5, EOS, 6))
        lab.add("a", max_tokens=20, eos={EOS})
        lab.add("b", max_tokens=1)
        lab.step()
        lab.step()  # commits EOS; a step beyond it is in flight

        assert lab.answers["a"].tokens == [5, EOS] and lab.answers["a"].reason is FinishReason.STOP
        assert lab.cache.num_free < lab.cache.num_blocks and lab.plan() is None
        assert lab.commit() == []
        assert lab.cache.num_free == lab.cache.num_blocks and lab.plan().opened

    def test_positions_beyond_the_end_are_not_taken_for_a_prefix(self):
        """Depth 3: two steps fly on after the end token at position 6; block 1 (4..7) has no eighth token."""
        lab = Lab(depth=3, device=scripted(5, EOS, 6, 8))
        made = lab.add("a", prompt=5, max_tokens=20, eos={EOS})
        lab.run()
        lab.add("b", prompt=(*made.prompt_ids, 5, EOS, 6, 7), max_tokens=1)

        assert lab.run()["b"].updates[0].cached_tokens == 4

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_one_answer_at_every_depth(self, depth):
        lab = Lab(depth=depth, max_num_batched_tokens=7)
        made = [lab.add(f"r{i}", prompt=3 + 4 * i, max_tokens=6) for i in range(6)]
        answers = lab.run()

        assert [answers[one.id].tokens for one in made] == [lab.right(one) for one in made]


class TestEnds:
    def ended(self, *, device, depth=1, **kwargs):
        lab = Lab(depth=depth, device=device)
        lab.add("a", **kwargs)
        answer = lab.run()["a"]
        return answer.tokens, answer.reason, answer.updates[-1].stop_reason

    def test_the_end_token_is_reported_with_stop_reason_none(self):
        assert self.ended(device=scripted(5, EOS), eos={EOS}) == ([5, EOS], FinishReason.STOP, None)

    def test_other_end_tokens_are_their_own_stop_reason(self):
        lab = Lab(device=scripted(5, 2))
        made = request("a", max_tokens=9)
        made = type(made)(id="a", prompt_ids=made.prompt_ids, sampling=made.sampling, eos_ids={EOS}, extra_eos_ids={2})
        lab.add(made)
        (*_, last) = lab.run()["a"].updates

        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, 2)

    def test_a_stop_token_is_its_own_stop_reason(self):
        assert self.ended(device=scripted(5, 6), stop_token_ids=[6]) == ([5, 6], FinishReason.STOP, 6)

    def test_ignore_eos_runs_on_to_the_limit_but_keeps_stop_tokens(self):
        assert self.ended(device=scripted(EOS, 5, 6), eos={EOS}, ignore_eos=True, max_tokens=3)[:2] == (
            [EOS, 5, 6],
            FinishReason.LENGTH,
        )
        assert self.ended(device=scripted(EOS, 5), eos={EOS}, ignore_eos=True, stop_token_ids=[5])[2] == 5

    def test_an_end_token_at_the_limit_is_a_stop(self):
        assert self.ended(device=scripted(5, EOS), eos={EOS}, max_tokens=2)[1] is FinishReason.STOP

    def test_end_tokens_count_only_after_min_tokens(self):
        """min_tokens 3: the sampler masks ends for tokens 1..3, so the fourth is the first that may end it."""
        tokens, reason, _ = self.ended(device=scripted(EOS, 5, EOS, EOS, 6), eos={EOS}, min_tokens=3, max_tokens=9)

        assert (tokens, reason) == ([EOS, 5, EOS, EOS], FinishReason.STOP)

    def test_max_tokens_ends_as_length(self):
        assert self.ended(device=scripted(5, 6, 7), max_tokens=2) == ([5, 6], FinishReason.LENGTH, None)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_the_context_ends_as_length(self, depth):
        """Context 12, prompt 10: two tokens, also when max_tokens asks for 9 or for whatever is left."""
        for most in (9, None):
            lab = Lab(context=12, depth=depth)
            lab.add("a", prompt=10, max_tokens=most)
            answer = lab.run()["a"]
            assert (len(answer.tokens), answer.reason) == (2, FinishReason.LENGTH)

    def test_max_tokens_zero_computes_the_prompt_and_gives_no_token(self):
        lab = Lab()
        lab.add("a", prompt=5, max_tokens=0, prompt_logprobs=0)
        (update,) = lab.run()["a"].updates

        assert (update.token_ids, update.finish_reason) == ((), FinishReason.LENGTH)
        assert len(update.prompt_logprobs) == 5

    def test_tokens_after_an_end_inside_accepted_drafts_are_dropped(self):
        class Oracle:
            def propose(self, tokens, most):
                return (5, EOS, 6)[:most]

        lab = Lab(device=scripted(4, 5, EOS, 6, 8), drafter=Oracle())
        lab.add("a", max_tokens=20, eos={EOS})
        answer = lab.run()["a"]

        assert [update.token_ids for update in answer.updates] == [(4,), (5, EOS)]
        assert len(lab.runner.steps) == 2

    def test_an_end_inside_accepted_drafts_names_no_block_beyond_it(self):
        """Prompt 4 and three tokens are 7; with the accepted drafts the device has computed 9 positions, two blocks of
        4, of which only the first holds tokens of the answer."""

        class Oracle:
            def propose(self, tokens, most):
                return (5, EOS, 6, 8)[:most]

        lab = Lab(device=scripted(4, 5, EOS, 6, 8, 9), drafter=Oracle())
        lab.add("a", prompt=4, max_tokens=20, eos={EOS})
        answer = lab.run()["a"]

        lab.add("b", prompt=(*request("a", 4).prompt_ids, 4, 5, EOS, 6, 8, 9), max_tokens=1)
        again = lab.run()["b"]

        assert answer.tokens == [4, 5, EOS]
        assert again.updates[0].cached_tokens == 4

    def test_drafts_follow_the_last_token_only_not_a_chunk_of_one(self):
        class Eager:
            def propose(self, tokens, most):
                return (999,) * most

        lab = Lab(drafter=Eager(), long_prefill_token_threshold=1, max_num_batched_tokens=9)
        made = [lab.add(name, prompt=4, max_tokens=3) for name in "ab"]

        assert [lab.run()[one.id].tokens for one in made] == [lab.right(one) for one in made]
        assert all(piece.samples for step in lab.runner.steps for piece in step.slices if piece.drafts)

    def test_rejected_drafts_are_computed_over(self):
        class Wrong:
            def propose(self, tokens, most):
                return (999, 999, 999)[:most]

        lab = Lab(drafter=Wrong(), windows=(None, 5))
        made = lab.add("a", max_tokens=12)

        assert lab.run()["a"].tokens == lab.right(made)
        assert any(piece.drafts for step in lab.runner.steps for piece in step.slices)


class TestFinishFromOutside:
    @pytest.mark.parametrize("turns", range(6))
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_at_any_moment_everything_comes_back_and_others_go_on(self, turns, depth):
        lab = Lab(blocks=10, depth=depth, max_num_batched_tokens=6)
        lab.add("a", prompt=9, max_tokens=9)
        other = lab.add("b", prompt=9, max_tokens=9)
        for _ in range(turns):
            lab.step()
        lab.plan() if len(lab.flying) < depth else None
        lab.scheduler.finish("a", FinishReason.ABORT)
        lab.scheduler.finish("a", FinishReason.ABORT)
        lab.scheduler.check_integrity()
        told = len(lab.answers["a"].updates)
        answers = lab.run()

        assert answers["b"].tokens == lab.right(other)
        assert len(answers["a"].updates) == told
        assert lab.cache.num_free == 10

    def test_a_queued_request_never_starts(self):
        lab = Lab(max_num_seqs=1)
        lab.add("a", max_tokens=3)
        lab.add("b", max_tokens=3)
        lab.step()
        lab.scheduler.finish("b", FinishReason.ABORT)
        lab.run()

        assert sum(len(step.opened) for step in lab.runner.steps) == 1

    def test_unknown_ids_are_ignored(self):
        Lab().scheduler.finish("nobody", FinishReason.ABORT)

    def test_an_id_may_be_used_again_while_flights_of_the_first_are_out(self):
        lab = Lab(depth=2)
        lab.add("a", max_tokens=9)
        lab.plan()
        lab.plan()
        lab.scheduler.finish("a", FinishReason.ABORT)
        made = lab.add("a", max_tokens=5)

        assert lab.run()["a"].tokens == lab.right(made)


class TestBadNumbers:
    def poisoned(self, depth, at=2, **kwargs):
        """A device that gives NaN for requests whose prompt starts with 13, from output token `at` + 1 on."""
        return Lab(
            depth=depth,
            device={"bad": lambda tokens: tokens[0] == 13 and len(tokens) >= 18 + at},
            block_size=4,
            **kwargs,
        )

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_only_that_request_fails_after_its_good_tokens(self, depth):
        lab = self.poisoned(depth, max_num_batched_tokens=100)
        bad = lab.add("bad", prompt=(13, *range(17)), max_tokens=10)
        good = lab.add("good", prompt=9, max_tokens=10)
        answers = lab.run()

        assert answers["bad"].tokens == lab.right(bad)[:2]
        assert answers["bad"].reason is FinishReason.ERROR
        assert isinstance(answers["bad"].updates[-1].error, NumericsError)
        assert answers["good"].tokens == lab.right(good)
        assert lab.scheduler.stats().numerics_errors == 1

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_its_blocks_are_no_prefix_for_anybody(self, depth):
        """The prompt's four full blocks were named long before the first bad token, and are forgotten with it."""
        lab = self.poisoned(depth, max_num_batched_tokens=100)
        lab.add("bad", prompt=(13, *range(17)), max_tokens=10)
        lab.run()
        lab.add("next", prompt=(13, *range(17)), max_tokens=1)

        assert lab.run()["next"].updates[0].cached_tokens == 0

    def test_also_when_only_the_step_after_the_end_is_bad(self):
        """Depth 2: the step planned beyond the end token gives NaN when the answer has already been sent."""
        device = scripted(5, EOS) | {"bad": lambda tokens: tokens[-1] == EOS}
        lab = Lab(depth=2, device=device, max_num_batched_tokens=100)
        lab.add("a", prompt=range(50, 68), max_tokens=9, eos={EOS})
        answer = lab.run()["a"]
        lab.add("b", prompt=range(50, 68), max_tokens=1)

        assert answer.tokens == [5, EOS] and answer.reason is FinishReason.STOP
        assert lab.run()["b"].updates[0].cached_tokens == 0

    def test_a_bad_first_token_of_a_chunked_prompt(self):
        lab = self.poisoned(2, at=0, max_num_batched_tokens=5)
        lab.add("bad", prompt=(13, *range(17)), max_tokens=10)
        answer = lab.run()["bad"]
        lab.add("next", prompt=(13, *range(17)), max_tokens=1)

        assert answer.tokens == [] and answer.reason is FinishReason.ERROR
        assert lab.run()["next"].updates[0].cached_tokens == 0


class TestRefusals:
    def test_a_prompt_without_room_for_one_token(self):
        lab = Lab(context=12)
        lab.add("a", prompt=11, max_tokens=5)

        assert len(lab.run()["a"].tokens) == 1
        for length in (12, 300):
            with pytest.raises(ContextLengthExceeded, match=f"12 tokens.*{length}"):
                lab.add("b", prompt=length)

    def test_a_prompt_that_the_pool_can_never_hold(self):
        """7 usable blocks of 16 hold 112 positions: 112 prompt tokens fit (the 113th is never stored), 113 do not."""
        lab = Lab(blocks=7, block_size=16, max_num_batched_tokens=512, context=256)
        with pytest.raises(ContextLengthExceeded, match="113"):
            lab.add("a", prompt=200)
        with pytest.raises(ContextLengthExceeded):
            lab.add("a", prompt=113)
        lab.add("a", prompt=112)

        assert len(lab.run()["a"].tokens) == 1

    @pytest.mark.parametrize("windows", [(None,), (None, 5), (None, None, 9)])
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_an_answer_that_outgrows_the_pool_ends_as_length(self, windows, depth):
        lab = Lab(blocks=12, windows=windows, depth=depth, max_num_batched_tokens=6)
        made = lab.add("a", prompt=5, max_tokens=150)
        answer = lab.run()["a"]

        assert answer.reason is FinishReason.LENGTH
        assert len(made.prompt_ids) + len(answer.tokens) == lab.scheduler.max_length < 155
        assert answer.tokens == lab.right(made)

    def test_an_id_in_use(self):
        lab = Lab()
        lab.add("a")
        with pytest.raises(RequestError, match="'a'"):
            lab.add("a")

    def test_what_is_not_available_is_not_ignored(self):
        plain = request("a")
        with pytest.raises(RequestError):
            Lab().add(type(plain)(id="a", prompt_ids=(1, 2), constraint=Constraint(kind="json", value={})))
        with pytest.raises(UnknownModel, match="mine"):
            Lab().add(type(plain)(id="a", prompt_ids=(1, 2), adapter="mine"))

    def test_the_queue_limit_does_not_count_those_that_can_start(self):
        lab = Lab(max_num_seqs=2, max_num_queued_reqs=1)
        for name in "abc":
            lab.add(name)

        with pytest.raises(Overloaded, match="max-num-queued-reqs 1"):
            lab.add("d")
        lab.run()
        lab.add("d")

    def test_the_queue_limit_in_tokens_lets_a_single_one_pass(self):
        lab = Lab(max_num_queued_tokens=10)
        lab.add("a", prompt=12)

        with pytest.raises(Overloaded, match="12 prompt tokens"):
            lab.add("b", prompt=1)
        lab.step()
        lab.add("b", prompt=9)


class Slow:
    """A grammar that compiles until told otherwise."""

    ready, masks, ended, error = False, False, False, None

    def __init__(self):
        self.seen = []

    def advance(self, token):
        self.seen.append(token)


class TestFeaturesThatAreOff:
    def test_a_request_whose_grammar_compiles_is_passed_by_others(self):
        slow = Slow()
        lab = Lab()
        plain = lab.scheduler._constrain
        lab.scheduler._constrain = lambda made: slow if made.id == "a" else plain(made)
        made = lab.add("a", max_tokens=3)
        lab.add("b", max_tokens=3)

        assert [update.request_id for update in lab.step()] == ["b"]
        assert lab.scheduler.stats().deferred == lab.scheduler.stats().waiting == 1
        slow.ready = True
        assert lab.run()["a"].tokens == lab.right(made) == slow.seen
        assert lab.scheduler.stats().deferred == 0

    def test_a_request_that_waits_for_room_is_not_deferred(self):
        lab = Lab(max_num_seqs=1)
        for name in "ab":
            lab.add(name, max_tokens=3)
        lab.step()

        stats = lab.scheduler.stats()
        assert (stats.running, stats.waiting, stats.deferred) == (1, 1, 0)

    def test_adapters_limit_which_requests_run_together(self):
        known = LoadedAdapters(1)
        x, y = (known.load(name, "", 8, None) for name in "xy")
        lab = Lab(adapters=known, max_num_batched_tokens=100)
        plain = request("a", max_tokens=2)
        for name, adapter in (("a", x), ("b", y), ("c", x), ("d", None)):
            lab.add(type(plain)(id=name, prompt_ids=(5, 6, 7), sampling=plain.sampling, adapter=adapter))

        assert [update.request_id for update in lab.step()] == ["a", "c", "d"]
        assert all(answer.reason for answer in lab.run().values())


def test_a_full_decode_step_is_planned_and_committed_in_little_time():
    """256 sequences, three groups: 0.6 ms when written; 1.5 ms would be felt at every step of a fast GPU."""
    lab = Lab(blocks=9000, block_size=64, windows=(None, 512, 512), context=4000, max_num_seqs=256, depth=2,
              max_num_batched_tokens=100_000)  # fmt: skip
    for index in range(256):
        lab.add(f"r{index}", prompt=[index, *range(100)], max_tokens=1000)
    scheduler, flying, seconds = lab.scheduler, deque([lab.scheduler.plan()]), []
    for _ in range(60):
        began = time.perf_counter()
        flying.append(scheduler.plan())
        spent = time.perf_counter() - began
        step = flying.popleft()
        output = StepOutput(step.step_id, tuple(SliceOutput(piece.slot, (7,)) for piece in step.slices))
        began = time.perf_counter()
        scheduler.commit(output)
        seconds.append(spent + time.perf_counter() - began)

    assert min(seconds) < 0.0015, f"{min(seconds) * 1e3:.2f} ms"


def test_a_step_committed_out_of_order_is_an_error():
    lab = Lab(depth=2)
    lab.add("a")
    lab.plan()
    lab.plan()

    with pytest.raises(RuntimeError, match="step 2 was committed, but step 1"):
        lab.scheduler.commit(lab.flying.pop().output)
