"""`tinyserve quantize`: what it writes is read back here, and by the library whose format it is."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests import oracles
from tests.quant.quantised import SIZES, TOKENS, kept, logits, open_model
from tests.scripted import byte_tokenizer
from tinyserve.__main__ import main
from tinyserve.cli import calibrate, quantize
from tinyserve.device import Device, Memory
from tinyserve.quant.encode import encode, scheme_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint of plain numbers in bfloat16."""
    folder = oracles.save_config(oracles.llama(**SIZES, torch_dtype="bfloat16"), tmp_path_factory.mktemp("plain"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def quantised(folder, out, *options):
    assert main(["quantize", str(folder), str(out), *options]) == 0
    return out


@pytest.mark.parametrize("scheme, error", [("fp8", 0.04), ("int8", 0.015), ("int4", 0.15)])
def test_products_stay_near(scheme, error, plain, tmp_path, capsys):
    """Every product of 16 rows within what the bits allow; the report holds the error of each matrix."""
    out = quantised(plain, tmp_path / "out", "--scheme", scheme, "--group-size", "32")
    model, before = open_model(out), dict(open_model(plain).named_modules())
    layers = kept(model)
    report = json.loads((out / quantize.REPORT).read_text())

    assert len(layers) == 8 and len(report["matrices"]) == 14 and (out / "tokenizer.json").exists()
    for path, layer in layers.items():
        x = torch.randn(16, layer.inputs)
        expected = x @ before[path].weight.T
        assert (layer(x) - expected).norm() < error * expected.norm()
    assert 0 < report["mean_error"] < error and report["bytes_after"] < report["bytes_before"]
    assert f"14 matrices in {scheme}" in capsys.readouterr().out


def test_the_report_is_true(plain, tmp_path):
    """The error of q_proj of layer 0, from the numbers in the file, to 1e-6."""
    out = quantised(plain, tmp_path / "out", "--scheme", "int8")
    saved, name = load_file(out / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    weight = load_file(plain / "model.safetensors")[f"{name}.weight"].float()
    numbers = saved[f"{name}.weight"].float() * saved[f"{name}.weight_scale"]
    report = json.loads((out / quantize.REPORT).read_text())

    stated = next(one["error"] for one in report["matrices"] if one["module"] == name)
    assert float((numbers - weight).norm() / weight.norm()) == pytest.approx(stated, abs=1e-6)


def test_scales_are_rounded_before_codes():
    """In bfloat16 a scale is off by up to 0.4 %; codes made with the exact one would be read with another. Only what is
    cut off is further from its code than half a step; scales at the largest number would be more wrong."""
    weight = torch.randn(64, 256)
    made = encode(weight, scheme_of("int4", 64), torch.bfloat16).tensors
    scales = made["weight_scale"].float().repeat_interleave(64, dim=1)
    shifts = torch.arange(0, 32, 4)
    codes = ((made["weight_packed"][..., None] >> shifts) & 15).flatten(1) - 8

    inside = (codes > -8) & (codes < 7)
    assert bool(((codes * scales - weight).abs() <= scales * 0.501)[inside].all()) and inside.float().mean() > 0.9
    widest = weight.unflatten(1, (-1, 64)).abs().amax(-1).div(7).repeat_interleave(64, dim=1)
    plain = (weight / widest).round() * widest
    assert (codes * scales - weight).norm() < 0.95 * (plain - weight).norm()


def test_columns_make_up_for_the_errors_before_them():
    """Inputs that are alike: products are 0.4 times as wrong as with the nearest codes, at most; breaks if a group's
    scale meets another, or errors go the wrong way. Inputs that are always 0 cost nothing."""
    torch.manual_seed(0)
    x = torch.randn(400, 8) @ torch.randn(8, 96) + 0.1 * torch.randn(400, 96)
    x[:, 5] = 0
    weight, scheme = torch.randn(24, 96), scheme_of("int4", 32)
    nearest, made = encode(weight, scheme, torch.bfloat16), encode(weight, scheme, torch.bfloat16, x.T @ x)

    def products(tensors):
        codes = ((tensors["weight_packed"][..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1) - 8
        return x @ (codes * tensors["weight_scale"].float().repeat_interleave(32, dim=1)).T

    exact = x @ weight.T
    wrong = [float((products(one.tensors) - exact).norm() / exact.norm()) for one in (nearest, made)]
    assert wrong[1] < 0.4 * wrong[0] and made.error == pytest.approx(wrong[1], rel=1e-2)


def test_a_text_calibrates(tmp_path, capsys, monkeypatch):
    """All 14 matrices by sums of two layers at a time, as the report says; what a text cannot do is said in a line."""
    folder = oracles.save_config(oracles.llama(**SIZES, vocab_size=300), tmp_path / "plain")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 12)
    monkeypatch.setattr(calibrate, "SUM_BYTES", 2 * 4 * 96**2)
    options = ("--scheme", "int4", "--group-size", "32")
    out = quantised(folder, tmp_path / "out", *options, "--calibrate", str(text))
    nearest = quantised(folder, tmp_path / "nearest", *options)

    report = json.loads((out / quantize.REPORT).read_text())
    saved, other = (load_file(one / "model.safetensors") for one in (out, nearest))
    packed = [name for name in saved if name.endswith("weight_packed")]
    assert report["calibrated"] and len(packed) == 14 == sum(one["calibrated"] for one in report["matrices"])
    assert not any(one["calibrated"] for one in json.loads((nearest / quantize.REPORT).read_text())["matrices"])
    assert all(not torch.equal(saved[name], other[name]) for name in packed)
    assert report["mean_error"] < 0.7 * json.loads((nearest / quantize.REPORT).read_text())["mean_error"]
    text.write_text("Too short.")
    assert main(["quantize", str(folder), str(tmp_path / "a"), *options, "--calibrate", str(text)]) == 2
    assert main(["quantize", str(folder), str(tmp_path / "b"), *options, "--calibrate", str(tmp_path / "no")]) == 2
    assert main(["quantize", str(folder), str(tmp_path / "c"), "--calibrate", str(text)]) == 2
    said = capsys.readouterr().err
    assert "too few" in said and "can be read" in said and "nearest" in said


def test_sums_take_at_most_half_of_what_is_free(tmp_path, monkeypatch):
    """Sums of 8 GiB were kept on devices that had less: with 1 GB free, those of layers share 500 MB."""
    folder = oracles.save_config(oracles.llama(**SIZES, vocab_size=300), tmp_path / "plain")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    most = []
    monkeypatch.setattr(calibrate, "shares", lambda layers, limit: most.append(limit) or iter(()))
    for free in (10**9, 10**12):
        monkeypatch.setattr(Device, "memory", lambda self, free=free: Memory(free, 10**12))
        assert not list(calibrate.sums(str(folder), "It was the best of times. " * 12))
    assert most == [500_000_000, calibrate.SUM_BYTES]


def test_several_files_and_modules_left_out(plain, tmp_path, monkeypatch):
    """Files of at most 40 KB, named by an index; layer 0 stays plain, and the config says so."""
    monkeypatch.setattr(quantize, "SHARD_BYTES", 40_000)
    out = quantised(plain, tmp_path / "out", "--skip", r"layers\.0\.")
    config = json.loads((out / "config.json").read_text())["quantization_config"]

    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2 and not list(out.glob("part-*"))
    assert "model.layers.0.mlp.down_proj" in config["ignore"] and "lm_head" in config["ignore"]
    assert sorted(kept(open_model(out))) == [
        f"layers.1.{name}" for name in ("attn.out", "attn.qkv", "mlp.down", "mlp.gate_up")
    ]


def test_the_library_reads_it(plain, tmp_path):
    """int4 through transformers and compressed-tensors: its logits are ours, to 2 % of their size (bfloat16)."""
    from transformers import AutoModelForCausalLM

    out = quantised(plain, tmp_path / "out", "--scheme", "int4", "--group-size", "32")
    (out / "tokenizer.json").unlink()
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]

    torch.testing.assert_close(logits(open_model(out)), expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--scheme", "int3"], "invalid choice"),
        (["--group-size", "24"], "no multiple of 16"),
        (["--skip", "("], "quantize"),
    ],
)
def test_wrong_options(options, message, plain, tmp_path, capsys):
    assert main(["quantize", str(plain), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


def test_what_is_quantised_already_is_refused(plain, tmp_path, capsys):
    out = quantised(plain, tmp_path / "out")
    assert main(["quantize", str(out), str(tmp_path / "again")]) == 2
    assert "quantised already" in capsys.readouterr().err
    assert main(["quantize", str(plain), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_where_nothing_can_be_written(plain, tmp_path, capsys, monkeypatch):
    """A file in the place of the folder, a disk that fills up, nothing to round: a line each, no folder half full."""
    (tmp_path / "file").write_text("")
    assert main(["quantize", str(plain), str(tmp_path / "file")]) == 2
    assert main(["quantize", str(plain), str(tmp_path / "none"), "--skip", "."]) == 1
    assert not (tmp_path / "none").exists()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert main(["quantize", str(plain), str(tmp_path / "full")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "no folder can be made" in said[0] and "--skip" in said[1] and "No space left" in said[2]
    assert "remove it before" in said[2] or not (tmp_path / "full").exists()
