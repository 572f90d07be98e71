"""Compressed-tensors checkpoints, against the library that writes them, and packed by hand."""

import json

import pytest
import torch

from tests.quant.quantised import SIZES, affine, assert_same, kept, open_model, save, words
from tinyserve.quant.codes import Inputs

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def config(*groups, layout="pack-quantized", ignore=("lm_head",)):
    made = {f"group_{number}": {"targets": ["Linear"], "input_activations": None} | group
            for number, group in enumerate(groups)}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": made, "ignore": list(ignore),
            "quantization_status": "compressed"}  # fmt: skip


def packed(bits, width, *, symmetric=True, order=False):
    """An independent packer: words along the columns, zero points along the rows."""

    def packer(module, weight):
        columns = weight.shape[1]
        groups = torch.arange(columns) // (width or columns)
        if order:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(len(module)))]
        codes, zeros, scales, numbers = affine(weight, bits, groups, symmetric=symmetric)
        tensors = {"weight_packed": words(codes, bits), "weight_scale": scales.half(),
                   "weight_shape": torch.tensor(weight.shape)}  # fmt: skip
        tensors |= {} if symmetric else {"weight_zero_point": words(zeros.T, bits).T}
        return tensors | ({"weight_g_idx": groups.int()} if order else {}), numbers

    return packer


@pytest.mark.parametrize(
    "bits, width, symmetric, order",
    [(4, 32, True, False), (4, 16, False, False), (8, 0, True, False), (8, 0, False, False), (3, 32, False, True),
     (5, 32, True, False), (2, 16, False, False), (4, 32, True, True)],
)  # fmt: skip
def test_packed_integers(bits, width, symmetric, order, tmp_path):
    """W4A16 and W8A16, grouped and by channel: logits within 1e-3 of the numbers'."""
    weights = INT4 | {"num_bits": bits, "symmetric": symmetric, "strategy": "group" if width else "channel",
                      "group_size": width or None, "actorder": "group" if order else None}  # fmt: skip
    assert_same(save(tmp_path, packed(bits, width, symmetric=symmetric, order=order), config({"weights": weights})))


def int8_rows(module, weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes * scale


def test_mixed_groups_and_modules_left_out(tmp_path):
    """By regular expression v has 8 bits, by name one down_proj too, the rest 4; o_proj is left out by a pattern."""

    def packer(module, weight):
        if "o_proj" in module:
            return None
        return packed(8 if "v_proj" in module or module == named else 4, 32)(module, weight)

    named = "model.layers.1.mlp.down_proj"
    eight = {"targets": ["re:.*v_proj", named], "weights": INT4 | {"num_bits": 8}}
    described = config({"weights": INT4}, eight, ignore=["lm_head", "re:.*self_attn.o_proj"])
    assert_same(save(tmp_path, packer, described), layers=6)


@pytest.mark.parametrize("dynamic, symmetric", [(True, True), (False, True), (True, False), (False, False)])
def test_int8_products(dynamic, symmetric, tmp_path):
    """W8A8: codes of inputs by hand, times codes of weights in integers, within 1e-4 of the layer's output."""

    def packer(module, weight):
        tensors, numbers = int8_rows(module, weight)
        if not dynamic:
            tensors["input_scale"] = torch.tensor([0.03])
            tensors |= {} if symmetric else {"input_zero_point": torch.tensor([-7], dtype=torch.int8)}
        return tensors, numbers

    inputs = {"num_bits": 8, "type": "int", "strategy": "token" if dynamic else "tensor", "dynamic": dynamic,
              "symmetric": symmetric}  # fmt: skip
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    described = config({"weights": weights, "input_activations": inputs}, layout="int-quantized")
    for layer in kept(open_model(save(tmp_path, packer, described)[0])).values():
        x = torch.randn(3, layer.inputs)
        steps, zeros = torch.full((3, 1), 0.03), torch.full((3, 1), 0.0 if symmetric else -7.0)
        if dynamic:
            low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
            steps = x.abs().amax(1, keepdim=True) / 127 if symmetric else (high - low) / 255
            zeros = torch.zeros(3, 1) if symmetric else (-128 - low / steps).round()
        codes = ((x / steps).double() + zeros).round().clamp(-128, 127) - zeros
        expected = (codes @ layer.codes.double().T) * steps * layer.scales.T
        torch.testing.assert_close(layer(x), expected.float(), rtol=0, atol=1e-4)


PRESETS = [
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "W8A8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8A16",
]


def library(preset):
    """A packer of the library's own, with the numbers that it reads back, and the config that it writes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    layout = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(layout.value)

    def packer(module, weight):
        stored = compressor.compress({"weight": weight, **library_scales(weight, scheme)}, scheme)
        numbers = compressor.decompress(dict(stored), scheme)["weight"].float()
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            stored["input_scale"] = torch.tensor([0.05])
        return stored, numbers

    described = QuantizationConfig(config_groups={"g": scheme}, ignore=["lm_head"], format=layout.value)
    return packer, json.loads(described.model_dump_json()) | {"quantization_status": "compressed"}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_library_writes(preset, tmp_path):
    """Compressed by the library: codes give its own decompressed numbers within 1e-3 (NVFP4: bf16, which it makes)."""
    packer, written = library(preset)
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    quantised, numbers = map(open_model, save(tmp_path, packer, written, sizes=sizes))
    plain = dict(numbers.named_modules())

    assert len(kept(quantised)) == 8
    for path, layer in kept(quantised).items():
        weight = torch.cat([codes.dense(torch.float32) for codes in layer.format.codes(layer)])
        expected = plain[path].weight
        assert (weight - expected).abs().max() <= (2**-8 if "FP4" in preset else 1e-3) * expected.abs().max()
        assert (layer.format.scheme.inputs is None) == preset.endswith(("A16", "ASYM"))
        if preset == "FP8_BLOCK":
            assert layer.format.scheme.inputs == Inputs("fp8", width=128)


def library_scales(weight, scheme):
    """Scales and zero points as the library's observers would find them."""
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = scheme.weights
    outer = {}
    if args.strategy == "block":
        high, wide = args.block_structure
        tiles = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).permute(0, 2, 1, 3).flatten(2)
    elif args.group_size:
        tiles = weight.unflatten(1, (-1, args.group_size))
    else:
        tiles = weight[:, None] if args.strategy == "channel" else weight.reshape(1, 1, -1)
    low, high = tiles.amin(-1), tiles.amax(-1)
    if args.strategy == "tensor_group":
        outer["weight_global_scale"] = generate_gparam(low.min(), high.max()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=outer.get("weight_global_scale"))
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8), **outer}
