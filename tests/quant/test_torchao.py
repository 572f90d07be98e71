"""torchao checkpoints: each kind of tensor from an independent packer, and what the library itself writes."""

import json

import pytest
import torch

from tests import oracles
from tests.quant.quantised import SIZES, affine, assert_same, kept, logits, open_model, save, words
from tinyserve.errors import CheckpointError, UnsupportedModel
from tinyserve.quant.codes import Inputs
from tinyserve.quant.detect import detect
from tinyserve.quant.torchao import usual_scheme

CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
WIDTH = 32


class Notes(dict):
    """The header of a file."""

    def add(self, module, kind, **data):
        names = self.get("tensor_names", "[]")
        self["tensor_names"] = json.dumps([*json.loads(names), f"{module}.weight"])
        self[f"{module}.weight"] = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]})


def named(**tensors):
    return {f"_weight_{name}": tensor for name, tensor in tensors.items()}


def kind_of(name):
    return {"_type": "torch.dtype", "_data": name}


def groups_of(weight, bits):
    """Codes around zero, zero points and scales, in groups of WIDTH columns."""
    codes, zeros, scales, numbers = affine(weight, bits, torch.arange(weight.shape[1]) // WIDTH, symmetric=False)
    return (codes - 2 ** (bits - 1)).to(torch.int8), (zeros - 2 ** (bits - 1)).to(torch.int8), scales, numbers


def integers(bits):
    def packer(notes, module, weight):
        codes, zeros, scales, numbers = groups_of(weight, bits)
        notes.add(module, "IntxUnpackedToInt8Tensor", target_dtype=kind_of(f"int{bits}"), block_size=[1, WIDTH],
                  activation_quantization=None)  # fmt: skip
        return named(qdata=codes, scale=scales, zero_point=zeros), numbers

    return packer


def added(weight):
    """Codes -8 .. 7, scales and what is added to them [N, G], in bfloat16; numbers."""
    tiles = weight.unflatten(1, (-1, WIDTH))
    low, high = tiles.amin(-1), tiles.amax(-1)
    scales = ((high - low) / 15).bfloat16().float()
    middles = (low + 8 * scales).bfloat16().float()
    codes = ((tiles - middles[..., None]) / scales[..., None]).round().clamp(-8, 7)
    numbers = (codes * scales[..., None] + middles[..., None]).flatten(1)
    return codes.flatten(1).to(torch.int8), scales, middles, numbers


def nibbles(notes, module, weight):
    """Signed, the even column in the low half."""
    codes, scales, middles, numbers = added(weight)
    rows = [[(low & 15) | (high & 15) << 4 for low, high in zip(row[::2], row[1::2], strict=True)]
            for row in codes.tolist()]  # fmt: skip
    notes.add(module, "Int4Tensor", block_size=[1, WIDTH], shape=list(weight.shape))
    packed = torch.tensor(rows, dtype=torch.uint8).view(torch.int8)
    return named(qdata=packed, scale=scales.T.bfloat16(), zero_point=middles.T.bfloat16()), numbers


def nibbles_for_fp8(notes, module, weight):
    """Around zero; activations are rounded."""
    scales = weight.unflatten(1, (-1, WIDTH)).abs().amax(-1) / 7
    wide = scales.repeat_interleave(WIDTH, 1)
    codes = (weight / wide).round().to(torch.int8)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    notes.add(module, "Int4Tensor", block_size=[1, WIDTH], shape=list(weight.shape),
              activation_dtype=kind_of("float8_e4m3fn"))  # fmt: skip
    return named(qdata=packed, scale=scales.T, zero_point=torch.zeros_like(scales.T)), codes * wide


def in_words(notes, module, weight):
    codes, zeros, scales, numbers = affine(weight, 4, torch.arange(weight.shape[1]) // WIDTH, symmetric=False)
    notes.add(module, "Int4PlainInt32Tensor", block_size=[1, WIDTH], shape=list(weight.shape))
    return named(qdata=words(codes, 4), scale=scales.T, zero_point=zeros.T.to(torch.int8)), numbers


def in_tiles(notes, module, weight):
    """Word by word as torch's kernel writes them; columns padded to 1024, rows to 8."""
    codes, scales, middles, numbers = added(weight)
    rows, columns = weight.shape
    high, wide = -(-rows // 8) * 8, -(-columns // 1024) * 1024
    padded = torch.nn.functional.pad(codes + 8, (0, wide - columns, 0, high - rows)).tolist()
    packed = torch.zeros(high // 8, wide // 128, 32, 4, dtype=torch.int64)
    for tile in range(high // 8):
        for outer in range(-(-columns // 128)):
            for lane in range(32):
                for word in range(4):
                    first = outer * 128 + word * 32 + lane % 4 * 2
                    places = [first + step + odd for odd in (0, 1) for step in (0, 8, 16, 24)]
                    row = padded[tile * 8 + lane // 4]
                    packed[tile, outer, lane, word] = sum(row[k] << (4 * at) for at, k in enumerate(places))
    both = torch.zeros(wide // WIDTH, high, 2)
    both[: columns // WIDTH, :rows] = torch.stack((scales.T, middles.T), -1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    notes.add(module, "Int4TilePackedTo4dTensor", block_size=[1, WIDTH], shape=list(weight.shape))
    return named(qdata=packed, scale_and_zero=both.bfloat16()), numbers


def int8_rows(notes, module, weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    notes.add(module, "Int8Tensor", block_size=[1, weight.shape[1]], dtype=kind_of("float32"))
    return named(qdata=codes, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int8)), codes * scale


def fp8_blocks(notes, module, weight):
    tiles = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
    scales = tiles.abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    notes.add(module, "Float8Tensor", block_size=[16, 16])
    return named(qdata=codes, scale=scales), codes.float() * wide


PACKERS = {
    "int3": integers(3), "int2": integers(2), "int4": integers(4), "int8 in groups": integers(8), "nibbles": nibbles,
    "words": in_words, "tiles": in_tiles, "int8": int8_rows, "fp8 in blocks": fp8_blocks,
}  # fmt: skip


@pytest.mark.parametrize("packer", PACKERS)
def test_each_kind_of_tensor(packer, tmp_path):
    """Logits within 1e-3 of the numbers'; no library needed."""
    notes = Notes()
    assert_same(save(tmp_path, lambda *given: PACKERS[packer](notes, *given), CONFIG, notes=notes))


def test_groups_of_128_whose_number_is_added_are_cut(tmp_path, monkeypatch):
    """Kernels add a number to groups below 128 only: two pieces of 64 stand for one group, with the same numbers."""
    monkeypatch.setattr(f"{__name__}.WIDTH", 128)
    notes = Notes()
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    model = assert_same(save(tmp_path, lambda *given: nibbles(notes, *given), CONFIG, notes=notes, sizes=sizes))

    assert {(layer.format.scheme.width, layer.format.scheme.added) for layer in kept(model).values()} == {(64, True)}


ROWS, BATCH = {"_type": "PerRow", "_data": {"dim": -1}}, {"_type": "PerTensor", "_data": {}}


@pytest.mark.parametrize(
    "kind, data, extra, inputs",
    [
        ("Int8Tensor", {"granularity": ROWS}, {}, Inputs("int8")),
        ("Int8Tensor", {"granularity": ROWS, "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}, {},
         Inputs("int8", symmetric=False)),
        ("Int8Tensor", {"granularity": BATCH}, {"act_quant_scale": torch.tensor([[0.03]])},
         Inputs("int8", static=True)),
        ("Float8Tensor", {"granularity": BATCH, "hp_value_ub": 3.0}, {}, Inputs("fp8", limit=3.0)),
        ("Float8Tensor", {"granularity": {"_type": "PerBlock", "_data": {"block_size": [1, 16]}}}, {},
         Inputs("fp8", width=16)),
    ],
)  # fmt: skip
def test_rounded_activations_are_as_the_header_says(kind, data, extra, inputs, tmp_path):
    notes = Notes()

    def packer(module, weight):
        tensors, numbers = (int8_rows if kind == "Int8Tensor" else fp8_blocks)(notes, module, weight)
        note = json.loads(notes[f"{module}.weight"])
        note["_data"]["act_quant_kwargs"] = {"_type": "Kwargs", "_data": data}
        notes[f"{module}.weight"] = json.dumps(note)
        return tensors | named(**{name: value.clone() for name, value in extra.items()}), numbers

    model = open_model(save(tmp_path, packer, CONFIG, notes=notes)[0])
    assert {layer.format.scheme.inputs for layer in kept(model).values()} == {inputs}
    if extra:
        assert all(float(layer.input_scale) == pytest.approx(0.03) for layer in kept(model).values())


def test_nibbles_for_fp8_activations(tmp_path):
    notes = Notes()
    model = open_model(save(tmp_path, lambda *given: nibbles_for_fp8(notes, *given), CONFIG, notes=notes)[0])
    assert {layer.format.scheme.inputs for layer in kept(model).values()} == {Inputs("fp8")}
    assert all(bool((layer.zeros == 8).all()) for layer in kept(model).values())


def test_what_is_not_read_is_refused_by_name(tmp_path):
    """No header, an unknown class, scaled activations, codes of e5m2, AMD's tiles: none is read as something else."""

    def packer(change):
        def changed(module, weight):
            tensors, numbers = fp8_blocks(notes, module, weight)
            change(module, tensors)
            return tensors, numbers

        return changed

    cases = {
        "Int4PreshuffledTensor": lambda module, tensors: notes.add(module, "Int4PreshuffledTensor"),
        "act_pre_scale": lambda module, tensors: tensors.update(named(act_pre_scale=torch.ones(4))),
        "e5m2": lambda module, tensors: tensors.update(named(qdata=tensors["_weight_qdata"].to(torch.float8_e5m2))),
        "header": lambda module, tensors: notes.pop(f"{module}.weight"),
    }
    for number, (match, change) in enumerate(cases.items()):
        notes, folder = Notes(), tmp_path / str(number)
        folder.mkdir()
        with pytest.raises((UnsupportedModel, CheckpointError), match=match):
            open_model(save(folder, packer(change), CONFIG, notes=notes)[0])
    with pytest.raises(UnsupportedModel, match="AMD"):
        detect({"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_data": {
            "int4_tile_packed_ntile": 16}}}}})  # fmt: skip


@pytest.mark.parametrize(
    "header",
    ["[]", "null", '"a"', "no JSON", '{"_type": "Int8Tensor", "_data": "abc"}', *(
        json.dumps({"_type": "Int8Tensor", "_data": data}) for data in (
            {"act_quant_kwargs": {"_data": [1]}}, {"act_quant_kwargs": {"_data": {"granularity": "PerRow"}}},
            {"act_quant_kwargs": {}}, {"block_size": [0, 32]}, {"block_size": ["a", {}]}, {"block_size": 3.5},
        )
    )],
)  # fmt: skip
def test_a_header_without_sense_is_one_clear_error(header, tmp_path):
    """Whatever a file says of its matrices: the module's name and a cause, no traceback of ours."""
    notes = Notes()

    def packer(module, weight):
        tensors, numbers = fp8_blocks(notes, module, weight)
        notes[f"{module}.weight"] = header
        return tensors, numbers

    with pytest.raises((CheckpointError, UnsupportedModel), match=r"model\.layers\.0"):
        open_model(save(tmp_path, packer, CONFIG, notes=notes)[0])


@pytest.mark.parametrize("kind", ["Int8DynamicActivationInt4WeightConfig", "Float8DynamicActivationInt4WeightConfig"])
def test_a_plan_guesses_no_bits(kind):
    """Breaks if four bits behind activations of eight are planned as eight."""
    assert usual_scheme({"_type": kind, "_data": {}}) is None


def library(name):
    """A config of torchao, by a short name."""
    ao = pytest.importorskip("torchao.quantization")
    micro = (
        pytest.importorskip("torchao.prototype.mx_formats.inference_workflow") if "x" in name or "nv" in name else None
    )

    return {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "int8 dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
        "int3": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=ao.PerAxis(0)),
        "fp8": lambda: ao.Float8WeightOnlyConfig(),
        "mxfp8": lambda: micro.MXDynamicActivationMXWeightConfig(),
        "nvfp4": lambda: micro.NVFP4WeightOnlyConfig(),
    }[name]()


def exact(weight):
    """The library's numbers in float32, where it can give them so."""
    return weight.dequantize() if type(weight).__name__.startswith("Intx") else weight.dequantize(torch.float32)


@pytest.mark.parametrize("name", ["int8", "int8 dynamic", "int4", "int3", "fp8", "mxfp8", "nvfp4"])
def test_what_the_library_writes(name, tmp_path):
    """Quantised and flattened by torchao: codes give its own dequantised numbers within 1e-3."""
    config = library(name)
    flatten_tensor_state_dict = pytest.importorskip(
        "torchao.prototype.safetensors.safetensors_support"
    ).flatten_tensor_state_dict
    from torchao.quantization import quantize_

    notes = Notes()

    def packer(module, weight):
        layer = torch.nn.Linear(
            *weight.shape[::-1], bias=False, dtype=torch.bfloat16 if "fp" in name else torch.float32
        )
        layer.weight.data.copy_(weight)
        quantize_(layer, config)
        numbers = exact(layer.weight)
        tensors, found = flatten_tensor_state_dict({f"{module}.weight": layer.weight.data})
        notes.update(found)
        return {kind.removeprefix(f"{module}."): tensor for kind, tensor in tensors.items()}, numbers

    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    quantised, numbers = map(open_model, save(tmp_path, packer, CONFIG, notes=notes, sizes=sizes))
    plain = dict(numbers.named_modules())

    assert len(kept(quantised)) == 8
    for path, layer in kept(quantised).items():
        weight = torch.cat([codes.dense(torch.float32) for codes in layer.format.codes(layer)])
        expected = plain[path].weight
        assert (weight - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_a_checkpoint_that_transformers_saved(tmp_path):
    """The whole way, in shards: logits within 1e-3 of transformers' own."""
    config = library("int8")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    source = oracles.save_config(oracles.llama(**SIZES), tmp_path / "source")
    given = TorchAoConfig(config)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=given)
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    tokens = torch.tensor([oracles.prompt(9)])
    with torch.no_grad():
        expected = model(tokens).logits[0, -1]

    loaded = open_model(tmp_path / "saved")
    assert len(kept(loaded)) == 8 and len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(loaded)[-1], expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
