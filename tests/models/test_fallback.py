"""Architectures without a file: transformers' modules over our cache, through the whole engine; and what is refused."""

import importlib.util
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.models.batching import Paged
from tests.models.serving import serve
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import CheckpointError, UnsupportedModel
from tinyserve.kv.groups import group_layers
from tinyserve.models import registry

CONFIGS = {
    "norms without weights, capped logits": lambda: oracles.make("NanoChat"),
    "windows": lambda: oracles.make("VaultGemma", head_dim=16, sliding_window=6),
    "one key head, learned positions": lambda: oracles.old("GPTBigCode", n_positions=128),
}
REFUSED = {
    "DiffLlama": "values of another size",
    "Doge": "masks of its own",
    "Mamba": "cannot run it over our cache",
}


def load(folder, **options):
    return registry.load_model(resolve(str(folder)), dtype="float32", **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_runs_like_any_other_model(name, tmp_path, caplog):
    """Logits within 1e-4 in a mixed batch; 64 greedy tokens with chunks, prefix cache, preemption; one warning."""
    folder = oracles.save_config(CONFIGS[name](), tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    groups = group_layers(model.kv_layers())

    assert [record.msg for record in caplog.records if record.name.startswith("tinyserve")] == [
        "%s has no file in tinyserve: it runs through transformers' modules, more slowly"
    ]

    paged, tokens = Paged(model), (oracles.prompt(40), oracles.prompt(14, seed=1))
    rows = [paged.add(one) for one in tokens]
    steps = [paged.step({rows[0]: 37, rows[1]: 13}), paged.step({rows[0]: 3, rows[1]: 1})]
    for row, one in zip(rows, tokens, strict=True):
        actual = torch.cat([step[row] for step in steps])
        torch.testing.assert_close(actual, oracles.reference_logits(folder, one), atol=1e-4, rtol=0)

    prompts = [tokens[0][:21], oracles.prompt(8, seed=1), oracles.prompt(19, seed=2), tokens[0][:20]]
    served = serve(model, prompts, blocks=1 + sum(21 if group.window is None else 5 for group in groups))

    assert served.ids == oracles.reference_choices(folder, prompts, served.ids)
    assert served.preemptions > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_compute_something_else_is_refused(name, tmp_path):
    """Attention of another kind, masks that we are not told, states beside keys and values."""
    folder = oracles.save_config(oracles.make(name, head_dim=...), tmp_path)
    with pytest.raises(UnsupportedModel, match=REFUSED[name]):
        load(folder)


def test_a_model_whose_logits_differ_is_refused(tmp_path, monkeypatch):
    """The check at the start compares 12 tokens with transformers' own attention; here the scores are doubled."""
    from tinyserve.models import fallback

    folder = oracles.save_config(oracles.make("NanoChat"), tmp_path)
    right = fallback.Step.attend
    monkeypatch.setattr(
        fallback.Step, "attend", lambda step, layer, q, k, v, options: right(step, layer, 2 * q, k, v, options)
    )
    with pytest.raises(UnsupportedModel, match="logits differ"):
        load(folder)


def test_loading_is_strict(tmp_path):
    folder = oracles.save_config(oracles.make("NanoChat"), tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.mystery.weight"] = tensors.pop("model.layers.0.mlp.fc1.weight")
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"missing_keys.*fc1[\s\S]*unexpected_keys.*mystery"):
        load(folder)


def test_without_transformers_the_cure_is_named(tmp_path, monkeypatch):
    folder = oracles.save_config(oracles.make("NanoChat"), tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UnsupportedModel, match=r"tinyserve\[transformers\]"):
        load(folder)


def test_noise_instead_of_weights(tmp_path):
    """load_format dummy needs the config alone."""
    folder = oracles.save_config(oracles.make("NanoChat"), tmp_path)
    (folder / "model.safetensors").unlink()
    model = load(folder, load_format="dummy")
    paged = Paged(model)

    assert paged.step({paged.add([5, 6, 7]): 3})[0].isfinite().all()
