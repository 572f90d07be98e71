"""runner/runner.py: scripted models through the real rows, batches and sampler."""

import asyncio

import pytest
import torch

from tests.scripted import EOS, VOCAB, FlatModel, ScriptModel
from tinyserve.device import Device
from tinyserve.errors import EngineDead
from tinyserve.runner.runner import Limits, Runner
from tinyserve.runner.warmup import rehearse
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

    rehearse(runner)

    assert model.sizes == ((64, 4),)
    assert runner.rows.params == [None] * 4
    output = run(runner, opened=(SlotOpening(0, 1, (5,), GREEDY),), slices=(SeqSlice(0, 0, 1),))
    assert output.slices[0].tokens == (97,)


class Told(ScriptModel):
    """Logits that depend on the position and the token there, so that a wrong row shows."""

    def forward(self, batch):
        counts = batch.query_start[1:] - batch.query_start[:-1]
        slots = torch.repeat_interleave(batch.slots, counts)
        return torch.stack([batch.positions.float(), self.rows.tokens[slots, batch.positions].float()], dim=1)

    def logits(self, hidden):
        return torch.stack([self.row(int(position), int(token)) for position, token in hidden.tolist()])

    @staticmethod
    def row(position, token):
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * position + token))


@pytest.mark.parametrize("chunks", [[12], [5, 7], [3, 3, 3, 3], [1] * 12])
def test_named_ids_of_prompt_positions(make, chunks):
    """12 tokens scored from position 4: 7 rows, each with ids of its own, however the prompt is cut, with a neighbour
    in the batch. Oracle: log_softmax of the position's own logits."""
    runner = make(Told())
    prompt = tuple(range(20, 32))
    ids = tuple((row, 100 + row, -1)[: 1 + row % 3] for row in range(7))
    params = RowParams(temperature=0.0, prompt_ids=ids, prompt_start=4)
    opened = (SlotOpening(1, 12, prompt, params), SlotOpening(0, 24, (1,) * 24, RowParams()))
    found, start = [], 0
    for count in chunks:
        pieces = (SeqSlice(0, 2 * start, 2 * count, (), False), SeqSlice(1, start, count, (), start + count == 12))
        output = run(runner, opened=opened, slices=pieces)
        found += output.slices[1].prompt_logprobs or ()
        opened, start = (), start + count

    assert len(found) == 7
    for row, record in enumerate(found):
        right = Told.row(4 + row, prompt[4 + row]).log_softmax(-1)
        assert record.token == prompt[5 + row] and record.logprob == pytest.approx(right[record.token].item(), abs=1e-5)
        expected = [float("-inf") if id == -1 else right[id].item() for id in ids[row]]
        assert list(record.asked_logprobs) == pytest.approx(expected, abs=1e-5)


def test_named_ids_beside_prompt_logprobs(make):
    """prompt_logprobs start at 0, the named ids at 2."""
    runner = make(Told())
    params = RowParams(temperature=0.0, prompt_ids=((9,),) * 2, prompt_start=2, prompt_logprobs=1)

    output = run(runner, opened=(SlotOpening(1, 5, (1, 2, 3, 4, 5), params),), slices=(SeqSlice(1, 0, 5),))

    records = output.slices[0].prompt_logprobs
    assert [len(record.top_tokens) for record in records] == [1] * 4
    assert [len(record.asked_logprobs) for record in records] == [0, 0, 1, 1]
