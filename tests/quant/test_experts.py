"""Quantised experts: each published layout, packed independently, gives the layer output of the numbers it stands for.

The checkpoints are tiny; codes must still be codes once they are loaded, and the router, which stays plain, the same.
"""

import json
import logging
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import oracles
from tests.kernels.harness import interpreting, nan_outputs
from tests.models.test_published_moe import PUBLISHED
from tests.quant.quantised import logits, open_model, save
from tests.quant.test_checkpoints import FP8, awq, fp8_blocks, fp8_channel, fp8_tensor, gptq, nvfp4
from tests.quant.test_compressed import INT4, config, int8_rows, library, packed
from tinyserve.__main__ import main
from tinyserve.layers.moe import ExpertLinear, MoE
from tinyserve.models.registry import build_model, config_schemes, family, weight_bytes
from tinyserve.quant.detect import online
from tinyserve.quant.experts import PackedExperts, PlainExperts
from tinyserve.quant.grouped import grouped_formats

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "head_dim": 16, "num_experts": 4,
         "num_hidden_layers": 1, "num_experts_per_tok": 2}  # fmt: skip
FOURS = {"quant_method": "gptq", "bits": 4, "group_size": 32}
CASES = {  # name: (packer, quantization_config, bits an expert's weight takes in memory, scales included)
    "fp8-tensor": (fp8_tensor, FP8 | {"activation_scheme": "static"}, 8.5),
    "fp8-channel": (fp8_channel, FP8, 8.5),
    "fp8-blocks": (fp8_blocks, FP8 | {"weight_block_size": [32, 32]}, 9.4),
    "gptq": (gptq(4, 32, True, "gptq", False), FOURS, 4.9),
    "gptq-zeros": (gptq(4, 32, False, "gptq", False), FOURS, 5.9),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, 5.9),
    "w4a16": (packed(4, 32), config({"weights": INT4}), 4.9),
    "int8": (
        int8_rows,
        config({"weights": INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}}, layout="int-quantized"),
        8.5,
    ),
}

INTERPRETED = ("fp8-blocks", "gptq-zeros")


def moes(model):
    """The mixtures of a model, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoE)}


def matrices(model):
    """The matrices of experts, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, ExpertLinear)}


def bits(model):
    """Bits that a weight of an expert takes, with its scales."""
    found = matrices(model).values()
    return sum(8 * tensor.nbytes for layer in found for tensor in layer.buffers()) / sum(
        layer.experts * sum(layer.pieces) * layer.inputs for layer in found
    )


def assert_same_layers(quantised, numbers, tokens, *, kernels=False, within=1e-3):
    """Every mixture's output, `tokens` at once, agrees with that of plain numbers to `within` of its size."""
    plain = moes(numbers)
    for path, layer in moes(quantised).items():
        x = torch.randn(tokens, layer.experts.gate_up.inputs, generator=torch.Generator().manual_seed(tokens))
        expected = plain[path].experts(x, layer.router(x))
        with interpreting() if kernels else nullcontext(), nan_outputs():
            actual = layer.experts(x, layer.router(x))
        torch.testing.assert_close(actual, expected, rtol=0, atol=within * float(expected.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_experts_keep_their_codes(case, tmp_path):
    """Within 1e-3 of dequantise-then-matmul; for some by interpreted kernels, 3 tokens unsorted and 21 sorted."""
    packer, described, most = CASES[case]
    folders = save(tmp_path, packer, described, sizes=SIZES, family="qwen3_moe")
    quantised, numbers = map(open_model, folders)

    assert len(matrices(quantised)) == 2
    assert all(isinstance(layer.format, PackedExperts) for layer in matrices(quantised).values())
    assert bits(quantised) < most
    assert_same_layers(quantised, numbers, 9)
    for tokens in (3, 21) if case in INTERPRETED else ():
        assert_same_layers(quantised, numbers, tokens, kernels=True)


@pytest.mark.parametrize("preset", ["W4A16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16"])
def test_what_the_library_writes(preset, tmp_path):
    """Experts compressed by compressed-tensors: the layer output of its own decompressed numbers within 1e-3."""
    pack, written = library(preset)

    def packer(module, weight):
        return pack(module, weight) if "experts" in module else None

    sizes = SIZES | {"hidden_size": 128, "moe_intermediate_size": 256}
    quantised, numbers = map(open_model, save(tmp_path, packer, written, sizes=sizes, family="qwen3_moe"))

    assert all(isinstance(layer.format, PackedExperts) for layer in matrices(quantised).values())
    assert_same_layers(quantised, numbers, 9)


def gpt_oss(folder):
    """A tiny gpt-oss whose experts are MXFP4, packed here byte by byte, and the same with plain numbers."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2,
             "num_hidden_layers": 1, "head_dim": 16}  # fmt: skip
    numbers = oracles.save_config(oracles.make("GptOss", **sizes), folder / "numbers")
    tensors = {name: tensor.float() for name, tensor in load_file(numbers / "model.safetensors").items()}
    packed = dict(tensors)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors[name].mT.unflatten(-1, (-1, 32))  # stored [E, inputs, outputs]
        powers = torch.floor(torch.log2(rows.abs().amax(-1) / 4)).clamp(min=-100)
        codes = (rows[..., None] / 2.0 ** powers[..., None, None] - table).abs().argmin(-1)
        del packed[name]
        packed[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).contiguous()
        packed[f"{name}_scales"] = (powers + 127).to(torch.uint8).contiguous()
        tensors[name] = (table[codes] * 2.0 ** powers[..., None]).flatten(2).mT.contiguous()
    quantised = folder / "quantised"
    quantised.mkdir()
    save_file(packed, quantised / "model.safetensors")
    save_file(tensors, numbers / "model.safetensors")
    written = json.loads((numbers / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(written | {"quantization_config": {"quant_method": "mxfp4"}}))
    return quantised, numbers, packed


def test_mxfp4_of_gpt_oss(tmp_path):
    """Layers within 1e-3 of the packer's numbers, logits too; transformers' own decoder gives the same numbers."""
    folder, plain, stored = gpt_oss(tmp_path)
    quantised, numbers = open_model(folder, format_for=grouped_formats()), open_model(plain)

    assert bits(quantised) < 4.8  # 4.25, but 96 columns take the room of 128
    for tokens in (3, 21):
        assert_same_layers(quantised, numbers, tokens, kernels=True)
    expected = logits(numbers)
    with interpreting(), nan_outputs():
        actual = logits(quantised)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(logits(open_model(folder)), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))

    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as decode

    name = "model.layers.0.mlp.experts.gate_up_proj"
    theirs = decode(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)  # [E, inputs, outputs]
    ours = load_file(plain / "model.safetensors")[name]
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("asked, error, most", [("fp8", 0.05, 8.5), ("int8", 0.02, 8.5), ("int4", 0.2, 4.9)])
def test_plain_experts_are_rounded_while_loading(asked, error, most, tmp_path):
    """`--quantization`: the relative error of each mixture stays below what its bits allow."""
    sizes = SIZES | {"hidden_size": 128, "moe_intermediate_size": 128}
    _, folder = save(tmp_path, lambda module, weight: None, None, sizes=sizes, family="qwen3_moe")
    quantised, numbers = open_model(folder, format_for=online(asked)), open_model(folder)

    assert bits(quantised) < most
    for path, layer in moes(quantised).items():
        x = torch.randn(32, 128)
        expected = moes(numbers)[path].experts(x, layer.router(x))
        assert 0 < (layer.experts(x, layer.router(x)) - expected).norm() < error * expected.norm()


@pytest.mark.parametrize("case", ["act-order", "nvfp4", "mixed"])
def test_what_cannot_be_packed_becomes_numbers(case, tmp_path, caplog):
    """Columns out of order, tables of 16 in groups of 16, and up_proj in 8 bits beside 4: right, and in the log."""
    packer, described = {
        "act-order": (gptq(4, 32, True, "gptq", True), FOURS | {"desc_act": True}),
        "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "mixed": (
            lambda module, weight: gptq(8 if "up_proj" in module else 4, 32, True, "gptq", False)(module, weight),
            FOURS | {"dynamic": {r"+:.*\.up_proj": {"bits": 8}}},
        ),
    }[case]
    with caplog.at_level(logging.WARNING, "tinyserve"):
        quantised, numbers = map(open_model, save(tmp_path, packer, described, sizes=SIZES, family="qwen3_moe"))

    assert isinstance(matrices(quantised)["layers.0.mlp.experts.gate_up"].format, PlainExperts)
    assert "turned into plain numbers" in caplog.text
    assert_same_layers(quantised, numbers, 3)


def test_noise_is_packed_too(tmp_path):
    """Dummy weights of a config that says MXFP4: experts are codes, logits are numbers."""
    folder, _, _ = gpt_oss(tmp_path)
    model = open_model(folder, load_format="dummy")

    assert all(isinstance(layer.format, PackedExperts) for layer in matrices(model).values())
    assert logits(model).isfinite().all() and logits(model).std() > 0


def test_the_plan_counts_codes():
    """gpt-oss-20b: 20.9 G parameters are 41.8 GB in bfloat16, 13.8 GB in its files, and so in the plan."""
    config = PUBLISHED["gpt-oss-20b"][0]
    model, weights = build_model(config), family("GptOssForCausalLM").WEIGHTS
    found = [weight_bytes(model, torch.bfloat16, schemes) for schemes in (None, config_schemes(config, None, weights))]

    assert found[0] == pytest.approx(41.83e9, rel=1e-3) and found[1] == pytest.approx(13.76e9, rel=1e-2)


def test_quantize_writes_experts(tmp_path):
    """`tinyserve quantize` in int4: experts are codes when they are read, routers are named among what is ignored."""
    sizes = SIZES | {"hidden_size": 64, "moe_intermediate_size": 64, "torch_dtype": "bfloat16"}
    _, folder = save(tmp_path, lambda module, weight: None, None, sizes=sizes, family="qwen3_moe")

    assert main(["quantize", str(folder), str(tmp_path / "out"), "--scheme", "int4", "--group-size", "32"]) == 0

    quantised, plain = open_model(tmp_path / "out"), open_model(folder)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert all(isinstance(layer.format, PackedExperts) for layer in matrices(quantised).values())
    assert ignored == ["lm_head", "model.layers.0.mlp.gate"]
    for path, layer in moes(quantised).items():
        x = torch.randn(32, 64)
        expected = moes(plain)[path].experts(x, layer.router(x))
        assert (layer.experts(x, layer.router(x)) - expected).norm() < 0.2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["fp8-channel", "fp8-blocks", "gptq", "gptq-zeros", "int8", "mxfp4"])
def test_experts_on_a_gpu(case, tmp_path):
    """1, 9 and 600 tokens in bfloat16: within 1 % of the layer output of the numbers."""
    if case == "mxfp4":
        folders = gpt_oss(tmp_path)[:2]
    else:
        folders = save(tmp_path, *CASES[case][:2], sizes=SIZES, family="qwen3_moe")
    quantised, numbers = open_model(folders[0], device="cuda", dtype="bfloat16"), open_model(folders[1])
    for path, layer in moes(quantised).items():
        assert isinstance(layer.experts.gate_up.format, PackedExperts)
        for tokens in (1, 9, 600):
            x = torch.randn(tokens, layer.experts.gate_up.inputs).bfloat16()
            weights, ids = moes(numbers)[path].router(x.float())
            expected = moes(numbers)[path].experts(x.float(), (weights, ids))
            actual = layer.experts(x.cuda(), (weights.cuda(), ids.cuda()))
            assert (actual.float().cpu() - expected).norm() < 0.01 * expected.norm()
