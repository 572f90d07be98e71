"""Blocks of GGUF files as codes: the same numbers, and a model that is never made dense."""

import gguf
import pytest
import torch

from tests import oracles
from tests.checkpoint import test_load_gguf
from tests.checkpoint.test_dequantize import random_rows
from tests.kernels.harness import interpreting, nan_outputs
from tests.models.batching import Paged
from tinyserve.checkpoint.dequantize import decode
from tinyserve.checkpoint.gguf_codes import KEPT, codes_of
from tinyserve.checkpoint.source import resolve
from tinyserve.kernels.packed import can_pack
from tinyserve.kernels.packed_planes import Planes
from tinyserve.models.registry import load_model
from tinyserve.quant.experts import PackedExperts
from tinyserve.quant.grouped import Grouped
from tinyserve.quant.plain import Plain


@pytest.mark.parametrize("kind", KEPT)
def test_codes_are_the_numbers_of_the_decoder(kind):
    """Random blocks, in float32 to a part in a million; else to the rounding of scales to halves, 1 part in 2000 of a
    group's largest number."""
    rows = torch.from_numpy(random_rows(kind, 6, 5))
    exact, codes = decode(rows, kind), codes_of(rows, kind)

    full = codes.scaled_for(torch.float32).dense(torch.float32)
    torch.testing.assert_close(full, exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
    codes = codes.scaled_for(torch.bfloat16)
    assert torch.equal(codes.scales, codes.scales.half().float())
    largest = codes.scheme.width and exact.unflatten(1, (-1, codes.scheme.width)).abs().amax(-1)
    bound = largest.repeat_interleave(codes.scheme.width, dim=1) / 2000 + 1e-6
    least = 0 if not codes.scheme.added else codes.zeros.abs().repeat_interleave(codes.scheme.width, dim=1) / 2000
    assert bool(((codes.dense(torch.float32) - exact).abs() <= bound + least).all())
    assert can_pack(codes.scheme.bits, codes.scheme.width, "int")


def prompt_and_more(model, tokens):
    """Logits of all but the last token in one step, and of the last in another."""
    paged = Paged(model)
    row = paged.add(tokens)
    return torch.cat((paged.step({row: len(tokens) - 1})[row], paged.step({row: 1})[row]))


def saved(folder, monkeypatch, kind, family, config):
    """A file of random weights whose matrices are blocks of this kind."""
    monkeypatch.setattr(test_load_gguf, "Q8", gguf.GGMLQuantizationType[kind])
    plain = oracles.save_config(config, folder / "checkpoint")
    return test_load_gguf.write(folder / "model.gguf", family, plain, config, quantized=True)


@pytest.mark.parametrize("kind, ratio", [("Q4_1", 1.15), ("Q8_0", 1.15), ("Q5_0", 1.15)])
def test_a_model_is_kept_in_its_blocks(kind, ratio, tmp_path, monkeypatch):
    """By interpreted kernels, the table and its tied head in one: logits within 1e-3 of dense numbers', and little more
    memory than the file has bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}  # fmt: skip
    path = saved(tmp_path, monkeypatch, kind, "llama", oracles.llama(**sizes))
    tokens = oracles.prompt(12)
    expected = prompt_and_more(load_model(resolve(str(path)), dtype="float32"), tokens)

    with interpreting(), nan_outputs():
        model = load_model(resolve(str(path)), dtype="float32")
        actual = prompt_and_more(model, tokens)
        plain = load_model(resolve(str(path)), dtype="float32", format_for=lambda path, layer, stored: Plain())

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    assert model.head.packed is model.embed.packed and isinstance(model.layers[0].mlp.down.format, Grouped)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *(b for b in model.buffers() if b.dim() < 3)))
    held -= sum(rope.cos_sin.nbytes for rope in model.ropes())
    assert held <= ratio * sum(tensor.data.nbytes for tensor in resolve(str(path)).gguf_file.tensors.values())
    assert isinstance(model.embed.packed, Planes) == (kind == "Q5_0")
    assert plain.embed.packed is None and plain.head.weight is plain.embed.weight


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_experts_are_kept_in_their_blocks(kind, tmp_path, monkeypatch):
    """Qwen3-MoE by interpreted kernels, 11 tokens and then one: logits within 1e-3 of dense numbers'."""
    config = test_load_gguf.config_of("qwen3moe")
    config.num_hidden_layers = 1
    path = saved(tmp_path, monkeypatch, kind, "qwen3moe", config)
    tokens = oracles.prompt(12)
    expected = prompt_and_more(load_model(resolve(str(path)), dtype="float32"), tokens)

    with interpreting(), nan_outputs():
        model = load_model(resolve(str(path)), dtype="float32")
        actual = prompt_and_more(model, tokens)

    experts = model.layers[0].mlp.experts
    assert isinstance(experts.gate_up.format, PackedExperts) and isinstance(experts.down.format, PackedExperts)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
