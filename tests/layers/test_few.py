"""Layers written out for a few decodes give the numbers of their modules, and step aside for what they do not know."""

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
from tinyserve.layers.embedding import Embedding
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


LAYERS, VOCAB, TWO_EACH = 2, 50, Heads(4, 2, 16)


def model(*, heads=TWO_EACH, window=None):
    """Embedding, layers, and last norm with random weights, bound to caches of random numbers, 40 blocks of 4."""
    torch.manual_seed(0)
    rope = Rope(RopeSpec(dim=16))
    rope.allocate(128, CPU)
    kinds, layers = [LayerKV(heads.kv, 16, window=window)] * LAYERS, []
    embed, last = Embedding(VOCAB, HIDDEN), RMSNorm(HIDDEN, eps=1e-5)
    for pair in allocate(group_layers(kinds), kinds, 40, PAGE, torch.bfloat16, CPU):
        attn = Attention(HIDDEN, heads, rope=rope, scores=Scores(window=window))
        layer = Layer(HIDDEN, partial(RMSNorm, eps=1e-5), attn, GatedMLP(HIDDEN, INNER, "silu"))
        for seed, linear in enumerate((attn.qkv, attn.out, layer.mlp.gate_up, layer.mlp.down)):
            filled(linear, 4 * len(layers) + seed, cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, cpu_dense.Dense()))
        attn.bind(LayerCache(*(cache.normal_() for cache in pair), 0))
        layers.append(layer)
    embed.allocate(torch.float32, CPU)
    embed.weight.normal_()
    for norm in (last, *(norm for layer in layers for norm in (layer.attn_norm, layer.mlp_norm))):
        norm.allocate(torch.float32, CPU)
        norm.weight.uniform_(0.5, 1.5)
        norm.settle()
    return embed, layers, last


def by_modules(embed, layers, last, batch):
    x, delta = embed(batch.tokens), None
    for layer in layers:
        x, delta = layer(x, delta, batch)
    return last.add(x, delta)[1]


def step(lengths, tables):
    lengths, tables = torch.tensor(lengths, dtype=torch.int32), torch.tensor(tables, dtype=torch.int32)
    rows, at = torch.arange(len(lengths)), lengths.long() - 1
    slots = tables[rows, at // PAGE].long() * PAGE + at % PAGE
    return SimpleNamespace(
        tokens=(lengths * 7 % VOCAB).int(),
        positions=at.int(), seq_lens=lengths, block_tables=[tables], slots_to_write=[slots], memo={},
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32), num_seqs=len(lengths), num_decodes=len(lengths),
        max_query_len=1, max_seq_len=max(lengths.tolist()),
    )  # fmt: skip


TABLES = [[4 * row + 1, 4 * row + 2, 4 * row + 3] for row in range(8)]


@written_out
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("heads", "window"), [(TWO_EACH, None), (TWO_EACH, 5), (Heads(6, 2, 16), None)])
def test_numbers_and_cache_are_those_of_the_modules(rows, heads, window):
    """Of one row, of a few (int4) and of more (bf16), with a window, and in groups of 3 heads, which are asked as 4:
    1 % of the norm and of the newest keys, where products read bf16; keys of other rows would be off by 100 %.
    """
    found = []
    for written in (False, True):
        with torch.inference_mode():
            parts = model(heads=heads, window=window)
            stack, outputs = FewRows.of(*parts), []
            for later in range(2):  # the second step reads what the first wrote
                lengths = [length + later for length in (9, 3, 11, 1, 7, 8, 10, 4)]
                batch = step(lengths[:rows], TABLES[:rows])
                outputs.append(stack.forward(batch) if written else by_modules(*parts, batch))
            outputs += [cache for layer in parts[1] for cache in (layer.attn.cache.k, layer.attn.cache.v)]
            found.append(outputs)
    for expected, got in zip(*found, strict=True):
        assert (expected - got).norm() < 0.01 * expected.norm()


@written_out
def test_where_nothing_can_be_compiled_the_numbers_are_the_same(monkeypatch):
    """On Pythons that TorchScript does not support, a model would not have started at all."""
    with torch.inference_mode():
        batch = step([4, 9, 3], TABLES[:3])
        compiled = FewRows.of(*model()).forward(batch)
        monkeypatch.setattr(few, "UNSCRIPTED", (3, 0))
        monkeypatch.setattr(torch.jit, "script", None)
        assert torch.allclose(compiled, FewRows.of(*model()).forward(batch), rtol=1e-3, atol=1e-3)


@written_out
@pytest.mark.parametrize("window", [None, 5])
def test_a_step_further_is_the_next_step(window):
    """Bit for bit, also past a window's edge; breaks if what the step before found out is used for another batch."""
    with torch.inference_mode():
        stacks = [FewRows.of(*model(window=window)) for _ in range(2)]
        first = step([4, 9, 3], TABLES[:3])
        assert torch.equal(*(stack.forward(first) for stack in stacks))
        for later in (1, 2):
            following = step([4 + later, 9 + later, 3 + later], TABLES[:3])
            for name in ("tokens", "positions", "seq_lens"):
                getattr(first, name).copy_(getattr(following, name))
            first.slots_to_write[0].copy_(following.slots_to_write[0])
            assert torch.equal(stacks[0].forward(following), stacks[1].further(first))
        assert stacks[1].further(following) is None
        assert stacks[1].forward(step([9, 3], [[9, 5, 7], TABLES[1]])) is None
        assert stacks[1].further(first) is None


@written_out
def test_other_steps_go_through_the_modules():
    """Breaks if scattered blocks, padding, prompts, many rows, unknown tokens, adapters are taken for granted."""
    parts = model()
    written = FewRows.of(*parts)
    assert written.forward(step([9, 3], TABLES[:2])) is not None
    assert written.forward(step([9, 3], [[9, 5, 7], TABLES[1]])) is None
    assert written.forward(step([9, 0], TABLES[:2])) is None
    prompt, unknown = step([9, 3], TABLES[:2]), step([9, 3], TABLES[:2])
    prompt.num_decodes = 1
    unknown.tokens[1] = VOCAB
    assert written.forward(prompt) is None and written.forward(unknown) is None
    unknown.tokens[1] = -1
    assert written.forward(unknown) is None
    assert written.forward(step([1] * 16, TABLES[:1] * 16)) is not None
    assert written.forward(step([1] * 17, TABLES[:1] * 17)) is None
    parts[1][1].attn.qkv.format = cpu.ByRows(cpu_int4.Int4(), cpu.INT4_ROWS, cpu_dense.Dense())
    assert written.forward(step([9, 3], TABLES[:2])) is None


def other_class(module):
    module.__class__ = type("Other", (type(module),), {})


def other_rope():
    rope = Rope(RopeSpec(dim=16, theta=1e6))
    rope.allocate(128, CPU)
    return rope


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
    "a window of its own": lambda layer: setattr(layer.attn, "scores", Scores(window=5)),
    "a scale of its own": lambda layer: setattr(layer.attn, "scale", 1.0),
    "a rotation of its own": lambda layer: setattr(layer.attn, "rope", other_rope()),
    "other heads": lambda layer: setattr(layer.attn, "heads", Heads(2, 2, 16)),
    "a KV group of its own": lambda layer: layer.attn.bind(LayerCache(layer.attn.cache.k, layer.attn.cache.v, 1)),
    "another width": lambda layer: setattr(layer.mlp.down, "inputs", 2 * INNER),
    "an epsilon of its own": lambda layer: setattr(layer.attn_norm, "eps", 1e-6),
    "a cache of codes": caches(torch.int8),
    "a cache of fp32": caches(torch.float32),
    "keys and values apart": caches(torch.bfloat16, apart=True),
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
def test_other_layers_are_not_written_out(change):
    """Breaks if what the second layer has and the usual one has not is lost on the way."""
    embed, layers, last = model()
    assert FewRows.of(embed, layers, last) is not None
    change(layers[1])
    assert FewRows.of(embed, layers, last) is None


def all_fp32(embed, layers, last):
    kinds = [LayerKV(2, 16)] * LAYERS
    for layer, pair in zip(layers, allocate(group_layers(kinds), kinds, 40, PAGE, torch.float32, CPU), strict=True):
        layer.attn.bind(LayerCache(*pair, 0))


MODELS = {
    "all caches in fp32": all_fp32,
    "a scaled table": lambda embed, layers, last: setattr(embed, "scale", 2.0),
    "a table of codes": lambda embed, layers, last: setattr(embed, "packed", object()),
    "a table in bf16": lambda embed, layers, last: embed.bfloat16(),
    "a last norm of another class": lambda embed, layers, last: other_class(last),
    "a last norm with an epsilon of its own": lambda embed, layers, last: setattr(last, "eps", 1e-6),
    "caches in another order": lambda embed, layers, last: layers.reverse(),
    "layers of another family": lambda embed, layers, last: setattr(layers[0], "plain", False),
}


@written_out
@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_other_models_are_not_written_out(change):
    parts = model()
    assert FewRows.of(*parts) is not None
    change(*parts)
    assert FewRows.of(*parts) is None


@written_out
def test_layers_whose_kernels_run_are_not_written_out(monkeypatch):
    parts = model()
    assert FewRows.of(*parts) is not None
    monkeypatch.setattr(few, "use_kernel", lambda tensor: True)
    assert FewRows.of(*parts) is None
