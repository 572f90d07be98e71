"""The choice of block sizes, and the harness that stands behind the other tests of this folder."""

import json
import sys
import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import build, driver

from tests.kernels.harness import TARGETS, CompileDriver, compile_only, interpreting, nan_outputs, replaced
from tinyserve.kernels import launch


@triton.jit
def _fill_kernel(out_ptr, value, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) + value)


@triton.jit
def _large_kernel(out_ptr, SIDE: tl.constexpr):
    short, long = tl.arange(0, 64), tl.arange(0, SIDE)
    tile = tl.load(out_ptr + short[:, None] * SIDE + long[None, :])
    tl.store(out_ptr + short[:, None] * 64 + short[None, :], tl.dot(tile, tl.trans(tile)))


@triton.jit
def _scalar_mask_kernel(out_ptr, enabled_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, index, mask=(index < 3) & (tl.load(enabled_ptr) > 0))


LIMIT, OTHER = tl.constexpr(3), tl.constexpr(5)


@triton.jit
def _below(index):
    return index < LIMIT


@triton.jit
def _between(index):
    return _below(index) & (index > OTHER)


@triton.jit
def _calling_kernel(out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, index, mask=_between(index))


# In a process started with TRITON_INTERPRET=1 every kernel is interpreted always, and none can be compiled.
compiles = pytest.mark.skipif(launch.CPU_RUNS_KERNELS, reason="Triton is interpreted in the whole process")


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """A function that writes the tuned file of the CPU."""
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    launch.tuned_rows.cache_clear()

    def write(rows):
        (tmp_path / "cpu.json").write_text(json.dumps(rows))

    yield write
    launch.tuned_rows.cache_clear()


def test_the_first_tuned_row_that_fits_overlays_the_default(tuned):
    tuned({"op": [{"when": {"width": [64, 128]}, "use": {"BLOCK": 32}}, {"when": {}, "use": {"num_warps": 8}}]})
    default, x = {"BLOCK": 16, "num_warps": 4}, torch.empty(0)

    assert launch.choose("op", x, default, width=64) == {"BLOCK": 32, "num_warps": 4}
    assert launch.choose("op", x, default, width=129) == {"BLOCK": 16, "num_warps": 8}
    assert launch.choose("other", x, default, width=64) == default


@pytest.mark.parametrize("row", [{"when": {"height": [1, 2]}, "use": {}}, {"when": {}, "use": {"height": 1}}])
def test_a_tuned_row_with_an_unknown_name_is_refused(tuned, row):
    tuned({"op": [row]})

    with pytest.raises(ValueError, match=r"op: a tuned row names \['height'\]; known: \['BLOCK', 'width'\]"):
        launch.choose("op", torch.empty(0), {"BLOCK": 1}, width=1)


def test_without_a_tuned_file_the_formula_decides(tuned):
    assert launch.choose("op", torch.empty(0), {"BLOCK": 16}, width=1) == {"BLOCK": 16}


def test_tuned_files_are_named_by_device():
    assert launch.tuned_path("NVIDIA H200").name == "nvidia_h200.json"
    assert launch.tuned_path("AMD Instinct MI300X (VF)").name == "amd_instinct_mi300x_vf.json"


def test_every_tuned_file_is_well_formed():
    for path in launch.TUNED.glob("*.json"):
        for kernel, rows in json.loads(path.read_text()).items():
            for row in rows:
                assert row.keys() == {"when", "use"}, (path.name, kernel)
                assert all(low <= high for low, high in row["when"].values()), (path.name, kernel)


@pytest.mark.parametrize("count, power", [(0, 1), (1, 1), (2, 2), (3, 4), (576, 1024), (1024, 1024)])
def test_next_power_of_2(count, power):
    assert launch.next_power_of_2(count) == power


@pytest.mark.parametrize("count, size, pieces", [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_cdiv(count, size, pieces):
    assert launch.cdiv(count, size) == pieces


@compiles
def test_kernels_run_on_the_cpu_only_while_interpreting():
    x = torch.empty(4)

    assert not launch.use_kernel(x)
    assert launch.use_kernel(x.to("meta"))
    with interpreting():
        assert launch.use_kernel(x)
        _fill_kernel[(1,)](x, 3.0, BLOCK=4)
    assert not launch.use_kernel(x)
    assert x.tolist() == [3.0] * 4


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_compiling_sees_the_target_and_its_shared_memory(target):
    with compile_only(target) as built:
        assert launch.shared_memory(torch.empty(1)) == TARGETS[target].shared
        _fill_kernel[(1,)](torch.empty(4), 3.0, BLOCK=4)

    assert [(one.name, one.shared) for one in built] == [("_fill_kernel", 0)]
    assert built[0].kernel.metadata.target.arch == TARGETS[target].gpu.arch


@compiles
def test_a_kernel_that_is_too_large_for_its_target_is_refused():
    """Breaks if the check is lost: one 64 x 2048 float16 tile is 256 KiB."""
    with pytest.raises(AssertionError, match="sm_80 has 166912 bytes"), compile_only("sm_80"):
        _large_kernel[(1,)](torch.empty(64, 2048, dtype=torch.float16), SIDE=2048)


def test_a_scalar_condition_may_mask_a_tile():
    """Breaks where the interpreter turns the scalar into int32: triton 3.9 refuses such a mask."""
    out = torch.full((4,), -1, dtype=torch.int32)

    with interpreting():
        _scalar_mask_kernel[(1,)](out, torch.ones(1, dtype=torch.int32), BLOCK=4)

    assert out.tolist() == [0, 1, 2, -1]


def test_new_tensors_are_nan_while_outputs_are_watched():
    with nan_outputs():
        assert torch.empty(3).isnan().all()
        assert torch.zeros(3).new_empty(3).isnan().all()


def test_once_makes_a_thing_once_a_step_and_anew_without_a_memo():
    made = []
    memo: dict = {}

    def make():
        made.append(len(made))
        return made[-1]

    assert [launch.once(memo, ("a",), make), launch.once(memo, ("a",), make), launch.once(memo, ("b",), make)] == [
        0,
        0,
        1,
    ]
    assert [launch.once(None, ("a",), make), launch.once(None, ("a",), make)] == [2, 3]


@compiles
def test_noted_launches_are_compiled_together():
    """Two variants, asked for three times: inside `noting` none is compiled, afterwards all three find theirs.

    Launches are left out there, also of what is compiled: this driver could not launch, and would raise.
    """
    out = torch.empty(128, device="meta")

    def launches():
        return [_fill_kernel.warmup(out, 1.0, BLOCK=size, grid=(1,)) for size in (64, 128, 64)]

    with replaced(driver, _active=CompileDriver(TARGETS["sm_90"].gpu)):
        _fill_kernel.device_caches.clear()
        try:
            with launch.noting() as variants:
                assert not any(isinstance(kernel, CompiledKernel) for kernel in launches())
            loading = launch.Loading(threads=2)
            for variant in variants * 2:
                loading.add(variant)
            assert loading.finish() == 2
            with launch.noting() as more:
                assert all(isinstance(kernel, CompiledKernel) for kernel in launches())
                _fill_kernel[(1,)](out, 1.0, BLOCK=64)
        finally:
            _fill_kernel.device_caches.clear()

    assert more == []


class _Promise:
    """What Triton 3.6 gives for a kernel under way: it can be waited for, and passes no attribute on."""

    __slots__ = ("_promise",)

    def __init__(self, promise):
        self._promise = promise

    def result(self):
        return self._promise.result()


class _Mode(triton.AsyncCompileMode):
    def submit(self, *args):
        return _Promise(super().submit(*args))


class _LoadDriver(CompileDriver):
    """Notes the threads on which kernels are loaded."""

    def __init__(self, target):
        super().__init__(target)
        self.utils, self.loaded = self, []

    def launcher_cls(self, source, metadata):
        return "launcher"

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name, *args):
        self.loaded.append((name, threading.get_ident()))
        return "module", "function", 32, 0, 1024


@compiles
def test_kernels_compiled_together_are_loaded_by_threads_that_have_the_device():
    """Two variants, two loads. Breaks where a promise of Triton is taken for the kernel: an AttributeError, 0 loads."""
    out, selected = torch.empty(128, device="meta"), []
    stand_in = _LoadDriver(TARGETS["sm_90"].gpu)

    with replaced(driver, _active=stand_in), replaced(triton, AsyncCompileMode=_Mode):
        _fill_kernel.device_caches.clear()
        try:
            with launch.noting() as variants:
                for size in (64, 128):
                    _fill_kernel.warmup(out, 1.0, BLOCK=size, grid=(1,))
            loading = launch.Loading(2, lambda: selected.append(threading.get_ident()))
            for variant in variants:
                loading.add(variant)
            loading.finish()
        finally:
            _fill_kernel.device_caches.clear()

    assert [name for name, _ in stand_in.loaded] == ["_fill_kernel"] * 2
    assert {thread for _, thread in stand_in.loaded} <= set(selected) - {threading.get_ident()}


@pytest.mark.parametrize("message", ["AST constructor recursion depth mismatch (before=1, after=2)", "something else"])
def test_a_compilation_that_another_thread_disturbed_is_tried_again(monkeypatch, message):
    """What a parser with a counter for all threads answers now and then; any other error is told."""

    class Kernel:
        tries = 0

        def preload(self, data):
            self.tries += 1
            if self.tries < 3:
                raise SystemError(message)

    monkeypatch.setattr(launch, "settle_key", lambda kernel: None)
    loading, kernel = launch.Loading(1), Kernel()
    loading.add(launch.Variant(kernel, "{}"))
    if message == "something else":
        with pytest.raises(SystemError, match=message):
            loading.finish()
    else:
        assert loading.finish() == 1
    assert kernel.tries == (1 if message == "something else" else 3)


@compiles
@pytest.mark.parametrize("first", [None, _below, _between])
def test_a_kernel_has_one_place_in_the_cache_whatever_was_hashed_before(first):
    """Breaks where a callee is hashed after its caller: two places, so the second start compiles again."""
    chain = (_below, _between, _calling_kernel)
    places = []
    for begin in (first, _below):
        for function in chain:
            function.hash, function.used_global_vals = None, {}
        if begin is not None:
            launch.settle_key(begin)
        launch.settle_key(_calling_kernel)
        places.append(_calling_kernel.cache_key)

    assert places[0] == places[1]


MODULE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "one_name", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_one_name(void) {{ return PyModule_Create(&definition); }}
"""


def test_launchers_of_one_name_stay_apart(monkeypatch, tmp_path):
    """Two files of one name, the first loaded again: 1, 2, 1. The second one gave 1, with the first's arguments."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first, second, again = (
        build.compile_module_from_src(MODULE.format(number=number), "one_name") for number in (1, 2, 1)
    )
    assert [module.launch() for module in (first, second, again)] == [1, 2, 1]
    assert "one_name" not in sys.modules
