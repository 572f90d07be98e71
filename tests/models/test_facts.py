"""What is known of models beyond their logits: reach of windows, stretched contexts, old checkpoints, relatives."""

import json
import shutil
from collections import Counter

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import moe_configs, oracles
from tests.models.batching import Paged
from tests.models.serving import serve
from tinyserve.checkpoint.source import resolve
from tinyserve.errors import UnsupportedModel
from tinyserve.models.registry import FAMILIES, build_model, load_model

CLOSE = {"atol": 1e-4, "rtol": 0}


# Architectures that transformers does not know, or knows by another name: held here to what they are made of.
RELATIVES = {"InternLM2ForCausalLM", "InternLM3ForCausalLM", "MiniCPMForCausalLM", "PhiMoEForCausalLM"}


def logits_of(model, tokens):
    paged = Paged(model, block_size=8)
    row = paged.add(tokens)
    return paged.step({row: len(tokens)})[row]


def load(folder):
    return load_model(resolve(str(folder)), dtype="float32")


def saved(tmp_path, config):
    return oracles.save_config(config, tmp_path)


def edit_config(folder, change):
    """Change the dict in config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rename(folder, new_name):
    """Rename the tensors of a checkpoint; new_name: old -> new, or None to drop it."""
    path = folder / "model.safetensors"
    tensors = {new_name(name): tensor for name, tensor in load_file(path).items() if new_name(name) is not None}
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_token_outside_all_windows_has_no_influence(tmp_path):
    """3 layers of windows of 5 reach 3 * 4 = 12 positions back: from position 13 on, logits are the same bits."""
    model = load(saved(tmp_path, oracles.mistral()))
    tokens = oracles.prompt(37)
    other = [tokens[0] + 1, *tokens[1:]]
    difference = (logits_of(model, tokens) - logits_of(model, other)).abs().amax(dim=1)

    assert difference[:13].min() > 0
    assert difference[13:].max() == 0


STRETCHED = {
    "linear": {},
    "dynamic": {},
    "llama3": oracles.LLAMA3,
    "yarn": {"original_max_position_embeddings": 32},
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", STRETCHED)
def test_answers_agree_on_both_sides_of_the_original_length(kind, tmp_path):
    """64 greedy tokens after 8, across the 32 positions of the training, equal transformers'."""
    length = {"max_position_embeddings": 32} if kind == "dynamic" else {}
    folder = saved(tmp_path, oracles.llama(**oracles.rope(kind, **STRETCHED[kind]), **length))
    prompt, ids = oracles.prompt(8), []
    paged = Paged(load(folder), block_size=8)
    row = paged.add(prompt)
    logits = paged.step({row: len(prompt)})[row]
    while len(ids) < 64:
        ids.append(int(logits[-1].argmax()))
        paged.rows[row].tokens.append(ids[-1])
        logits = paged.step({row: 1})[row]

    assert ids == oracles.reference_greedy(folder, prompt, 64)


@pytest.mark.parametrize(("served", "length"), [(32, 30), (128, 60)])
def test_longrope_agrees_where_what_is_served_fits_the_sequence(served, length, tmp_path):
    """Short factors for a server of 32 tokens (the original length), long ones for a server of 128."""
    folder = saved(tmp_path, oracles.make("Phi3", **oracles.longrope(12, 32)))
    tokens = oracles.prompt(length)
    model = load(folder)
    model.reach(served, torch.device("cpu"))

    torch.testing.assert_close(logits_of(model, tokens), oracles.reference_logits(folder, tokens), **CLOSE)


def check_relative(theirs, folder):
    """A checkpoint gives what transformers makes of another: logits of two ragged prompts within 1e-4, and the 64
    greedy tokens through the engine with chunks, a prefix cache and preemption."""
    model, tokens = load(folder), (oracles.prompt(40), oracles.prompt(14, seed=1))
    paged = Paged(model, block_size=8)
    rows = [paged.add(one) for one in tokens]
    steps = [paged.step({rows[0]: 37, rows[1]: 11}), paged.step({rows[0]: 3, rows[1]: 3})]
    for row, one in zip(rows, tokens, strict=True):
        actual = torch.cat([step[row] for step in steps])
        torch.testing.assert_close(actual, oracles.reference_logits(theirs, one), **CLOSE)

    prompts = [tokens[0][:21], oracles.prompt(8, seed=1), tokens[0][:20]]
    served = serve(model, prompts, blocks=15)

    assert served.ids == oracles.reference_choices(theirs, prompts, served.ids)
    assert served.preemptions > 0
    assert served.cached[-1] == 16


@pytest.mark.parametrize(("depth", "base", "tied"), [(1.4, 16, False), (2.1, 24, True)])
def test_minicpm_is_granite_with_derived_factors(depth, base, tied, tmp_path):
    """scale_depth 1.4 over 3 layers, hidden size 48 tuned at 16: factors 1.4 / sqrt(3) and 1/3."""
    config = oracles.make(
        "Granite", embedding_multiplier=5.0, attention_multiplier=12**-0.5, residual_multiplier=depth / 3**0.5,
        logits_scaling=48 / base, tie_word_embeddings=tied,
    )  # fmt: skip
    folder = saved(tmp_path / "granite", config)
    shutil.copytree(folder, tmp_path / "minicpm")

    def change(config):
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
            del config[key]
        config |= {"architectures": ["MiniCPMForCausalLM"]}
        config |= {"scale_emb": 5, "scale_depth": depth, "dim_model_base": base}

    edit_config(tmp_path / "minicpm", change)

    check_relative(folder, tmp_path / "minicpm")


@pytest.mark.parametrize(("qkv", "others"), [(True, True), (False, False)])
def test_internlm3_is_llama_with_biases_of_its_own_names(qkv, others, tmp_path):
    """qkv_bias and bias stand for attention_bias and mlp_bias."""
    folder = saved(tmp_path / "llama", oracles.llama(attention_bias=others, mlp_bias=others, **oracles.rope("linear")))
    shutil.copytree(folder, tmp_path / "internlm")

    def change(config):
        del config["attention_bias"], config["mlp_bias"]
        config.update(architectures=["InternLM3ForCausalLM"], qkv_bias=qkv, bias=others)

    edit_config(tmp_path / "internlm", change)

    check_relative(folder, tmp_path / "internlm")


@pytest.mark.parametrize("tied", [False, True])
def test_internlm2_is_llama_with_groups_of_heads_in_one_matrix(tied, tmp_path):
    """Of each key/value head: its two queries, its key, its value."""
    theirs = saved(tmp_path / "llama", oracles.llama(tie_word_embeddings=tied))
    folder = shutil.copytree(theirs, tmp_path / "internlm")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        q, k, v = (tensors.pop(f"{prefix}{name}_proj.weight").view(2, -1, 20, 48) for name in "qkv")
        tensors[f"{prefix}wqkv.weight"] = torch.cat((q, k, v), dim=1).reshape(-1, 48).contiguous()
    names = {
        "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.wqkv": "attention.wqkv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
    }  # fmt: skip
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, lambda config: config.update(architectures=["InternLM2ForCausalLM"], bias=False))

    check_relative(theirs, folder)


OLD_NAMES = {
    # The checkpoints that people have were saved from the bare model, with masks that nobody needs any more.
    "gpt2": ("transformer.", {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.2.attn.masked_bias": torch.ones(())}),
    "opt": ("model.", {}),
    "falcon": ("transformer.", {}),
    "gpt-neox": ("", {"gpt_neox.layers.1.attention.bias": torch.ones(1, 1, 4, 4)}),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_checkpoints_of_the_bare_model_load(name, tmp_path):
    """Names without the prefix, and masks among them, give the same bits."""
    folder, tokens = oracles.save(name, tmp_path), oracles.prompt(9)
    expected = logits_of(load(folder), tokens)
    prefix, extra = OLD_NAMES[name]
    rename(folder, lambda old: old.removeprefix(prefix))
    path = folder / "model.safetensors"
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})

    assert torch.equal(logits_of(load(folder), tokens), expected)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("OPTForCausalLM", {"do_layer_norm_before": False, "ffn_dim": 64}, "do_layer_norm_before=False"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 512, "ffn_dim": 64}, "word_embed_proj_dim=512"),
        ("Exaone4ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": "LXG"}, "'LXG'"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("Cohere2ForCausalLM", {"use_parallel_block": False}, "use_parallel_block=False"),
        ("FalconForCausalLM", {"activation": "swishy"}, "activation='swishy'"),
        ("StableLmForCausalLM", {"hidden_act": "mish"}, "hidden_act='mish'"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
    ],
)
def test_switches_that_no_file_implements_are_refused_by_name(architecture, changes, message):
    """A silent default would change every logit."""
    with pytest.raises(UnsupportedModel, match=message):
        build_model({**oracles.SIZES, "architectures": [architecture], **changes})


CONFIGS = oracles.CONFIGS | moe_configs.CONFIGS


def test_every_architecture_is_held_to_transformers_by_two_configs():
    """Breaks with the name of the architecture that has one config, or none."""
    known = transformers.AutoModelForCausalLM._model_mapping
    counts = Counter(known[type(config())].__name__ for config in CONFIGS.values())

    assert {name for name in FAMILIES if counts[name] < 2} == RELATIVES


@pytest.mark.parametrize("name", oracles.families(CONFIGS))
def test_noise_runs_in_place_of_the_weights_of_every_family(name, tmp_path):
    """load_format dummy: config.json is enough, logits are finite and differ from token to token."""
    config = CONFIGS[name]()
    made = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [made.__name__]}))
    logits = logits_of(
        load_model(resolve(str(tmp_path), load_format="dummy"), dtype="float32", load_format="dummy"), [5, 6, 7]
    )

    assert logits.isfinite().all()
    assert logits[1].sub(logits[2]).abs().max() > 0
