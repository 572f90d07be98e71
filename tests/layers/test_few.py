"""A block written out for a few decodes gives the bits of its modules, and steps aside for what it does not know."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.quant.test_cpu_formats import Blocks, random_blocks
from tinyserve.kernels.coded import CodedCache
from tinyserve.kv.groups import LayerKV, group_layers
from tinyserve.kv.storage import allocate
from tinyserve.layers import few
from tinyserve.layers.attention import Attention, Heads, LayerCache, Scores
from tinyserve.layers.few import FewRows
from tinyserve.layers.mlp import GatedMLP
from tinyserve.layers.norm import RMSNorm
from tinyserve.layers.rope import Rope, RopeSpec
from tinyserve.models.llama import Layer
from tinyserve.quant import cpu, cpu_dense, cpu_int4
from tinyserve.quant.plain import Plain

CPU, HIDDEN, INNER, PAGE = torch.device("cpu"), 64, 96, 4
written_out = pytest.mark.skipif(
    not cpu_int4.available() or cpu_dense.dense_dtype() != torch.bfloat16, reason="no int4 or no bf16 products here"
)


def filled(linear, seed, fmt):
    linear.format = fmt
    linear.allocate(torch.float32, CPU)
    for part, rows in enumerate(linear.parts):
        stored: Blocks = random_blocks(rows, linear.inputs, "Q4_1", seed=10 * seed + part)
        linear.load("weight", part, stored)
    linear.finish()


def block(*, window=None):
    """A layer with random weights, bound to a cache of random numbers, 40 blocks of 4."""
    torch.manual_seed(0)
    rope = Rope(RopeSpec(dim=16))
    rope.allocate(128, CPU)
    attn = Attention(HIDDEN, Heads(4, 2, 16), rope=rope, scores=Scores(window=window))
    layer = Layer(HIDDEN, partial(RMSNorm, eps=1e-5), attn, GatedMLP(HIDDEN, INNER, "silu"))
    for norm in (layer.attn_norm, layer.mlp_norm):
        norm.allocate(torch.float32, CPU)
        norm.weight.uniform_(0.5, 1.5)
        norm.settle()
    for seed, linear in enumerate((attn.qkv, attn.out, layer.mlp.gate_up, layer.mlp.down)):
        filled(linear, seed, cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, cpu_dense.Dense()))
    kinds = [LayerKV(2, 16, window=window)]
    ((k, v),) = allocate(group_layers(kinds), kinds, 40, PAGE, torch.float32, CPU)
    attn.bind(LayerCache(k.normal_(), v.normal_(), 0))
    return layer


def step(lengths, tables):
    lengths, tables = torch.tensor(lengths, dtype=torch.int32), torch.tensor(tables, dtype=torch.int32)
    rows, at = torch.arange(len(lengths)), lengths.long() - 1
    slots = tables[rows, at // PAGE].long() * PAGE + at % PAGE
    return SimpleNamespace(
        positions=at.int(), seq_lens=lengths, block_tables=[tables], slots_to_write=[slots], memo={},
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32), num_seqs=len(lengths), num_decodes=len(lengths),
        max_query_len=1, max_seq_len=max(lengths.tolist()),
    )  # fmt: skip


TABLES = [[4 * row + 1, 4 * row + 2, 4 * row + 3] for row in range(8)]


@written_out
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 5])
def test_numbers_and_cache_are_those_of_the_modules(rows, window):
    """No bit differs in stream, delta or cache: of one row, of a few (int4) and of more (bf16), with a window too."""
    found = []
    for written in (False, True):
        with torch.inference_mode():
            layer = block(window=window)
            layer.few = FewRows.of((layer.attn_norm, layer.mlp_norm), layer.attn, layer.mlp) if written else None
            assert (layer.few is not None) == written
            batch = step([9, 3, 12, 1, 7, 8, 10, 4][:rows], TABLES[:rows])
            x, delta = torch.randn(rows, HIDDEN), None
            for _ in range(2):
                x, delta = layer(x, delta, batch)
            assert (delta.dtype == torch.bfloat16) == written
            found.append((x, delta.float(), layer.attn.cache.k.clone(), layer.attn.cache.v.clone()))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


@written_out
def test_other_steps_go_through_the_modules():
    """Breaks if scattered blocks, rows of padding, prompts, many rows, other numbers or the format of an adapter are
    taken for granted."""
    layer = block()
    layer.settle()
    x, most = torch.randn(2, HIDDEN), torch.randn(17, HIDDEN)
    assert layer.few.plan(x, step([9, 3], TABLES[:2])) is not None
    assert layer.few.plan(x, step([9, 3], [[9, 5, 7], TABLES[1]])) is None
    padded = step([9, 3], TABLES[:2])
    padded.seq_lens = torch.tensor([9, 0], dtype=torch.int32)
    assert layer.few.plan(x, padded) is None
    prompt = step([9, 3], TABLES[:2])
    prompt.num_decodes = 1
    assert layer.few.plan(x, prompt) is None
    assert layer.few.plan(most[:16], step([1] * 16, TABLES[:1] * 16)) is not None
    assert layer.few.plan(most, step([1] * 17, TABLES[:1] * 17)) is None
    assert layer.few.plan(x.double(), step([9, 3], TABLES[:2])) is None
    layer.attn.qkv.format = cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, cpu_dense.Dense())
    assert layer.few.plan(x, step([9, 3], TABLES[:2])) is None


def other_class(module):
    module.__class__ = type("Other", (type(module),), {})


def caches(dtype, *, apart=False):
    """A change of a layer's caches: to numbers or codes of another type, or to two pieces of memory."""

    def change(layer):
        kinds = [LayerKV(2, 16)]
        k, v = allocate(group_layers(kinds), kinds, 40, PAGE, dtype, CPU)[0]
        assert isinstance(k, CodedCache) == (dtype == torch.int8)
        layer.attn.bind(LayerCache(k, v.clone() if apart else v, 0))

    return change


OTHERS = {
    "an attention of another class": lambda layer: other_class(layer.attn),
    "a feed-forward of another class": lambda layer: other_class(layer.mlp),
    "a norm of another class": lambda layer: other_class(layer.mlp_norm),
    "another activation": lambda layer: setattr(layer.mlp, "kind", "gelu"),
    "no rotation": lambda layer: setattr(layer.attn, "rope", None),
    "a bias by distance": lambda layer: setattr(layer.attn.rope, "slopes", torch.ones(4)),
    "norms of q and k": lambda layer: setattr(layer.attn, "q_norm", RMSNorm(16, 1e-5)),
    "a clamp": lambda layer: setattr(layer.attn, "adjust", torch.nn.Hardtanh()),
    "sinks": lambda layer: setattr(layer.attn, "sinks", torch.nn.Identity()),
    "chunks": lambda layer: setattr(layer.attn, "scores", Scores(chunk=8)),
    "a temper": lambda layer: setattr(layer.attn, "scores", Scores(temper=(8, 0.1))),
    "a soft-cap": lambda layer: setattr(layer.attn, "scores", Scores(softcap=30.0)),
    "a cache of codes": caches(torch.int8),
    "a cache of bf16": caches(torch.bfloat16),
    "keys and values apart": caches(torch.float32, apart=True),
    "one format for all rows": lambda layer: setattr(layer.mlp.down, "format", cpu_dense.Dense()),
    "another format for few rows": lambda layer: setattr(layer.mlp.down.format, "few", cpu_dense.Dense()),
    "another format for many rows": lambda layer: setattr(layer.mlp.down.format, "many", Plain()),
    "a bias": lambda layer: setattr(layer.attn.out, "bias", torch.nn.Parameter(torch.ones(HIDDEN))),
    "numbers in fp32": lambda layer: setattr(layer.attn.out, "dense", torch.ones(HIDDEN, HIDDEN)),
    "numbers that are not packed": lambda layer: setattr(
        layer.attn.out, "dense", torch.ones(HIDDEN, HIDDEN).bfloat16()
    ),
}


@written_out
@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_blocks_are_not_written_out(change):
    """Breaks if what this block has and the usual one has not is lost on the way; without it, it is written out."""
    layer = block()
    layer.settle()
    assert layer.few is not None
    change(layer)
    layer.settle()
    assert layer.few is None


@written_out
def test_blocks_whose_kernels_run_are_not_written_out(monkeypatch):
    layer = block()
    monkeypatch.setattr(few, "use_kernel", lambda tensor: True)
    layer.settle()
    assert layer.few is None
