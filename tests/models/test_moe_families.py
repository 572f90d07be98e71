"""Each mixture-of-experts family against transformers: prefill and decode, chunks, interpreted kernels, the engine."""

import logging
from contextlib import nullcontext

import pytest
import torch

from tests import oracles
from tests.kernels.harness import interpreting, nan_outputs
from tests.models.batching import Paged, check_invariance
from tests.models.serving import serve
from tests.moe_configs import CONFIGS
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import UnsupportedModel
from tinyserve.kv.groups import group_layers
from tinyserve.layers import moe
from tinyserve.models.registry import as_saved, family, load_model
from tinyserve.quant.cpu import cpu_formats
from tinyserve.quant.cpu_dense import dense_dtype

CLOSE = {"atol": 1e-4, "rtol": 0}
LENGTHS = (37, 11)
DECODES = 3


def open_model(folder, dtype="float32"):
    return load_model(resolve(str(folder)), dtype=dtype)


def sequences(name):
    """Two prompts. LongRoPE turns otherwise in transformers as long as a sequence is short; both are long then."""
    lengths = (37, 33) if name.endswith("longrope") else LENGTHS
    return [oracles.prompt(length + DECODES, seed=seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, checkpoint, caplog):
    """Largest difference of any logit: 1e-4, for one prompt in chunks beside another, then both decoded together."""
    folder = checkpoint(name)
    with caplog.at_level(logging.WARNING, "tinyserve"):
        paged = Paged(open_model(folder), block_size=8)
    prompts = sequences(name)
    rows = [paged.add(tokens) for tokens in prompts]
    steps = [paged.step({rows[0]: 17, rows[1]: len(prompts[1]) - DECODES}), paged.step({rows[0]: 20})]
    steps += [paged.step(dict.fromkeys(rows, 1)) for _ in range(DECODES)]

    assert [record for record in caplog.records if record.name.startswith("tinyserve")] == []
    for row, tokens in zip(rows, prompts, strict=True):
        expected = oracles.reference_logits(folder, tokens)
        actual = torch.cat([step[row] for step in steps if row in step])

        assert expected.abs().max() > 2
        torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3"])
def test_triton_kernels_give_the_same_logits(name, checkpoint, monkeypatch):
    """Every op by its interpreted Triton kernel: a prefill, then a decode beside the rest of a prompt, within 1e-4.

    Slots are sorted in the first step and not in the second; in the third, one token's experts add to the stream.
    """
    monkeypatch.setattr(moe, "MOST_SLOTS", 16)
    folder = checkpoint(name)
    long, short = oracles.prompt(17), oracles.prompt(9, seed=1)
    with interpreting(), nan_outputs():
        paged = Paged(open_model(folder), block_size=16)
        rows = paged.add(long), paged.add(short)
        steps = [paged.step(dict(zip(rows, counts, strict=True))) for counts in ((13, 7), (4, 1))]
        steps.append(paged.step({rows[1]: 1}))

    for row, tokens in zip(rows, (long, short), strict=True):
        actual = torch.cat([step[row] for step in steps if row in step])
        torch.testing.assert_close(actual, oracles.reference_logits(folder, tokens), **CLOSE)


def test_batch_invariant_logits_are_equal_to_the_bit(checkpoint):
    """The row of one prompt, prefilled and decoded alone and beside two others: 0 bits apart. MLA refuses by name."""
    check_invariance(checkpoint("qwen2-moe"))
    with pytest.raises(UnsupportedModel, match=r"products of layers.0.attn.kv_up"):
        open_model(checkpoint("deepseek-v2")).make_invariant()


@pytest.mark.parametrize("name", oracles.pairs(CONFIGS))
def test_64_greedy_tokens_through_the_engine_equal_transformers(name, checkpoint):
    """Chunks of 12 tokens, 14 blocks of 8 positions for two sequences of up to 85, a shared beginning of 16 found.

    A window or chunk needs fewer blocks; and what it has given back may be overwritten before it can be found.
    """
    folder = checkpoint(name)
    first = oracles.prompt(21)
    prompts = [first, oracles.prompt(8, seed=1), first[:17] + oracles.prompt(3, seed=3)]
    model = open_model(folder)
    groups = group_layers(model.kv_layers())
    if any(group.reach for group in groups):  # two would find room for their windows
        prompts.insert(2, oracles.prompt(19, seed=2))

    served = serve(model, prompts, blocks=1 + sum(14 if group.reach is None else 5 for group in groups))

    assert served.ids == oracles.reference_choices(folder, prompts, served.ids)
    assert served.preemptions > 0
    assert served.cached[-1] == 16 or any(group.reach for group in groups)


@pytest.mark.parametrize("name, needle, first", [("mixtral-window", 0, 13), ("llama4-chunks", 6, 8)])
@pytest.mark.parametrize(
    "kernels, counts", [(False, (1,) * 15), (True, (9, 5, 1))], ids=["references", "interpreted kernels"]
)
def test_a_needle_outside_what_is_seen_has_no_influence(name, needle, first, kernels, counts, checkpoint):
    """Windows of 5 in 3 layers reach 12 positions back; chunks of 8 end at 8. From there on logits are bit-equal.

    References take one token a step: the rounding of a product on the CPU depends on how many tokens share an expert.
    """
    model = open_model(checkpoint(name))
    found = []
    for token in (5, 6):
        tokens = oracles.prompt(15)
        tokens[needle] = token
        with interpreting() if kernels else nullcontext():
            paged = Paged(model, block_size=8)
            row = paged.add(tokens)
            found.append(torch.cat([paged.step({row: count})[row] for count in counts]))

    assert torch.equal(found[0][first:], found[1][first:])
    assert not torch.equal(found[0][first - 1], found[1][first - 1])


def test_layers_that_predict_further_tokens_are_left_out():
    """GLM-4.5 and DeepSeek-V3 keep such a layer behind the last: here 3 layers, so those of layer 3 are dropped."""
    names = [f"model.layers.{layer}.norm.weight" for layer in (0, 2, 3, 30)] + ["model.norm.weight", "lm_head.weight"]

    kept = as_saved(family("Glm4MoeForCausalLM"), dict.fromkeys(names), 3)

    assert list(kept) == [names[0], names[1], "model.norm.weight", "lm_head.weight"]


def test_experts_of_halves_stay_halves_on_the_cpu(checkpoint, tmp_path):
    """With the CPU's packed formats a bfloat16 checkpoint keeps 2 bytes for a number of an expert, a float32 one 4.

    Nine of ten logits stay within 2 % of the largest one; a token near a tie may go to another expert.
    """
    folder = checkpoint("qwen3-moe")
    oracles.open_reference(folder).to(torch.bfloat16).save_pretrained(tmp_path)
    tokens = oracles.prompt(40)
    for source, dtype in ((folder, torch.float32), (tmp_path, dense_dtype())):
        model = load_model(resolve(str(source)), dtype="float32", format_for=cpu_formats())
        paged = Paged(model)
        actual = paged.step({paged.add(tokens): len(tokens)})[0]
        expected = oracles.reference_logits(source, tokens)

        assert model.layers[1].mlp.experts.gate_up.weight.dtype == dtype
        assert (actual - expected).abs().quantile(0.9) < 0.02 * expected.abs().max()
