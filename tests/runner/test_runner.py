"""runner/runner.py: scripted models through the real rows, batches and sampler."""

import asyncio

import pytest
import torch

from tests.scripted import EOS, VOCAB, FlatModel, ScriptModel
from tinyserve.device import Device
from tinyserve.errors import EngineDead
from tinyserve.runner.runner import Limits, Runner
from tinyserve.sampling.sampler import Sampler
from tinyserve.step import RowParams, SeqSlice, SlotOpening, StepInput

LIMITS = Limits(rows=4, max_seqs=4, max_tokens=64, max_model_len=32, block_size=8, groups=1, depth=2)
GREEDY = RowParams(temperature=0.0)


@pytest.fixture
def make():
    runners = []

    def build(model):
        runner = Runner(model, Sampler(4, VOCAB, 32, torch.device("cpu")), LIMITS, Device("cpu"))
        model.attach(runner)
        runners.append(runner)
        return runner

    yield build
    for runner in runners:
        runner.close()


def run(runner, **step):
    return runner.launch(StepInput(step_id=7, **step)).landing.result(10)


def test_decode_needs_no_token_from_the_host(make):
    """Three steps are launched before any result is looked at; the tokens follow the script."""
    runner = make(ScriptModel([97, 98, 99]))
    flights = [
        runner.launch(StepInput(step_id=1, opened=(SlotOpening(2, 3, (1, 2, 3), GREEDY),), slices=(SeqSlice(2, 0, 3),)))
    ]
    flights += [runner.launch(StepInput(step_id=2 + k, slices=(SeqSlice(2, 3 + k, 1),))) for k in range(3)]

    tokens = [flight.landing.result(10).slices[0].tokens for flight in flights]

    assert tokens == [(97,), (98,), (99,), (EOS,)]
    assert runner.rows.tokens[2, :7].tolist() == [1, 2, 3, 97, 98, 99, EOS]


def test_outputs_come_in_the_order_of_the_slices(make):
    """The batch puts single tokens first; the output does not."""
    runner = make(ScriptModel([97]))
    opened = tuple(
        SlotOpening(slot, len(tokens), tokens, GREEDY) for slot, tokens in ((0, (5, 6)), (1, (9,)), (3, (7, 8, 9)))
    )

    output = run(runner, opened=opened, slices=(SeqSlice(0, 0, 2), SeqSlice(1, 0, 1), SeqSlice(3, 0, 2, (), False)))

    assert output.step_id == 7
    assert [piece.slot for piece in output.slices] == [0, 1, 3]
    assert [piece.tokens for piece in output.slices] == [(97,), (97,), ()]


def test_a_bad_row_is_flagged_and_its_neighbour_is_not(make):
    runner = make(ScriptModel([97], poison={(5, 0): float("nan")}))
    opened = (SlotOpening(0, 1, (5,), GREEDY), SlotOpening(1, 1, (6,), GREEDY))

    output = run(runner, opened=opened, slices=(SeqSlice(0, 0, 1), SeqSlice(1, 0, 1)))

    assert [piece.bad for piece in output.slices] == [True, False]
    assert output.slices[1].tokens == (97,)


def test_logprobs_of_output_and_prompt(make):
    """FLAT: ten ids share all the mass, so each has log(1/10)."""
    runner = make(FlatModel())
    params = RowParams(temperature=1.0, seed=3, logprobs=2, prompt_logprobs=0)

    first = run(runner, opened=(SlotOpening(0, 4, (97, 98, 1, 99), params),), slices=(SeqSlice(0, 0, 2, (), False),))
    second = run(runner, slices=(SeqSlice(0, 2, 2),))

    tenth = pytest.approx(-2.302585, abs=1e-5)
    assert [(p.token, p.logprob) for p in first.slices[0].prompt_logprobs] == [
        (98, tenth),
        (1, pytest.approx(-102.302585)),
    ]
    assert [(p.token, p.logprob) for p in second.slices[0].prompt_logprobs] == [(99, tenth)]
    (record,) = second.slices[0].logprobs
    assert record.token == second.slices[0].tokens[0] and record.logprob == tenth
    assert record.top_logprobs == (tenth, tenth)


def test_a_failing_model_fails_its_flight(make):
    class Broken(ScriptModel):
        def forward(self, batch):
            raise RuntimeError("no such kernel")

    runner = make(Broken())

    with pytest.raises(RuntimeError, match="no such kernel"):
        run(runner, opened=(SlotOpening(0, 1, (5,), GREEDY),), slices=(SeqSlice(0, 0, 1),))


def test_a_closed_runner_refuses(make):
    runner = make(ScriptModel())
    runner.close()
    runner.close()

    with pytest.raises(EngineDead):
        runner.launch(StepInput(step_id=1))


def test_awaiting_a_landed_flight_gives_others_a_turn(make):
    """A device that is always ready would otherwise starve the sockets of the loop."""

    async def main():
        runner = make(ScriptModel([97]))
        flight = runner.launch(
            StepInput(step_id=1, opened=(SlotOpening(0, 1, (5,), GREEDY),), slices=(SeqSlice(0, 0, 1),))
        )
        flight.landing.result(10)
        turns = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        await flight
        return turns

    assert asyncio.run(main()) == [1]


def test_a_rehearsal_is_the_largest_step_and_leaves_no_row_open(make):
    """64 tokens over 4 rows, all sampling: 4 x 16 tokens; afterwards a row opens as if nothing had been."""

    class Counting(ScriptModel):
        sizes = ()

        def forward(self, batch):
            self.sizes = (*self.sizes, (batch.num_tokens, batch.num_seqs))
            return super().forward(batch)

    model = Counting([97])
    runner = make(model)

    runner.rehearse(LIMITS)

    assert model.sizes == ((64, 4),)
    assert runner.rows.params == [None] * 4
    output = run(runner, opened=(SlotOpening(0, 1, (5,), GREEDY),), slices=(SeqSlice(0, 0, 1),))
    assert output.slices[0].tokens == (97,)
