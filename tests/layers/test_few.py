"""A block written out for a few decodes gives the bits of its modules, and steps aside for what it does not know."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.quant.test_cpu_formats import Blocks, random_blocks
from tinyserve.kernels.coded import CodedCache
from tinyserve.kv.groups import LayerKV, group_layers
from tinyserve.kv.storage import allocate
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


def block(*, window=None, softcap=0.0, fmt=None):
    """A layer with random weights, bound to a cache of random numbers, 40 blocks of 4."""
    torch.manual_seed(0)
    rope = Rope(RopeSpec(dim=16))
    rope.allocate(128, CPU)
    attn = Attention(HIDDEN, Heads(4, 2, 16), rope=rope, scores=Scores(window=window, softcap=softcap))
    layer = Layer(HIDDEN, partial(RMSNorm, eps=1e-5), attn, GatedMLP(HIDDEN, INNER, "silu"))
    for norm in (layer.attn_norm, layer.mlp_norm):
        norm.allocate(torch.float32, CPU)
        norm.weight.uniform_(0.5, 1.5)
        norm.settle()
    for seed, linear in enumerate((attn.qkv, attn.out, layer.mlp.gate_up, layer.mlp.down)):
        filled(linear, seed, fmt or cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, cpu_dense.Dense()))
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
            few = FewRows.of((layer.attn_norm, layer.mlp_norm), layer.attn, layer.mlp)
            layer.few = few if written else None
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
    """Breaks if scattered blocks, empty rows, prompts, many rows or the format of an adapter are taken for granted."""
    layer = block()
    layer.settle()
    x, most = torch.randn(2, HIDDEN), torch.randn(17, HIDDEN)
    assert layer.few.plan(x, step([9, 3], TABLES[:2])) is not None
    assert layer.few.plan(x, step([9, 3], [[9, 5, 7], TABLES[1]])) is None
    prompt = step([9, 3], TABLES[:2])
    prompt.num_decodes = 1
    assert layer.few.plan(x, prompt) is None
    assert layer.few.plan(most, step([1] * 17, TABLES[:1] * 17)) is None
    layer.attn.qkv.format = cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, cpu_dense.Dense())
    assert layer.few.plan(x, step([9, 3], TABLES[:2])) is None


@written_out
def test_other_blocks_are_not_written_out():
    """Breaks if a soft-cap, plain weights or a cache of codes are lost on the way."""
    for layer in (block(softcap=30.0), block(fmt=Plain())):
        layer.settle()
        assert layer.few is None
    layer = block()
    kinds = [LayerKV(2, 16)]
    codes = allocate(group_layers(kinds), kinds, 40, PAGE, torch.int8, CPU)[0]
    assert isinstance(codes[0], CodedCache)
    layer.attn.bind(LayerCache(*codes, 0))
    layer.settle()
    assert layer.few is None
