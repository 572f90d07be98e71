"""Loading: strict both ways, from shards, from noise, in any format."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.models.batching import Paged
from tinyserve.checkpoint.gguf_names import stored_tensors
from tinyserve.checkpoint.load import parameter_count
from tinyserve.checkpoint.safetensors import INDEX, open_safetensors
from tinyserve.checkpoint.source import resolve
from tinyserve.checkpoint.table import sources
from tinyserve.errors import CheckpointError
from tinyserve.layers.linear import Linear
from tinyserve.models.registry import build_model, load_model
from tinyserve.quant.plain import Plain

TOKENS = oracles.prompt(9)


@pytest.fixture
def folder(tmp_path):
    return oracles.save("llama", tmp_path)


def edit(folder, change):
    """Change the dict of tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def logits(model):
    paged = Paged(model)
    row = paged.add(TOKENS)
    return paged.step({row: len(TOKENS)})[row]


def open_model(folder, **options):
    return load_model(resolve(str(folder)), **{"dtype": "float32"} | options)


def test_all_that_does_not_fit_is_in_one_error(folder):
    """A missing, an unknown and a misshapen tensor: all three names, before anything is read."""

    def change(tensors):
        tensors["model.layers.1.mlp.gate_proj.weight_typo"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
        tensors["model.norm.weight"] = torch.ones(47)

    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_model(folder)

    assert "1 missing from the checkpoint: model.layers.1.mlp.gate_proj.weight" in str(caught.value)
    assert "unknown to the model: model.layers.1.mlp.gate_proj.weight_typo" in str(caught.value)
    assert "model.norm.weight is [47], the model needs [48]" in str(caught.value)


def test_saved_rotary_frequencies_are_not_an_error(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)}))

    assert open_model(folder)


def test_shards_load_like_one_file(folder, tmp_path):
    """Shards of 20 KB and their index give bit-equal logits."""
    shards = oracles.save("llama", tmp_path / "shards", shard_size="20KB")

    assert len(list(shards.glob("*.safetensors"))) > 3
    assert torch.equal(logits(open_model(shards)), logits(open_model(folder)))


def test_an_index_that_names_a_lost_file_is_refused(tmp_path):
    shards = oracles.save("llama", tmp_path, shard_size="20KB")
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        open_model(shards)


def test_a_damaged_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="damaged"):
        open_model(folder)


def test_a_tied_head_is_the_embedding_unless_the_file_has_one(folder):
    """The file wins over tie_word_embeddings, as in semantics of other engines."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    own = open_model(folder)
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    tied = open_model(folder)

    assert not torch.equal(own.head.weight, own.embed.weight)
    assert tied.head.weight is tied.embed.weight


def test_an_untied_head_must_be_there(folder):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        open_model(folder)


def test_progress_ends_at_the_size_of_the_tensors(folder):
    calls = []
    open_model(folder, progress=lambda done, total: calls.append((done, total)))
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())

    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (size, size)


def test_parameters_are_counted_without_loading(folder):
    config = json.loads((folder / "config.json").read_text())
    size = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())

    assert parameter_count(build_model(config)) == size


def test_dummy_weights_are_finite_and_follow_the_seed(folder):
    """Logits of noise: finite, not all alike, the same for the same seed, others for another; no file is opened."""
    (folder / "model.safetensors").unlink()
    first, again, other = (logits(open_model(folder, load_format="dummy", seed=seed)) for seed in (0, 0, 1))

    assert first.isfinite().all()
    assert 0.1 < first.std() < 10
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Recorder(Plain):
    """Dense numbers, and what it was asked to do."""

    def __init__(self):
        self.calls, self.lock = [], threading.Lock()

    def load(self, layer, name, part, stored):
        super().load(layer, name, part, stored)
        with self.lock:
            self.calls.append((id(layer), name, part, stored.shape))

    def finish(self, layer):
        with self.lock:
            self.calls.append((id(layer), "finish"))


def test_a_format_is_chosen_with_its_tensors_in_view_and_finished_once(folder):
    """Parts come in any order, each once; `finish` comes once, last of its layer."""
    formats, seen = {}, {}

    def choose(path, layer, stored):
        seen[path] = (layer, [tensor.shape for tensor in stored])
        return formats.setdefault(path, Recorder())

    model = open_model(folder, format_for=choose)

    assert [shape for shape in seen["layers.0.attn.qkv"][1]] == [(80, 48), (40, 48), (40, 48)]
    assert {path for path, module in model.named_modules() if isinstance(module, Linear)} == set(seen)
    for path, recorder in formats.items():
        layer = seen[path][0]
        loads = {call[2] for call in recorder.calls[:-1]}

        assert recorder.calls[-1] == (id(layer), "finish")
        assert loads == set(range(len(layer.parts)))
        assert len(recorder.calls) == len(layer.parts) + 1


def test_a_tied_head_in_a_format_of_its_own_reads_the_embedding_a_second_time(tmp_path):
    """A format that is not Plain cannot use the dense table: it holds its own copy, with the same logits."""
    folder = oracles.save("qwen3", tmp_path)
    model = open_model(folder, format_for=lambda path, layer, stored: Recorder() if path == "head" else Plain())

    assert model.head.weight is not model.embed.weight
    assert torch.equal(model.head.weight, model.embed.weight)
    assert torch.equal(logits(model), logits(open_model(folder)))


@pytest.mark.parametrize("options", [{"load_format": "gguf"}, {"load_format": "pickle"}])
def test_a_load_format_that_is_not_there_is_refused(folder, options):
    with pytest.raises(CheckpointError, match=options["load_format"]):
        open_model(folder, **options)


def test_dummy_weights_take_the_format_that_is_chosen(folder):
    own = Plain()
    model = open_model(folder, load_format="dummy", format_for=lambda path, layer, stored: own)

    assert model.layers[0].attn.qkv.format is own


def test_overrides_replace_keys_of_the_config(folder):
    model = open_model(folder, overrides={"max_position_embeddings": 64, "num_hidden_layers": 3})

    assert model.config.max_model_len == 64
    assert len(model.ropes()[0].cos_sin) == 64


def test_an_error_while_reading_reaches_the_caller(folder):
    class Broken(Plain):
        def load(self, layer, name, part, stored):
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        open_model(folder, format_for=lambda path, layer, stored: Broken())


def test_table_rows_fill_layer_and_expert_numbers():
    weights = {"layers.*.a": "m.*.b", "layers.*.e.#.g": ("m.*.x.#.p", "m.*.x.#.q"), "norm": "n"}

    assert sources(weights, "layers.12.a") == ("m.12.b",)
    assert sources(weights, "layers.1.e.11.g") == ("m.1.x.11.p", "m.1.x.11.q")
    assert sources(weights, "norm") == ("n",)
    assert sources(weights, "other") == ()


@pytest.mark.parametrize("value", [5, None, ["x"], {"a": "b"}, True])
def test_an_index_that_holds_no_names_is_refused(tmp_path, value):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": value}}))

    with pytest.raises(CheckpointError, match="not an index"):
        open_safetensors(tmp_path)


def test_rows_that_heads_cannot_share_are_refused():
    """A damaged shape in a GGUF file whose query rows are stored in pairs: torch refused it with a traceback."""
    tensor = SimpleNamespace(name="blk.0.attn_q.weight", shape=(10, 8))
    file = SimpleNamespace(path="x.gguf", architecture="llama", tensors={tensor.name: tensor})

    with pytest.raises(CheckpointError, match="has 10 rows, which 4 heads"):
        stored_tensors(file, 4, 2)


def test_pickles_are_refused_with_the_way_to_convert_them(folder):
    """A .bin file is not opened, though it lies there alone; the message holds a command."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*python -c.*save_pretrained"):
        open_model(folder)
