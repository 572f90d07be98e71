"""GGUF files written by the `gguf` package from tiny checkpoints: the same model as from safetensors."""

import json
import logging
import math
import re
from functools import partial

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tests import moe_configs, oracles
from tests.models.batching import Paged
from tinyserve.checkpoint.dequantize import decode
from tinyserve.checkpoint.gguf import GGUFFile
from tinyserve.checkpoint.gguf_names import stored_tensors
from tinyserve.checkpoint.safetensors import open_safetensors
from tinyserve.checkpoint.source import resolve
from tinyserve.checkpoint.stacked import unstack
from tinyserve.errors import CheckpointError
from tinyserve.models import registry
from tinyserve.models.registry import load_model

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3-long": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "seed-oss": gguf.MODEL_ARCH.SEED_OSS,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "exaone4-stretched": gguf.MODEL_ARCH.EXAONE4,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek-v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek-v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
PAIRED = ("llama", "mixtral", "granite", "smollm3", "arcee")
Q8 = gguf.GGMLQuantizationType.Q8_0


def paired(rows, heads):
    """What the converter does to Llama's q and k: halves of each head become neighbouring pairs."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted(name, tensor, family, config):
    """The numbers that a converter stores for a tensor of a Hugging Face checkpoint."""
    if family in PAIRED and "q_proj" in name:
        return paired(tensor, config.num_attention_heads)
    if family in PAIRED and "k_proj" in name:
        return paired(tensor, config.num_key_value_heads)
    if family == "nemotron":
        return tensor + 1 if name.endswith("norm.weight") else tensor
    return tensor + 1 if family.startswith("gemma") and "norm" in name else tensor


def write_own(writer, family, config):
    """What converters write for one family only."""
    if family in ("gemma2", "gemma3", "olmo3", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "exaone4":
        writer.add_sliding_window(config.sliding_window)
    if family in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family in ("mixtral", "qwen3moe", "olmoe", "gpt-oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family.startswith("deepseek"):
        write_deepseek(writer, config)
    if family == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family.startswith("phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if family == "phi3-long":
        writer.add_rope_scaling_attn_factors((1 + math.log(4) / math.log(32)) ** 0.5)
        for length in ("long", "short"):
            factors = torch.tensor(config.rope_parameters[f"{length}_factor"])
            writer.add_tensor(f"rope_factors_{length}.weight", factors.numpy())


def stacked(folder):
    """The checkpoint's tensors; those of all experts of a layer as one, under the name without numbers."""
    made = registry.family(json.loads((folder / "config.json").read_text())["architectures"][0])
    tensors = unstack(open_safetensors(folder), getattr(made, "STACKS", {}))
    found, experts = {}, {}
    for name, stored in tensors.items():
        number = re.search(r"\.experts\.(\d+)\.", name)
        if number is None:
            named = f"{name}.weight" if name.endswith("sinks") else name.replace("correction_bias", "correction.bias")
            found[named] = stored.read(torch.float32)
        else:
            experts.setdefault(name.replace(number[0], ".experts."), {})[int(number[1])] = stored.read(torch.float32)
    return found | {name: torch.stack([rows[e] for e in sorted(rows)]) for name, rows in experts.items()}


def write_deepseek(writer, config):
    """Of the newer kind: attention as if of one key head."""
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def split_heads(tensors, config):
    """DeepSeek's kv_b_proj as two tensors, the first transposed."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        by_head = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2).contiguous()
        found[name.replace("kv_b_proj", "v_b_proj")] = values.contiguous()
    return found


def write(path, family, folder, config, *, quantized=False, extra=()):
    """Write the checkpoint in `folder` as one GGUF file; matrices in Q8_0 if `quantized`."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_value_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    centred = (
        getattr(config, "layer_norm_eps", None)
        or getattr(config, "norm_eps", None)
        or getattr(config, "norm_epsilon", None)
    )
    if centred:
        writer.add_layer_norm_eps(centred)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(
            int(rope["partial_rotary_factor"] * config.hidden_size) // config.num_attention_heads
        )
    write_own(writer, family, config)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    tensors = stacked(folder)
    if family == "deepseek-v3":  # and v2 as older converters wrote it
        tensors = split_heads(tensors, config)
    for name, tensor in {**tensors, **dict(extra)}.items():
        numbers = converted(name, tensor, family, config).numpy()
        short = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if quantized and tensor.dim() >= 2:
            writer.add_tensor(short, gguf.quants.quantize(numbers, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(short, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(family):
    """Sizes that GGUF can say: rows of whole blocks (32), Gemma's fixed pattern and query scale, no soft-cap."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    if family == "llama":
        return oracles.llama(**sizes, head_dim=24)
    if family == "gemma3":
        own = {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 24}
        return oracles.gemma3(**sizes, **own, final_logit_softcapping=None)
    own = {
        "qwen2": oracles.qwen2,
        "qwen3": oracles.qwen3,
        "gemma": partial(oracles.make, "Gemma", head_dim=32),
        "gemma2": partial(oracles.make, "Gemma2", head_dim=24, query_pre_attn_scalar=24, sliding_window=6),
        "phi3": partial(oracles.make, "Phi3", sliding_window=7, **oracles.PARTIAL),
        "phi3-long": partial(oracles.make, "Phi3", **oracles.longrope(16, 32)),
        "granite": partial(
            oracles.make, "Granite", embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.6,
            logits_scaling=0.5,
        ),
        "smollm3": partial(oracles.make, "SmolLM3", num_hidden_layers=5, tie_word_embeddings=True),
        "olmo2": partial(oracles.make, "Olmo2"),
        "olmo3": partial(oracles.make, "Olmo3", num_hidden_layers=5, sliding_window=5),
        "cohere": partial(oracles.make, "Cohere", logit_scale=2.0, use_qk_norm=True),
        "cohere2": partial(
            oracles.make, "Cohere2", num_hidden_layers=5, logit_scale=2.0, sliding_window=6, head_dim=16
        ),
        "starcoder2": partial(oracles.make, "Starcoder2"),
        "arcee": partial(oracles.make, "Arcee"),
        "seed-oss": partial(oracles.make, "SeedOss", head_dim=24),
        "glm4": partial(oracles.make, "Glm4", head_dim=16),
        "exaone4": partial(oracles.make, "Exaone4", head_dim=16, sliding_window=5, layer_types=oracles.KINDS3),
        "exaone4-stretched": partial(
            oracles.make, "Exaone4", head_dim=16, sliding_window=None, layer_types=["full_attention"] * 3
        ),
        "nemotron": partial(oracles.make, "Nemotron", head_dim=16),
        "mixtral": partial(oracles.make, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
        "qwen3moe": partial(
            oracles.make, "Qwen3Moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
            norm_topk_prob=True,
        ),
        "olmoe": partial(oracles.make, "Olmoe", num_experts=4, num_experts_per_tok=2),
        "deepseek-v2": partial(
            oracles.make, "DeepseekV2", **moe_configs.LATENT, q_lora_rank=None, n_routed_experts=4, n_shared_experts=2,
            num_experts_per_tok=2, first_k_dense_replace=1, moe_intermediate_size=32, topk_method="greedy",
        ),
        "deepseek-v3": partial(
            oracles.make, "DeepseekV3", **moe_configs.LATENT, q_lora_rank=32, n_routed_experts=8, n_group=4,
            topk_group=2, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, moe_intermediate_size=32,
            routed_scaling_factor=2.5,
            **oracles.rope("yarn", original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7),
        ),
        "gpt-oss": partial(
            oracles.make, "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=6,
            num_hidden_layers=4, **oracles.rope("yarn", original_max_position_embeddings=32, truncate=False),
        ),
    }  # fmt: skip
    return own[family](**sizes)


@pytest.fixture
def checkpoint(tmp_path):
    """(family) -> folder with a checkpoint of `config_of(family)`."""
    return lambda family: oracles.save_config(config_of(family), tmp_path / family)


def logits(path, tokens):
    paged = Paged(load_model(resolve(str(path)), dtype="float32"))
    row = paged.add(tokens)
    return paged.step({row: len(tokens)})[row]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_file_gives_the_logits_of_its_checkpoint(family, checkpoint, tmp_path, caplog):
    """Names, row order of q and k, norms, tied heads: logits within 1e-4 of transformers on the original.

    Granite's go up to 20, in whose last bits the order of additions shows: within 1e-5 of the largest."""
    folder, tokens = checkpoint(family), oracles.prompt(35)
    path = write(tmp_path / "model.gguf", family, folder, config_of(family))

    expected = oracles.reference_logits(folder, tokens)
    torch.testing.assert_close(
        logits(path, tokens), expected, atol=max(1e-4, 1e-5 * float(expected.abs().max())), rtol=0
    )
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.msg for record in warnings if record.name.startswith("tinyserve")] == []


def test_blocks_come_in_the_order_of_the_model(checkpoint, tmp_path):
    """Raw Q8_0 blocks of every matrix, decoded, equal what `read` gives: q and k rows are un-paired in both."""
    folder, config = checkpoint("llama"), config_of("llama")
    path = write(tmp_path / "model.gguf", "llama", folder, config, quantized=True)
    stored = stored_tensors(GGUFFile(path), config.num_attention_heads, config.num_key_value_heads)
    original = load_file(folder / "model.safetensors")

    assert stored.keys() == original.keys()
    for name, tensor in stored.items():
        assert tensor.shape == original[name].shape
        torch.testing.assert_close(tensor.read(torch.float32), original[name], atol=0.01, rtol=0)
        if original[name].dim() == 2:
            assert tensor.qtype == "Q8_0"
            assert torch.equal(decode(tensor.blocks(), "Q8_0"), tensor.read(torch.float32))
        else:
            assert tensor.qtype is None


def test_a_tensor_that_nobody_knows_is_refused(checkpoint, tmp_path):
    extra = [("blk.0.mystery.weight", torch.ones(3))]
    path = write(tmp_path / "model.gguf", "llama", checkpoint("llama"), config_of("llama"), extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.mystery\.weight"):
        load_model(resolve(str(path)))
