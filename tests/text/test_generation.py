"""generation.py: when answers end, and what requests are filled with."""

import json

import pytest

from tests import real_models
from tests.scripted import EOS, EOT, byte_tokenizer
from tests.text.test_tokenizer import byte_level_metadata, real, with_bos
from tinyserve.checkpoint.source import Source, resolve
from tinyserve.errors import CheckpointError, ConfigError, RequestError
from tinyserve.text.generation import GenerationDefaults, _gguf_ends
from tinyserve.text.gguf_vocab import build
from tinyserve.text.tokenizer import Tokenizer


def load(folder, generation=None, config=None, **options):
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return GenerationDefaults.load(Source("m", "folder", folder), with_bos(), **options)


def test_c24_several_end_ids(tmp_path):
    """The tokenizer's own end (260) has no stop_reason; 261 of generation_config.json has."""
    defaults = load(tmp_path, {"eos_token_id": [260, 261]})

    assert (defaults.eos_ids, defaults.extra_eos_ids) == ({EOS}, {EOT})


def test_c24_f_the_union_stops(tmp_path):
    assert load(tmp_path, None, {"eos_token_id": 261}).end_ids == {260, 261}
    assert load(tmp_path, {"eos_token_id": 97}, {"text_config": {"eos_token_id": [98]}}).end_ids == {260, 97, 98}


def test_without_a_tokenizer_end_the_others_are_plain(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [97, 98]}')
    defaults = GenerationDefaults.load(Source("m", "folder", tmp_path), Tokenizer(byte_tokenizer()))

    assert (defaults.eos_ids, defaults.extra_eos_ids) == ({97, 98}, frozenset())


def test_odd_end_ids_are_ignored(tmp_path):
    assert load(tmp_path, {"eos_token_id": [True, -1, "x", None, 261]}).extra_eos_ids == {261}


FILE = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 2048,
    "do_sample": True, "transformers_version": "5", "min_p": None,
}  # fmt: skip


def test_the_models_recommendations_fill_what_a_request_leaves_open(tmp_path):
    defaults = load(tmp_path, FILE)
    filled = defaults.fill({"temperature": 0.0, "top_p": None, "stop": "x"}, max_tokens=16)

    assert (filled.temperature, filled.top_p, filled.top_k, filled.repetition_penalty) == (0.0, 0.9, 20, 1.1)
    assert (filled.max_tokens, filled.stop, filled.min_p) == (2048, ("x",), 0.0)
    assert defaults.fill({"max_tokens": 5}).max_tokens == 5
    assert defaults.default_sampling.temperature == 0.6


def test_vllm_means_neutral_sampling_but_the_same_ends(tmp_path):
    defaults = load(tmp_path, {**FILE, "eos_token_id": [261]}, generation_config="vllm")

    assert (defaults.sampling, defaults.max_new_tokens, defaults.end_ids) == ({}, None, {260, 261})
    assert defaults.fill({}, max_tokens=16).max_tokens == 16
    assert defaults.fill({}).max_tokens is None


def test_overrides_are_strongest(tmp_path):
    overrides = {"temperature": 0.1, "eos_token_id": 97}
    defaults = load(tmp_path, {**FILE, "eos_token_id": [261]}, overrides=overrides)

    assert (defaults.sampling["temperature"], defaults.sampling["top_k"]) == (0.1, 20)
    assert defaults.end_ids == {260, 97}
    with pytest.raises(ConfigError, match="'temprature'"):
        load(tmp_path, overrides={"temprature": 1})


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", "hot"), ("top_p", 7), ("max_new_tokens", -1), ("eos_token_id", "x"), ("eos_token_id", [[1]]),
])  # fmt: skip
def test_a_wrong_override_is_told_as_the_option_that_it_is(tmp_path, name, value):
    """It was told as a fault of the model's files; an end that is none was passed over."""
    with pytest.raises(ConfigError, match="--override-generation-config: "):
        load(tmp_path, overrides={name: value})


def test_another_file(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 3}')

    assert load(tmp_path, FILE, generation_config=str(other)).sampling == {"top_k": 3}
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path, generation_config="/nowhere")


def test_values_out_of_range_are_the_files_fault(tmp_path):
    with pytest.raises(CheckpointError, match="temperature"):
        load(tmp_path, {"temperature": -1})
    with pytest.raises(RequestError, match="top_p"):
        load(tmp_path, {}).fill({"top_p": 3})


def test_smollm2_ends_with_its_turn():
    defaults = GenerationDefaults.load(resolve(str(real_models.smollm2())), real("smollm2"))

    assert (defaults.eos_ids, defaults.extra_eos_ids, defaults.sampling) == ({2}, frozenset(), {})


class FakeSource:
    """A source whose GGUF metadata is given."""

    def __init__(self, metadata):
        self.gguf_file = self
        self.metadata = metadata


def test_turn_ends_of_gguf_files():
    """eot_token_id where the file says it; else the control tokens that the template writes at the end of a turn."""
    metadata = byte_level_metadata(eot_token_id=261)
    tokenizer = Tokenizer(build(metadata))
    assert _gguf_ends(FakeSource(metadata), tokenizer) == {260, 261}

    older = byte_level_metadata()
    older["tokenizer.ggml.tokens"][261] = "<end_of_turn>"
    tokenizer = Tokenizer(build(older))
    assert _gguf_ends(FakeSource(older), tokenizer) == {260}
    older["tokenizer.chat_template"] = "{{ m.content }}<end_of_turn>"
    assert _gguf_ends(FakeSource(older), tokenizer) == {260, 261}


def test_a_limit_that_the_operator_chose_binds(tmp_path):
    """By path or override; not the file that came with the model."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"max_new_tokens": 7}')

    def bound(**options):
        found = load(tmp_path, FILE, **options)
        return found.max_new_tokens, found.bounds_answers

    assert bound() == (2048, False)
    assert bound(generation_config="vllm") == (None, False)
    assert bound(generation_config=str(other)) == (7, True)
    assert bound(overrides={"max_new_tokens": 9}) == (9, True)
    assert bound(overrides={"top_k": 9}) == (2048, False)
