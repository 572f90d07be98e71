"""Each family against transformers: random weights, odd sizes, ragged prompts, paged cache in scattered blocks."""

import logging
from contextlib import nullcontext

import pytest
import torch

from tests import oracles
from tests.kernels.harness import interpreting, nan_outputs
from tests.models.batching import Paged, check_invariance
from tests.models.serving import serve
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import UnsupportedModel
from tinyserve.kv.groups import group_layers
from tinyserve.models.registry import load_model
from tinyserve.quant import cpu_int8

CLOSE = {"atol": 1e-4, "rtol": 0}  # of logits between 5 and 20; float32 noise is 1e-5
LENGTHS = (37, 11)  # more than one window (4 to 6), more than llama3's and yarn's original length (32)
DECODES = 3


def open_model(folder):
    return load_model(resolve(str(folder)), dtype="float32")


def lengths(name):
    """Of the two prompts. LongRoPE turns keys of short sequences otherwise if the longest that is served is short, too;
    transformers decides by the sequence at hand."""
    return (37, 33) if name.endswith("longrope") else LENGTHS


def sequences(name):
    return [oracles.prompt(length + DECODES, seed=seed) for seed, length in enumerate(lengths(name))]


@pytest.mark.parametrize("name", oracles.CONFIGS)
def test_logits_equal_transformers(name, checkpoint, caplog):
    """Largest difference of any logit: 1e-4, for two prompts prefilled as one batch, then decoded together."""
    folder = checkpoint(name)
    with caplog.at_level(logging.WARNING):
        paged = Paged(open_model(folder))
    rows = [paged.add(tokens) for tokens in sequences(name)]
    steps = [paged.step(dict(zip(rows, lengths(name), strict=True)))]
    steps += [paged.step(dict.fromkeys(rows, 1)) for _ in range(DECODES)]

    assert [
        record.msg for record in caplog.records if record.name.startswith("tinyserve")
    ] == []  # every key of the config was understood
    for row, tokens in zip(rows, sequences(name), strict=True):
        expected = oracles.reference_logits(folder, tokens)
        actual = torch.cat([step[row] for step in steps])

        assert expected.abs().max() > 2
        torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3"])
def test_chunks_and_mixed_batches_change_nothing(name, checkpoint):
    """One prompt in chunks of 5, the other decoding beside it: logits within 1e-4 of transformers."""
    folder = checkpoint(name)
    paged = Paged(open_model(folder), block_size=8)
    long, short = (paged.add(tokens) for tokens in sequences(name))
    found = {long: [], short: [paged.step({short: LENGTHS[1]})[short]]}
    for count in (5, 5, 5, 10, 12, 1, 1):
        asked = {long: count}
        if len(found[short]) <= DECODES:
            asked[short] = 1
        for row, logits in paged.step(asked).items():
            found[row].append(logits)

    for row, tokens in zip((long, short), sequences(name), strict=True):
        actual = torch.cat(found[row])
        expected = oracles.reference_logits(folder, tokens)[: len(actual)]
        torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2-window", "qwen3", "gemma3", "gemma2", "cohere-norms", "apertus", "bloom-6"]
)
def test_triton_kernels_give_the_same_logits(name, checkpoint):
    """Every op by its interpreted Triton kernel: a prefill, then a decode beside the rest of a prompt, within 1e-4."""
    folder = checkpoint(name)
    long, short = oracles.prompt(21), oracles.prompt(8, seed=1)
    with interpreting(), nan_outputs():
        paged = Paged(open_model(folder), block_size=16)
        rows = paged.add(long), paged.add(short)
        steps = [paged.step(dict(zip(rows, counts, strict=True))) for counts in ((13, 7), (8, 1))]

    for row, tokens in zip(rows, (long, short), strict=True):
        actual = torch.cat([step[row] for step in steps])
        torch.testing.assert_close(actual, oracles.reference_logits(folder, tokens), **CLOSE)


@pytest.mark.parametrize(("name", "kernels"), [("llama-biases", True), ("qwen3", False), ("starcoder2", False)])
def test_the_rows_that_are_wanted_are_those_of_all(name, kernels, checkpoint):
    """Hidden states of the last of 13 tokens, and of the last of 13 and of 7: within 1e-4 of all those; one step later,
    with the keys and values that a narrow step left, logits within 1e-4 of transformers."""
    folder = checkpoint(name)
    prompts = oracles.prompt(14), oracles.prompt(8, seed=1)
    with interpreting() if kernels else nullcontext(), nan_outputs():
        paged = Paged(open_model(folder), block_size=16)
        rows = [paged.add(tokens) for tokens in prompts]
        assert paged.model.narrows
        with torch.inference_mode():
            for which in (rows[:1], rows):
                counts = dict(zip(which, (13, 7), strict=False))
                batch = paged.batch(which, counts)
                wanted = batch.query_start[1:] - 1
                whole = paged.model.forward(batch)
                narrow = paged.model.forward(paged.batch(which, counts), wanted)
                assert narrow.shape == (len(which), whole.shape[1])
                torch.testing.assert_close(narrow, whole[wanted], **CLOSE)
        for row in rows:
            paged.rows[row].computed = counts[row]
        steps = paged.step(dict.fromkeys(rows, 1))

    for row, tokens in zip(rows, prompts, strict=True):
        torch.testing.assert_close(steps[row], oracles.reference_logits(folder, tokens)[-1:], **CLOSE)


def greedy(paged, prompts, count):
    """The next `count` ids of each prompt, all in one batch, by argmax."""
    rows = [paged.add(tokens) for tokens in prompts]
    logits = paged.step({row: len(tokens) for row, tokens in zip(rows, prompts, strict=True)})
    found = [[] for _ in rows]
    while True:
        for row, ids in zip(rows, found, strict=True):
            ids.append(int(logits[row][-1].argmax()))
            paged.rows[row].tokens.append(ids[-1])
        if len(found[0]) == count:
            return found
        logits = paged.step(dict.fromkeys(rows, 1))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_one_token_alone_gives_the_same_logits(name, checkpoint):
    """Decoding one sequence, where norms, gates and additions move into the products' kernels: within 1e-4."""
    tokens = oracles.prompt(8)
    with interpreting(), nan_outputs():
        paged = Paged(open_model(checkpoint(name)), block_size=16)
        row = paged.add(tokens)
        actual = torch.cat([paged.step({row: count})[row] for count in (6, 1, 1)])

    torch.testing.assert_close(actual, oracles.reference_logits(checkpoint(name), tokens), **CLOSE)


def test_batch_invariant_logits_are_equal_to_the_bit(checkpoint):
    """The row of one prompt, prefilled and decoded alone and beside two others: 0 bits apart."""
    check_invariance(checkpoint("qwen3"))


@pytest.mark.parametrize("kernels", [False, True], ids=["references", "interpreted kernels"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_64_greedy_tokens_equal_transformers(name, kernels, checkpoint):
    """Two prompts in one batch; one wrong position or block anywhere changes every id after it."""
    folder = checkpoint(name)
    prompts = [oracles.prompt(21), oracles.prompt(8, seed=1)]
    with interpreting() if kernels else nullcontext():
        found = greedy(Paged(open_model(folder), block_size=16), prompts, 64)

    assert found == [oracles.reference_greedy(folder, tokens, 64) for tokens in prompts]


@pytest.mark.parametrize("name", oracles.pairs(oracles.CONFIGS))
def test_64_greedy_tokens_through_the_engine_equal_transformers(name, checkpoint):
    """Chunks of 12 tokens; 21 blocks of 8 positions for three sequences of up to 85, 5 where layers have windows."""
    folder = checkpoint(name)
    first = oracles.prompt(21)
    prompts = [first, oracles.prompt(8, seed=1), oracles.prompt(19, seed=2), first[:17] + oracles.prompt(3, seed=3)]
    model = open_model(folder)
    groups = group_layers(model.kv_layers())

    served = serve(model, prompts, blocks=1 + sum(21 if group.window is None else 5 for group in groups))

    assert served.ids == oracles.reference_choices(folder, prompts, served.ids)
    assert served.preemptions > 0
    assert served.cached[-1] == 16 or any(group.window for group in groups)


def test_bfloat16_follows_float32(checkpoint):
    """Half precision through the same code: logits within 5 % of the largest one."""
    folder = checkpoint("gemma3")
    tokens = sequences("gemma3")[0]
    paged = Paged(load_model(resolve(str(folder)), dtype="bfloat16"))
    row = paged.add(tokens)
    actual = paged.step({row: len(tokens)})[row].float()
    expected = oracles.reference_logits(folder, tokens)

    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


def test_batch_invariance_is_refused_where_it_is_not_built(checkpoint):
    """A quantised product: its name is in the message."""
    model = open_model(checkpoint("llama"))
    model.layers[1].mlp.down.format = cpu_int8.Int8()

    with pytest.raises(UnsupportedModel, match=r"products of layers.1.mlp.down"):
        model.make_invariant()
