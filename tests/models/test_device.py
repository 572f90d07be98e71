"""Every family on a GPU, by the Triton kernels: two configs each, logits and whole answers, in both precisions.

| asked | of which weights | in | what must hold |
| --- | --- | --- | --- |
| logits of two ragged prompts | wide: tests/oracles.py | float32 | 1e-4 from transformers |
| 64 greedy tokens through the engine | wide | float32 | transformers' choice, ties aside |
| the same, with log-probabilities | untouched, as below | bfloat16 | BEST and MEAN |
| logits of two ragged prompts | untouched: exactly as transformers draws them | bfloat16 | BEST and MEAN |
| the same | mild: a spread of 0.05, more than twice what transformers draws | bfloat16 | BEST and MEAN |
| logits of two ragged prompts, of the first config | wide | bfloat16 | as close to float32 as transformers is |

BEST and MEAN are the criterion of half precision: the most likely token is the same wherever the reference's best two
log-probabilities are further apart than BEST, and the mean difference of log-probabilities is below MEAN. The reference
is transformers in float32, on the same rounded weights. Wide weights, five times as wide as mild ones, are chosen so
that every mistake shows: attention is sharp there, two experts are often nearly as good as each other, and
transformers' own bfloat16 misses the criterion for most families. So the criterion is not asked of them.

`--configs 2` takes both configs of a family, else there is time for the first.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import moe_configs, oracles
from tests.models.batching import Paged
from tests.models.serving import serve
from tinyserve.checkpoint.source import resolve
from tinyserve.kv.groups import group_layers
from tinyserve.models.registry import load_model
from tinyserve.runner import warmup

pytestmark = pytest.mark.gpu
CONFIGS = oracles.CONFIGS | moe_configs.CONFIGS
FAMILIES = oracles.families(CONFIGS)
LENGTHS = (60, 41)  # with LongRoPE, both beyond its original length
DECODES = 4
MILD = 0.05  # spread of the weights
BEST, MEAN = 0.05, 0.02
TIE = 2e-4  # two logits that may each be 1e-4 off
# Of wide weights: the most likely token where the best two are further apart than this, but for so many more than
# transformers' own bfloat16 misses; and a mean difference of so many times its own, or MEAN.
FAR, MORE, ROOM = 0.2, 4, 2.0


def pytest_generate_tests(metafunc):
    """The names of configs; all tests of one run one after the other, so that its kernels compile once."""
    count = 1 if metafunc.function is FIRST_CONFIGS else metafunc.config.getoption("--configs")
    metafunc.parametrize("name", [name for names in FAMILIES.values() for name in names[:count]], scope="module")


@pytest.fixture(scope="module")
def device():
    return torch.accelerator.current_accelerator()


def logits_on(folder, dtype, device):
    """Of two prompts: prefilled as one batch, then decoded together."""
    paged = Paged(load_model(resolve(str(folder)), dtype=dtype, device=device), block_size=16)
    tokens = [oracles.prompt(length + DECODES, seed=seed) for seed, length in enumerate(LENGTHS)]
    rows = [paged.add(one) for one in tokens]
    steps = [paged.step(dict(zip(rows, LENGTHS, strict=True)))]
    steps += [paged.step(dict.fromkeys(rows, 1)) for _ in range(DECODES)]
    return tokens, [torch.cat([step[row] for step in steps]).float().cpu() for row in rows]


def saved(name, folder, weights):
    """A checkpoint whose weights are "wide", "mild" or "untouched"; the last two hold numbers of bfloat16, so that both
    precisions run the same model."""
    config = CONFIGS[name]()
    if weights == "wide":
        return oracles.save_config(config, folder)
    config.initializer_range = MILD if weights == "mild" else getattr(type(config)(), "initializer_range", 0.02)
    oracles.save_config(config, folder, untouched=weights == "untouched")
    return bfloat16_weights(folder)


def bfloat16_weights(folder):
    """Round a checkpoint's weights."""
    path = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    return folder


def strays(expected, found, gap):
    """Mean difference of log-probabilities; how many most likely tokens differ where the best two are `gap` apart."""
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > gap
    wrong = (found.argmax(-1) != expected.argmax(-1))[clear]
    return (found - expected).abs().mean().item(), int(wrong.sum())


def test_float32_equals_transformers(name, tmp_path, device):
    """Largest difference of any logit: 1e-4."""
    folder = saved(name, tmp_path, "wide")
    for tokens, actual in zip(*logits_on(folder, "float32", device), strict=True):
        torch.testing.assert_close(actual, oracles.reference_logits(folder, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", ["untouched", "mild"])
def test_bfloat16_is_close_to_float32(name, weights, tmp_path, device, record_property):
    """Mean difference of the log-probabilities below 0.02; no most likely token other where it leads by 0.05."""
    folder = saved(name, tmp_path, weights)
    tokens, ours = logits_on(folder, "bfloat16", device)
    expected = torch.cat([oracles.reference_logits(folder, one) for one in tokens]).log_softmax(-1)
    mean, wrong = strays(expected, torch.cat(ours).log_softmax(-1), BEST)
    record_property(weights, (mean, wrong))

    assert mean < MEAN
    assert wrong == 0


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "wide"), ("bfloat16", "untouched")])
def test_64_greedy_tokens_through_the_engine(name, dtype, weights, tmp_path, device, monkeypatch, record_property):
    """Chunks of 12 tokens, 12 blocks of 16 positions for three sequences of up to 85, 4 where layers do not see all,
    and a beginning that the last prompt shares. At each place the token is the reference's after what stands before it,
    unless its best two are nearly equal there."""
    folder = saved(name, tmp_path, weights)
    first = oracles.prompt(21)
    prompts = [first, oracles.prompt(8, seed=1), oracles.prompt(19, seed=2), first[:17] + oracles.prompt(3, seed=3)]
    model = load_model(resolve(str(folder)), dtype=dtype, device=device)
    groups = group_layers(model.kv_layers())
    blocks = 1 + sum(4 if group.reach else 12 for group in groups)

    # What this answer needs compiles on the way: a start compiles whatever any answer could need.
    monkeypatch.setattr(warmup, "compile_kernels", lambda *_: 0)
    served = serve(model, prompts, blocks=blocks, block_size=16, logprobs=0, enforce_eager=True)

    expected = [
        oracles.reference_logits(folder, tokens + ids[:-1])[len(tokens) - 1 :].log_softmax(-1)
        for tokens, ids in zip(prompts, served.ids, strict=True)
    ]
    expected, ids = torch.cat(expected), torch.tensor(served.ids).flatten()
    best = expected.topk(2).values
    wrong = (ids != expected.argmax(-1)) & (best[:, 0] - best[:, 1] > (TIE if dtype == "float32" else BEST))
    apart = (torch.tensor(served.logprobs).flatten() - expected.gather(1, ids[:, None])[:, 0]).abs()
    record_property(f"engine {dtype}", (apart.mean().item(), int(wrong.sum())))

    assert wrong.sum() == 0
    assert apart.max() <= TIE if dtype == "float32" else apart.mean() < MEAN
    assert served.preemptions > 0
    assert served.cached[-1] == 16 or any(group.reach for group in groups)


def test_bfloat16_of_wide_weights_is_as_close_as_transformers(name, tmp_path, device, record_property):
    """Mean difference of the log-probabilities from float32, and the most likely token where it is clear."""
    folder = bfloat16_weights(saved(name, tmp_path, "wide"))
    theirs = oracles.open_reference(folder).to(device, torch.bfloat16)
    tokens, ours = logits_on(folder, "bfloat16", device)
    with torch.inference_mode():
        others = [theirs(torch.tensor([one], device=device)).logits[0].float().cpu() for one in tokens]
    expected = torch.cat([oracles.reference_logits(folder, one) for one in tokens]).log_softmax(-1)
    found = [torch.cat(logits).log_softmax(-1) for logits in (ours, others)]
    means, wrong = zip(*(strays(expected, one, FAR) for one in found), strict=True)
    record_property("wide", (means, wrong, [strays(expected, one, BEST) for one in found]))

    assert means[0] < max(MEAN, ROOM * means[1])
    assert wrong[0] <= wrong[1] + MORE


FIRST_CONFIGS = test_bfloat16_of_wide_weights_is_as_close_as_transformers  # one config of a family is enough
