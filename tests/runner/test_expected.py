"""runner/early.py and expected.py: what a start looks ahead to, against what it then asks for."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import driver

from tests.kernels.harness import TARGETS, CompileDriver
from tinyserve import config
from tinyserve.checkpoint.source import resolve
from tinyserve.kernels import launch
from tinyserve.kv.groups import group_layers
from tinyserve.kv.storage import allocate
from tinyserve.models.registry import load_model
from tinyserve.runner import early, warmup
from tinyserve.runner.expected import expected, named
from tinyserve.runner.graphs import Recorded, Wanted
from tinyserve.runner.runner import Limits, Runner
from tinyserve.sampling.sampler import Sampler

ALONE = "TINYSERVE_TEST_ALONE"
META = torch.device("meta")
H200 = launch.DeviceFacts("NVIDIA H200", "cuda", 227 * 1024, 132, overlaps=True, arch=90)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


class NoDevice:
    """A GPU whose tensors have no numbers."""

    torch, is_cpu, has_graphs = META, False, True

    def event(self):
        return SimpleNamespace(record=lambda stream=None: None, synchronize=lambda: None)

    def current_stream(self):
        return None

    def use(self):
        return contextlib.nullcontext()

    def host_buffer(self, *shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def graph_pool(self):
        return None


def runner_of(folder):
    """A runner for the model of a folder with nothing but a config."""
    options = config.build({"model": str(folder), "max_num_seqs": 600}).resolve("cuda", 100 << 30)
    model = load_model(
        resolve(str(folder), offline=True, progress=False, load_format="dummy"), dtype="auto", device=META,
        load_format="dummy", format_for=None, overrides={}, seed=0, progress=lambda *_: None,
    )  # fmt: skip
    layers, block = model.kv_layers(), options.cache.block_size
    model.bind(group_layers(layers), allocate(group_layers(layers), layers, 1, block, torch.bfloat16, META))
    sizes = {"max_seqs": 600, "max_tokens": 2048, "max_model_len": 4096, "block_size": block}
    limits = Limits(rows=602, groups=1, depth=2, **sizes)
    graphs = Recorded(NoDevice(), Wanted.usual(600, 2048, small=True))
    return Runner(model, Sampler(602, model.vocab_size, 4096, META), limits, NoDevice(), graphs)


@pytest.mark.skipif(launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")
def test_what_is_expected_is_what_a_start_asks_for(tmp_path, monkeypatch):
    """Two layers of Qwen3's kind on an H200: all 33 variants that are expected are among those that a start names, and
    no variant of attention but that of prompts is left out."""
    if ALONE not in os.environ:  # what other tests compiled in this process changes what is named
        again = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
        again += ["-k", "asks_for"]
        found = subprocess.run(again, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
        return
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(launch, "facts", lambda device: H200)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    moved = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *to, **how: self if to[0] == "cpu" else moved(self, *to, **how)
    )
    driver.set_active(CompileDriver(TARGETS["sm_90"].gpu))
    looked = [variant for job in expected(CONFIG, "auto", 64) for variant in named(*job)]

    monkeypatch.setattr(warmup, "_steps", without_results)
    with launch.noting() as asked:
        warmup.every_step(runner_of(tmp_path))

    assert len(set(looked)) == 33
    assert set(looked) <= set(asked)
    left = {variant.kernel.fn.__name__ for variant in set(asked) - set(looked)}
    assert not left & {"_attention_parts_kernel", "_attention_merge_kernel", "_pick_kernel", "_tile_kernel"}


steps = warmup._steps


def without_results(runner, *args, **more):
    """Steps are queued, but nobody waits for numbers that are not there."""
    runner._worker.submit = lambda work, *args: SimpleNamespace(result=lambda: None)
    return steps(runner, *args, **more)


@pytest.mark.parametrize(
    "change, attention",
    [({}, 9), ({"sliding_window": 128}, 0), ({"num_attention_heads": 5}, 0), ({"num_key_value_heads": None}, 9)],
)
def test_attention_of_other_kinds_is_not_looked_ahead_to(change, attention):
    jobs = expected(CONFIG | change, "auto", 64)

    assert sum(job[0] == "attention" for job in jobs) == attention
    assert len(jobs) == attention + 6


def test_a_config_without_sizes_lets_nothing_expect():
    assert expected({}, "auto", 64) == [] == expected(CONFIG | {"torch_dtype": "float8"}, "auto", 64)


class Driver:
    """NVIDIA's driver, as far as it is asked. fails: the call that gives an error."""

    def __init__(self, fails=""):
        self.fails, self.contexts = fails, []

    def __getattr__(self, name):
        def call(*args):
            if name == "cuDeviceGet":
                args[0]._obj.value = args[1]
            if name == "cuDeviceGetName":
                args[0].value = b"NVIDIA H200"
            if name == "cuDeviceGetAttribute":
                args[0]._obj.value = {16: 132, 75: 9, 76: 0, 97: 232448}[args[1]]
            if name == "cuDevicePrimaryCtxRetain":
                self.contexts.append(args[1].value)
            return int(name == self.fails)

        return call


def test_the_driver_tells_what_is_there_and_makes_the_context(monkeypatch):
    one = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: one)

    assert early.look(1) == early.Gpu("NVIDIA H200", 90, 132, 232448)
    for thread in [one for one in early.threading.enumerate() if one.name == "tinyserve-context"]:
        thread.join()
    assert one.contexts == [1]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_is_nobody(monkeypatch, fails):
    one = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: one)

    assert early.look() is None and one.contexts == []
