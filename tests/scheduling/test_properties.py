"""Random traffic: one right answer for each request, whatever the schedule.

A state machine adds and aborts requests and moves plan and commit in any legal order, on pools so small that most
traffic is preempted. After each move all invariants of scheduler, cache and pool hold; the fake device checks each step.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinyserve.errors import ContextLengthExceeded
from tinyserve.request import FinishReason

from .harness import EOS, Lab, request

PREFIXES = [tuple(range(100 + 20 * i, 120 + 20 * i)) for i in range(3)]
WINDOWS = [(None,), (None, 5), (7,), (None, 4, 9), (None, None), (1,)]


class Traffic(RuleBasedStateMachine):
    """Any interleaving of arrivals, aborts, plans and commits."""

    @initialize(
        blocks=st.integers(4, 24), size=st.sampled_from([1, 2, 4]), windows=st.sampled_from(WINDOWS),
        depth=st.integers(1, 3), budget=st.integers(1, 24), seqs=st.integers(1, 5), extra_rows=st.integers(0, 2),
        policy=st.sampled_from(["fcfs", "priority"]), cap=st.sampled_from([0, 3]), gate=st.booleans(),
        watermark=st.sampled_from([0.0, 0.2]), caching=st.booleans(), chunked=st.booleans(),
    )  # fmt: skip
    def start(
        self, blocks, size, windows, depth, budget, seqs, extra_rows, policy, cap, gate, watermark, caching, chunked
    ):
        self.lab = Lab(
            blocks=blocks * len(windows), block_size=size, windows=windows, depth=depth, caching=caching,
            rows=seqs + extra_rows, device={"vocab": 30, "bad": self.is_bad}, context=40,
            max_num_batched_tokens=max(budget, seqs) if chunked else 40, max_num_seqs=seqs, scheduling_policy=policy,
            enable_chunked_prefill=chunked, long_prefill_token_threshold=cap, scheduler_reserve_full_isl=gate,
            watermark=watermark,
        )  # fmt: skip
        self.made = {}
        self.stopped = set()
        self.poison = set()

    def is_bad(self, tokens):
        return any(len(tokens) >= length and tokens[: len(prompt)] == prompt for prompt, length in self.poison)

    @rule(
        prefix=st.sampled_from(PREFIXES), shared=st.integers(0, 20), own=st.lists(st.integers(0, 29), max_size=8),
        max_tokens=st.integers(0, 20), salt=st.sampled_from([None, None, "s"]), priority=st.integers(-1, 1),
        ends=st.booleans(), logprobs=st.sampled_from([None, None, 2]), bad=st.integers(0, 30),
    )  # fmt: skip
    def arrive(self, prefix, shared, own, max_tokens, salt, priority, ends, logprobs, bad):
        name = f"r{len(self.made)}"
        prompt = prefix[:shared] + tuple(own) or (3,)
        made = request(
            name, prompt, max_tokens, salt=salt, priority=priority, arrival=float(len(self.made)),
            eos={EOS} if ends else (), prompt_logprobs=logprobs,
        )  # fmt: skip
        if len(prompt) >= self.lab.scheduler.max_length:
            with pytest.raises(ContextLengthExceeded):
                self.lab.add(made)
            return
        self.lab.add(made)
        self.made[name] = made
        if bad == 0:
            self.poison.add((prompt, len(prompt) + max_tokens // 2))

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        if self.made:
            name = f"r{which % len(self.made)}"
            self.lab.scheduler.finish(name, FinishReason.ABORT)
            if self.lab.answers[name].reason is None:
                self.stopped.add(name)

    @precondition(lambda self: len(self.lab.flying) < self.lab.depth)
    @rule()
    def plan(self):
        self.lab.plan()

    @precondition(lambda self: self.lab.flying)
    @rule()
    def commit(self):
        self.lab.commit()

    @rule(turns=st.integers(1, 8))
    def run_on(self, turns):
        for _ in range(turns):
            self.lab.step()

    @invariant()
    def nothing_is_broken(self):
        if hasattr(self, "lab"):
            self.lab.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "lab"):
            return
        self.lab.run(6000)
        for name, made in self.made.items():
            self.judge(name, made)
        assert self.lab.cache.num_free == self.lab.cache.num_blocks

    def judge(self, name, made):
        """The answer is the one of a lone request, cut where it was aborted or went bad, and nowhere else."""
        answer, right = self.lab.answers[name], self.lab.right(made)
        if made.sampling.max_tokens == 0:
            right = []
        assert answer.tokens == right[: len(answer.tokens)], name
        if name in self.stopped:
            return
        assert answer.reason is not None, name
        if answer.reason is FinishReason.ERROR:
            assert self.is_bad((*made.prompt_ids, *answer.tokens)), name
            return
        assert answer.tokens == right, name
        stopped = bool(right) and EOS in made.eos_ids and right[-1] == EOS
        assert answer.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH), name
        if made.sampling.prompt_logprobs is not None:
            (reported,) = [update.prompt_logprobs for update in answer.updates if update.prompt_logprobs is not None]
            assert [entry and entry.token for entry in reported] == [None, *made.prompt_ids[1:]]


Traffic.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestTraffic = Traffic.TestCase
