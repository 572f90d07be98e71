"""Recorded steps with and without adapters, on a device whose graphs run the work once more."""

import pytest
import torch

from tests import oracles
from tests.lora.checkpoints import greedy, merged, write_adapter
from tests.lora.test_served import dressed, open_model
from tests.runner.test_graphs import Recorder
from tinyserve.device import Device
from tinyserve.kv.groups import group_layers
from tinyserve.kv.storage import allocate
from tinyserve.lora.adapters import Move
from tinyserve.lora.batch import Packed
from tinyserve.runner.batch import Shape
from tinyserve.runner.graphs import Recorded, Wanted
from tinyserve.runner.runner import Limits, Runner
from tinyserve.runner.warmup import every_step, warm_up
from tinyserve.sampling.sampler import Sampler
from tinyserve.step import RowParams, SeqSlice, SlotOpening, StepInput, TableEdit

LIMITS = Limits(rows=4, max_seqs=4, max_tokens=32, max_model_len=32, block_size=8, groups=1, depth=2)
WANTED = Wanted(decodes=(1, 2, 4), mixed=((0, 16), (0, 32)), adapted=True)


@pytest.fixture
def runner(tmp_path):
    base = oracles.save("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", base)
    model = open_model(base)
    adapted = dressed(model, [adapter])
    layers = model.kv_layers()
    groups = group_layers(layers)
    model.bind(groups, allocate(groups, layers, 20, 8, torch.float32, torch.device("cpu")))
    sampler = Sampler(4, oracles.VOCAB, 32, torch.device("cpu"))
    made = Runner(model, sampler, LIMITS, Device("cpu"), Recorded(Recorder(), WANTED), adapted)
    made.right = [merged(base, folder) for folder in (adapter, None)]
    weights = Packed(adapted.weights[0].clone(), ())
    adapted.weights.zero_()  # they come with the step
    made.given = type("Given", (), {"weights": weights})
    yield made
    made.close()


def test_every_kind_of_step_is_launched_with_adapters_too(runner):
    """So that none of its kernels compiles later: all numbers of tokens by which the model's kernels are chosen."""
    seen = set()
    wear = runner.adapters.wear

    def noted(adapted, rows, slots):
        seen.add((adapted, len(slots)))
        wear(adapted, rows, slots)

    runner.adapters.wear = noted
    every_step(runner)

    plain, worn = ({size for adapted, size in seen if adapted is kind} for kind in (False, True))
    assert plain - worn == {6} and worn < plain  # 6: three prompts of two tokens, which are there for the samplers


def test_a_step_takes_the_graph_with_adapters_only_if_a_row_wears_one(runner):
    """Tokens of padded graphs equal merged weights; a step of the model alone replays the graphs without adapters."""
    warm_up(runner)
    while runner.improve():
        pass
    graphs = {shape: graph for shape, (graph, _) in runner.graphs._graphs.items()}
    assert {shape.adapted for shape in graphs} == {False, True} and len(graphs) == 10
    before = {shape: graph.replays for shape, graph in graphs.items()}
    prompts, tokens = [oracles.prompt(5), oracles.prompt(7, seed=1), oracles.prompt(3, seed=2)], [[], [], []]
    worn, ends = (1, 0, 0), [5, 7, 3]

    def run(**step):
        given = runner.launch(StepInput(step_id=1, **step)).landing.result(10)
        for piece in given.slices:
            tokens[piece.slot] += piece.tokens

    run(
        moves=(Move(0, runner.given),),
        opened=tuple(
            SlotOpening(row, len(prompt), tuple(prompt), RowParams(temperature=0, adapter=worn[row]))
            for row, prompt in enumerate(prompts)
        ),
        edits=tuple(TableEdit(row, 0, 0, (1 + 3 * row, 2 + 3 * row, 3 + 3 * row)) for row in range(3)),
        slices=tuple(SeqSlice(row, 0, end) for row, end in enumerate(ends)),
    )
    for k in range(8):
        run(slices=tuple(SeqSlice(row, end + k, 1) for row, end in enumerate(ends)))
    run(closed=(0,), slices=tuple(SeqSlice(row, ends[row] + 8, 1) for row in (1, 2)))

    replays = {shape: graph.replays - before[shape] for shape, graph in graphs.items()}
    used = {shape: count for shape, count in replays.items() if count}
    assert used == {Shape(16, 8, 0, True): 1, Shape(4, 4, 4, True): 8, Shape(2, 2, 2, False): 1}
    for row, prompt in enumerate(prompts):
        assert tokens[row] == greedy(runner.right[1 - worn[row]], prompt, len(tokens[row]))
