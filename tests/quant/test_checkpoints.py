"""Quantised checkpoints: each published layout, packed independently, gives the logits of the numbers it stands for.

Where activations are rounded too, single products are compared, because a rounding error of an activation may fall to
either side.
"""

import json
import logging

import pytest
import torch

from tests.kernels.harness import interpreting, nan_outputs
from tests.quant.quantised import SIZES, affine, assert_same, kept, logits, open_model, save, words
from tinyserve.checkpoint.source import resolve
from tinyserve.config import QUANTIZATIONS
from tinyserve.errors import CheckpointError, ConfigError, UnsupportedModel
from tinyserve.kernels.grouped_gemm import unpack
from tinyserve.models.registry import load_model
from tinyserve.quant import cpu
from tinyserve.quant.codes import FP4, Inputs, from_words, pack, quantise, rounded
from tinyserve.quant.detect import READERS, check_asked, detect, online
from tinyserve.quant.grouped import ONLINE

E4M3 = torch.float8_e4m3fn
ODD = {"hidden_size": 48, "intermediate_size": 80, "head_dim": 20, "num_hidden_layers": 2}


def consecutive(columns, width):
    return torch.arange(columns) // (width or columns)


def fp8_codes(weight, scales):
    codes = (weight / scales).clamp(-448, 448).to(E4M3)
    return codes, codes.float() * scales


def fp8_tensor(module, weight):
    scale = weight.abs().max() / 448
    codes, numbers = fp8_codes(weight, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.05)}, numbers


def fp8_channel(module, weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes, numbers = fp8_codes(weight, scale)
    return {"weight": codes, "weight_scale": scale}, numbers


def fp8_blocks(module, weight):
    """Blocks of 32 x 32; the last ones are smaller."""
    rows, columns = weight.shape
    scales = torch.tensor([[float(weight[r : r + 32, c : c + 32].abs().max()) / 448 for c in range(0, columns, 32)]
                           for r in range(0, rows, 32)])  # fmt: skip
    spread = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            spread[row, column] = scales[row // 32, column // 32]
    codes, numbers = fp8_codes(weight, spread)
    return {"weight": codes, "weight_scale_inv": scales}, numbers


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_CASES = {
    "tensor": (fp8_tensor, FP8 | {"activation_scheme": "static"}, Inputs("fp8", static=True)),
    "channel": (fp8_channel, FP8, Inputs("fp8")),
    "blocks": (fp8_blocks, FP8 | {"weight_block_size": [32, 32]}, Inputs("fp8", width=32)),
    "fbgemm": (fp8_channel, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Inputs("fp8", limit=1200.0)),
    "modelopt": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}, Inputs("fp8", static=True)),
}


@pytest.mark.parametrize("case", FP8_CASES)
def test_fp8(case, tmp_path):
    """Each product: fp8 inputs times the packer's numbers within 1e-4; q, k and v have scales of their own."""
    packer, config, inputs = FP8_CASES[case]
    quantised, numbers = map(open_model, save(tmp_path, packer, config, sizes=ODD))
    layers, plain = kept(quantised), dict(numbers.named_modules())

    assert len(layers) == 8
    for path, layer in layers.items():
        x = torch.randn(5, layer.inputs)
        assert layer.format.scheme.inputs == inputs
        expected = rounded(x, inputs, torch.tensor(0.05)) @ plain[path].weight.T
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-4)


GPTQ_CASES = [
    (4, 32, True, "gptq", False),
    (4, 16, False, "gptq", True),
    (3, 32, False, "gptq", False),
    (2, 16, False, "gptq_v2", True),
    (8, -1, True, "gptq", False),
    (8, 32, False, "gptq_v2", False),
]


def gptq(bits, size, symmetric, layout, act_order):
    def packer(module, weight):
        columns = weight.shape[1]
        groups = consecutive(columns, max(size, 0))
        if act_order:  # another order for each module: q, k and v of a layer do not agree
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(len(module)))]
        codes, zeros, scales, numbers = affine(weight, bits, groups, symmetric=symmetric)
        stored = (zeros.T - int(layout == "gptq")) & (2**bits - 1)
        tensors = {"qweight": words(codes, bits).T, "qzeros": words(stored, bits), "scales": scales.T.half()}
        return tensors | ({"g_idx": groups.int()} if act_order or size > 0 else {}), numbers

    return packer


@pytest.mark.parametrize("bits, size, symmetric, layout, act_order", GPTQ_CASES)
def test_gptq(bits, size, symmetric, layout, act_order, tmp_path):
    """Logits within 1e-3; breaks at 3 bits if a code across two words is torn, at v1 if a zero of 0 becomes 16."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": symmetric,
              "checkpoint_format": layout}  # fmt: skip
    model = assert_same(save(tmp_path, gptq(bits, size, symmetric, layout, act_order), config))
    codes = next(iter(kept(model).values())).codes

    assert codes.shape[1] * 8 // 64 == {3: 4}.get(bits, bits)  # bits a weight in memory


def test_gptq_with_other_bits_for_some_modules(tmp_path):
    """`dynamic`: v_proj has 8 bits, so one fused product is of two formats; k_proj is left out and stays plain."""

    def packer(module, weight):
        if "k_proj" in module:
            return None
        return gptq(8 if "v_proj" in module else 4, 32, True, "gptq", False)(module, weight)

    rules = {"-:.*k_proj": {}, r"+:.*\.v_proj": {"bits": 8}}
    assert_same(save(tmp_path, packer, {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": rules}))


def awq(module, weight):
    codes, zeros, scales, numbers = affine(weight, 4, consecutive(weight.shape[1], 32), symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows = [list(range(8 * word, 8 * word + 8)) for word in range(len(weight) // 8)]
    places = [row[place] for row in rows for place in order]
    tensors = {"qweight": words(codes.T[:, places], 4), "qzeros": words(zeros.T[:, places], 4)}
    return tensors | {"scales": scales.T.half()}, numbers


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_awq(tmp_path, family):
    """Logits within 1e-3; breaks if two outputs of a word change places. Qwen2 has biases on q, k and v."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    sizes = SIZES if family == "llama" else {**SIZES, "head_dim": None}
    assert_same(save(tmp_path, awq, config, sizes={k: v for k, v in sizes.items() if v}, family=family))


def fp4_codes(numbers):
    """The nearest of the 15 numbers, two to a byte."""
    codes = (numbers[..., None] - torch.tensor(FP4)).abs().argmin(-1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), torch.tensor(FP4)[codes]


def nvfp4(module, weight):
    outer = weight.abs().max() / (6 * 448)
    inner = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 / outer).to(E4M3)
    scales = inner.float().repeat_interleave(16, 1) * outer
    packed, numbers = fp4_codes(weight / scales)
    tensors = {"weight": packed, "weight_scale": inner, "weight_scale_2": outer, "input_scale": torch.tensor(1.0)}
    return tensors, numbers * scales


def test_nvfp4_of_modelopt(tmp_path):
    """Logits within 1e-3, the description in hf_quant_config.json; the cache's scales are left out and logged."""

    def packer(module, weight):
        tensors, numbers = nvfp4(module, weight)
        return tensors | ({"k_scale": torch.tensor(1.0)} if "k_proj" in module else {}), numbers

    folders = save(tmp_path, packer, None)
    described = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (folders[0] / "hf_quant_config.json").write_text(json.dumps(described))
    assert_same(folders)


def test_integers_survive_packing():
    """2, 4 and 8 bits, also an odd number of columns; words against Python's integers at every width."""
    for bits in range(2, 9):
        codes = torch.randint(0, 2**bits, (3, 37), dtype=torch.uint8)
        assert torch.equal(from_words(words(codes, bits), bits, 37), codes)
        if bits in (2, 4, 8):
            assert torch.equal(unpack(pack(codes, bits), bits, 37), codes)


def test_rounded_activations():
    """Each number within half a step of its own, a token's rounding independent of its neighbours, zeros stay zero."""
    x = torch.randn(4, 40) * torch.tensor([[1.0], [100.0], [1e-3], [0.0]])
    for inputs, steps in (
        (Inputs("int8"), 254),
        (Inputs("int8", symmetric=False), 255),
        (Inputs("int8", width=16), 254),
    ):
        y = rounded(x, inputs)
        step = 2 * x.abs().amax(1, keepdim=True) / steps
        assert ((y - x).abs() <= step * 0.51).all()
        assert torch.equal(rounded(x[1:2], inputs), y[1:2]) and not y[3].any()
    y = rounded(x, Inputs("fp8"))
    assert ((y - x).abs() <= x.abs() * 2**-4 + x.abs().amax(1, keepdim=True) / 448 * 2**-10).all()
    assert rounded(x, Inputs("int8", static=True), torch.tensor(0.5))[1].abs().max() <= 64


@pytest.mark.parametrize("asked, error", [("fp8", 0.04), ("int8", 0.01), ("int4", 0.15)])
def test_plain_weights_are_rounded_while_loading(asked, error, tmp_path):
    """The relative error of each product stays below what its bits allow; the head stays plain; codes are small."""
    _, folder = save(tmp_path, lambda module, weight: None, None)
    model, plain = open_model(folder, format_for=online(asked)), dict(open_model(folder).named_modules())
    layers = kept(model)

    assert len(layers) == 8
    for path, layer in layers.items():
        x, weight = torch.randn(16, layer.inputs), plain[path].weight
        assert (layer(x) - x @ weight.T).norm() < error * (x @ weight.T).norm()
        assert layer.codes.nbytes == weight.numel() * (4 if asked == "int4" else 8) // 8


def test_a_quantised_checkpoint_on_a_cpu_by_default(tmp_path, caplog):
    """`--dtype auto`: codes go to the CPU's own formats, near the numbers' logits, and the log says so."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folders = save(tmp_path, gptq(4, 32, True, "gptq", False), config)
    expected = logits(open_model(folders[1]))
    with caplog.at_level(logging.INFO):
        actual = logits(load_model(resolve(str(folders[0])), dtype="float32", format_for=cpu.cpu_formats()))

    assert (actual - expected).norm() < 0.05 * expected.norm()
    assert "14 matrices of gptq were turned into plain numbers" in caplog.text


def test_every_name_is_known_to_the_options():
    """A reader that --quantization does not name could not be asked for."""
    assert set(READERS) <= set(QUANTIZATIONS)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "static"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "2:4"}}, "2:4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights":
            {"num_bits": 6, "type": "float"}}}}, "6-bit 'float'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights":
            {"num_bits": 8}, "input_activations": {"num_bits": 16}}}}, "16 bits"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModel, match=message):
        detect({"quantization_config": config})


@pytest.mark.parametrize(
    "config",
    [
        5, {"quant_method": []}, {"quant_method": "gptq", "bits": 4, "group_size": "x"},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, {"quant_method": "fp8", "weight_block_size": 3},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 7}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:("], "weights":
            {"num_bits": 8}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights":
            {"num_bits": 8, "strategy": "block"}}}},
        {"quant_method": "bitsandbytes"}, {"quant_method": "modelopt", "quantization": 3, "quant_algo": "FP8"},
    ],
)  # fmt: skip
def test_descriptions_without_sense_are_one_line(config):
    with pytest.raises(CheckpointError) as caught:
        detect({"quantization_config": config})

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind, change",
    [
        ("qweight", lambda t: t.flatten()),
        ("qzeros", lambda t: t[:-1]),
        ("g_idx", lambda t: t + 9),
        ("scales", lambda t: t.float()[..., None]),
    ],
)
def test_damaged_tensors_are_named(kind, change, tmp_path):
    """Whatever is wrong with one module's tensors, the error names the module."""

    def packer(module, weight):
        tensors, numbers = gptq(4, 32, False, "gptq", False)(module, weight)
        return tensors | ({kind: change(tensors[kind])} if "gate_proj" in module else {}), numbers

    with pytest.raises(CheckpointError, match="gate_proj"):
        open_model(save(tmp_path, packer, {"quant_method": "gptq", "bits": 4, "group_size": 32})[0])


def test_plain_weights_under_a_quantised_config_are_refused(tmp_path):
    """And so are fp8 codes without scales: neither is loaded as if nothing were wrong."""
    folder, _ = save(tmp_path, lambda module, weight: None, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match="no module has qweight"):
        open_model(folder)

    def forgetful(module, weight):
        tensors, numbers = fp8_channel(module, weight)
        return ({"weight": tensors["weight"]} if "o_proj" in module else tensors), numbers

    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match=r"o_proj.*no scales"):
        open_model(save(tmp_path / "b", forgetful, FP8)[0])


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def short(module, weight):
        tensors, numbers = gptq(4, 32, True, "gptq", False)(module, weight)
        return tensors | ({"scales": tensors["scales"][:, :-1]} if "up_proj" in module else {}), numbers

    with pytest.raises(CheckpointError, match="up_proj"):
        open_model(save(tmp_path, short, {"quant_method": "gptq", "bits": 4, "group_size": 32})[0])


def test_the_option_must_agree_with_the_checkpoint():
    method = detect({"quantization_config": {"quant_method": "gptq", "bits": 4}})
    check_asked("gptq_marlin", method)
    check_asked("int8", None)
    with pytest.raises(ConfigError, match="checkpoint is gptq"):
        check_asked("fp8", method)
    with pytest.raises(ConfigError, match="plain numbers"):
        check_asked("awq", None)


@pytest.mark.parametrize("case", ["fp8", "fp8-blocks", "nvfp4", "asymmetric", "act-order"])
def test_kernels_give_the_same_logits(case, tmp_path):
    """The whole model by interpreted kernels: steps of 1, 9 and 70 tokens, within 1e-3 of the numbers'.

    All but nvfp4 are packed, so norms, gates and residuals are taken in by their products, and splits are left.
    """
    fours = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    packer, config = {
        "fp8": (fp8_channel, FP8),
        "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
        "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "asymmetric": (gptq(4, 16, False, "gptq", False), fours),
        "act-order": (gptq(4, 16, False, "gptq", True), fours),
    }[case]
    folders = save(tmp_path, packer, config, sizes={**SIZES, "num_hidden_layers": 1})
    with interpreting(), nan_outputs():
        quantised = open_model(folders[0])
    numbers = open_model(folders[1])
    layer, x = quantised.layers[0].attn.qkv, torch.randn(70, 64)
    weight = numbers.layers[0].attn.qkv.weight
    with interpreting(), nan_outputs():
        many = layer(x)
        actual = logits(quantised), logits(quantised, steps=2)

    assert (layer.packed is None) == (case == "nvfp4") and layer.codes.dtype.itemsize <= 2
    torch.testing.assert_close(many, x @ weight.T, rtol=0, atol=1e-4)
    for steps, found in enumerate(actual, start=1):
        expected = logits(numbers, steps=steps)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["fp8", "fp8-blocks", "asymmetric", "act-order"])
def test_products_on_a_gpu(case, tmp_path):
    """1, 5, 70 and 300 rows, in bfloat16: within 1 % of the numbers' products; 4 % where rows are rounded to fp8."""
    fours = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    packer, config = {
        "fp8": (fp8_channel, FP8),
        "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
        "asymmetric": (gptq(4, 16, False, "gptq", False), fours),
        "act-order": (gptq(4, 16, False, "gptq", True), fours),
    }[case]
    folders = save(tmp_path, packer, config, sizes={**SIZES, "num_hidden_layers": 1})
    quantised, numbers = open_model(folders[0], device="cuda", dtype="bfloat16"), open_model(folders[1])
    for part, whole in ((quantised.layers[0].attn.qkv, numbers.layers[0].attn.qkv),
                        (quantised.layers[0].mlp.down, numbers.layers[0].mlp.down)):  # fmt: skip
        for rows in (1, 5, 70, 300):
            x = torch.randn(rows, part.inputs).bfloat16()
            expected = x.float() @ whole.weight.T

            difference = (part(x.cuda()).float().cpu() - expected).norm() / expected.norm()

            assert difference < (0.04 if case == "fp8" and rows > 1 else 0.01), (rows, difference)


@pytest.mark.parametrize(
    "config, bits",
    [
        (FP8, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4),
        ({"quant_method": "fp8", "weight_block_size": [32, 32]}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data":
            {"group_size": 128}}}}, 4),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, 8),
    ],
)  # fmt: skip
def test_dummy_weights_are_quantised_as_the_config_says(config, bits, tmp_path):
    """All 8 products are codes of the right size, and logits of a prompt are numbers of a sane size, twice the same."""
    folder, _ = save(tmp_path, lambda module, weight: None, config)
    model, again = (open_model(folder, load_format="dummy") for _ in range(2))

    assert len(kept(model)) == 8
    assert all(layer.codes.nbytes == layer.inputs * layer.outputs * bits // 8 for layer in kept(model).values())
    assert 0.1 < float(logits(model).abs().mean()) < 10 and torch.equal(logits(model), logits(again))


def test_a_matrix_that_the_checkpoint_already_fused(tmp_path):
    """Phi-3 stores q, k and v as one module: its rows are cut out of the codes, and all of them stay codes."""
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim"}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert_same(save(tmp_path, gptq(4, 32, False, "gptq", False), config, sizes=sizes, family="phi3"))


def test_a_mixture_in_blocks_gives_the_same_logits(tmp_path):
    """Qwen3-MoE in fp8 blocks of 32 that 40 and 48 columns do not fill: attention and experts within 1e-3."""
    sizes = {**ODD, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    weightless = {"quant_method": "fp8", "activation_scheme": None, "weight_block_size": [32, 32]}
    assert_same(save(tmp_path, fp8_blocks, weightless, sizes=sizes, family="qwen3_moe"), layers=4)


def test_many_rows_are_rounded_like_few():
    """Rows are worked on in pieces: 2500 rows give what each gives alone, and so do words of 3 bits."""
    weight, scheme = torch.randn(2500, 128), ONLINE["int4"]
    whole, last = quantise(weight, scheme), quantise(weight[2400:], scheme)
    assert torch.equal(whole.dense(torch.float32)[2400:], last.dense(torch.float32))

    codes = torch.randint(0, 8, (2500, 32), dtype=torch.uint8)
    assert torch.equal(from_words(words(codes, 3), 3, 32), codes)
