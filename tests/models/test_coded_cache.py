"""Models over caches of one byte a number: how near their logits are, and that they do not depend on the schedule."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.kernels.harness import interpreting
from tests.models.batching import Paged
from tests.models.serving import serve
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import ConfigError
from tinyserve.kv.groups import LayerKV
from tinyserve.kv.storage import cache_dtype
from tinyserve.models.registry import load_model
from tinyserve.quant.detect import detect

KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
TOKENS = oracles.prompt(48, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama, less steep than other tests' (whose logits amplify any change fivefold)."""
    return oracles.save_config(oracles.llama(initializer_range=0.1), tmp_path_factory.mktemp("llama"))


def open_model(folder):
    return load_model(resolve(str(folder)), dtype="float32")


def logprobs(model, dtype, tokens=TOKENS):
    """[T, V] after each token, of a prompt that comes in three pieces and single tokens."""
    paged = Paged(model, block_size=16, cache_dtype=dtype)
    row = paged.add(tokens)
    counts = [20, 9, 1, 1, len(tokens) - 31]
    return torch.cat([paged.step({row: count})[row] for count in counts]).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_near_those_of_plain_numbers(folder, kind):
    """Mean difference of all logprobs below 0.05; breaks by far more if a scale is lost or columns change places."""
    plain = logprobs(open_model(folder), None)
    apart = (logprobs(open_model(folder), KINDS[kind]) - plain).abs().mean()

    assert 0 < apart < {"fp8": 0.025, "fp8_e5m2": 0.05, "int8": 0.006}[kind]


def test_the_kernels_compute_what_the_references_do_whatever_the_batch(folder):
    """0 bits between a row alone and beside two others, in batch-invariant mode; near the CPU's own logits."""
    prompts, found = [oracles.prompt(4, seed=seed) for seed in range(3)], []
    with interpreting():
        for number in (1, 3):
            model = open_model(folder)
            model.make_invariant()
            paged = Paged(model, block_size=16, cache_dtype=torch.int8)
            rows = [paged.add(tokens) for tokens in prompts[:number]]
            first = paged.step(dict.fromkeys(rows, 3))[rows[0]]
            found.append(torch.cat([first, paged.step(dict.fromkeys(rows, 1))[rows[0]]]))
    paged = Paged(open_model(folder), block_size=16, cache_dtype=torch.int8)
    expected = paged.step({paged.add(prompts[0]): 4})[0]

    assert torch.equal(*found)
    assert (found[0] - expected).abs().mean() < 1e-3  # a tie may be rounded the other way


@pytest.mark.parametrize("kind", ["fp8", "int8_per_token_head"])
def test_greedy_ids_through_chunks_prefixes_and_preemption(folder, kind):
    """The ids of whole prompts in a large pool; breaks if a shared, or recomputed, block holds other codes."""
    shared = oracles.prompt(16, seed=1)
    prompts = [shared + oracles.prompt(7, seed=2), oracles.prompt(20, seed=3), shared + oracles.prompt(3, seed=4)]

    calm = serve(open_model(folder), prompts, blocks=200, chunk=96, enable_prefix_caching=False, kv_cache_dtype=kind)
    busy = serve(open_model(folder), prompts, blocks=1 + 14, kv_cache_dtype=kind)

    assert busy.preemptions > 0 and busy.cached[-1] >= 16 and calm.preemptions == 0 == calm.cached[-1]
    assert busy.ids == calm.ids


def test_scales_of_the_checkpoint(folder, tmp_path, caplog):
    """1000 and 0.01 move what fp8 can hold: logits differ from those of scale 1, and only with fp8; -1 means none."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        scales = {
            "self_attn.k_scale": -1.0 if layer else 1000.0,
            "self_attn.v_proj.v_scale": 0.01,
            "self_attn.q_scale": 1.0,
        }
        tensors |= {f"model.layers.{layer}.{name}": torch.tensor(scale) for name, scale in scales.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO):
        model = open_model(tmp_path)

    assert [attention.kv_scales for attention in model.attentions()] == [(1000.0, pytest.approx(0.01)), None, None]
    assert "1 layers have scales" in caplog.text and "3 scales of cached keys and values are not used" in caplog.text
    assert torch.equal(logprobs(model, None), logprobs(open_model(folder), None))
    assert torch.equal(logprobs(model, torch.int8), logprobs(open_model(folder), torch.int8))
    apart = (logprobs(model, torch.float8_e4m3fn) - logprobs(open_model(folder), None)).abs().mean()
    assert 0.001 < apart < 1


def test_a_checkpoint_of_which_only_the_cache_is_quantised():
    """Its quantization_config names no weights: they are plain."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert detect({"quantization_config": config}) is None


def test_what_cannot_be_coded_is_refused():
    assert cache_dtype("auto", torch.float16, [LayerKV(1, 576, latent=True)]) == torch.float16
    for layer, message in ((LayerKV(1, 576, latent=True), "latent attention"), (LayerKV(2, 5), "of an even size")):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype fp8 .*{message}"):
            cache_dtype("fp8", torch.bfloat16, [layer])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_on_a_device(folder, kind):
    """bfloat16, kernels: as near to those of plain numbers as on the CPU."""
    device = torch.accelerator.current_accelerator()
    found = []
    for dtype in (None, KINDS[kind]):
        model = load_model(resolve(str(folder)), dtype="bfloat16", device=device)
        found.append(logprobs(model, dtype).float())
    apart = (found[0] - found[1]).abs().mean().item()
    print(kind, apart)

    assert 0 < apart < 0.05
