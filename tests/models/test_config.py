"""config.json: spellings, refusals, keys that nobody read, and the numbers derived from it."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests import oracles
from tinyserve import models
from tinyserve.errors import CheckpointError, UnsupportedModel
from tinyserve.models.config import HF, ModelConfig, choose_dtype
from tinyserve.models.registry import FAMILIES, build_model, family

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1000,
    "eos_token_id": [2, 7],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}


def read(**changes):
    return ModelConfig.from_hf(HF(LLAMA | changes))


def test_defaults_follow_the_other_keys():
    config = read()

    assert (config.num_kv_heads, config.head_dim, config.tied_head) == (4, 8, False)
    assert config.eos_ids == (2, 7)
    assert read(eos_token_id=3).eos_ids == (3,)
    assert read(eos_token_id=None).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1000),
        ({"max_position_embeddings": None}, 2048),
        ({"max_seq_len": 800}, 800),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 2000),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1.5, "rope_theta": 1e4}}, 1500),
        ({"rope_scaling": YARN}, 1000),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1000),
    ],
)
def test_context_length(changes, expected):
    """The least length key, times the RoPE factor unless the kind is one whose length includes it."""
    assert read(**changes).max_model_len == expected


@pytest.mark.parametrize(
    ("asked", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", "cpu", torch.bfloat16),
        ("auto", "float16", "cpu", torch.float32),
        ("auto", "float32", "cpu", torch.float32),
        ("auto", None, "cpu", torch.float32),
        ("auto", "float32", "cuda", torch.bfloat16),
        ("auto", None, "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16),
        ("half", "bfloat16", "cpu", torch.float16),
        (torch.float32, "bfloat16", "cuda", torch.float32),
    ],
)
def test_dtype_rule(asked, stored, device, expected):
    assert choose_dtype(asked, read(dtype=stored), torch.device(device)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention", "linear"]}, "'linear'"),
        ({"architectures": ["Phi3ForCausalLM"], "attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, "'spiral'"),
        ({"architectures": ["RwkvForCausalLM"]}, "LlamaForCausalLM"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_would_change_the_numbers_is_refused(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_model(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": None}, {"architectures": None}, {"num_key_value_heads": 3}, {"rope_scaling": "linear"}],
)
def test_a_config_that_cannot_be_is_refused(changes):
    with pytest.raises(CheckpointError):
        build_model(LLAMA | changes)


def test_unknown_keys_are_reported_once_and_nulls_are_not(caplog):
    build_model(LLAMA | {"mystery_scale": 2.0, "other_feature": None, "third": False, "use_cache": True})

    assert caplog.messages == ["config.json keys that this version does not know and ignores: mystery_scale"]


def test_keys_inside_the_rope_dict_are_watched_too():
    hf = HF(LLAMA | {"rope_scaling": YARN | {"secret": 1}})
    family("LlamaForCausalLM").build(hf)

    assert hf.unread() == ["rope_scaling.secret"]


# What no family of experts or latents has a default for.
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 16),
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1},
    "attention_chunk_size": 16,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_declares_its_weights_and_builds_without_memory(name):
    """A registry row without WEIGHTS or build would fail at the user's start, not in CI."""
    config = LLAMA | EXPERTS | {"architectures": [name], "sliding_window": 8}
    model = build_model(config)

    assert family(name).WEIGHTS
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(model.kv_layers()) == 2


@pytest.mark.parametrize("file", sorted(set(FAMILIES.values())))
def test_a_family_is_a_page_that_only_declares(file):
    """At most 150 lines; of the checkpoint it knows layouts, and nothing of files, caches, formats or other ranks."""
    path = Path(models.__file__).parent / f"{file}.py"
    text = path.read_text()
    foreign = re.findall(
        r"^from \.\.(kv|quant|parallel|runner|device|checkpoint\.(?!table|stacked)\w+)", text, re.MULTILINE
    )

    assert len(text.splitlines()) <= 150
    assert foreign == []


def test_gemma3_reads_the_classic_config():
    """Flat rope keys and sliding_window_pattern, as Gemma 3 was published: 8x linear on full layers only."""
    config = LLAMA | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "rope_theta": 5e5,
        "rope_local_base_freq": 7e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    model = build_model(config)
    specs = [layer.attn.rope.spec for layer in model.layers]

    assert [layer.window for layer in model.kv_layers()] == [16, 16, None, 16, 16, None]
    assert [(spec.kind, spec.theta) for spec in specs[1:3]] == [("default", 7e3), ("linear", 5e5)]
    assert model.config.max_model_len == 1000
    assert model.config.tied_head


ABSURD = [-1, 0, 10**9 * 5, 10**30, 1.5, float("nan"), float("inf"), "x", [], [1, 2], {}, True]


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size",
                                 "max_position_embeddings", "num_key_value_heads", "intermediate_size"])  # fmt: skip
def test_sizes_that_cannot_be_are_refused_by_name(key):
    """Breaks if a damaged number reaches torch (a traceback), or a loop over 10**9 layers (for ever)."""
    for value in ABSURD:
        with pytest.raises(CheckpointError, match=key) as caught:
            build_model(LLAMA | {key: value})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 1}, {"architectures": [5]}, {"eos_token_id": 1.5}, {"eos_token_id": ["x"]},
        {"rms_norm_eps": -1}, {"rope_theta": float("nan")}, {"rope_theta": []}, {"attention_bias": "yes"},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}}, {"rope_scaling": {"rope_type": [], "factor": 2.0}},
        {"quantization_config": 5}, {"hidden_act": []}, {"tie_word_embeddings": 3},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, {"partial_rotary_factor": 1.5},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
    ],
)  # fmt: skip
def test_other_values_of_a_wrong_kind_are_one_line(changes):
    with pytest.raises(CheckpointError) as caught:
        build_model(LLAMA | changes)

    assert "\n" not in str(caught.value)


DAMAGED = [-1, 0, 10**30, 1.5, float("nan"), "x", [], [1, 2], {}, True, {"rope_type": "yarn"}]


@pytest.mark.parametrize("name", ["falcon-40b", "gemma2", "phi3-longrope", "exaone4", "smollm3-window"])
def test_a_damaged_key_gives_a_model_or_one_line(name):
    """Every key of a family's config set to 11 values that hardly can be meant: no traceback, no loop without end."""
    config = oracles.CONFIGS[name]()
    named = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    whole = config.to_dict() | {"architectures": [named]}
    for key, value in ((key, value) for key in whole for value in DAMAGED):
        try:
            build_model({**whole, key: value})
        except (CheckpointError, UnsupportedModel) as error:
            assert "\n" not in str(error) and len(str(error)) < 400
