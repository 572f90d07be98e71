"""PEFT checkpoints: what is read, and what is refused by name."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.lora.checkpoints import write_adapter
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import CheckpointError
from tinyserve.lora.config import Patterns
from tinyserve.lora.names import check_adapter, places, read_adapter
from tinyserve.models.registry import family, load_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return oracles.save("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def layers(base):
    model = load_model(resolve(str(base)), dtype="float32")
    return places(model, family(model.config.architecture).WEIGHTS)


def test_every_product_but_the_head_can_be_adapted(layers):
    names = [module for place in layers for module in place.modules]

    assert len(names) == 7 * 3 and len(set(names)) == len(names)
    assert not any("lm_head" in name or "embed" in name for name in names)


@pytest.mark.parametrize("more, factor", [
    ({}, 8 / 4), ({"use_rslora": True}, 8 / 2), ({"alpha_pattern": {"q_proj": 2}}, 2 / 4),
    ({"alpha_pattern": {r"layers\.\d+\..*(k|q)_proj": 2}}, 2 / 4), ({"alpha_pattern": {"k_proj": 2}}, 8 / 4),
    ({"target_modules": "all-linear"}, 8 / 4), ({"target_modules": r".*_proj"}, 8 / 4),
    ({"target_modules": None}, 8 / 4),
    ({"layers_to_transform": [0, 1, 2]}, 8 / 4), ({"target_modules": [f"self_attn.{name}_proj" for name in "qkvo"]
      + ["gate_proj", "up_proj", "model.layers.0.mlp.down_proj", "layers.1.mlp.down_proj", "down_proj"]}, 8 / 4),
    ({"init_lora_weights": "gaussian", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}, 8 / 4),
])  # fmt: skip
def test_the_factor_is_in_b(base, layers, tmp_path, more, factor):
    folder = write_adapter(tmp_path, base, **more)
    stored = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"

    rank, found = read_adapter(str(folder), layers, 16)

    assert rank == 4 and len(found) == 21
    assert torch.equal(found[name].a, stored[f"base_model.model.{name}.lora_A.weight"])
    torch.testing.assert_close(found[name].b, stored[f"base_model.model.{name}.lora_B.weight"] * factor)


def test_modules_may_have_ranks_of_their_own(base, layers, tmp_path):
    rank, found = read_adapter(str(write_adapter(tmp_path, base, rank_pattern={"up_proj": 11})), layers, 16)

    assert rank == 11 and {pair.a.shape[0] for pair in found.values()} == {4, 11}


def test_names_inside_a_model_that_also_sees(base, layers, tmp_path):
    folder = write_adapter(tmp_path, base)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({key.replace("model.layers", "model.language_model.layers"): value for key, value in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip

    assert len(read_adapter(str(folder), layers, 16)[1]) == 21


@pytest.mark.parametrize("more, message", [
    ({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "only LORA"), ({"init_lora_weights": "pissa"}, "base weights"),
    ({"r": -1}, "r must be a positive integer"), ({"r": 8.5}, "r must be a positive integer"),
    ({"something_new": {"x": 1}}, "something_new"), ({"lora_alpha": "8"}, "lora_alpha must be a finite number"),
    ({"lora_alpha": math.nan}, "lora_alpha must be a finite"), ({"lora_alpha": 1e308}, "numbers that are not finite"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a finite"), ({"spread": math.inf}, "numbers that are not finite"),
    ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be an object"),
    ({"alpha_pattern": {"(q_proj": 64}}, "no regular expression"),
    ({"alpha_pattern": {r"(a+|[a-z._0-9]+)*$X": 3}}, "too complex"),
    ({"alpha_pattern": {"(a|a)" * 30 + "x": 3}}, "too complex"),
    ({"alpha_pattern": {".*.*.*.*x": 3}}, "too complex"), ({"alpha_pattern": {r"(a)\1x": 3}}, "too complex"),
    ({"rank": 17}, "rank is 17, above the limit of 16"), ({"prefix": "base_model.model.other."}, "none of its modules"),
    ({"targets": ("q_proj", "lm_head")}, "1 of its modules are not one.*lm_head"),
    ({"targets": ("embed_tokens",)}, "embed_tokens"),
    ({"use_rslora": "no"}, "use_rslora must be true or false"), ({"layers_to_transform": "0"}, "must be numbers of"),
    ({"layers_to_transform": [0.0]}, "must be numbers of layers"), ({"target_modules": {"a": 1}}, "a list of names"),
    ({"r": 2}, "is of rank 4 in the file, but r says 2"), ({"r": 10**30}, r"rank 4 in the file, but r says 10+"),
    ({"rank_pattern": {"layers.1.*": "x"}}, "must be a positive integer"),
    ({"rank_pattern": {"(a+)+x": 3}}, "in rank_pattern is too complex"),
    ({"target_modules": ["o_proj"]}, "the file holds .*_proj, which target_modules .*o_proj.* do not name"),
    ({"layers_to_transform": [5]}, "layers_to_transform .*5.* leave that layer out"),
    ({"layers_to_transform": 1}, "layers.0.* leave that layer out"), ({"targets": ()}, "holds no tensors"),
])  # fmt: skip
def test_what_would_be_answered_wrongly_is_refused(base, layers, tmp_path, more, message):
    with pytest.raises(CheckpointError, match=message):
        read_adapter(str(write_adapter(tmp_path, base, **more)), layers, 16)


def test_patterns_may_hold_groups_that_are_not_captured():
    """`(?:` was too complex; all else with a question mark behind its bracket is refused still."""
    config = {"rank_pattern": {r".*layers\.(?:0|1)\.self_attn\.q_proj": 4}}
    found = Patterns(config, "rank_pattern", lambda _, value: value, "x")
    assert [found.of(f"model.layers.{n}.self_attn.q_proj") for n in (0, 1, 2)] == [4, 4, None]
    for key in ("(?=a)b", "(?:a+)+x", "(?i)a"):
        with pytest.raises(CheckpointError, match="too complex"):
            Patterns({"rank_pattern": {key: 4}}, "rank_pattern", lambda _, value: value, "x")


def test_a_file_and_a_config_of_two_adapters(base, layers, tmp_path):
    """Of rank 8 with `r: 4` the factor was alpha / 8, and PEFT refuses it; also before there is a model."""
    folder = write_adapter(tmp_path, base, rank_pattern={"up_proj": 8})
    file = folder / "adapter_config.json"
    check_adapter(str(folder), 16)
    for change, message in (({"rank_pattern": {"up_proj": 2}}, "up_proj is of rank 8 .* rank_pattern says 2"),
                            ({"rank_pattern": {}}, "up_proj is of rank 8 in the file, but r says 4"),
                            ({"rank_pattern": [1]}, "must be an object"),
                            ({"r": 8}, "is of rank 4 in the file, but r says 8"),
                            ({"lora_alpha": "8"}, "lora_alpha must be a finite number"),
                            ({"alpha_pattern": {"(a+)+x": 3}}, "in alpha_pattern is too complex"),
                            ({"target_modules": ["q_proj"]}, "do not name")):  # fmt: skip
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | change))
        for check in (lambda: read_adapter(str(folder), layers, 16), lambda: check_adapter(str(folder), 16)):
            with pytest.raises(CheckpointError, match=message):
                check()
        file.write_text(before)


def test_files_that_are_no_adapter(base, layers, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    inside = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_"

    def refused(message, path=folder):
        with pytest.raises(CheckpointError, match=message):
            read_adapter(str(path), layers, 16)

    for path in (tmp_path / "none", "x" * 5000, "a\0b"):
        refused("there is no such folder", path)
    refused("there is no adapter_config.json", tmp_path)
    for change, message in (
        ({key: tensors[key][:, :-1].clone()}, "made for another model"),
        ({"a.lora_magnitude_vector": torch.ones(1)}, "lora_magnitude_vector"),
        ({"a.lora_embedding_A": torch.ones(1)}, "lora_embedding_A"),
        ({key: tensors[key].int()}, "matrices of I32; read are F32"),
        (
            {key: tensors[key][:-1].clone()},
            r"q_proj has lora_A \[3, .*\] and lora_B .*, 4\], which are no \[r, inputs\]",
        ),
        ({key: tensors[key].flatten()}, "which are no"),
        ({key.removeprefix("base_model.model."): tensors[key]}, "lora_A of model.layers.0.self_attn.q_proj twice"),
        ({inside + "A.weight": tensors[key], inside + "B.weight": tensors[key.replace("_A", "_B")]}, "_proj twice"),
    ):
        copies = {name: value.clone() for name, value in (tensors | change).items()}
        save_file(copies, folder / "adapter_model.safetensors")
        refused(message)
    save_file({name: value for name, value in tensors.items() if name != key}, folder / "adapter_model.safetensors")
    refused("has only lora_B")
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    refused("damaged")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").touch()
    refused("is a pickle")
    (folder / "adapter_config.json").write_text(json.dumps([]))
    refused("must hold an object")


def test_an_adapter_that_is_refused_is_not_read(base, layers, tmp_path, monkeypatch):
    """A rank of 2**20 was read and made float32 first: 2.7 GB. A header of 76 MB stopped the interpreter for 2 s."""
    config, tensors = write_adapter(tmp_path, base) / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    assert config.is_file()
    key, rank = "base_model.model.model.layers.0.self_attn.q_proj.lora_", 2**20
    place = next(place for place in layers if "q_proj" in place.modules[0])
    inputs, outputs = place.layer.inputs, place.rows(0)
    a, b = 4 * rank * inputs, 4 * rank * outputs
    header = {
        key + "A.weight": {"dtype": "F32", "shape": [rank, inputs], "data_offsets": [0, a]},
        key + "B.weight": {"dtype": "F32", "shape": [outputs, rank], "data_offsets": [a, a + b]},
    }

    opened = []

    class Unread:
        def __init__(self, *args, **options):
            opened.append(args)
            self.file = safe_open(*args, **options)

        def __enter__(self):
            self.inside = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.inside, name)

        def get_tensor(self, name):
            pytest.fail(f"{name} was read")

    monkeypatch.setattr("tinyserve.lora.names.safe_open", Unread)

    def refused(head, length, message):
        with tensors.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(length)  # a file with a hole takes no room
        with pytest.raises(CheckpointError, match=message):
            read_adapter(str(tmp_path), layers, 16)

    head = json.dumps(header).encode()
    refused(head, 8 + len(head) + a + b, "rank is 1048576, above the limit of 16")
    assert len(opened) == 1
    refused(b" " * 80_000_000, 8 + 80_000_000 + 16, "header has 80000000 bytes")
    assert len(opened) == 1  # not even its header was
