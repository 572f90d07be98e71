"""runner/warmup.py names every kernel that real steps launch, found out without a GPU.

Launchers run as on an H200, with a driver that knows nothing but the target; `noting` writes down what would be
compiled, and nothing is. What real steps need must have been named by the steps of the warm-up.
"""

import json
import random
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from attrs import evolve
from triton.runtime import driver

from tests.engine.test_device_graphs import FAMILIES, SHAPE
from tests.kernels.harness import TARGETS, CompileDriver, forget_compiled, replaced
from tinyserve.checkpoint.source import resolve
from tinyserve.device import Device
from tinyserve.kernels import launch
from tinyserve.kv.groups import group_layers
from tinyserve.kv.storage import allocate
from tinyserve.models.registry import load_model
from tinyserve.runner.expected import expected, named
from tinyserve.runner.graphs import Eager, Wanted
from tinyserve.runner.hands import Hands
from tinyserve.runner.runner import Limits, Runner
from tinyserve.runner.warmup import _all_kinds, every_step, rehearse
from tinyserve.sampling.sampler import Sampler
from tinyserve.step import RowParams, SeqSlice, SlotOpening, StepInput

pytestmark = pytest.mark.skipif(launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")

LIMITS = Limits(rows=102, max_seqs=100, max_tokens=1024, max_model_len=1200, block_size=64, groups=1, depth=2)
KINDS = (
    RowParams(temperature=0.0),
    RowParams(temperature=1.0, seed=1),
    RowParams(temperature=0.0, logprobs=3),
    RowParams(temperature=0.6, top_k=20, top_p=0.95),
    RowParams(temperature=0.0, repetition_penalty=1.2, bias=((3, 2.0),)),
    RowParams(temperature=0.0, prompt_logprobs=1),
    RowParams(temperature=1.0, min_p=0.1, min_tokens=3, masked=(2,), allowed=(1, 2, 3)),
)


class Inline:
    """A worker that works at once: `noting` looks at its own thread only."""

    def submit(self, work, *args):
        done = Future()
        done.set_result(work(*args))
        return done

    def close(self, **_):
        pass


class Padding(Eager):
    """Says which shapes get graphs, and records none."""

    def shapes(self):
        return Wanted.usual(LIMITS.max_seqs, LIMITS.max_tokens, small=True).shapes()


@pytest.fixture
def h200():
    forget_compiled()
    goal = TARGETS["sm_90"]
    facts = launch.facts(torch.device("cpu"))
    facts = evolve(facts, name="NVIDIA H200", backend="cuda", shared=goal.shared, processors=132, overlaps=True)
    with (
        replaced(driver, _active=CompileDriver(goal.gpu)),
        replaced(launch, CPU_RUNS_KERNELS=True, facts=lambda device: facts),
    ):
        yield


def make(folder, family, graphs, **changes):
    shape = SHAPE | FAMILIES[family] | {"num_hidden_layers": 1, "vocab_size": 5003, "head_dim": 128} | changes
    (folder / "config.json").write_text(json.dumps(shape))
    source = resolve(str(folder), offline=True, progress=False, load_format="dummy")
    cpu = torch.device("cpu")
    model = load_model(source, dtype="bfloat16", device=cpu, load_format="dummy", seed=0)
    layers = model.kv_layers()
    groups = group_layers(layers)
    model.bind(groups, allocate(groups, layers, 1, LIMITS.block_size, torch.bfloat16, cpu))
    sampler = Sampler(LIMITS.rows, model.vocab_size, LIMITS.max_model_len, cpu)
    runner = Runner(model, sampler, evolve(LIMITS, groups=len(groups)), Device("cpu"), graphs)
    runner._worker, runner._hands = Inline(), Hands()
    return runner


def traffic():
    """Prompts alone and in batches, whole and in chunks, with decodes beside them; all kinds of rows."""
    draw = random.Random(0)
    for kind in KINDS:
        for lengths in ([1], [15], [16], [17], [255], [1000], [3] * 2, [5] * 3, [7, 12] * 4, [2] * 40, [10] * 100):
            yield [(length, kind) for length in lengths]
    for count in (1, 2, 3, 8, 31, 64, 100):
        yield [(draw.choice((1, 2, 6, 14, 20)), draw.choice(KINDS)) for _ in range(count)]


class AnyToken:
    """Masks of a grammar, of a tokenizer with fewer words than the model has logits."""

    begun = there = True

    def __init__(self, slots, width):
        self.slots, self.width = slots, width

    def result(self):
        return np.full((len(self.slots), self.width), -1, dtype=np.int32)


def run(runner, rows):
    """All prompts in a step (the second half of a long one in another, beside a decode), then two decodes, of which the
    second is held to grammars."""
    opened = tuple(SlotOpening(slot, length, (0,) * length, kind) for slot, (length, kind) in enumerate(rows))
    first = [SeqSlice(s, 0, n if n < 8 else n // 2, (), n < 8) for s, (n, _) in enumerate(rows)]
    second = [SeqSlice(p.slot, p.end, 1 if p.samples else rows[p.slot][0] - p.end) for p in first]
    third = [SeqSlice(piece.slot, piece.end, 1) for piece in second]
    fourth = [SeqSlice(piece.slot, piece.end, 1) for piece in third]
    closed = tuple(range(len(rows)))
    for slices in (first, second, third):
        runner.launch(StepInput(step_id=0, opened=opened, slices=tuple(slices)))
        opened = ()
    masks = AnyToken(closed, 144 + len(rows) % 8)
    runner.launch(StepInput(step_id=0, slices=tuple(fourth), masks=masks))
    runner.launch(StepInput(step_id=0, closed=closed))


@pytest.mark.parametrize("graphs", [Padding, Eager])
def test_real_steps_need_no_kernel_that_the_warm_up_did_not_name(h200, tmp_path, graphs):
    """About 84 batches of prompts of 1 to 1000 tokens: 0 variants are new."""
    runner = make(tmp_path, "qwen3", graphs())
    with launch.noting() as warm:
        every_step(runner)
    with launch.noting() as real:
        for rows in traffic():
            run(runner, rows)
    runner.close()

    new = {(variant.kernel.fn.__name__, variant.data) for variant in set(real) - set(warm)}
    assert len(set(warm)) > 30
    assert sorted(name for name, _ in new) == []


def test_layers_that_are_alike_name_nothing_new(h200, tmp_path):
    """Eight layers, the last four with a window: two are left out, and 0 variants are missing."""
    windows = {"num_hidden_layers": 8, "use_sliding_window": True, "max_window_layers": 4, "sliding_window": 64}
    runner = make(tmp_path, "qwen3", Eager(), **windows)
    with launch.noting() as few, runner.model.shortened():
        assert len(runner.model.layers) == 6
        rehearse(runner)
        _all_kinds(runner)
    with launch.noting() as every:
        rehearse(runner)
        _all_kinds(runner)
    assert len(runner.model.layers) == 8
    runner.close()

    assert {variant.data for variant in few} == {variant.data for variant in every}


def test_what_is_expected_of_a_config_is_what_its_model_needs(h200, tmp_path):
    """How tokens are drawn, in 2 types with and without filters, the largest logits: 12 variants, all needed. With its
    heads, attention of up to 100 sequences: 19 more, and of all that is needed only that of long prompts is left."""
    runner = make(tmp_path, "qwen3", Eager(), torch_dtype="bfloat16")
    with launch.noting() as needed:
        every_step(runner)
    runner.close()

    config = json.loads((tmp_path / "config.json").read_text())
    jobs = [job for job in expected(config, "auto", 64) if job[0] != "attention" or job[-1][0] <= LIMITS.max_seqs]
    found, tokens = ({v.data for job in some for v in named(*job)} for some in (jobs, [j for j in jobs if len(j) == 4]))
    left = [variant.kernel.fn.__name__ for variant in needed if variant.data not in found]
    assert (len(tokens), len(found - tokens)) == (12, 19)
    assert found <= {variant.data for variant in needed}
    assert [name for name in left if "attention" in name] == ["_attention_prefill_kernel"]


def test_nothing_is_expected_of_a_config_that_does_not_say():
    assert expected({}, "auto", 64) == expected({"vocab_size": 10, "dtype": "int7"}, "auto", 64) == []
    assert expected({"vocab_size": 10}, "float16", 64)[0] == ("sample", "float16", 10, True)


@pytest.mark.parametrize(
    "change, attention",
    [({}, 7), ({"sliding_window": 128}, 0), ({"num_attention_heads": 5}, 0), ({"num_key_value_heads": None}, 7)],
)
def test_attention_of_other_kinds_is_not_looked_ahead_to(change, attention):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    jobs = expected({"vocab_size": 10, "dtype": "bfloat16"} | sizes | change, "auto", 64)

    assert sum(job[0] == "attention" for job in jobs) == attention
    assert len(jobs) == attention + 6
