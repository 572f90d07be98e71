"""Every family on a GPU, by the Triton kernels: float32 against transformers, bfloat16 as close as transformers'."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import moe_configs, oracles
from tests.models.batching import Paged
from tinyserve.checkpoint.source import resolve
from tinyserve.models.registry import load_model

pytestmark = pytest.mark.gpu
CONFIGS = oracles.CONFIGS | moe_configs.CONFIGS
FAMILIES = [name for name in CONFIGS if not any(name.startswith(f"{other}-") for other in CONFIGS)]
LENGTHS = (60, 41)  # with LongRoPE, both beyond its original length
DECODES = 4
# In bfloat16, mean difference of the log-probabilities: this, or what transformers' own has, and a half (rounding may
# send a token to another expert).
MEAN, ROOM = 0.02, 1.5
# Where the reference's best two are further apart, the best one is the same, but for so many more than transformers'.
GAP, MORE = 0.2, 2


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


def bfloat16_weights(folder):
    """Round the checkpoint's weights, so that both precisions run the same model."""
    path = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_equals_transformers(name, tmp_path, device):
    """Largest difference of any logit: 1e-4."""
    folder = oracles.save_config(CONFIGS[name](), tmp_path)
    for tokens, actual in zip(*logits_on(folder, "float32", device), strict=True):
        torch.testing.assert_close(actual, oracles.reference_logits(folder, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_close_as_transformers(name, tmp_path, device):
    """Mean difference of the log-probabilities from float32, and the most likely token where it is clear."""
    folder = oracles.save_config(CONFIGS[name](), tmp_path)
    bfloat16_weights(folder)
    theirs = oracles.open_reference(folder).to(device, torch.bfloat16)
    tokens, ours = logits_on(folder, "bfloat16", device)
    with torch.inference_mode():
        others = [theirs(torch.tensor([one], device=device)).logits[0].float().cpu() for one in tokens]
    expected = torch.cat([oracles.reference_logits(folder, one) for one in tokens]).log_softmax(-1)
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > GAP
    found = [torch.cat(logits).log_softmax(-1) for logits in (ours, others)]
    means = [(one - expected).abs().mean().item() for one in found]
    wrong = [int((one.argmax(-1) != expected.argmax(-1))[clear].sum()) for one in found]

    assert means[0] < max(MEAN, ROOM * means[1])
    assert wrong[0] <= wrong[1] + MORE
